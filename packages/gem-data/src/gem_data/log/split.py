"""Splitting a log by time: the past trains, the future tests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gem_data.log.event_log import EventLog


@dataclass(frozen=True, kw_only=True)
class Split:
    """Rows of a log, each part in global time order (equal times in the order of the log)."""

    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]


def time_split(log: EventLog, fractions: Sequence[float] = (0.8, 0.1, 0.1)) -> Split:
    """Split all rows by global time into train, validation and test.

    A boundary falls on the time of the event at its cumulative fraction; all events of that time are on the later side,
    so every time is in one part. Histories are not cut: a test row sees the earlier events of its user, those of
    training included.

    Raises ValueError for fractions that are not three positive numbers with sum 1, and for a part that would be empty.
    """
    if len(fractions) != 3 or min(fractions) <= 0 or abs(sum(fractions) - 1) > 1e-6:
        raise ValueError(
            f"fractions must be three positive numbers (train, validation, test) with sum 1, not {tuple(fractions)}"
        )
    order = log.by_time
    cuts = [0]
    for share in np.cumsum(fractions)[:2]:
        boundary = log.time[order[min(round(share * len(log)), len(log) - 1)]]
        cuts.append(bisect_left(range(len(log)), boundary, key=lambda i: log.time[order[i]]))
    cuts.append(len(log))
    parts = {name: order[a:b] for name, a, b in zip(("train", "validation", "test"), cuts[:-1], cuts[1:], strict=True)}
    for name, rows in parts.items():
        if rows.size == 0:
            raise ValueError(
                f"the {name} part of {tuple(fractions)} is empty: {len(log)} events with "
                f"{np.unique(np.asarray(log.time)).size} "
                "distinct times; a boundary keeps all events of one time together"
            )
    return Split(**parts)
