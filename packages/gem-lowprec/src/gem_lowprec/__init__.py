"""Ultra-low precision training: MX formats, quantisers, recipes and FP8 modules."""

from gem_lowprec.__about__ import __version__

__all__ = ["__version__"]
