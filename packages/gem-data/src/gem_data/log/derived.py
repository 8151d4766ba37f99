"""What follows from the columns of a log: where the history of each row ends, labels and their mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gem_data.schema import Schema

Array = NDArray[Any]


def first_recent(head: Array, time: Array, delay: int) -> NDArray[np.int64]:
    """For rows sorted by (key, time), the first of each row's key whose time is at least its own less `delay`.

    head [n]: the first row of each row's key. One search in numbers that order the rows by (key, time).
    """
    if len(time) == 0:
        return np.empty(0, np.int64)
    first, span = int(time.min()), int(time.max()) - int(time.min()) + 1
    key = np.cumsum(head == np.arange(len(head)), dtype=np.int64) - 1
    if int(key[-1] + 1) * span >= 2**63:
        raise ValueError(f"times span {span} s over {int(key[-1]) + 1} keys, too much for a delay")
    return np.searchsorted(key * span + (time - first), key * span + np.maximum(time - first - delay, 0), side="left")


def history_ends(user: Array, time: Array, *, delay: int = 0) -> NDArray[np.int64]:
    """For rows sorted by (user, time), where the history of each ends: the first row of its user that is too recent.

    Without delay that is the first row of the same (user, time): equal times are not history.
    """
    n = len(user)
    new_user, new = np.ones(n, bool), np.ones(n, bool)
    new_user[1:] = user[1:] != user[:-1]
    new[1:] = new_user[1:] | (time[1:] != time[:-1])
    at = np.arange(n)
    if delay:
        return first_recent(np.maximum.accumulate(np.where(new_user, at, 0)), time, delay)
    return np.maximum.accumulate(np.where(new, at, 0))


def label_arrays(schema: Schema, columns: Mapping[str, Array]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Labels [n, K] float32 (0 where masked) and mask [n, K] bool of outcome columns [n]."""
    positive = {t.name: t.positive(columns[t.column]) for t in schema.tasks}
    mask = [positive[t.given] if t.given else np.ones(len(positive[t.name]), bool) for t in schema.tasks]
    labels = [positive[t.name] & m for t, m in zip(schema.tasks, mask, strict=True)]
    return np.stack(labels, axis=1).astype(np.float32), np.stack(mask, axis=1)
