"""How configurations are checked: what is wrong, what was expected, and what may have been meant. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown(value: object, known: Iterable[str]) -> str:
    """The end of an error message: that ``value`` is unknown, what it may have meant, and what is known."""
    known = list(known)
    close = difflib.get_close_matches(str(value), known, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"unknown{hint} Known: {', '.join(map(repr, known)) or 'none'}"


def at_least(name: str, value: object, least: int) -> None:
    """TypeError unless ``value`` is an int, ValueError unless it is ``least`` or more."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_name(what: str, name: str) -> None:
    """ValueError for an empty name."""
    if not name:
        raise ValueError(f"{what} is empty")


def no_duplicates(what: str, names: Iterable[str]) -> None:
    """ValueError for a name that comes twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what}: {name!r} appears twice")
        seen.add(name)
