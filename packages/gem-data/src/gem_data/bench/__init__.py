"""How fast it is: `python -m gem_data.bench`."""

from __future__ import annotations
