"""The three products of a linear layer, each in a precision of its own.

    forward   Y[T, N] = X[T, K] W[N, K]^T + bias         contraction over K
    dgrad    dX[T, K] = dY[T, N] W[N, K]                 contraction over N
    wgrad    dW[N, K] = dY[T, N]^T X[T, K]               contraction over T

Each quantised product quantises its own two operands along its own contraction from the high-precision tensors, so no
product inherits another's rounding. Where block-wise products run natively, X is read once for the forward's and the
weight gradient's operand, and only the latter is kept, one byte per element; the same for dY, with the bias's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gem_lowprec.gemm import PRECISIONS, Operand, engine, product
from gem_lowprec.hadamard import random_signs
from gem_lowprec.quantize import FP8_1X128, FP8_128X128, QTensor
from gem_lowprec.rounding import Randoms
from gem_lowprec.weight import QuantizedWeight

READABLE = (torch.bfloat16, torch.float16, torch.float32)  # what `quantize_both` reads
Observer = Callable[[str, str, Tensor, QTensor], None]  # product, role, what was quantised, its quantisation
Sink = Callable[[QTensor, QTensor, Tensor | None], None]  # X, W and the bias of a product that goes elsewhere


class Clock:
    """Where training is, shared by the layers of a model: the optimizer `step` and the `micro` batch inside it.

    `state` [2] int64 on the CPU holds both: a compiled model reads it there, and a new step does not compile it anew.
    """

    def __init__(self, *, step: int = 0, micro: int = 0) -> None:
        self.state = torch.tensor([step, micro], dtype=torch.int64)
        self.leave: Callable[[], None] | None = None  # called when the next step begins

    @property
    def step(self) -> int:
        """The optimizer step."""
        return int(self.state[0])

    @step.setter
    def step(self, value: int) -> None:
        self.state[0] = value

    @property
    def micro(self) -> int:
        """The micro batch inside the step."""
        return int(self.state[1])

    @micro.setter
    def micro(self, value: int) -> None:
        self.state[1] = value


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
class Plan:
    """What the products need beside tensors. `step` and `micro` are those of the forward pass, in backward too."""

    products: Products
    dtype: torch.dtype
    seed: int
    stream: int
    step: int
    micro: int
    observer: Observer | None = None

    def blockwise(self, name: str, x: Tensor) -> bool:
        """Whether a product takes operands like x from `quantize_both`: our kernel runs it, on values as they are."""
        products, device = self.products, x.device
        if x.dtype not in READABLE:
            return False
        plain = self.observer is None and not (products.hadamard and name in products.hadamard_in)
        return plain and getattr(products, name) == "fp8_block" and engine("fp8_block", device).name == "native"

    @property
    def has_wgrad(self) -> bool:
        """Whether the weight gets a gradient on this step."""
        return self.products.wgrad != "skip" and self.step % self.products.wgrad_every == 0

    def run(self, name: str, a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """One of the three products, as `dtype`."""
        products = self.products
        signs = None
        if products.hadamard and name in products.hadamard_in:
            signs = random_signs(a.value.shape[1], self.seed, step=self.step, device=a.value.device)
        observe = None if self.observer is None else partial(self.observer, name)
        return product(
            a, b, getattr(products, name), dtype, signs=signs, block=products.hadamard, observe=observe, bias=bias
        )  # fmt: skip

    def randoms(self, name: str) -> Randoms | None:
        """Of the gradient operand of that product."""
        if not self.products.stochastic:
            return None
        return Randoms(
            seed=self.seed, stream=2 * self.stream + (name == "wgrad"), step=self.step, offset=self.micro << 40
        )  # fmt: skip

    def weight(self, name: str, weight: Tensor) -> Operand:
        """W, or for the dgrad W^T, as an operand; one that arrived quantised keeps its bits."""
        transposed = name == "dgrad"
        if isinstance(weight, QuantizedWeight):
            given = weight.quantized.t() if transposed else weight.quantized
            return Operand(value=given.data, role="weight", quantized=given)
        q: QTensor | None = None
        if self.blockwise(name, weight):
            from gem_lowprec.orientations import quantize_both  # imports Triton

            both = quantize_both(weight, FP8_128X128, row=not transposed, col=transposed)
            q = both.col if transposed else both.row
        return Operand(value=weight.t() if transposed else weight, role="weight", quantized=q)


def unwritten(rows: int, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """What stands for a product [rows, N] that goes to a sink: its shape, no memory, NaN for whoever reads it."""
    return torch.full((), torch.nan, dtype=dtype, device=weight.device).expand(rows, weight.shape[0])


def into(sink: Sink, x: QTensor | None, weight: Operand, bias: Tensor | None) -> None:
    """Give a sink the forward's operands; both must be quantised."""
    assert x is not None
    assert weight.quantized is not None
    sink(x, weight.quantized, None if bias is None else bias.detach())


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, *, keep: bool, given: QTensor | None = None,
    sink: Sink | None = None,
) -> tuple[Tensor, QTensor | None]:  # fmt: skip
    """Y, and X^T quantised where that is all that backward wants of X (`keep`: it wants something).

    `given`: X as the forward reads it, where somebody has it already. With a `sink` Y is `unwritten`.
    """
    row, col = given, None
    if row is None and plan.blockwise("forward", x) and x.numel():
        from gem_lowprec.orientations import quantize_both

        kept = keep and plan.has_wgrad and plan.blockwise("wgrad", x)
        both = quantize_both(x, FP8_1X128, col=kept, col_spec=FP8_128X128)
        row, col = both.row, both.col
    if sink is not None:
        into(sink, row, plan.weight("forward", weight), bias)
        return unwritten(x.shape[0], weight, plan.dtype), col
    a = Operand(value=x, role="input", quantized=row)
    return plan.run("forward", a, plan.weight("forward", weight), plan.dtype, bias), col


