"""Topology, sharding of tables and dense parameters, and atomic checkpoints for jagged models."""

from gem_parallel.__about__ import __version__

__all__ = ["__version__"]
