"""Pages about runs: self-contained HTML made from the files of their folders alone, and the figures as PNG."""

from gem_train.report.several import write_comparison
from gem_train.report.single import write_report

__all__ = ["write_comparison", "write_report"]
