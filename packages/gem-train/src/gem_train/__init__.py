"""Train, evaluate and report recommendation models of the GEM kind."""

from gem_train.__about__ import __version__

__all__ = ["__version__"]
