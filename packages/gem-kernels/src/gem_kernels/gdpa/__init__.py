"""Generalised dot-product attention (GDPA): an activation in the place of softmax."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from gem_kernels import dispatch
from gem_kernels.checks import check_number, check_problem, check_scale, dense, normalise_window
from gem_kernels.gdpa import reference
from gem_kernels.gdpa.activations import ACTIVATIONS, resolve
from gem_kernels.operator import operator

__all__ = ["ACTIVATIONS", "gdpa"]


def gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    *,
    activation: str = "silu",
    scale: float | None = None,
    out_scale: float = 1.0,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    score_bound: float | None = None,
    residual: Tensor | None = None,
    backend: str | None = None,
    validate: bool = False,
) -> Tensor:
    """Attention with an element-wise activation, on jagged tensors: self-attention, cross-attention and PMA in one
    operator.

    For each sample b and head h, with Q, K, V that sample's rows::

        O = out_scale * act(scale Q K^T) V (+ residual)

    HSTU is the member act = silu, out_scale = 1 / N. Tensors, offsets, maxima, `causal`, `window`, `backend`,
    `validate` and the errors raised are those of `jagged_attention`.

    Args:
        q: [Tq, H, D], or [Lq, H, D] learned queries with `q_offsets=None`.
        k: [Tk, Hkv, D].
        v: [Tk, Hkv, D].
        q_offsets: [B + 1] or None.
        k_offsets: [B + 1].
        max_q: at least the longest query sequence.
        max_k: at least the longest key sequence.
        activation: identity, relu, relu2 (relu squared), leaky_relu (slope 0.01), gelu (erf), gelu_tanh, silu,
            hardswish, or silu_poly and gelu_poly: silu and gelu by multiplications and additions alone, where
            `score_bound` allows it, and exactly where it does not (which is announced once).
        scale: 1 / sqrt(D) by default.
        out_scale: a factor of the output.
        causal: query i sees keys j <= i + (Lk - Lq).
        window: (left, right) around the same diagonal.
        score_bound: what the caller asserts: no |scale q . k| is larger. With normalised q and k it is scale |q| |k|.
            `activations.POLYNOMIALS` has the largest errors within it; beyond it a polynomial is not the activation.
        residual: as O in shape, dtype and device; added to it before it is rounded.
        backend: "reference", "triton" or "hopper"; None lets `dispatch` choose.
        validate: also check the offsets' values on a GPU, which waits for the device.

    Returns:
        O: [Tq, H, D] ([B * Lq, H, D] for learned queries) in q's dtype; 0, or the residual, for a query that sees no
        key.

    Raises:
        ValueError: also for a `score_bound` that is not a positive number, and a `residual` that is not as O.

    Source: Meta's GDPA; HSTU (Zhai et al., 2024).
    """
    activation = resolve(activation, score_bound)
    check_problem(q, k, v, q_offsets, k_offsets, max_q, max_k, validate=validate)
    if residual is not None:
        _check_residual(residual, q, q_offsets, k_offsets)
    left, right = normalise_window(causal, window)
    scale = check_scale(scale, q.shape[2])
    out_scale = check_number("out_scale", out_scale)
    wanted = {
        f"activation:{activation}": True,
        "causal": causal,
        "window": window is not None,
        "shared_q": q_offsets is None,
        "grouped": k.shape[1] != q.shape[1],
    }
    name = dispatch.choose("gdpa", q, backend, tuple(f for f, on in wanted.items() if on))
    if name == dispatch.REFERENCE:
        return reference.attention(
            q,
            k,
            v,
            q_offsets,
            k_offsets,
            max_q,
            max_k,
            activation=activation,
            scale=scale,
            out_scale=out_scale,
            left=left,
            right=right,
            residual=residual,
        )
    q_offsets, k_offsets = dense(q_offsets, k_offsets)  # type: ignore[assignment]
    tensors, where = (q, k, v, q_offsets, k_offsets, residual), (max_q, max_k)
    return cast(Tensor, _forward(*tensors, *where, activation, scale, out_scale, left, right, name))


def _check_residual(residual: Tensor, q: Tensor, q_offsets: Tensor | None, k_offsets: Tensor) -> None:
    rows = q.shape[0] if q_offsets is not None else q.shape[0] * (k_offsets.shape[0] - 1)
    found, expected = ((tuple(x), d, str(at)) for x, d, at in (
        (residual.shape, residual.dtype, residual.device), ((rows, *q.shape[1:]), q.dtype, q.device)
    ))  # fmt: skip
    if found != expected:
        raise ValueError(f"residual must be as the output, {expected}; got {found}")


@operator("gdpa")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    residual: Tensor | None,
    max_q: int,
    max_k: int,
    activation: str,
    scale: float,
    out_scale: float,
    left: int,
    right: int,
    backend: str,
) -> Tensor:
    forward = dispatch.module("gdpa", backend).forward
    return forward(q, k, v, q_offsets, k_offsets, max_q, max_k, activation, scale, out_scale, left, right, residual)


@_forward.register_fake
def _(q, k, v, q_offsets, k_offsets, *_rest):  # type: ignore[no-untyped-def]
    rows = q.shape[0] if q_offsets is not None else q.shape[0] * (k_offsets.shape[0] - 1)
    return q.new_empty(rows, q.shape[1], q.shape[2])


@operator("gdpa_backward")
def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    activation: str,
    scale: float,
    out_scale: float,
    left: int,
    right: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    backward = dispatch.module("gdpa", backend).backward
    return backward(dout, q, k, v, q_offsets, k_offsets, max_q, max_k, activation, scale, out_scale, left, right)


@_backward.register_fake
def _(dout, q, k, v, *_rest):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rest = inputs[6:]
    ctx.save_for_backward(*inputs[:6])  # the residual for those who compute O again


def _autograd(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    *tensors, residual = ctx.saved_tensors
    dq, dk, dv = _backward(dout, *tensors, *ctx.rest)
    return dq, dk, dv, None, None, None if residual is None else dout, *(None,) * 8


_forward.register_autograd(_autograd, setup_context=_setup)
