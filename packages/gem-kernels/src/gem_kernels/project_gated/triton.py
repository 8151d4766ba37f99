"""Gated projections the separate way: torch's products, and the kernels of `projections` before or behind them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_kernels.dispatch import Problem
from gem_kernels.projections import gates, triton
from gem_kernels.tiling import applies_to_dtype

__all__ = ["applies", "backward", "forward", "heads_backward"]


def applies(problem: Problem) -> tuple[bool, str]:
    """The dtypes of the portable kernels."""
    return applies_to_dtype(problem)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, gain: Tensor | None, hidden: int, heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """packed [T, 2 hidden + H D], h [T, hidden] and q [T, H, D] of x [T, K]."""
    packed = F.linear(x, weight, None if bias is None else bias.to(x.dtype))
    return packed, *triton.gated(packed, gain, hidden, heads, eps)


def backward(
    dy: Tensor, weight: Tensor, packed: Tensor, dpacked: Tensor, dbias: Tensor | None, hidden: int,
    *, again: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """With dh = (dy weight)[:, :hidden], writes the gradients of gate and up into dpacked [T, >= 2 hidden] and their
    columns' sums into dbias [2 hidden].

    Returns (dy weight)[:, hidden:], and h where it is asked for again.
    """
    both = dy @ weight
    h = torch.empty(dy.shape[0], hidden, dtype=dy.dtype, device=dy.device) if again else None
    gates.swiglu_backward(both[:, :hidden], packed, dpacked, dbias, hidden, h)
    return both[:, hidden:], h


def heads_backward(
    dq: Tensor, packed: Tensor, dpacked: Tensor, gain: Tensor | None, dbias: Tensor | None, hidden: int, heads: int,
    eps: float,
) -> Tensor | None:  # fmt: skip
    """The gradient of the norm's weight; q's goes behind those of gate and up in dpacked, its sums in dbias."""
    dim = (packed.shape[1] - 2 * hidden) // heads
    q, to = packed[:, 2 * hidden :], dpacked[:, 2 * hidden :]
    behind = None if dbias is None else dbias[2 * hidden :]
    (dgain,) = triton._backward([None, dq], q, to, [gain], behind, heads, dim, [], [], None, eps)
    return None if gain is None else dgain
