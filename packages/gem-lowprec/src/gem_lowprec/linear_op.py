"""The linear layer under torch.compile: one custom operator forward and one backward, by the functions of `products`.

Nothing inside is traced, so that dynamic sizes, a new step or another seed build nothing anew. Dtypes follow from the
tensors; the layer's settings travel as text.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gem_lowprec.products import Plan, Products, backward, forward
from gem_lowprec.quantize import FP8_128X128, QTensor


@lru_cache(maxsize=256)
def _read(settings: str) -> Products:
    forward, dgrad, wgrad, every, hadamard, hadamard_in, stochastic = settings.split("|")
    return Products(
        forward=forward, dgrad=dgrad, wgrad=wgrad, wgrad_every=int(every), hadamard=int(hadamard),
        hadamard_in=tuple(filter(None, hadamard_in.split(","))), stochastic=stochastic == "True",
    )  # fmt: skip


def settings_of(products: Products) -> str:
    """`products` as text."""
    p = products
    every = (p.forward, p.dgrad, p.wgrad, p.wgrad_every, p.hadamard, ",".join(p.hadamard_in), p.stochastic)
    return "|".join(map(str, every))


def _plan_of(dtype: torch.dtype, clock: Tensor, seed: int, stream: int, settings: str) -> Plan:
    step, micro = clock.tolist()
    return Plan(products=_read(settings), dtype=dtype, seed=seed, stream=stream, step=step, micro=micro)


@torch.library.custom_op("gem_lowprec::linear", mutates_args=())
def _linear_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, clock: Tensor, seed: int, stream: int, settings: str, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Y, X^T's elements and scales (empty where X itself is kept), and the step and micro batch that it ran in."""
    out, kept = forward(x, weight, bias, _plan_of(x.dtype, clock, seed, stream, settings), keep=keep)
    if kept is None:  # no tensor may be returned twice
        return out, x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=torch.float32), clock.clone()
    return out, kept.data.view(torch.uint8), kept.scale, clock.clone()


@_linear_op.register_fake
def _(x, weight, bias, clock, seed, stream, settings, keep):  # type: ignore[no-untyped-def]
    out = x.new_empty(x.shape[0], weight.shape[0])
    data, scale = x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=torch.float32)
    if keep and _keeps_transposed(x, settings):
        rows, cols = x.shape
        data = x.new_empty(cols, -(-rows // 16) * 16, dtype=torch.uint8)[:, :rows]
        scale = x.new_empty(-(-rows // 128), -(-cols // 128), dtype=torch.float32).t()
    return out, data, scale, torch.empty_like(clock)


def _keeps_transposed(x: Tensor, settings: str) -> bool:
    plan = Plan(products=_read(settings), dtype=torch.bfloat16, seed=0, stream=0, step=0, micro=0)
    return plan.blockwise("forward", x) and plan.has_wgrad and plan.blockwise("wgrad", x)


@torch.library.custom_op("gem_lowprec::linear_backward", mutates_args=())
def _linear_backward_op(
    grad: Tensor, x: Tensor, data: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, clock: Tensor, seed: int,
    stream: int, settings: str, needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of X, W and the bias; empty for what is not needed."""
    plan = _plan_of(grad.dtype, clock, seed, stream, settings)
    kept: Tensor | QTensor = x
    if data.numel():
        kept = QTensor(
            data=data.view(torch.float8_e4m3fn), scale=scale, spec=FP8_128X128, dim=-1, dtype=grad.dtype,
            shape=torch.Size((weight.shape[1], grad.shape[0])),
        )  # fmt: skip
    dtype = None if bias is None else bias.dtype
    found = backward(grad, kept, weight, plan, bias_dtype=dtype, needs=(needs[0], needs[1], needs[2]))
    x_grad, w_grad, b_grad = (grad.new_empty(0) if g is None else g for g in found)
    return x_grad, w_grad, b_grad


@_linear_backward_op.register_fake
def _(grad, x, data, scale, weight, bias, clock, seed, stream, settings, needs):  # type: ignore[no-untyped-def]
    wgrad = needs[1] and _read(settings).wgrad != "skip"
    return (
        grad.new_empty(grad.shape[0], weight.shape[1]) if needs[0] else grad.new_empty(0),
        torch.empty_like(weight) if wgrad else grad.new_empty(0),
        torch.empty_like(bias) if needs[2] and bias is not None else grad.new_empty(0),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _clock, ctx.seed, ctx.stream, ctx.settings, _keep = inputs
    _y, data, scale, clock = output
    whole = not (_keep and _keeps_transposed(x, ctx.settings))
    ctx.save_for_backward(x if whole else None, data, scale, weight, bias, clock)


def _autograd(ctx: Any, grad: Tensor, *_others: Tensor) -> tuple[Any, ...]:
    x, data, scale, weight, bias, clock = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    found = torch.ops.gem_lowprec.linear_backward(
        grad, data if x is None else x, data, scale, weight, bias, clock, ctx.seed, ctx.stream, ctx.settings, needs
    )
    skipped = _read(ctx.settings).wgrad == "skip"
    wanted = (needs[0], needs[1] and not skipped, needs[2])
    return *(g if n else None for g, n in zip(found, wanted, strict=True)), None, None, None, None, None


_linear_op.register_autograd(_autograd, setup_context=_setup)
