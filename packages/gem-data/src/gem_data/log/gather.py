"""Taking rows of columns that lie in several parts: where they are is worked out once and used for every column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gem_data.ragged import Ragged

Array = Any  # an NDArray, a Ragged or a Spread: all have len, take and [rows]
Index = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Rows [n] sorted into parts: of each part that holds some, its number, their places in [0, n) and local rows.

    Made once for a batch, used for every column. `None` for the places: all, in order.
    """

    size: int
    pieces: list[tuple[int, Index | None, Index]]

    @classmethod
    def of(cls, rows: Index, firsts: Index) -> Plan:
        """`firsts` [parts]: the first row of each part, ascending."""
        if len(firsts) == 1:
            return cls(size=len(rows), pieces=[(0, None, rows - firsts[0] if firsts[0] else rows)])
        part = (np.searchsorted(firsts, rows, side="right") - 1).astype(np.int16)
        order = np.argsort(part, kind="stable")  # a radix sort, for 16 bits
        ends = np.cumsum(np.bincount(part, minlength=len(firsts)))
        pieces: list[tuple[int, Index | None, Index]] = []
        for p, end in enumerate(ends.tolist()):
            begin = int(ends[p - 1]) if p else 0
            if end == len(rows) and begin == 0:
                return cls(size=len(rows), pieces=[(p, None, rows - firsts[p])])
            if end > begin:
                where = order[begin:end]
                pieces.append((p, where, rows[where] - firsts[p]))
        return cls(size=len(rows), pieces=pieces)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A column over several parts, to be indexed by rows; `numpy.asarray` copies it into one array."""

    arrays: Sequence[Array]
    firsts: Index

    def take_plan(self, plan: Plan) -> Array:
        """The rows of a plan."""
        if len(plan.pieces) == 1 and plan.pieces[0][1] is None:
            p, _, local = plan.pieces[0]
            return self.arrays[p].take(local, axis=0)
        some = self.arrays[0]
        if isinstance(some, Ragged):
            return self._lists(plan)
        out = np.empty((plan.size, *some.shape[1:]), some.dtype)
        for p, where, local in plan.pieces:
            out[where] = self.arrays[p].take(local, axis=0)
        return out

    def _lists(self, plan: Plan) -> Ragged:
        found = [self.arrays[p].take(local) for p, _, local in plan.pieces]
        order = np.concatenate([np.empty(0, np.int64), *(where for _, where, _ in plan.pieces if where is not None)])
        back = np.empty(plan.size, np.int64)
        back[order] = np.arange(plan.size)
        return Ragged.concat(found).take(back)

    def take(self, rows: Any, axis: int = 0) -> Array:
        """The given rows."""
        return self.take_plan(Plan.of(np.asarray(rows, np.int64), self.firsts))

    def __len__(self) -> int:
        return sum(len(a) for a in self.arrays)

    @property
    def shape(self) -> tuple[int, ...]:
        """As of one array."""
        return (len(self), *self.arrays[0].shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """As of one array."""
        return self.arrays[0].dtype

    @property
    def ndim(self) -> int:
        """As of one array."""
        return self.arrays[0].ndim

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if isinstance(self.arrays[0], Ragged):
            raise TypeError("a column of lists is no array; index it by rows")
        return np.concatenate(self.arrays).astype(dtype or self.dtype, copy=False)

    def __getitem__(self, key: Any) -> Array:
        if isinstance(key, int | np.integer):
            row = int(key) + (len(self) if key < 0 else 0)
            return self.take(np.array([row]))[0]
        if isinstance(key, slice):
            return self.take(np.arange(*key.indices(len(self))))
        key = np.asarray(key)
        return self.take(np.flatnonzero(key) if key.dtype == bool else np.where(key < 0, key + len(self), key))

    def tolist(self) -> list[Any]:
        """Plain values."""
        return [value for a in self.arrays for value in a.tolist()]


def spread(arrays: Sequence[Array], firsts: Index) -> Array:
    """One array as it is, several as a Spread."""
    return arrays[0] if len(arrays) == 1 else Spread(arrays=arrays, firsts=firsts)
