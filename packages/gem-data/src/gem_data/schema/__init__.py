"""What an event log holds: columns with roles, tasks derived from outcomes, streaming counters. No torch here."""

from __future__ import annotations

from gem_data.schema.columns import (
    MOST_BITS,
    TIME,
    Column,
    Counter,
    CounterKind,
    Encoding,
    Kind,
    Role,
    Source,
    Task,
    unknown,
)
from gem_data.schema.schema import Schema

__all__ = [
    "MOST_BITS",
    "TIME",
    "Column",
    "Counter",
    "CounterKind",
    "Encoding",
    "Kind",
    "Role",
    "Schema",
    "Source",
    "Task",
    "unknown",
]
