"""Projected heads the separate way: torch's product, and the kernel of `projections` behind it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gem_kernels.dispatch import Problem
from gem_kernels.projections import triton
from gem_kernels.tiling import applies_to_dtype

__all__ = ["applies", "forward"]


def applies(problem: Problem) -> tuple[bool, str]:
    """The dtypes of the portable kernels."""
    return applies_to_dtype(problem)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, gains: list[Tensor | None], heads: int, positions: list[Tensor],
    bases: list[float], seats: Tensor | None, added: int, eps: float,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """packed [T, (n + 1) H D] of x [T, K], and its first n parts [T, H, D] normed and turned; the first of two with
    `added` rows that are left to the caller, its own where `seats` say.
    """
    packed = F.linear(x, weight, None if bias is None else bias.to(x.dtype))
    return packed, triton.rotary(packed, gains, heads, positions, bases, seats, added, eps)
