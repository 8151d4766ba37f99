"""Copying runs of rows at the speed of memory: a history is one run in every column, so it is one copy of bytes.

A gather reads an index of 8 bytes for every event and column, and writes it first. Arrow's `take` of binary values
copies a run of bytes for each value instead, in C++: the columns are shown to it as one array of binary values whose
offsets are where the histories begin and end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gem_data.log.gather import Spread
from gem_data.ragged import Ragged

Array = Any  # an NDArray, a Ragged or a Spread
Index = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Runs of rows, each within one part: its number, the first row within it and the number of rows, [R] each."""

    part: Index
    start: Index
    lengths: Index

    @classmethod
    def of(cls, start: Index, lengths: Index, firsts: Index) -> Runs:
        """`start` in rows of the log; `firsts` [parts]: the first row of each part, ascending. Empty runs go."""
        some = lengths > 0
        start, lengths = start[some], lengths[some]
        part = np.searchsorted(firsts, start, side="right") - 1
        return cls(part=part, start=start - firsts[part], lengths=lengths)

    def take(self, column: Array) -> Array:
        """The rows of a column, end to end: [T], [T, size] or Ragged [T]."""
        arrays = column.arrays if isinstance(column, Spread) else [column]
        if not isinstance(arrays[0], Ragged):
            return copy_runs(arrays, self.part, self.start, self.lengths)
        offsets = [a.offsets for a in arrays]
        low = copy_runs(offsets, self.part, self.start, self.lengths)
        lengths = copy_runs(offsets, self.part, self.start + 1, self.lengths) - low
        run_ends = np.cumsum(self.lengths)
        first = low[run_ends - self.lengths]
        size = low[run_ends - 1] + lengths[run_ends - 1] - first
        values = copy_runs([a.values for a in arrays], self.part, first, size)
        return Ragged(values, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))


def copy_runs(arrays: Sequence[NDArray[Any]], part: Index, start: Index, lengths: Index) -> NDArray[Any]:
    """Rows start[i]:start[i] + lengths[i] of arrays[part[i]] for each i, end to end in one new, writable array.

    The arrays are C-contiguous and of one dtype and row shape; [R] each of the others. Rows are not checked.
    """
    shape, dtype = arrays[0].shape[1:], arrays[0].dtype
    row = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    total = int(lengths.sum())
    if total * row == 0:
        return np.empty((total, *shape), dtype)
    assert all(a.flags.c_contiguous for a in arrays)
    # All parts are one range of addresses that begins at the first of them; nothing between them is ever read.
    bases = np.array([a.ctypes.data for a in arrays], np.int64)
    origin = int(bases.min())
    count = len(start)
    offsets = np.empty(2 * count + 2, np.int64)
    offsets[0:-2:2] = bases[part] - origin + start * row
    offsets[1:-2:2] = offsets[0:-2:2] + lengths * row
    # Run i is value 2 i; the values between them are nonsense that is never taken. Arrow guesses the size of what it
    # takes from the first and the last offset: let it guess right, or it copies everything again to grow.
    offsets[-2] = offsets[-3]
    offsets[-1] = offsets[0] + (total * row // count + 64) * (2 * count + 1)
    end = max(int(offsets[-1]), *(int(b) - origin + a.nbytes for a, b in zip(arrays, bases, strict=True)))
    buffers = [None, pa.py_buffer(offsets), pa.foreign_buffer(origin, end)]
    runs = pa.Array.from_buffers(pa.large_binary(), 2 * count + 1, buffers)
    taken = runs.take(pa.array(np.arange(0, 2 * count, 2)))
    out = np.frombuffer(taken.buffers()[2], dtype, count=total * row // dtype.itemsize).reshape(total, *shape)
    assert out.flags.writeable
    return out
