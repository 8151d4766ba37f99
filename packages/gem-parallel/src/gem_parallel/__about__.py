"""The version of gem-parallel."""

__version__ = "0.1.0"
