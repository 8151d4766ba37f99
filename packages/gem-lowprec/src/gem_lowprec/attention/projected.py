"""FP8 attention between two projections with no pass that quantises: the first writes attention's operands, attention
writes what the second reads.

The first projection's result is not written. What stands for it in the graph of gradients is a tensor of its shape
without memory (`unwritten`): a projection told where its product goes (`Into`) returns it, and attention's backward
gives it the gradient that the product would have had.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from gem_kernels.norms import rms_norm
from gem_kernels.projections import Turn, rotary_heads
from gem_kernels.rotary import rope
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_lowprec.attention.launch import forward, forward_with_rows
from gem_lowprec.attention.native import U8, _backward
from gem_lowprec.attention.operands import BLOCK, Operands
from gem_lowprec.attention.projection import Between, project
from gem_lowprec.quantize import FP8_1X128, QTensor


@dataclass(kw_only=True)
class Into:
    """Where a packed projection of self-attention writes: called with the product's operands, it keeps attention's, and
    [q || k || v] as it was `between` the two (`project`).
    """

    offsets: Tensor
    max_len: int
    heads: int
    kv_heads: int
    dtype: torch.dtype
    between: Between
    operands: Operands | None = None
    raw: Tensor | None = None

    def __call__(self, x: QTensor, weight: QTensor, bias: Tensor | None) -> None:
        """[q || k || v] = x weight^T + bias, quantised as it is made."""
        self.operands, self.raw = project(
            x, weight, bias, self.offsets, self.max_len, heads=self.heads, kv_heads=self.kv_heads, dtype=self.dtype,
            between=self.between,
        )  # fmt: skip


def _places(offsets: Tensor, total: int) -> Tensor:
    """Of every token its place in its sequence, [T] int64."""
    index = torch.arange(total, device=offsets.device)
    starts = torch.repeat_interleave(offsets[:-1].long(), offsets.diff(), output_size=total)
    return index - starts


def _through(
    raw: Tensor, gains: tuple[Tensor | None, Tensor | None], offsets: Tensor, heads: int, between: Between,
    grads: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of [q || k || v] before heads of q and k were normed and turned, and of the two gains."""
    with torch.enable_grad():
        leaves = [t if t is None else t.detach().requires_grad_() for t in (raw, *gains)]
        packed, *weights = leaves
        assert packed is not None
        if grads[0].shape == grads[1].shape:
            turns = () if between.base is None else (Turn(positions=_places(offsets, raw.shape[0]), base=between.base),)
            parts = rotary_heads(packed, heads, weights, turns=turns, eps=between.eps)
        else:
            parts = packed.unflatten(1, (-1, BLOCK)).split([g.shape[1] for g in grads], 1)
            turned = list(parts[:2])
            for i, weight in enumerate(weights):
                if weight is not None:
                    turned[i] = rms_norm(turned[i], weight, eps=between.eps)
                if between.base is not None:
                    turned[i] = rope(turned[i], offsets, base=between.base)
            parts = (*turned, parts[2])
        found = iter(torch.autograd.grad(parts, [t for t in leaves if t is not None], grads))
    return tuple(None if t is None else next(found) for t in leaves)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, _packed: Tensor, q_gain: Tensor | None, k_gain: Tensor | None, into: Into, scale: float, rows: bool
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        made = into.operands
        assert made is not None
        if rows:
            out, lse, data, data_scale = forward_with_rows(made, scale)
        else:
            out, lse = forward(made, scale)
            data, data_scale = out.new_empty(0, dtype=U8), lse.new_empty(0)
        ctx.save_for_backward(
            out, lse, made.q.view(U8), made.q_scale, made.k.view(U8), made.v.view(U8), made.kv_scale, made.q_offsets,
            into.raw, q_gain, k_gain,
        )  # fmt: skip
        ctx.longest, ctx.scale, ctx.heads = made.longest, scale, into.heads
        ctx.between = replace(into.between, gains=None)  # they are saved
        ctx.mark_non_differentiable(data, data_scale)
        ctx.set_materialize_grads(False)  # zeros for Q(O) would be a pass over its bytes
        return out, data, data_scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, *_others: Any) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 6
        *found, offsets, raw, q_gain, k_gain = ctx.saved_tensors
        dq, dk, dv = _backward(dout, None, tuple(found), offsets, offsets, ctx.longest, ctx.longest, ctx.scale)  # type: ignore[arg-type]
        gains = (q_gain, k_gain)
        if q_gain is None and ctx.between.nothing:
            return torch.cat((dq, dk, dv), 1).flatten(1), None, None, None, None, None
        return *_through(raw, gains, offsets, ctx.heads, ctx.between, (dq, dk, dv)), None, None, None


def attend(packed: Tensor, into: Into, scale: float, *, rows: bool) -> tuple[Tensor, QTensor | None]:
    """O [T, H, 128] of the operands that `into` keeps; with `rows` also Q(O) [T, H 128] as a projection reads it, of
    the values that O has. `packed` is what the projection into it returned; dO becomes its gradient.
    """
    gains = into.between.gains or (None, None)
    out, data, scale_of = _Attend.apply(packed, *gains, into, scale, rows)
    if not rows:
        return out, None
    tokens = out.shape[0]
    return out, QTensor(
        data=data.view(torch.float8_e4m3fn), scale=scale_of[:, :tokens].t(), spec=FP8_1X128, dim=-1,
        shape=torch.Size((tokens, data.shape[1])), dtype=out.dtype,
    )  # fmt: skip
