"""Norms of rows in plain PyTorch. Differentiable by autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    kind: str,
    eps: float,
    swish: bool,
) -> tuple[Tensor, Tensor]:
    """y and the sum that was normalised, both in x's dtype; at least float32 in between."""
    total = x if residual is None else x + residual
    work = torch.promote_types(x.dtype, torch.float32)
    wide = total.to(work)
    scale = None if weight is None else weight.to(work)
    if kind == "rms":
        y = F.rms_norm(wide, wide.shape[-1:], scale, eps)
    else:
        y = F.layer_norm(wide, wide.shape[-1:], scale, None if bias is None else bias.to(work), eps)
    if swish:
        y = wide * torch.sigmoid(y)
    return y.to(x.dtype), total


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    eps: float,
    swish: bool,
) -> tuple[Tensor, Tensor]:
    """As the kernels' of this name."""
    y, total = norm(x, residual, weight, bias, kind=kind, eps=eps, swish=swish)
    return y, x.new_empty(0) if residual is None else total


def backward_again(
    dy: Tensor, dtotal: Tensor | None, total: Tensor, weight: Tensor | None, bias: Tensor | None,
    residual_bias: Tensor | None, kind: str, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As the kernels' of this name: gradients of the sum, of weight, bias and residual_bias, and the result again."""
    with torch.enable_grad():
        given = [None if t is None else t.detach().requires_grad_() for t in (total, weight, bias)]
        assert given[0] is not None
        y, _ = norm(given[0], None, given[1], given[2], kind=kind, eps=eps, swish=False)
    dx, *found = torch.autograd.grad(y, [t for t in given if t is not None], dy)
    dx = dx if dtotal is None else dx + dtotal
    nothing = total.new_empty(0)
    vectors = [nothing if t is None else found.pop(0) for t in given[1:]]
    sums = nothing if residual_bias is None else dx.sum(0, dtype=residual_bias.dtype)
    return dx, vectors[0], vectors[1], sums, y.detach()
