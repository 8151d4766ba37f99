"""Rotary embedding of interleaved pairs in plain PyTorch. Differentiable by autograd."""

from __future__ import annotations

import torch
from torch import Tensor


def frequencies(dim: int, base: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """base^(-2 i / D) for the D / 2 pairs."""
    pair = torch.arange(0, dim, 2, device=device, dtype=dtype)
    return torch.pow(base, -pair / dim)


def rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotate pair (x[2i], x[2i + 1]) of every token [T, H, D] by positions[t] * base^(-2i / D)."""
    work = torch.promote_types(x.dtype, torch.float32)
    angle = positions.to(work)[:, None] * frequencies(x.shape[-1], base, x.device, work)  # [T, D / 2]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    even, odd = x.to(work).unflatten(-1, (-1, 2)).unbind(-1)  # [T, H, D / 2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)
