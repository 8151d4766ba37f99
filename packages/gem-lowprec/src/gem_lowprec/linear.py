"""A linear layer whose three products have a precision each.

    forward   Y[T, N] = X[T, K] W[N, K]^T + bias         contraction over K
    dgrad    dX[T, K] = dY[T, N] W[N, K]                 contraction over N
    wgrad    dW[N, K] = dY[T, N]^T X[T, K]               contraction over T

Each quantised product quantises its own two operands along its own contraction from the saved high-precision tensors,
so no product inherits another's rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gem_lowprec.gemm import PRECISIONS, Operand, product
from gem_lowprec.hadamard import random_signs
from gem_lowprec.quantize import QTensor
from gem_lowprec.rounding import Randoms
from gem_lowprec.weight import QuantizedWeight

Observer = Callable[[str, str, Tensor, QTensor], None]  # product, role, what was quantised, its quantisation


@dataclass(kw_only=True)
class Clock:
    """Where training is, shared by the layers of a model: the optimizer `step` and the `micro` batch inside it."""

    step: int = 0
    micro: int = 0


@dataclass(frozen=True, kw_only=True)
class Products:
    """Precision of each product of a linear layer; `gem_lowprec.gemm` describes the names.

    `wgrad` may also be "skip": the weight gets no gradient (None). With `wgrad_every` = n the weight gets one only on
    the steps that n divides, and None on the others; optimizers leave such a parameter alone.
    `hadamard` = b > 0 applies a block-b random Hadamard transform in the products named by `hadamard_in`.
    `stochastic` rounds the gradient operand of the quantised backward products stochastically instead of to nearest.
    """

    forward: str = "bf16"
    dgrad: str = "bf16"
    wgrad: str = "bf16"
    wgrad_every: int = 1
    hadamard: int = 0
    hadamard_in: tuple[str, ...] = ("wgrad",)
    stochastic: bool = False

    def __post_init__(self) -> None:
        for name in ("forward", "dgrad", "wgrad"):
            allowed = (*PRECISIONS, "skip") if name == "wgrad" else PRECISIONS
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.wgrad_every < 1:
            raise ValueError(f"wgrad_every must be at least 1, got {self.wgrad_every}")
        if self.hadamard < 0 or self.hadamard & (self.hadamard - 1):
            raise ValueError(f"hadamard must be 0 or a power of two, got {self.hadamard}")
        unknown = set(self.hadamard_in) - {"forward", "dgrad", "wgrad"}
        if unknown:
            raise ValueError(f"hadamard_in names products forward, dgrad and wgrad, got {sorted(unknown)}")

    @property
    def quantised(self) -> bool:
        """Whether anything differs from a plain linear layer."""
        return (self.forward, self.dgrad, self.wgrad, self.wgrad_every) != ("bf16", "bf16", "bf16", 1)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What the autograd function needs beside tensors."""

    products: Products
    dtype: torch.dtype
    seed: int
    stream: int
    clock: Clock
    observer: Observer | None = None

    def run(self, name: str, a: Operand, b: Operand, step: int) -> Tensor:
        products = self.products
        signs = None
        if products.hadamard and name in products.hadamard_in:
            signs = random_signs(a.value.shape[1], self.seed, step=step, device=a.value.device)
        observe = None if self.observer is None else partial(self.observer, name)
        precision = getattr(products, name)
        return product(a, b, precision, self.dtype, signs=signs, block=products.hadamard, observe=observe)

    def gradient(self, value: Tensor, name: str, step: int, micro: int) -> Operand:
        randoms = None
        if self.products.stochastic:
            stream = 2 * self.stream + (name == "wgrad")
            randoms = Randoms(seed=self.seed, stream=stream, step=step, offset=micro << 40)
        return Operand(value=value, role="grad_output", randoms=randoms)


def _weight(weight: Tensor, *, transposed: bool = False) -> Operand:
    """W or W^T as an operand; one that arrived quantised keeps its bits."""
    if isinstance(weight, QuantizedWeight):
        q = weight.quantized.t() if transposed else weight.quantized
        return Operand(value=q.data, role="weight", quantized=q)
    return Operand(value=weight.t() if transposed else weight, role="weight")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.plan, ctx.step, ctx.micro = plan, plan.clock.step, plan.clock.micro
        ctx.bias_dtype = None if bias is None else bias.dtype
        a, b = Operand(value=x, role="input"), _weight(weight)
        out = plan.run("forward", a, b, ctx.step)
        return out if bias is None else out + bias.to(out.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        plan: _Plan = ctx.plan
        products, step = plan.products, ctx.step
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            a = plan.gradient(grad, "dgrad", step, ctx.micro)
            grad_x = plan.run("dgrad", a, _weight(weight, transposed=True), step).to(x.dtype)
        if ctx.needs_input_grad[1] and products.wgrad != "skip" and step % products.wgrad_every == 0:
            a = plan.gradient(grad.t(), "wgrad", step, ctx.micro)
            grad_weight = plan.run("wgrad", a, Operand(value=x.t(), role="input"), step).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            total = torch.float64 if grad.dtype == torch.float64 else torch.float32
            grad_bias = grad.sum(0, dtype=total).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None


def low_precision_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    products: Products,
    clock: Clock | None = None,
    seed: int = 0,
    stream: int = 0,
    observer: Observer | None = None,
) -> Tensor:
    """Y = X W^T + bias with a precision per product, differentiable once.

    x [..., K], weight [N, K], bias [N] -> [..., N] in the dtype of x, or in autocast's where that is on. `seed`,
    `stream` (one per layer) and `clock` select the random numbers. Raises ValueError for shapes that do not fit.
    """
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"expected x [..., K] and weight [N, K], got {list(x.shape)} and {list(weight.shape)}")
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    plan = _Plan(products=products, dtype=dtype, seed=seed, stream=stream, clock=clock or Clock(), observer=observer)
    out = _Linear.apply(x.reshape(-1, x.shape[-1]).to(dtype), weight, bias, plan)
    return out.view(*x.shape[:-1], weight.shape[0])


class LowPrecisionLinear(nn.Linear):
    """An `nn.Linear` whose products run in the precisions of `products`.

    Parameters, their names and the state_dict are those of `nn.Linear`, so checkpoints move both ways.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, products: Products,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._configure(products, Clock(), seed=0, stream=0)

    def _configure(self, products: Products, clock: Clock, seed: int, stream: int) -> None:
        self.products, self.clock, self.seed, self.stream = products, clock, seed, stream
        self.observer: Observer | None = None

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, products: Products, *, clock: Clock | None = None, seed: int = 0, stream: int = 0
    ) -> LowPrecisionLinear:  # fmt: skip
        """A low-precision layer that shares the Parameters of `linear`: optimizers and tied weights stay valid."""
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new.in_features, new.out_features = linear.in_features, linear.out_features
        new.weight = linear.weight
        new.register_parameter("bias", linear.bias)
        new._configure(products, clock or Clock(), seed, stream)
        return new.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return low_precision_linear(
            input, self.weight, self.bias, products=self.products, clock=self.clock, seed=self.seed, stream=self.stream,
            observer=self.observer,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Sizes and precisions."""
        p = self.products
        return f"{super().extra_repr()}, forward={p.forward}, dgrad={p.dgrad}, wgrad={p.wgrad}"
