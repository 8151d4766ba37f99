"""Block attention: every block of a sequence attends only to itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem_kernels import dispatch
from gem_kernels.block_attention import reference
from gem_kernels.checks import check_heads, check_number, check_offsets, check_qkv, check_scale
from gem_kernels.gdpa.activations import check_activation
from gem_kernels.operator import operator
from gem_kernels.rotary import Rope

__all__ = ["block_attention", "block_attention_packed"]

BLOCKS = (16, 32, 64, 128)


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
        rope: a `Rope`, or the base of one with positions counted from the offsets; fused into the kernels. Where
            positions are counted and values are not turned, kernels count from the block's start: equal in exact
            arithmetic, and with smaller angles.
        backend: "reference", "triton" or "hopper"; None lets `dispatch` choose.
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
    rope = _as_rope(rope)
    scale = _check(q, offsets, block, scale, activation, rope, validate)
    name = _choose(q, k, block, activation, rope, backend)
    if name == dispatch.REFERENCE:
        return _reference(q, k, v, offsets, block, scale, activation, rope)
    return _forward(q, k, v, *_options(q, offsets, block, scale, activation, rope, name))


def block_attention_packed(
    qkv: Tensor,
    offsets: Tensor,
    *,
    kv_heads: int | None = None,
    block: int = 64,
    scale: float | None = None,
    activation: str | None = None,
    rope: Rope | float | None = None,
    backend: str | None = None,
    validate: bool = False,
) -> Tensor:
    """`block_attention` on one packed projection, whose gradient is written packed too.

    The same as splitting `qkv` and calling `block_attention`, without the pass over memory that puts three gradients
    together.

    Args:
        qkv: [T, H + 2 Hkv, D]: the heads of q, then of k, then of v.
        kv_heads: Hkv; as many as query heads (a third of all) by default.
        others: see `block_attention`.

    Returns:
        O: [T, H, D] in qkv's dtype.

    Raises:
        TypeError, ValueError, RuntimeError: as `block_attention`.
    """
    check_heads("qkv", qkv)
    if kv_heads is None:
        if qkv.shape[1] % 3:
            raise ValueError(f"kv_heads must be given unless the heads of qkv are a multiple of 3; got {qkv.shape[1]}")
        kv_heads = qkv.shape[1] // 3
    if not 0 < 2 * kv_heads < qkv.shape[1]:
        raise ValueError(f"kv_heads must leave query heads of the {qkv.shape[1]} of qkv; got {kv_heads}")
    q, k, v = _split(qkv, kv_heads)
    check_qkv(q, k, v)
    rope = _as_rope(rope)
    scale = _check(q, offsets, block, scale, activation, rope, validate)
    name = _choose(q, k, block, activation, rope, backend)
    if name == dispatch.REFERENCE:
        return _reference(q, k, v, offsets, block, scale, activation, rope)
    return _packed(qkv, kv_heads, *_options(q, offsets, block, scale, activation, rope, name))


def _split(qkv: Tensor, kv_heads: int) -> tuple[Tensor, ...]:
    return qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)


def _as_rope(rope: Rope | float | None) -> Rope | None:
    return rope if rope is None or isinstance(rope, Rope) else Rope(base=check_number("rope, if it is no Rope,", rope))


def _check(
    q: Tensor,
    offsets: Tensor,
    block: int,
    scale: float | None,
    activation: str | None,
    rope: Rope | None,
    validate: bool,
) -> float:
    """The scale."""
    check_offsets("offsets", offsets, q.shape[0], q.shape[0], q.device, values=validate or q.device.type == "cpu")
    if block not in BLOCKS:
        raise ValueError(f"block must be 16, 32, 64 or 128; got {block}")
    if activation is not None:
        check_activation(activation)
    if rope is not None:
        rope.check(q)
    return check_scale(scale, q.shape[2])


def _choose(q: Tensor, k: Tensor, block: int, activation: str | None, rope: Rope | None, backend: str | None) -> str:
    wanted = {
        f"block:{block}": True,
        f"activation:{activation}": activation is not None,
        "rope": rope is not None,
        "grouped": k.shape[1] != q.shape[1],
    }
    return dispatch.choose("block_attention", q, backend, tuple(f for f, on in wanted.items() if on))


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    block: int,
    scale: float,
    activation: str | None,
    rope: Rope | None,
) -> Tensor:
    turn: dict[str, Any] = {}
    if rope is not None:
        turn = {"positions": rope.at(q, offsets), "base": rope.base, "values": rope.values}
    return reference.attention(q, k, v, offsets, block=block, scale=scale, activation=activation, **turn)


# What the four operators below take after their tensors, and hand on to a backend but for its name.
OPTIONS = (
    "Tensor blocks, Tensor? positions, int block, float scale, str? activation, float? base, bool values, str backend"
)


def _options(
    q: Tensor, offsets: Tensor, block: int, scale: float, activation: str | None, rope: Rope | None, backend: str
) -> tuple[Any, ...]:
    """The OPTIONS. No positions where a kernel may count from the block's start; no base without a rotary embedding."""
    blocks = _blocks(offsets, q.shape[0], block)
    if rope is None:
        return blocks, None, block, scale, activation, None, False, backend
    counted = rope.positions is None and not rope.values
    positions = None if counted else rope.at(q, offsets).float().contiguous()
    return blocks, positions, block, scale, activation, float(rope.base), rope.values, backend


