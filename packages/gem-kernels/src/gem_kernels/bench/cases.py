"""The shapes that the suites measure, by name; "half" is lengths uniform in 1..L from a fixed seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # NumPy belongs to the benchmarks, not to the kernels: it is imported where lengths are drawn
    import numpy as np
    from numpy.typing import NDArray

Lengths: TypeAlias = "NDArray[np.int64]"
HEADS, DIM = 4, 128


def full(batch: int, length: int) -> Lengths:
    """Equal lengths."""
    import numpy as np

    return np.full(batch, length, dtype=np.int64)


def half(batch: int, length: int) -> Lengths:
    """Lengths uniform in 1..length from a fixed seed."""
    import numpy as np

    return np.random.default_rng(0).integers(1, length + 1, batch)


def _lognormal() -> Lengths:
    import numpy as np

    drawn = np.random.default_rng(0).lognormal(math.log(300), 1.2, 256)
    return np.clip(drawn.round(), 1, 8192).astype(np.int64)


@dataclass(frozen=True)
class Case:
    """Query and key lengths [B] of one batch, and what else is asked for.

    window: (left, right) as `jagged_attention` takes it; bias: a dense one for each head, shared by the batch.
    """

    name: str
    q: Lengths
    k: Lengths
    dim: int = DIM
    window: tuple[int, int] = (-1, -1)
    bias: bool = False

    @property
    def max_q(self) -> int:
        """The longest query sequence."""
        return int(self.q.max())

    @property
    def max_k(self) -> int:
        """The longest key sequence."""
        return int(self.k.max())


CAUSAL = (-1, 0)
Make = Callable[[], tuple[Lengths, Lengths]]


def _half_1024() -> tuple[Lengths, Lengths]:
    return (half(256, 1024),) * 2


def _half_4096() -> tuple[Lengths, Lengths]:
    return (half(64, 4096),) * 2


_MAKE: dict[str, tuple[Make, dict[str, Any]]] = {
    "self-full-1024": (lambda: (full(256, 1024),) * 2, {}),
    "self-half-1024": (_half_1024, {}),
    "self-half-512": (lambda: (half(1152, 512),) * 2, {}),
    "self-half-4096": (_half_4096, {}),
    "self-lognormal": (lambda: (_lognormal(),) * 2, {}),
    "short-kv-256": (lambda: (full(1152, 1024), full(1152, 256)), {}),
    "short-kv-256-half": (lambda: (half(1152, 1024), full(1152, 256)), {}),
    "short-kv-32": (lambda: (full(1152, 1024), full(1152, 32)), {}),
    "pma": (lambda: (full(1152, 64), half(1152, 1024)), {}),
    "half-1024-d64": (_half_1024, {"dim": 64}),
    "half-1024-d96": (_half_1024, {"dim": 96}),
    "half-1024-causal": (_half_1024, {"window": CAUSAL}),
    "half-4096-window": (_half_4096, {"window": (256, 0)}),
    "half-1024-bias": (_half_1024, {"bias": True}),
}
NAMES = tuple(_MAKE)

# Only where named: they ask what costs time elsewhere. 1152 queries are six tiles of three blocks, where 1024 leave the
# third consumer idle in two tiles of six.
_EXTRA: dict[str, tuple[Make, dict[str, Any]]] = {
    "self-full-1152": (lambda: (full(224, 1152),) * 2, {}),
    "half-4096-window-64": (_half_4096, {"window": (64, 0)}),
    "half-4096-window-128": (_half_4096, {"window": (128, 0)}),
}
EXTRA = tuple(_EXTRA)


def case(name: str) -> Case:
    """The case called `name`; ValueError for a name that is in neither NAMES nor EXTRA."""
    known = _MAKE | _EXTRA
    if name not in known:
        raise ValueError(f"unknown case {name!r}; expected one of {', '.join(known)}")
    make, options = known[name]
    return Case(name, *make(), **options)
