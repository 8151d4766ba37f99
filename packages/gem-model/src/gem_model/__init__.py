"""The GEM model: sequence towers, Wukong interaction, interleaved layers, multi-task heads."""

from gem_model.__about__ import __version__

__all__ = ["__version__"]
