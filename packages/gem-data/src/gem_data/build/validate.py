"""Row validation: typed columns of the good rows, a reason for each bad one, and duplicates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gem_data.hashing import mix64
from gem_data.ragged import Ragged
from gem_data.schema import TIME, Schema, unknown
from gem_data.schema.values import DUPLICATE, REASONS, column_values, time_values

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Validated:
    """Typed columns of the good rows, and of each bad one its input row, reason code and column.

    A column with a vocabulary holds int64 keys; `texts` has those that stand for text.
    """

    columns: dict[str, Array]  # name -> [N] int64 or float32, [N, size] float32, or Ragged [N]; input order
    rejected: NDArray[np.int64]  # input rows, ascending
    reasons: NDArray[np.int8]
    where: list[str]  # the column, "" for a duplicate
    texts: dict[str, dict[int, str]] = field(default_factory=dict)  # column -> key -> text
    # column -> distinct keys, counts; with duplicates
    keys: dict[str, tuple[Array, Array]] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        """Rejected rows by reason."""
        found, n = np.unique(self.reasons, return_counts=True)
        return {REASONS[r]: int(k) for r, k in zip(found, n, strict=True)}


def validate(table: pa.Table, schema: Schema, *, unique: bool = True) -> Validated:
    """Check every row of `table` against `schema`; a row with several faults is reported with the first.

    `unique` also looks for exact duplicates and counts keys. Raises ValueError for a column that the table lacks,
    TypeError for one whose type cannot hold the declared kind.
    """
    names = [TIME, *(c.name for c in schema.columns)]
    for name in names:
        if name not in table.column_names:
            raise ValueError(
                f"the source lacks a column of schema {schema.name!r}: {unknown('column', name, table.column_names)}; "
                f"where it has another name, --rename THEIRS={name} (files: rename) says which it is"
            )
    fault = np.zeros(table.num_rows, np.int8)
    where = np.full(table.num_rows, -1, np.int64)
    columns: dict[str, Array] = {}
    texts: dict[str, dict[int, str]] = {}
    for i, name in enumerate(names):
        source = table.column(name)
        values, found = time_values(source) if name == TIME else column_values(source, schema.column(name), texts)
        columns[name] = values
        new = (fault == 0) & (found != 0)
        fault[new], where[new] = found[new], i
    good = np.flatnonzero(fault == 0)
    if good.size < table.num_rows:
        columns = {k: v[good] for k, v in columns.items()}
    keys = {c.name: count_keys(columns[c.name]) for c in schema.columns if c.vocabulary} if unique else {}
    twice = duplicates(list(columns.values())) if unique else np.empty(0, np.int64)
    fault[good[twice]] = DUPLICATE
    if twice.size:
        keep = np.ones(good.size, bool)
        keep[twice] = False
        columns = {k: v[keep] for k, v in columns.items()}
    rejected = np.flatnonzero(fault)
    return Validated(
        columns=columns,
        rejected=rejected,
        reasons=fault[rejected],
        where=[names[w] if w >= 0 else "" for w in where[rejected]],
        texts=texts,
        keys=keys,
    )


def count_keys(values: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The distinct keys, ascending, and how often each comes."""
    keys, counts = np.unique(values.values if isinstance(values, Ragged) else values, return_counts=True)
    return keys, counts.astype(np.int64)


def duplicates(columns: list[Array]) -> NDArray[np.int64]:
    """Rows [n] equal in all columns to an earlier row, ascending.

    Rows are grouped by a 64-bit hash and compared by value with the first of their group, so that a collision never
    rejects a row.
    """
    n = len(columns[0])
    key = np.zeros(n, np.uint64)
    for column in columns:
        if isinstance(column, Ragged):
            key = mix64(key ^ _list_hash(column)) + np.uint64(0x9E3779B97F4A7C15)
            continue
        for part in column.T if column.ndim == 2 else (column,):
            bits = (part + 0.0).astype(np.float64).view(np.uint64) if part.dtype.kind == "f" else part.astype(np.uint64)
            key = mix64(key ^ bits) + np.uint64(0x9E3779B97F4A7C15)
    order = np.argsort(key, kind="stable")
    if n == 0:
        return order
    sorted_key = key[order]
    starts = np.flatnonzero(np.r_[True, sorted_key[1:] != sorted_key[:-1]])
    first = np.repeat(order[starts], np.diff(np.r_[starts, n]))
    suspects = first != order
    a, b = order[suspects], first[suspects]
    same = np.ones(a.size, bool)
    for column in columns:
        if isinstance(column, Ragged):
            same &= _equal_lists(column.take(a), column.take(b))
            continue
        equal = column[a] == column[b]
        same &= equal.all(axis=1) if equal.ndim == 2 else equal
    return np.sort(a[same])


def _list_hash(lists: Ragged) -> NDArray[np.uint64]:
    """A hash of each row: the sum of its mixed (position, value) pairs, wrapping around."""
    at = np.arange(len(lists.values), dtype=np.int64) - np.repeat(lists.offsets[:-1], lists.lengths)
    mixed = mix64(lists.values.astype(np.uint64) ^ mix64(at.astype(np.uint64) + np.uint64(1)))
    total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
    return total[lists.offsets[1:]] - total[lists.offsets[:-1]] + mix64(lists.lengths.astype(np.uint64))


def _equal_lists(a: Ragged, b: Ragged) -> NDArray[np.bool_]:
    same = np.asarray(a.lengths == b.lengths)
    rows = np.flatnonzero(same)
    x, y = a.take(rows), b.take(rows)
    wrong = np.concatenate([[0], np.cumsum(x.values != y.values)])
    same[rows] = wrong[x.offsets[1:]] == wrong[x.offsets[:-1]]
    return same
