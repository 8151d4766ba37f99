"""Orders of an epoch: permutations that are a pure function of (seed, epoch).

Not numpy's generator, whose streams may change between versions: a resumed run must see the order it began with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gem_data.hashing import mix64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 6


def _start(seed: int, epoch: int) -> NDArray[np.uint64]:
    return mix64(mix64(np.array([seed], np.uint64)) + _GOLDEN * np.array([epoch + 1], np.uint64))


def permutation(n: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of range(n) from (seed, epoch): sorted by a SplitMix64 hash of (seed, epoch, i)."""
    keys = mix64(_start(seed, epoch) + _GOLDEN * np.arange(1, n + 1, dtype=np.uint64))
    return np.argsort(keys, kind="stable").astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Cipher:
    """A permutation of range(n) that is never written out: where position i goes is computed when it is asked for.

    A Feistel network over the next power of two, with SplitMix64 as its round function; what falls beyond n is
    enciphered again until it falls inside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """

    n: int
    seed: int
    epoch: int

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The images of positions [m] in [0, n): [m] int64, distinct for distinct positions."""
        assert positions.size == 0 or (positions.min() >= 0 and positions.max() < self.n)
        out = positions.astype(np.uint64)
        keys = mix64(_start(self.seed, self.epoch) + _GOLDEN * np.arange(1, _ROUNDS + 1, dtype=np.uint64))
        outside = np.arange(len(out))
        while outside.size:
            out[outside] = self._rounds(out[outside], keys)
            outside = outside[out[outside] >= self.n]
        return out.astype(np.int64)

    def _rounds(self, x: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        bits = max(2, int(self.n - 1).bit_length())
        right = bits // 2
        left = bits - right
        a, b = x >> np.uint64(right), x & np.uint64((1 << right) - 1)
        for i, key in enumerate(keys):
            # In turn, each half is masked with a hash of the other; the halves keep their widths.
            if i % 2 == 0:
                a = a ^ (mix64(b + key) & np.uint64((1 << left) - 1))
            else:
                b = b ^ (mix64(a + key) & np.uint64((1 << right) - 1))
        return (a << np.uint64(right)) | b
