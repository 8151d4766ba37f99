"""Jagged attention kernels for recommendation models: softmax (JFA), GDPA, 64-token blocks."""

from gem_kernels.__about__ import __version__

__all__ = ["__version__"]
