"""Where events come from. The `load(...)` of each module gives a table of events and their schema for `build_log`."""

from __future__ import annotations


class SourceUnavailable(RuntimeError):
    """A source can't be had here and now; the message says why. Who catches it says what is used instead."""
