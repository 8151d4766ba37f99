"""Event logs to jagged batches: memory-mapped histories, strict time, exact resume."""

from gem_data.__about__ import __version__

__all__ = ["__version__"]
