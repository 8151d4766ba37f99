"""Block attention: every block of a sequence attends only to itself."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gem_kernels import dispatch, jagged
from gem_kernels.block_attention import reference
from gem_kernels.checks import check_offsets, check_qkv
from gem_kernels.gdpa.activations import check_activation
from gem_kernels.rotary import Rope

__all__ = ["block_attention"]


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    block: int = 64,
    scale: float | None = None,
    activation: str | None = None,
    rope: Rope | float | None = None,
    backend: str | None = None,
    validate: bool = False,
) -> Tensor:
    """Self-attention inside blocks of a jagged sequence; a block sees nothing else.

    Each sequence is cut into blocks of `block` tokens from its start, the last one shorter. For each block and head::

        O = softmax(scale R(Q) R(K)^T) V      or, with an activation,      O = act(scale R(Q) R(K)^T) V

    R is the rotary embedding of `rope` at the token's position in its sequence, or the identity.

    Args:
        q: [T, H, D] float16, bfloat16, float32 or float64.
        k: [T, Hkv, D]; Hkv divides H.
        v: [T, Hkv, D].
        offsets: [B + 1] int32 or int64, from 0 to T.
        block: tokens in a block, a power of two from 16 to 128.
        scale: 1 / sqrt(D) by default.
        activation: None for softmax, or one of GDPA's activations.
        rope: a `Rope`, or the base of one with positions counted from the offsets; fused into the Triton kernel.
        backend: "reference" or "triton"; None lets `dispatch` choose.
        validate: also check the offsets' values on a GPU, which waits for the device; on a CPU they always are.

    Returns:
        O: [T, H, D] in q's dtype.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or offsets that do not fit together.
        RuntimeError: the backend asked for cannot run this.
    """
    check_qkv(q, k, v)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"q, k and v must have as many tokens; got {q.shape[0]} and {k.shape[0]}")
    check_offsets("offsets", offsets, q.shape[0], q.shape[0], q.device, values=validate or q.device.type == "cpu")
    if block not in (16, 32, 64, 128):
        raise ValueError(f"block must be 16, 32, 64 or 128; got {block}")
    if activation is not None:
        check_activation(activation)
    scale = 1.0 / math.sqrt(q.shape[2]) if scale is None else float(scale)
    base, positions = 1.0, None
    if rope is not None:
        rope = rope if isinstance(rope, Rope) else Rope(base=float(rope))
        base, positions = rope.base, rope.at(q, offsets)

    wanted = {
        f"block:{block}": True,
        f"activation:{activation}": activation is not None,
        "rope": rope is not None,
        "grouped": k.shape[1] != q.shape[1],
    }
    name = dispatch.choose("block_attention", q, backend, tuple(f for f, on in wanted.items() if on))
    if name == dispatch.REFERENCE:
        return reference.attention(
            q, k, v, offsets, block=block, scale=scale, activation=activation, positions=positions, base=base
        )
    blocks = jagged.block_offsets(offsets, q.shape[0], block)
    if positions is not None:
        positions = positions.float()
    return _forward(q, k, v, blocks, positions, block, scale, activation, base, name)


@torch.library.custom_op("gem_kernels::block_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    positions: Tensor | None,
    block: int,
    scale: float,
    activation: str | None,
    base: float,
    backend: str,
) -> Tensor:
    forward = dispatch.module("block_attention", backend).forward
    return forward(q, k, v, blocks, positions, block, scale, activation, base)


@_forward.register_fake
def _(q, *_rest):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape)


@torch.library.custom_op("gem_kernels::block_attention_backward", mutates_args=())
def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    positions: Tensor | None,
    block: int,
    scale: float,
    activation: str | None,
    base: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    backward = dispatch.module("block_attention", backend).backward
    return backward(dout, q, k, v, blocks, positions, block, scale, activation, base)


@_backward.register_fake
def _(dout, q, k, v, *_rest):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, blocks, positions, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, blocks, positions)


def _autograd(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    dq, dk, dv = _backward(dout, *ctx.saved_tensors, *ctx.rest)
    return dq, dk, dv, *(None,) * 7


_forward.register_autograd(_autograd, setup_context=_setup)
