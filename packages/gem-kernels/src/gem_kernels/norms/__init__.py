"""Norms at memory speed: RMSNorm and LayerNorm, per head too, with a residual added before and a gate after."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_kernels import dispatch
from gem_kernels.checks import FLOATS, check_number
from gem_kernels.norms import reference
from gem_kernels.operator import operator

__all__ = ["layer_norm", "qk_norm", "rms_norm"]


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
    swish: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Divide every row by its root mean square; over the last dim C, in float32 (float64 for float64)::

        h = x + residual                                     rounded to x's dtype, and returned too
        n = h / sqrt(mean(h^2) + eps) * weight
        y = n      or, with `swish`,      y = h * sigmoid(n)

    Args:
        x: [..., C] float16, bfloat16, float32 or float64. Views with a dense last dim are read as they are: rows of a
            wider tensor, or heads [T, H, D] of packed projections.
        weight: [C] floating, of any of these dtypes; 1 if None.
        eps: added to the mean square, positive.
        residual: like x, added before the norm.
        residual_bias: [C] floating, a bias that the residual holds already, of the projection that made it. Its
            gradient is made here, where the residual's is, so give that projection `residual_bias.detach()`.
        swish: gate h by the norm (SwishNorm) instead of returning the norm.
        backend: "reference" or "triton"; None lets `dispatch` choose.

    Returns:
        y: [..., C] in x's dtype; with a residual (y, h), and gradients flow through both.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or eps that do not fit.
        RuntimeError: the backend asked for cannot run this.

    Source: Zhang and Sennrich, 2019; the gate: Swish (Ramachandran et al., 2017) of a normalised row.
    """
    return _norm(x, residual, residual_bias, weight, None, "rms", eps, swish, backend)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
    swish: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """As `rms_norm`, with n = (h - mean(h)) / sqrt(var(h) + eps) * weight + bias and the biased variance.

    Args:
        bias: [C] floating, 0 if None; needs a weight.
        others: see `rms_norm`.

    Returns, raises: as `rms_norm`.

    Source: Ba et al., 2016.
    """
    return _norm(x, residual, residual_bias, weight, bias, "layer", eps, swish, backend)


def qk_norm(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """RMS-normalise every head of q [Tq, H, D] and k [Tk, Hkv, D], which bounds the scores of attention.

    Args:
        q, k: also views into packed projections.
        q_weight, k_weight: [D], shared by the heads; 1 if None.
        eps, backend: see `rms_norm`.

    Returns:
        The normalised q and k.

    Raises:
        TypeError, ValueError, RuntimeError: as `rms_norm`, and for q and k that are not [T, H, D].

    Source: Henry et al., 2020 (query-key normalisation), here by RMSNorm.
    """
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 3:
            raise ValueError(f"{name} must be [T, H, D]; got {tuple(x.shape)}")
    return (
        rms_norm(q, q_weight, eps=eps, backend=backend),  # type: ignore[return-value]
        rms_norm(k, k_weight, eps=eps, backend=backend),
    )


def _norm(
    x: Tensor,
    residual: Tensor | None,
    residual_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    eps: float,
    swish: bool,
    backend: str | None,
) -> Tensor | tuple[Tensor, Tensor]:
    _check(x, residual, weight, bias, residual_bias, eps)
    asked = {f"norm:{kind}": True, "residual": residual is not None, "swish": swish}
    name = dispatch.choose("norms", x, backend, tuple(f for f, on in asked.items() if on))
    if name == dispatch.REFERENCE:
        if residual_bias is not None:
            residual = residual + (residual_bias - residual_bias.detach()).to(x.dtype)  # type: ignore[operator]
        y, total = reference.norm(x, residual, weight, bias, kind=kind, eps=float(eps), swish=swish)
    elif residual_bias is not None:
        y, total = _Summed.apply(x, residual, residual_bias, weight, bias, kind, float(eps), swish, name)
    else:
        y, total = _forward(x, residual, weight, bias, kind, float(eps), swish, name)
    return y if residual is None else (y, total)


def _check(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual_bias: Tensor | None,
    eps: float,
) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor; got {type(x).__name__}")
    if x.dtype not in FLOATS:
        raise TypeError(f"x must be float16, bfloat16, float32 or float64; got {x.dtype}")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must be [..., C] with C at least 1; got {tuple(x.shape)}")
    check_number("eps", eps, positive=True)
    if residual is not None:
        if residual.shape != x.shape or residual.dtype != x.dtype:
            raise ValueError(
                f"residual must be like x, {tuple(x.shape)} {x.dtype}; got {tuple(residual.shape)} {residual.dtype}"
            )
        if residual.device != x.device:
            raise ValueError(f"residual must be on {x.device} with x; it is on {residual.device}")
    if bias is not None and weight is None:
        raise ValueError("a bias needs a weight")
    if residual_bias is not None and residual is None:
        raise ValueError("a residual_bias needs a residual")
    for name, vector in (("weight", weight), ("bias", bias), ("residual_bias", residual_bias)):
        if vector is None:
            continue
        if vector.dtype not in FLOATS:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64; got {vector.dtype}")
        if vector.shape != x.shape[-1:]:
            raise ValueError(f"{name} must be [{x.shape[-1]}], as wide as x; got {tuple(vector.shape)}")
        if vector.device != x.device:
            raise ValueError(f"{name} must be on {x.device} with x; it is on {vector.device}")


@operator("norm")
def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    eps: float,
    swish: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    return dispatch.module("norms", backend).forward(x, residual, weight, bias, kind, eps, swish)


@_forward.register_fake
def _(x, residual, *_rest):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), x.new_empty(x.shape if residual is not None else (0,))


