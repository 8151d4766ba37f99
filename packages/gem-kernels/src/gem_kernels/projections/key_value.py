"""Keys and values of one packed projection as they are, and their one gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["key_value", "side_by_side"]


def key_value(packed: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The two parts of [k || v] = packed as they are: views [T, H, D] of [T, 2 H D].

    Their gradients become one without a copy where they lie side by side, as our Hopper kernels write them for keys and
    values that do.

    Raises:
        ValueError: where packed is not [T, a multiple of 2 H].
    """
    if packed.dim() != 2 or heads < 1 or packed.shape[1] % (2 * heads):
        raise ValueError(f"packed must be [T, a multiple of {2 * heads}]; got {tuple(packed.shape)}")
    if torch.compiler.is_compiling():
        k, v = packed.unflatten(1, (2, heads, -1)).unbind(1)
        return k, v
    return _KeyValue.apply(packed, heads)  # type: ignore[no-any-return]


def side_by_side(k: Tensor, v: Tensor) -> bool:
    """Whether k and v [T, H, D] are the two halves of the rows of one [T, 2 H D] matrix."""
    _, heads, dim = k.shape
    return (
        k.shape == v.shape
        and k.dtype == v.dtype
        and k.stride() == v.stride() == (2 * heads * dim, dim, 1)
        and k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        and v.storage_offset() - k.storage_offset() == heads * dim
    )


class _KeyValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        k, v = packed.view(packed.shape[0], 2, heads, packed.shape[1] // (2 * heads)).unbind(1)
        return k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor, None]:
        rows, heads, dim = dk.shape
        if side_by_side(dk, dv):
            return dk.as_strided((rows, 2 * heads * dim), (2 * heads * dim, 1)), None
        return torch.stack((dk, dv), dim=1).view(rows, 2 * heads * dim), None
