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
