"""Gates between projections: SwiGLU's product beside heads of q, and a sigmoid gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

from gem_kernels import dispatch
from gem_kernels.checks import FLOATS, check_count, dense
from gem_kernels.late import LateProduct
from gem_kernels.operator import operator
from gem_kernels.projections import reference
from gem_kernels.projections.checks import check_bias, check_packed, check_vector

__all__ = ["gated_heads", "sigmoid_gate"]


def gated_heads(
    packed: Tensor,
    hidden: int,
    heads: int,
    weight: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    product: LateProduct | None = None,
    small: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The parts of [gate || up || q] = packed: SwiGLU's product, and heads of q, each divided by its root mean square::

        h = silu(gate) * up        q_h = q_h / sqrt(mean(q_h^2) + eps) * weight      in float32

    Args:
        packed: [T, 2 hidden + H D] float16, bfloat16, float32 or float64.
        hidden: columns of gate and of up, at least 1.
        heads: H. There may be no q: D = 0.
        weight: [D] floating; without it q is as it is.
        bias: [2 hidden + H D] floating, the projection's, which packed holds already. Its gradient is made here, where
            packed's is, so the projection should be given `bias.detach()`; otherwise it would count twice.
        eps: added to the mean square, positive.
        product: the only one that reads h and needs it for its gradients: h is not kept for it, but written again by
            the backward pass of the gate.
        small: packed is not kept for the backward pass: gate and up are in E4M3, a row of at most 512 columns with one
            power of two (within 1/16 of each number, or 2^-17 of the row's largest), and what q was before its norm
            follows from q, which whoever reads it keeps. Gradients are rounded accordingly; that of a head's weight
            which is 0 is 0. Not where torch.compile or a dispatch mode looks on.
        backend: "reference" or "triton"; None lets `dispatch` choose.

    Returns:
        h [T, hidden] and q [T, H, D] in packed's dtype.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or eps that do not fit.
        RuntimeError: the backend asked for cannot run this.

    Sources: Shazeer, 2020 (GLU variants); Henry et al., 2020 (query-key normalisation).
    """
    check_count("hidden", hidden, 1)
    check_count("heads", heads, 1)
    check_packed(packed, heads, 2 * hidden, (weight,), eps)
    width = packed.shape[1] - 2 * hidden
    if weight is not None:
        check_vector("weight", weight, width // heads)
    check_bias(bias, packed)
    name = dispatch.choose("projections", packed, backend, (f"head:{width // heads}",))
    watched = torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None
    late, small = None if watched else product, small and not watched
    if name == dispatch.REFERENCE and late is None and not small:
        return reference.gated_heads(reference.with_bias(packed, bias), hidden, heads, weight, float(eps))
    if late is not None:
        late.taken = True
    weight, bias = dense(weight, bias)
    return (_GatedSmall if small else _Gated).apply(  # type: ignore[no-any-return]
        packed, weight, bias, hidden, heads, float(eps), name, late and late.weight, late
    )


def sigmoid_gate(x: Tensor, logits: Tensor, *, bias: Tensor | None = None, backend: str | None = None) -> Tensor:
    """y = x * sigmoid(logits), in float32.

    Args:
        x: [..., C] float16, bfloat16, float32 or float64.
        logits: like x.
        bias: [C] floating, which the logits hold already, as in `gated_heads`.
        backend: "reference" or "triton"; None lets `dispatch` choose.

    Returns:
        y [..., C] in x's dtype.

    Raises:
        TypeError, ValueError: dtypes, shapes or devices that do not fit.
        RuntimeError: the backend asked for cannot run this.
    """
    if x.dtype not in FLOATS or logits.dtype != x.dtype:
        raise TypeError(f"x and logits must be of one floating dtype; got {x.dtype} and {logits.dtype}")
    if x.dim() == 0 or logits.shape != x.shape or logits.device != x.device:
        raise ValueError(
            f"logits must be like x, {tuple(x.shape)} on {x.device}; got {tuple(logits.shape)} on {logits.device}"
        )
    if bias is not None:
        check_vector("bias", bias, x.shape[-1])
    name = dispatch.choose("projections", x, backend, ())
    if name == dispatch.REFERENCE or x.numel() == 0:
        return reference.sigmoid_gate(x, reference.with_bias(logits, bias))
    return _Sigmoid.apply(x, logits, bias, name)  # type: ignore[no-any-return]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, weight: Tensor | None, bias: Tensor | None, hidden: int, heads: int, eps: float,
        name: str, _weight: Tensor | None = None, product: LateProduct | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(packed, weight, bias)
        ctx.rest = rest = (hidden, heads, eps, name)
        ctx.product = product
        return _gated(packed, weight, *rest)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dgated: Tensor, dq: Tensor) -> tuple[Any, ...]:
        packed, weight, bias = ctx.saved_tensors
        product: Tensor | None = None
        if ctx.product is None:
            dpacked, dweight, dbias = _gated_backward(dgated, dq, packed, weight, bias, *ctx.rest)
        else:
            hidden, *_, name = ctx.rest
            h = packed.new_empty(packed.shape[0], hidden) if ctx.product.waits else None
            backward = dispatch.module("projections", name).gated_backward
            dpacked, dweight, dbias = backward(dgated, dq, packed, weight, bias, *ctx.rest[:3], h)
            product = None if h is None else ctx.product.gradient(h)
        dweight, dbias = None if weight is None else dweight, None if bias is None else dbias
        return dpacked, dweight, dbias, *(None,) * 4, product, None