def _run(part: str, tensors: tuple[Tensor, ...], options: tuple[Any, ...]) -> None:
    *given, backend = options
    getattr(dispatch.module("block_attention", backend), part)(*tensors, *given)


@operator("block_list")
def _blocks(offsets: Tensor, total: int, block: int) -> Tensor:
    from gem_kernels.block_attention import blocks

    return blocks.offsets(offsets, total, block)


@_blocks.register_fake
def _(offsets, total, block):  # type: ignore[no-untyped-def]
    return offsets.new_empty(total // block + offsets.shape[0], dtype=torch.int64)


@operator("block_attention", f"(Tensor q, Tensor k, Tensor v, {OPTIONS}) -> Tensor")
def _forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _run("forward", (q, k, v, out), options)
    return out


@_forward.register_fake
def _(q, *_rest):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape)


@operator(
    "block_attention_backward",
    f"(Tensor dout, Tensor q, Tensor k, Tensor v, {OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def _backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    _run("backward", (dout, q, k, v, dq, dk, dv), options)
    return dq, dk, dv


@_backward.register_fake
def _(dout, q, k, v, *_rest):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, blocks, positions, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, blocks, positions)


def _autograd(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    dq, dk, dv = _backward(dout, *ctx.saved_tensors, *ctx.rest)
    return dq, dk, dv, *(None,) * 8


_forward.register_autograd(_autograd, setup_context=_setup)


@operator("block_attention_packed", f"(Tensor qkv, int kv_heads, {OPTIONS}) -> Tensor")
def _packed(qkv: Tensor, kv_heads: int, *options: Any) -> Tensor:
    q, k, v = _split(qkv, kv_heads)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _run("forward", (q, k, v, out), options)
    return out


@_packed.register_fake
def _(qkv, kv_heads, *_rest):  # type: ignore[no-untyped-def]
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] - 2 * kv_heads, qkv.shape[2])


@operator("block_attention_packed_backward", f"(Tensor dout, Tensor qkv, int kv_heads, {OPTIONS}) -> Tensor")
def _packed_backward(dout: Tensor, qkv: Tensor, kv_heads: int, *options: Any) -> Tensor:
    packed = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    _run("backward", (dout, *_split(qkv, kv_heads), *_split(packed, kv_heads)), options)
    return packed


@_packed_backward.register_fake
def _(dout, qkv, *_rest):  # type: ignore[no-untyped-def]
    return qkv.new_empty(qkv.shape)


def _packed_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    qkv, ctx.kv_heads, blocks, positions, *ctx.rest = inputs
    ctx.save_for_backward(qkv, blocks, positions)


def _packed_autograd(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    qkv, *lists = ctx.saved_tensors
    return _packed_backward(dout, qkv, ctx.kv_heads, *lists, *ctx.rest), *(None,) * 9


_packed.register_autograd(_packed_autograd, setup_context=_packed_setup)
