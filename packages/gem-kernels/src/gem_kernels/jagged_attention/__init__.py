"""Softmax attention on jagged tensors (jagged flash attention, JFA)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem_kernels import dispatch
from gem_kernels.checks import check_bias, check_problem, check_scale, dense, normalise_window
from gem_kernels.jagged_attention import reference
from gem_kernels.operator import operator

__all__ = ["jagged_attention"]


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    validate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of every sequence's queries to the same sequence's keys, straight on jagged tensors.

    For each sample b and head h, with Q, K, V that sample's rows::

        S = scale Q K^T + bias        P = softmax(S)        O = P V        LSE = log sum exp S

    Args:
        q: [Tq, H, D] float16, bfloat16, float32 or float64. With `q_offsets=None`, [Lq, H, D] learned queries that
            every sample uses (PMA); its gradient sums over the batch in a fixed order.
        k: [Tk, Hkv, D] in q's dtype; Hkv divides H, and query head h reads key head h // (H / Hkv).
        v: [Tk, Hkv, D].
        q_offsets: [B + 1] int32 or int64 on the same device, from 0 to Tq; or None.
        k_offsets: [B + 1], from 0 to Tk. To use buffers longer than their tokens, give the rest to one more sequence.
        max_q: at least the longest query sequence (Lq when `q_offsets` is None). A host int: it sizes the launch.
        max_k: at least the longest key sequence.
        scale: 1 / sqrt(D) by default.
        bias: [B or 1, H or 1, max_q, max_k], any floating dtype; its gradient is summed over broadcast dims in a
            fixed order.
        causal: query i sees keys j <= i + (Lk - Lq): the diagonal ends at both sequences' last token.
        window: (left, right): query i sees keys from i + (Lk - Lq) - left to i + (Lk - Lq) + right; -1 or None is
            unlimited. `causal` makes right 0.
        return_lse: also return LSE. It can be differentiated.
        backend: "reference", "triton" or "hopper"; None lets `dispatch` choose.
        validate: also check the offsets' values on a GPU, which waits for the device; on a CPU they always are.
            Unchecked, a sequence longer than its maximum is cut short.

    Returns:
        O: [Tq, H, D] ([B * Lq, H, D] for learned queries) in q's dtype. A query that sees no key gets 0.
        LSE: [Tq, H] float32 (float64 for float64 inputs), if asked for. A query that sees no key gets -inf.

    Raises:
        TypeError: a dtype that is not supported or does not match.
        ValueError: shapes, devices, offsets or maxima that do not fit together.
        RuntimeError: the backend asked for cannot run this.

    Source: FlashAttention-2 (Dao, 2023) for the algorithm; the jagged form follows Meta's JFA.
    """
    check_problem(q, k, v, q_offsets, k_offsets, max_q, max_k, validate=validate)
    if bias is not None:
        check_bias(bias, q, k_offsets.shape[0] - 1, max_q, max_k)
    left, right = normalise_window(causal, window)
    scale = check_scale(scale, q.shape[2])

    wanted = {
        "bias": bias is not None,
        "causal": causal,
        "window": window is not None,
        "shared_q": q_offsets is None,
        "grouped": k.shape[1] != q.shape[1],
        "return_lse": return_lse,
    }
    name = dispatch.choose("jagged_attention", q, backend, tuple(f for f, on in wanted.items() if on))
    if name == dispatch.REFERENCE:  # plain PyTorch: autograd and torch.compile see through it
        out, lse = reference.attention(
            q,
            k,
            v,
            q_offsets,
            k_offsets,
            max_q,
            max_k,
            scale=scale,
            bias=bias,
            left=left,
            right=right,
            return_lse=return_lse,
        )
    else:
        q_offsets, k_offsets = dense(q_offsets, k_offsets)  # type: ignore[assignment]
        out, lse = _forward(q, k, v, q_offsets, k_offsets, bias, max_q, max_k, scale, left, right, name)
    if return_lse:
        assert lse is not None
        return out, lse
    return out


def _rows(q: Tensor, q_offsets: Tensor | None, k_offsets: Tensor) -> int:
    return q.shape[0] if q_offsets is not None else q.shape[0] * (k_offsets.shape[0] - 1)


@operator("jagged_attention")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    bias: Tensor | None,
    max_q: int,
    max_k: int,
    scale: float,
    left: int,
    right: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    forward = dispatch.module("jagged_attention", backend).forward
    return forward(q, k, v, q_offsets, k_offsets, bias, max_q, max_k, scale, left, right)


@_forward.register_fake
def _(q, k, v, q_offsets, k_offsets, bias, max_q, max_k, scale, left, right, backend):  # type: ignore[no-untyped-def]
    rows = _rows(q, q_offsets, k_offsets)
    return q.new_empty(rows, q.shape[1], q.shape[2]), q.new_empty(rows, q.shape[1], dtype=torch.float32)


@operator("jagged_attention_backward")
def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    bias: Tensor | None,
    bias_grad: bool,
    max_q: int,
    max_k: int,
    scale: float,
    left: int,
    right: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    backward = dispatch.module("jagged_attention", backend).backward
    return backward(
        dout, dlse, q, k, v, out, lse, q_offsets, k_offsets, bias, bias_grad, max_q, max_k, scale, left, right
    )


@_backward.register_fake
def _(dout, dlse, q, k, v, out, lse, q_offsets, k_offsets, bias, bias_grad, max_q, max_k, scale, left, right, backend):  # type: ignore[no-untyped-def]
    dbias = q.new_empty(bias.shape, dtype=bias.dtype) if bias_grad else q.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, q_offsets, k_offsets, bias, *ctx.rest = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, q_offsets, k_offsets, bias)


def _autograd(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, q_offsets, k_offsets, bias = ctx.saved_tensors
    none = (None,) * 12
    if dout is None and dlse is None:
        return none
    dout = torch.zeros_like(out) if dout is None else dout
    bias_grad = bias is not None and ctx.needs_input_grad[5]
    dq, dk, dv, dbias = _backward(dout, dlse, q, k, v, out, lse, q_offsets, k_offsets, bias, bias_grad, *ctx.rest)
    return dq, dk, dv, None, None, dbias if bias_grad else None, *none[6:]


_forward.register_autograd(_autograd, setup_context=_setup)
