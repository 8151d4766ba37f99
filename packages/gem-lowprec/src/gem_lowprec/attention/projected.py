"""FP8 attention between two projections with no pass that quantises: the first writes attention's operands, attention
writes what the second reads.

The first projection's result is not written. What stands for it in the graph of gradients is a tensor of its shape
without memory (`unwritten`): a projection told where its product goes (`Into`) returns it, and attention's backward
gives it the gradient that the product would have had.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_lowprec.attention.launch import forward, forward_with_rows
from gem_lowprec.attention.native import U8, _backward
from gem_lowprec.attention.operands import BLOCK, Operands
from gem_lowprec.attention.projection import project
from gem_lowprec.quantize import FP8_1X128, QTensor


class Into:
    """Where a packed projection of self-attention writes: called with the product's operands, it keeps attention's."""

    def __init__(self, offsets: Tensor, max_len: int, *, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
        self.offsets, self.max_len, self.heads, self.kv_heads, self.dtype = offsets, max_len, heads, kv_heads, dtype
        self.operands: Operands | None = None

    def __call__(self, x: QTensor, weight: QTensor, bias: Tensor | None) -> None:
        """[q || k || v] = x weight^T + bias, quantised as it is made."""
        self.operands = project(
            x, weight, bias, self.offsets, self.max_len, heads=self.heads, kv_heads=self.kv_heads, dtype=self.dtype
        )


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, _packed: Tensor, made: Operands, scale: float, rows: bool
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        if rows:
            out, lse, data, data_scale = forward_with_rows(made, scale)
        else:
            out, lse = forward(made, scale)
            data, data_scale = out.new_empty(0, dtype=U8), lse.new_empty(0)
        ctx.save_for_backward(
            out, lse, made.q.view(U8), made.q_scale, made.k.view(U8), made.v.view(U8), made.kv_scale, made.q_offsets
        )
        ctx.longest, ctx.scale = made.longest, scale
        ctx.mark_non_differentiable(data, data_scale)
        return out, data, data_scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, *_others: Any) -> tuple[Tensor | None, ...]:
        *found, offsets = ctx.saved_tensors
        grads = _backward(dout, None, tuple(found), offsets, offsets, ctx.longest, ctx.longest, ctx.scale)  # type: ignore[arg-type]
        return torch.cat(grads, 1).flatten(1), None, None, None


def attend(packed: Tensor, made: Operands, scale: float, *, rows: bool) -> tuple[Tensor, QTensor | None]:
    """O [T, H, D] of the operands that `Into` kept; with `rows` (D 128) also Q(O) [T, H D] as a projection reads it,
    of the values that O has. `packed` is what that projection returned; dO becomes its gradient.
    """
    out, data, scale_of = _Attend.apply(packed, made, scale, rows)
    if not rows:
        return out, None
    assert out.shape[2] == BLOCK
    tokens = out.shape[0]
    return out, QTensor(
        data=data.view(torch.float8_e4m3fn), scale=scale_of[:, :tokens].t(), spec=FP8_1X128, dim=-1,
        shape=torch.Size((tokens, data.shape[1])), dtype=out.dtype,
    )  # fmt: skip
