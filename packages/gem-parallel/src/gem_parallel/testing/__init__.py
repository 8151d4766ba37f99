"""For tests and `selfcheck`: a small model with every kind of parameter, its plain twin, and jobs of a few ranks."""

from gem_parallel.testing.cards import FileWindow, pretend_cards
from gem_parallel.testing.job import SmallJob, full_state
from gem_parallel.testing.plain import PlainModel, relative_error
from gem_parallel.testing.ranks import run_ranks
from gem_parallel.testing.small import BAGS, ROWS, SEQUENCES, UNITS, Memory, SmallBatch, SmallModel, small_batch

__all__ = [
    "BAGS",
    "ROWS",
    "SEQUENCES",
    "UNITS",
    "FileWindow",
    "Memory",
    "PlainModel",
    "SmallBatch",
    "SmallJob",
    "SmallModel",
    "full_state",
    "pretend_cards",
    "relative_error",
    "run_ranks",
    "small_batch",
]
