"""Lists of int64 of any length, row after row: the values end to end and where each row ends."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]


def spans(start: Index, lengths: Index) -> tuple[Index, Index]:
    """The ragged arange: start[i], start[i] + 1, ... of each i end to end, [sum(lengths)], and offsets [n + 1]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return np.repeat(start - offsets[:-1], lengths) + np.arange(offsets[-1]), offsets


class Ragged:
    """`n` rows of int64 lists; row i is values[offsets[i]:offsets[i + 1]]. Indexed like an array of rows."""

    dtype = np.dtype(np.int64)
    ndim = 1

    def __init__(self, values: NDArray[np.int64], offsets: Index) -> None:
        self.values, self.offsets = values, offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Index:
        """Values per row, [n] int64."""
        return np.diff(self.offsets)

    def take(self, rows: Any, axis: int = 0) -> Ragged:
        """The rows of an int64 index, repeats allowed."""
        rows = np.asarray(rows, np.int64)
        start = self.offsets[rows]
        where, offsets = spans(start, self.offsets[rows + 1] - start)
        return Ragged(self.values.take(where), offsets)

    def __getitem__(self, key: Any) -> Ragged:
        if isinstance(key, slice):
            a, b, step = key.indices(len(self))
            if step == 1:
                offsets = self.offsets[a : max(a, b) + 1]
                return Ragged(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])
        return self.take(np.arange(len(self))[key])

    def tolist(self) -> list[list[int]]:
        """Plain lists."""
        return [self.values[a:b].tolist() for a, b in zip(self.offsets[:-1], self.offsets[1:], strict=True)]

    @staticmethod
    def concat(parts: list[Ragged]) -> Ragged:
        """The rows of all parts, in order."""
        lengths = np.concatenate([np.zeros(1, np.int64), *(p.lengths for p in parts)])
        values = [p.values[p.offsets[0] : p.offsets[-1]] for p in parts]
        return Ragged(np.concatenate([np.empty(0, np.int64), *values]), np.cumsum(lengths))
