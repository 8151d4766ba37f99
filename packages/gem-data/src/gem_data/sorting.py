"""The order of rows by several integer keys, as one sort of one number where the keys fit into it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST = 2**63


def order_of(keys: Sequence[NDArray[Any]], *, stable: bool = False) -> NDArray[np.int64]:
    """Where the rows go: [n] int64, by the first key, where it is equal by the second, and so on.

    `keys` are int64 columns [n], at least one. Rows that are equal in all keys come in any order, or in their own if
    `stable`. Numpy sorts single 64-bit numbers several times as fast as it sorts by several keys in turn.
    """
    n = len(keys[0])
    if n < 2:
        return np.arange(n)
    if stable:
        keys = [*keys, np.arange(n)]
    lows = [int(k.min()) for k in keys]
    widths = [int(k.max()) - low + 1 for k, low in zip(keys, lows, strict=True)]
    size = 1
    for width in widths:
        size *= width
    if size >= MOST:
        return np.lexsort(tuple(reversed(keys)))
    packed = np.zeros(n, np.int64)
    for key, low, width in zip(keys, lows, widths, strict=True):
        packed *= width
        packed += key - low
    return np.argsort(packed)
