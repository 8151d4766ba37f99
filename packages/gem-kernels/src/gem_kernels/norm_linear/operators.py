"""The two orders as custom operators with their gradients: products by torch, and the norm's backward kernel."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from gem_kernels import dispatch
from gem_kernels.norms import _backward as norm_backward
from gem_kernels.norms import _backward_with_rows as norm_backward_with_rows
from gem_kernels.operator import operator

__all__ = ["after", "before"]


@operator("norm_linear")
def before(x: Tensor, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float, backend: str) -> Tensor:
    """The norm before the product: [M, K], [K], [N, K], [N] -> [M, N]."""
    return dispatch.module("norm_linear", backend).forward(x, gain, weight, bias, eps)


@before.register_fake
def _(x, gain, weight, bias, eps, backend):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], weight.shape[0])


def _before_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, gain, weight, bias, ctx.eps, _ = inputs
    ctx.bias = bias is not None
    ctx.save_for_backward(x, gain, weight)


def _before_autograd(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, gain, weight = ctx.saved_tensors
    dx, dgain, normal = norm_backward_with_rows(dy @ weight, x, gain, ctx.eps, "triton")
    dweight = dy.T @ normal if ctx.needs_input_grad[2] else None
    return dx, dgain, dweight, dy.sum(0) if ctx.bias else None, None, None


before.register_autograd(_before_autograd, setup_context=_before_setup)


@operator("linear_norm")
def after(x: Tensor, weight: Tensor, gain: Tensor, bias: Tensor | None, eps: float, backend: str) -> Tensor:
    """The norm after it: [M, K], [N, K], [N], [N] -> [M, N]."""
    return dispatch.module("norm_linear", backend).forward_after(x, weight, gain, bias, eps)


@after.register_fake
def _(x, weight, gain, bias, eps, backend):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], weight.shape[0])


def _after_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, gain, bias, ctx.eps, _ = inputs
    ctx.save_for_backward(x, weight, gain, bias)


def _after_autograd(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, weight, gain, bias = ctx.saved_tensors
    dz, dgain, _ = norm_backward(dy, None, F.linear(x, weight, bias), gain, None, "rms", ctx.eps, False, "triton")
    dx = dz @ weight if ctx.needs_input_grad[0] else None
    dweight = dz.T @ x if ctx.needs_input_grad[1] else None
    return dx, dweight, dgain, None if bias is None else dz.sum(0), None, None


after.register_autograd(_after_autograd, setup_context=_after_setup)
