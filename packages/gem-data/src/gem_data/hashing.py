"""The hash of everything here: orders of rows, vocabularies, buckets of keys, duplicates."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: a bijection of 64 bits whose output looks random (wraps around by design)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
