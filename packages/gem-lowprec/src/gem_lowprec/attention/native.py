"""FP8 attention on Hopper with gradients: the forward in FP8, gem-kernels' backward on what the operands stand for.

Eagerly it is an autograd function; under torch.compile one custom operator forward and one backward.
"""

from __future__ import annotations

from typing import Any

import torch
from gem_kernels.jagged_attention import hopper
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_lowprec.attention.launch import forward
from gem_lowprec.attention.operands import BLOCK, Operands, quantise

Found = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
U8 = torch.uint8


def _forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int, scale: float
) -> Found:
    """O, LSE and the operands: Q, its scales, K, V, their scales; E4M3 as bytes."""
    made = quantise(q, k, v, q_offsets, k_offsets, max_q, max_k)
    out, lse = forward(made, scale)
    return out, lse, made.q.view(U8), made.q_scale, made.k.view(U8), made.v.view(U8), made.kv_scale


def _backward(
    dout: Tensor, dlse: Tensor | None, found: Found, q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out, lse, q, q_scale, k, v, kv_scale = found
    q, k, v = (x.view(torch.float8_e4m3fn) for x in (q, k, v))
    made = Operands(
        q=q, q_scale=q_scale, k=k, v=v, kv_scale=kv_scale, q_offsets=q_offsets, k_offsets=k_offsets,
        longest=max(max_q, max_k), dtype=out.dtype,
    )  # fmt: skip
    dq, dk, dv, _ = hopper.backward(
        dout, dlse, *made.dequantize(), out, lse, q_offsets, k_offsets, None, False, max_q, max_k, scale, -1, -1
    )
    return dq, dk, dv


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Found) -> None:
    _q, _k, _v, q_offsets, k_offsets, *ctx.sizes = inputs
    ctx.save_for_backward(*output, q_offsets, k_offsets)
    ctx.set_materialize_grads(False)


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Found:
        found = _forward(*inputs)
        _setup(ctx, inputs, found)
        ctx.mark_non_differentiable(*found[2:])
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_others: Any) -> tuple[Tensor | None, ...]:
        *found, q_offsets, k_offsets = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 8
        dout = torch.zeros_like(found[0]) if dout is None else dout
        return (*_backward(dout, dlse, tuple(found), q_offsets, k_offsets, *ctx.sizes), *(None,) * 5)  # type: ignore[arg-type]


@torch.library.custom_op("gem_lowprec::attention", mutates_args=())
def _op(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _forward(q, k, v, q_offsets, k_offsets, max_q, max_k, scale)


@_op.register_fake
def _(q, k, v, q_offsets, k_offsets, max_q, max_k, scale):  # type: ignore[no-untyped-def]
    rows, heads, dim = q.shape
    keys, kv_heads, _ = k.shape
    blocks = keys // BLOCK + k_offsets.shape[0] - 1
    f32 = torch.float32
    return (
        q.new_empty(rows, heads, dim), q.new_empty(rows, heads, dtype=f32), q.new_empty(rows, heads, dim, dtype=U8),
        q.new_empty(rows, heads, dtype=f32), q.new_empty(keys, kv_heads, dim, dtype=U8),
        q.new_empty(blocks, kv_heads, dim, BLOCK, dtype=U8), q.new_empty(blocks, kv_heads, 2, dtype=f32),
    )  # fmt: skip


@torch.library.custom_op("gem_lowprec::attention_backward", mutates_args=())
def _backward_op(
    dout: Tensor, dlse: Tensor | None, found: list[Tensor], q_offsets: Tensor, k_offsets: Tensor, max_q: int,
    max_k: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _backward(dout, dlse, tuple(found), q_offsets, k_offsets, max_q, max_k, scale)  # type: ignore[arg-type]


@_backward_op.register_fake
def _(dout, dlse, found, q_offsets, k_offsets, max_q, max_k, scale):  # type: ignore[no-untyped-def]
    q, k = (found[i].new_empty(found[i].shape, dtype=dout.dtype) for i in (2, 4))
    return q, k, torch.empty_like(k)


def _autograd(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_others: Any) -> tuple[Tensor | None, ...]:
    *found, q_offsets, k_offsets = ctx.saved_tensors
    dout = torch.zeros_like(found[0]) if dout is None else dout
    grads = torch.ops.gem_lowprec.attention_backward(dout, dlse, found, q_offsets, k_offsets, *ctx.sizes)
    return (*grads, *(None,) * 5)


_op.register_autograd(_autograd, setup_context=_setup)


def native_attention(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(O, LSE); see `low_precision_attention`."""
    run = torch.ops.gem_lowprec.attention if torch.compiler.is_compiling() else _Native.apply
    found = run(q, k, v, q_offsets, k_offsets, max_q, max_k, scale)
    return found[0], found[1]
