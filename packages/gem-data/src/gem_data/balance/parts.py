"""The order of a rank's samples in which equal runs of it hold about as many events, of every source.

A batch that is computed in parts, one after another, needs the memory of its largest part; and layers that are replayed
from CUDA graphs need a graph for every size of a part that is not near to one that they have had.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def in_even_parts(lengths: Any, parts: int) -> NDArray[np.int64]:
    """Where the samples of `lengths` [S, B] (events of each of S sources) are to come from: a permutation [B], whose
    runs [B i // parts, B (i + 1) // parts) are even.

    Samples with alike histories of the largest source are taken as many at a time as there are parts; of them the one
    with most events of the other sources goes to the part that has fewest so far. Inside a part the order stays.

    Raises ValueError for lengths that are not [S, B], or fewer than 1 part.
    """
    lengths = np.asarray(lengths, np.int64)
    if lengths.ndim != 2 or parts < 1:
        raise ValueError(f"expected lengths [S, B] and 1 part or more; got {lengths.shape} and {parts}")
    sources, count = lengths.shape
    edges = np.arange(parts + 1) * count // parts
    if parts == 1 or sources == 0:
        return np.arange(count)
    largest = lengths[lengths.sum(1).argmax()]
    others = lengths.sum(0) - largest if sources > 1 else largest
    room, sums = np.diff(edges), np.zeros(parts, np.int64)
    taken = np.empty(count, np.int64)  # the part of each sample
    waiting = np.argsort(-largest, kind="stable")
    while len(waiting):
        open_ = np.flatnonzero(room)
        group, waiting = waiting[: len(open_)], waiting[len(open_) :]
        group = group[np.argsort(-others[group], kind="stable")]
        to = open_[np.lexsort((-room[open_], sums[open_]))[: len(group)]]
        taken[group] = to
        room[to] -= 1
        sums[to] += others[group]
    return np.argsort(taken, kind="stable")