def backward(
    grad: Tensor, x: Tensor | QTensor, weight: Tensor, plan: Plan, *, bias_dtype: torch.dtype | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of X (in the plan's dtype), W and the bias; None for what is not needed. `x` may be X^T quantised."""
    dgrad, wgrad, dbias = needs[0], needs[1] and plan.has_wgrad, needs[2] and bias_dtype is not None
    row = col = sums = None
    if not plan.products.stochastic and grad.numel():
        by_row = dgrad and plan.blockwise("dgrad", grad)
        by_col = wgrad and plan.blockwise("wgrad", grad)
        if by_row or by_col:
            from gem_lowprec.orientations import quantize_both

            both = quantize_both(grad, FP8_1X128, row=by_row, col=by_col, sums=dbias and grad.dtype != torch.float64)
            row, col, sums = both.row, both.col, both.sums
    grad_x = grad_weight = grad_bias = None
    if dgrad:
        a = Operand(value=grad, role="grad_output", randoms=plan.randoms("dgrad"), quantized=row)
        grad_x = plan.run("dgrad", a, plan.weight("dgrad", weight), plan.dtype)
    if wgrad:
        a = Operand(value=grad.t(), role="grad_output", randoms=plan.randoms("wgrad"), quantized=col)
        if isinstance(x, Tensor) and plan.blockwise("wgrad", x) and x.numel():
            from gem_lowprec.orientations import quantize_both

            turned = quantize_both(x, FP8_128X128, row=False).col
            assert turned is not None
            x = turned
        if isinstance(x, QTensor):
            b = Operand(value=x.data, role="input", quantized=x)
        else:
            b = Operand(value=x.t(), role="input")
        # The block-wise kernel writes the master weight's dtype itself.
        native = plan.products.wgrad == "fp8_block" and engine("fp8_block", grad.device).name == "native"
        grad_weight = plan.run("wgrad", a, b, weight.dtype if native else plan.dtype).to(weight.dtype)
    if dbias:
        if sums is None:
            sums = grad.sum(0, dtype=torch.float64 if grad.dtype == torch.float64 else torch.float32)
        grad_bias = sums.to(bias_dtype)
    return grad_x, grad_weight, grad_bias
