"""What `prepare` builds a log from: a schema and tables that come one after another, the same each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from gem_data.schema import Schema

CHUNK_ROWS = 1 << 19


@dataclass(frozen=True, kw_only=True)
class Events:
    """A source of events that can be read again from the start.

    `tables` gives the same tables in the same order at every call, of any size; `identity` is what a resumed build
    compares (names, sizes and times of files, say). `licence` is shown to whoever prepares a log of it.
    """

    name: str
    schema: Schema
    tables: Callable[[], Iterable[pa.Table]]
    identity: Mapping[str, Any] = field(default_factory=dict)
    licence: str | None = None

    def chunks(self, rows: int = CHUNK_ROWS) -> Iterator[pa.Table]:
        """The same rows in tables of `rows` each, but the last and where the types of the source change."""
        waiting: list[pa.Table] = []
        have = 0
        for table in self.tables():
            if waiting and not _mergeable(waiting[0].schema, table.schema):
                yield pa.concat_tables(waiting, promote_options="permissive")
                waiting, have = [], 0
            at = 0
            while table.num_rows - at:
                piece = table.slice(at, rows - have)
                waiting.append(piece)
                at += piece.num_rows
                have += piece.num_rows
                if have == rows:
                    yield pa.concat_tables(waiting, promote_options="permissive")
                    waiting, have = [], 0
        if waiting:
            yield pa.concat_tables(waiting, promote_options="permissive")


def _mergeable(a: pa.Schema, b: pa.Schema) -> bool:
    try:
        pa.unify_schemas([a, b], promote_options="permissive")
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return False
    return True


def from_table(table: Any, schema: Schema, *, name: str | None = None) -> Events:
    """Events that are in memory already: what `build_log` takes, and what `SOURCE.load()` gives."""
    whole = as_table(table)
    identity = {"rows": whole.num_rows, "columns": whole.column_names}
    return Events(name=name or schema.name, schema=schema, tables=lambda: [whole], identity=identity)


def as_table(events: pa.Table | pa.RecordBatch | pa.RecordBatchReader | Iterable[pa.RecordBatch]) -> pa.Table:
    """One table of a table, a record batch, a reader or an iterable of record batches."""
    if isinstance(events, pa.Table):
        return events
    if isinstance(events, pa.RecordBatchReader):
        return events.read_all()
    batches = [events] if isinstance(events, pa.RecordBatch) else list(events)
    if not batches:
        raise ValueError("the source has no record batch, so not even the names of its columns are known")
    for batch in batches:
        if not isinstance(batch, pa.RecordBatch):
            raise TypeError(f"expected pyarrow record batches, not {type(batch).__name__}")
    return pa.Table.from_batches(batches)
