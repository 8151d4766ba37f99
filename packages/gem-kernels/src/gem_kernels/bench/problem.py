"""One case on the device, and what is timed on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gem_kernels import testing
from gem_kernels.bench.cases import HEADS, Case

POLYNOMIAL = ("silu_poly", "gelu_poly")
BOUND = 4.0  # of the scores, where a polynomial takes the activation's place


@dataclass
class Problem:
    """One case on the device. `act` is None for softmax."""

    case: Case
    act: str | None
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    q_offsets: Tensor
    k_offsets: Tensor
    bias: Tensor | None = None
    scale: float = 1.0

    @classmethod
    def make(cls, case: Case, act: str | None, device: torch.device, *, constant: bool = False) -> Problem:
        """Fresh N(0, 1) inputs in BF16; constant: of one number, so that little switches and little power is needed."""
        rows_q, rows_k = int(case.q.sum()), int(case.k.sum())
        q, k, v, dout = (
            torch.randn(n, HEADS, case.dim, device=device, dtype=torch.bfloat16)
            for n in (rows_q, rows_k, rows_k, rows_q)
        )
        if constant:
            q, k, v = (torch.full_like(x, 0.5) for x in (q, k, v))
        q_offsets, k_offsets = (testing.offsets_of(x.tolist(), device) for x in (case.q, case.k))
        if torch.equal(q_offsets, k_offsets):
            k_offsets = q_offsets  # as a model's layers give them, by which self-attention is told
        size = (1, HEADS, case.max_q, case.max_k)
        bias = torch.randn(size, device=device, dtype=torch.bfloat16) if case.bias else None
        scale = 1.0 / math.sqrt(case.dim)
        if act in POLYNOMIAL:  # a bound that the norms of q and k guarantee
            scale = BOUND / float(q.float().norm(dim=-1).max() * k.float().norm(dim=-1).max())
        return cls(case, act, q, k, v, dout, q_offsets, k_offsets, bias, scale)

    @property
    def where(self) -> tuple[Tensor, Tensor, int, int]:
        """Offsets and maxima, as the operators take them."""
        return self.q_offsets, self.k_offsets, self.case.max_q, self.case.max_k

    @property
    def features(self) -> tuple[str, ...]:
        """What the dispatch must know, see `dispatch.Problem`."""
        asked = {"window": max(self.case.window) >= 0, "bias": self.case.bias, f"activation:{self.act}": self.act}
        return tuple(name for name, on in asked.items() if on)


@dataclass(frozen=True)
class Variant:
    """Something to time: `forward()` gives O, `backward()` (after `forward`) gives dQ, dK, dV."""

    forward: Callable[[], Tensor] | None
    backward: Callable[[], tuple[Tensor, ...]] | None
