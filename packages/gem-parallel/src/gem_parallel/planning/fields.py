"""Dataclasses from the keys of a file: what is unknown, missing or out of range is named."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

T = TypeVar("T")


def require(ok: bool, what: str) -> None:
    """Raise ValueError(what) unless ok."""
    if not ok:
        raise ValueError(what)


def made(kind: type[T], values: Mapping[str, Any]) -> T:
    """`kind(**values)` for a dataclass.

    Raises:
        ValueError: a key that it does not have, or lacks; and whatever its own checks raise.
    """
    known = {f.name: f for f in fields(kind) if f.init}  # type: ignore[arg-type]
    for key in values:
        close = difflib.get_close_matches(key, known, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        require(key in known, f"unknown key {key!r}{meant} ({kind.__name__} has: {', '.join(known)})")
    needed = [name for name, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    missing = [name for name in needed if name not in values]
    require(not missing, f"{kind.__name__} needs {', '.join(missing)}, which the file does not give")
    return kind(**values)
