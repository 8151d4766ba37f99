"""Where things are kept by default. Imports nothing of the libraries."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(named: str | None = None) -> Path:
    """Where built logs and downloads are kept: as named, or $XDG_CACHE_HOME/gem-train, or ~/.cache/gem-train."""
    if named is not None:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gem-train"