@operator("norm_backward")
def _backward(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    eps: float,
    swish: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return dispatch.module("norms", backend).backward(dy, dtotal, total, weight, bias, kind, eps, swish)


@_backward.register_fake
def _(dy, dtotal, total, weight, bias, *_rest):  # type: ignore[no-untyped-def]
    dweight, dbias = (total.new_empty(0) if v is None else v.new_empty(v.shape) for v in (weight, bias))
    return total.new_empty(total.shape), dweight, dbias


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, residual, weight, bias, *ctx.rest = inputs
    ctx.residual = residual is not None
    ctx.save_for_backward(output[1] if ctx.residual else x, weight, bias)
    ctx.set_materialize_grads(False)  # a sum that nobody uses costs no zeros


def _autograd(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Any, ...]:
    total, weight, bias = ctx.saved_tensors
    dy = torch.zeros_like(total) if dy is None else dy
    dx, dweight, dbias = _backward(dy, dtotal if ctx.residual else None, total, weight, bias, *ctx.rest)
    return (
        dx,
        dx if ctx.residual else None,
        None if weight is None else dweight,
        None if bias is None else dbias,
        *(None,) * 4,
    )


_forward.register_autograd(_autograd, setup_context=_setup)


@operator("norm_backward_with_sums")
def _backward_with_sums(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual_bias: Tensor | None,
    kind: str,
    eps: float,
    swish: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    backward = dispatch.module("norms", backend).backward_with_sums
    return backward(dy, dtotal, total, weight, bias, residual_bias, kind, eps, swish)  # type: ignore[no-any-return]


@_backward_with_sums.register_fake
def _(dy, dtotal, total, weight, bias, residual_bias, *_rest):  # type: ignore[no-untyped-def]
    vectors = (total.new_empty(0) if v is None else v.new_empty(v.shape) for v in (weight, bias, residual_bias))
    return total.new_empty(total.shape), *vectors


@operator("norm_backward_with_rows")
def _backward_with_rows(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, backend: str
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return dispatch.module("norms", backend).backward_with_rows(dy, x, weight, eps)  # type: ignore[no-any-return]


@_backward_with_rows.register_fake
def _(dy, x, weight, *_rest):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), weight.new_empty(weight.shape), x.new_empty(x.shape)


class _Summed(torch.autograd.Function):
    """A norm of x + residual that also makes the gradient of a bias in the residual."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, residual_bias: Tensor, weight: Tensor | None, bias: Tensor | None,
        *rest: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        y, total = _forward(x, residual, weight, bias, *rest)
        ctx.save_for_backward(total, weight, bias, residual_bias)
        ctx.rest = rest
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Any, ...]:
        total, weight, bias, residual_bias = ctx.saved_tensors
        dy = torch.zeros_like(total) if dy is None else dy
        dx, dweight, dbias, dsums = _backward_with_sums(dy, dtotal, total, weight, bias, residual_bias, *ctx.rest)
        return dx, dx, dsums, None if weight is None else dweight, None if bias is None else dbias, *(None,) * 4
