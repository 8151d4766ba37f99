"""How a log lies on disk: generations of parts. A part is one Arrow file, mapped into memory, of some users' events.

A generation is sorted by (user, time) over all its parts, so that a row number does not depend on how many parts there
are. Generations follow one another in time: what was appended later is strictly later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gem_data.log.gather import spread
from gem_data.log.maps import Maps
from gem_data.ragged import Ragged

Array = Any  # an NDArray, a Ragged or a Spread: all have len, take and [rows]
Index = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Part:
    """The columns of rows [first, first + rows) of the log."""

    first: int
    rows: int
    columns: Mapping[str, Array]


def map_columns(path: Path, expected: Sequence[str], rows: int, maps: Maps) -> dict[str, Array]:
    """Zero-copy, read-only columns of one Arrow file. Raises ValueError for a file that is not what was written."""
    try:
        reader = pa.ipc.open_file(pa.py_buffer(maps.file(path)))
        if reader.num_record_batches != 1:
            raise ValueError(f"expected one record batch, found {reader.num_record_batches}")
        batch = reader.get_batch(0)
    except (pa.ArrowInvalid, OSError, ValueError) as error:
        raise ValueError(f"{path} is not a readable Arrow file of an event log: {error}") from None
    if batch.schema.names != list(expected) or batch.num_rows != rows:
        raise ValueError(
            f"{path} has {batch.num_rows} rows of columns {', '.join(batch.schema.names)}; "
            f"its manifest says {rows} rows of {', '.join(expected)}"
        )
    return {name: _view(batch.column(name)) for name in expected}


def _view(array: pa.Array) -> Array:
    if pa.types.is_fixed_size_list(array.type):
        return array.flatten().to_numpy(zero_copy_only=True).reshape(-1, array.type.list_size)
    if pa.types.is_large_list(array.type):
        return Ragged(array.values.to_numpy(zero_copy_only=True), array.offsets.to_numpy(zero_copy_only=True))
    return array.to_numpy(zero_copy_only=True)


def to_arrow(values: Array) -> pa.Array:
    """The inverse of the view: [n], [n, size] or Ragged to an Arrow array."""
    if isinstance(values, Ragged):
        return pa.LargeListArray.from_arrays(pa.array(values.offsets), pa.array(values.values))
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1]) if values.ndim == 2 else flat


def write_columns(path: Path, columns: Mapping[str, Array]) -> None:
    """One uncompressed record batch: its buffers are mapped as they lie, and every column is one array."""
    batch = pa.RecordBatch.from_pydict({name: to_arrow(values) for name, values in columns.items()})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Rows [first, first + rows): its parts, and what is found of it on disk or else computed when asked for.

    `stored` loads an index array by its name ("users", "starts", "by_time", "counters", "source.NAME"), or None.
    """

    first: int
    rows: int
    parts: Sequence[Part]
    user: str
    stored: Callable[[str], NDArray[Any] | None]
    maps: Maps = field(default_factory=Maps)
    _sources: dict[str, Index] = field(default_factory=dict)

    @cached_property
    def firsts(self) -> Index:
        """The first row of each part."""
        return np.array([p.first for p in self.parts], np.int64)

    def column(self, name: str) -> Array:
        """A column of the generation, indexed from 0."""
        return spread([p.columns[name] for p in self.parts], self.firsts - self.first)

    @cached_property
    def starts(self) -> Index:
        """Where each user's rows begin, relative to `first`, and at last `rows`: [users + 1]."""
        stored = self.stored("starts")
        if stored is not None:
            return stored
        user = np.asarray(self.column(self.user))
        return np.append(np.flatnonzero(np.diff(user, prepend=-1)), self.rows).astype(np.int64)

    @cached_property
    def users(self) -> Index:
        """The users, ascending."""
        stored = self.stored("users")
        return self.column(self.user)[self.starts[:-1]] if stored is None else stored

    @cached_property
    def by_time(self) -> Index:
        """The rows, relative to `first`, in order of time, equal times in their own."""
        stored = self.stored("by_time")
        return np.argsort(np.asarray(self.column("time")), kind="stable") if stored is None else stored

    def source_rows(self, name: str, column: str, values: Sequence[int]) -> Index:
        """The rows, relative to `first` and ascending, whose `column` is one of `values`."""
        if name not in self._sources:
            stored = self.stored(f"source.{name}")
            found = np.flatnonzero(np.isin(np.asarray(self.column(column)), values)) if stored is None else stored
            self._sources[name] = found.astype(np.int64, copy=False)
        return self._sources[name]

    def segments(self, user: Index) -> tuple[Index, Index]:
        """Where the rows of users begin and end, relative to `first`; equal where a user has none."""
        at = np.searchsorted(self.users, user)
        known = at < len(self.users)
        known[known] = self.users[at[known]] == user[known]
        at = np.where(known, at, 0)
        return self.starts[at], np.where(known, self.starts[at + 1], self.starts[at])