class _GatedSmall(torch.autograd.Function):
    """The same, with gate and up kept in E4M3, and q as it was made."""

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, weight: Tensor | None, bias: Tensor | None, hidden: int, heads: int, eps: float,
        name: str, _weight: Tensor | None = None, product: LateProduct | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.rest, ctx.product = (hidden, heads, eps, name), product
        h, q, small, scales = dispatch.module("projections", name).gated_small(packed, weight, hidden, heads, eps)
        ctx.save_for_backward(q, *small, scales, weight, bias)
        return h, q

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dgated: Tensor, dq: Tensor) -> tuple[Any, ...]:
        q, data, powers, scales, weight, bias = ctx.saved_tensors
        *rest, name = ctx.rest
        waits = ctx.product is not None and ctx.product.waits
        h = q.new_empty(q.shape[0], rest[0]) if waits else None
        backward = dispatch.module("projections", name).gated_small_backward
        dpacked, dweight, dbias = backward(dgated, dq, q, (data, powers), scales, weight, bias, *rest, h)
        product = None if h is None else ctx.product.gradient(h)
        dweight, dbias = None if weight is None else dweight, None if bias is None else dbias
        return dpacked, dweight, dbias, *(None,) * 4, product, None


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, logits: Tensor, bias: Tensor | None, backend: str) -> Tensor:
        ctx.save_for_backward(x, logits, bias)
        ctx.backend = backend
        return _sigmoid(x, logits, backend)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, logits, bias = ctx.saved_tensors
        dx, dlogits, dbias = _sigmoid_backward(dy, x, logits, bias, ctx.backend)
        return dx, dlogits, None if bias is None else dbias, None


def heads_again(
    packed: Tensor, weight: Tensor | None, hidden: int, heads: int, eps: float, backend: str
) -> Tensor:  # fmt: skip
    """The second result of `gated_heads` alone, for whoever did not keep it."""
    return dispatch.module("projections", backend).heads(packed[:, 2 * hidden :], weight, heads, eps)  # type: ignore[no-any-return]


@operator("gated_heads")
def _gated(
    packed: Tensor, weight: Tensor | None, hidden: int, heads: int, eps: float, backend: str
) -> tuple[Tensor, Tensor]:
    return dispatch.module("projections", backend).gated(packed, weight, hidden, heads, eps)  # type: ignore[no-any-return]


@_gated.register_fake
def _(packed, weight, hidden, heads, eps, backend):  # type: ignore[no-untyped-def]
    rows = packed.shape[0]
    return packed.new_empty(rows, hidden), packed.new_empty(rows, heads, (packed.shape[1] - 2 * hidden) // heads)


@operator("gated_heads_backward")
def _gated_backward(
    dgated: Tensor,
    dq: Tensor,
    packed: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    hidden: int,
    heads: int,
    eps: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    backward = dispatch.module("projections", backend).gated_backward
    return backward(dgated, dq, packed, weight, bias, hidden, heads, eps)  # type: ignore[no-any-return]


@_gated_backward.register_fake
def _(dgated, dq, packed, weight, bias, *_rest):  # type: ignore[no-untyped-def]
    vectors = (packed.new_empty(0) if v is None else v.new_empty(v.shape) for v in (weight, bias))
    return packed.new_empty(packed.shape), *vectors


@operator("sigmoid_gate")
def _sigmoid(x: Tensor, logits: Tensor, backend: str) -> Tensor:
    return dispatch.module("projections", backend).sigmoid(x, logits)  # type: ignore[no-any-return]


@_sigmoid.register_fake
def _(x, logits, backend):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


@operator("sigmoid_gate_backward")
def _sigmoid_backward(
    dy: Tensor, x: Tensor, logits: Tensor, bias: Tensor | None, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    return dispatch.module("projections", backend).sigmoid_backward(dy, x, logits, bias)  # type: ignore[no-any-return]


@_sigmoid_backward.register_fake
def _(dy, x, logits, bias, backend):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(0) if bias is None else bias.new_empty(bias.shape)
