"""RMSNorm folded into the projection that follows it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem_kernels import dispatch
from gem_kernels.checks import FLOATS
from gem_kernels.norm_linear import reference

__all__ = ["norm_linear"]


def norm_linear(
    x: Tensor,
    gain: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """Normalise every row by its root mean square and project it, without writing the normalised rows::

        y = W (x * gain) / sqrt(mean(x^2) + eps) + b

    The kernel multiplies x by W diag(gain), sums the squares of x while its tiles pass, and divides at the end. The
    backward pass recomputes the normalised rows, so that none are kept for it; its products are torch's.

    Args:
        x: [..., K] float16, bfloat16, float32 or float64.
        gain: [K] floating, the norm's weight.
        weight: [N, K] in x's dtype.
        bias: [N] in x's dtype.
        eps: added to the mean square, positive.
        backend: "reference" or "triton"; None lets `dispatch` choose.

    Returns:
        y: [..., N] in x's dtype.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or eps that do not fit.
        RuntimeError: the backend asked for cannot run this.

    Source: Zhang and Sennrich, 2019, for the norm.
    """
    _check(x, gain, weight, bias, eps)
    features = (f"width:{weight.shape[0]}",)
    name = dispatch.choose("norm_linear", x, backend, features)
    if name == dispatch.REFERENCE:
        return reference.norm_linear(x, gain, weight, bias, eps=float(eps))
    return _forward(x.flatten(0, -2), gain, weight, bias, float(eps), name).unflatten(0, x.shape[:-1])


def _check(x: Tensor, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
    if x.dtype not in FLOATS:
        raise TypeError(f"x must be float16, bfloat16, float32 or float64; got {x.dtype}")
    if x.dim() < 2 or x.shape[-1] == 0:
        raise ValueError(f"x must be [..., K] with K at least 1; got {tuple(x.shape)}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.shape[0] == 0:
        raise ValueError(f"weight must be [N, {x.shape[-1]}]; got {tuple(weight.shape)}")
    if gain.shape != x.shape[-1:]:
        raise ValueError(f"gain must be [{x.shape[-1]}], as wide as x; got {tuple(gain.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}], one for each row of weight; got {tuple(bias.shape)}")
    if not gain.is_floating_point():
        raise TypeError(f"gain must be floating; got {gain.dtype}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise TypeError(f"{name} must be of x's dtype, {x.dtype}; got {tensor.dtype}")
    for name, tensor in (("gain", gain), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} must be on {x.device} with x; it is on {tensor.device}")
    if eps <= 0:
        raise ValueError(f"eps must be positive; got {eps}")


@torch.library.custom_op("gem_kernels::norm_linear", mutates_args=())
def _forward(x: Tensor, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float, backend: str) -> Tensor:
    return dispatch.module("norm_linear", backend).forward(x, gain, weight, bias, eps)


@_forward.register_fake
def _(x, gain, weight, bias, eps, backend):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], weight.shape[0])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, gain, weight, bias, ctx.eps, ctx.backend = inputs
    ctx.bias = bias is not None
    ctx.save_for_backward(x, gain, weight)


def _autograd(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, gain, weight = ctx.saved_tensors
    norm = torch.ops.gem_kernels.norm
    dx = dgain = dweight = None
    if ctx.needs_input_grad[2]:
        normal, _ = norm(x, None, gain, None, "rms", ctx.eps, False, ctx.backend)
        dweight = dy.T @ normal
    if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
        backward = torch.ops.gem_kernels.norm_backward
        dx, dgain, _ = backward(dy @ weight, None, x, gain, None, "rms", ctx.eps, False, ctx.backend)
    return dx, dgain, dweight, dy.sum(0) if ctx.bias else None, None, None


_forward.register_autograd(_autograd, setup_context=_setup)
