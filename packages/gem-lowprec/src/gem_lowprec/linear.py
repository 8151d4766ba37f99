"""A linear layer whose three products have a precision each; `gem_lowprec.products` has the equations.

Under torch.compile the layer is one custom operator (`gem_lowprec.linear_op`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gem_lowprec.linear_op import settings_of
from gem_lowprec.products import Clock, Observer, Plan, Products, Sink, backward, forward
from gem_lowprec.quantize import QTensor
from gem_lowprec.weight import QuantizedWeight

__all__ = ["Clock", "LowPrecisionLinear", "Observer", "Products", "low_precision_linear"]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, given: QTensor | None, sink: Sink | None
    ) -> Tensor:
        out, kept = forward(x, weight, bias, plan, keep=ctx.needs_input_grad[1], given=given, sink=sink)
        ctx.plan, ctx.bias_dtype = plan, None if bias is None else bias.dtype
        none = x.new_empty(0)  # in the place of the tensors, which are saved apart
        ctx.kept = None if kept is None else replace(kept, data=none, scale=none)
        # As integers, so that hooks which store activations in fewer bits leave them alone.
        parts = (x,) if kept is None else (kept.data.view(torch.uint8), kept.scale.view(torch.int32))
        ctx.save_for_backward(*parts, weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *parts, weight = ctx.saved_tensors
        x = parts[0]
        if ctx.kept is not None:
            data, scale = parts[0].view(ctx.kept.spec.element.dtype), parts[1].view(torch.float32)
            x = replace(ctx.kept, data=data, scale=scale)
        needs = ctx.needs_input_grad[:3]
        return *backward(grad, x, weight, ctx.plan, bias_dtype=ctx.bias_dtype, needs=needs), None, None, None


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
    given: QTensor | None = None,
    sink: Sink | None = None,
) -> Tensor:
    """Y = X W^T + bias with a precision per product, differentiable once.

    x [..., K], weight [N, K], bias [N] -> [..., N] in the dtype of x, or in autocast's where that is on. `seed`,
    `stream` (one per layer) and `clock` select the random numbers. `given` is Q(X) where somebody has made it; a `sink`
    gets the product's operands instead of Y being written (`gem_lowprec.products`). Raises ValueError for shapes that
    do not fit, TypeError for `products` that are none.
    """
    if not isinstance(products, Products):
        raise TypeError(f"products must be Products, got {products!r}")
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"expected x [..., K] and weight [N, K], got {list(x.shape)} and {list(weight.shape)}")
    dtype = _dtype(x)
    clock = clock or Clock()
    rows = x.reshape(-1, x.shape[-1]).to(dtype)
    traced = torch.compiler.is_compiling() and observer is None and products.wgrad_every == 1
    if traced and not isinstance(weight, QuantizedWeight) and given is None and sink is None:
        keep = torch.is_grad_enabled() and weight.requires_grad
        settings = settings_of(products)
        out = torch.ops.gem_lowprec.linear(rows, weight, bias, clock.state, seed, stream, settings, keep)[0]
    else:
        out = _eager(rows, weight, bias, products, dtype, clock, seed, stream, observer, given, sink)
    return out.view(*x.shape[:-1], weight.shape[0])


def _dtype(x: Tensor) -> torch.dtype:
    """Of the result: autocast's where that is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


@torch.compiler.disable
def _eager(
    x: Tensor, weight: Tensor, bias: Tensor | None, products: Products, dtype: torch.dtype, clock: Clock, seed: int,
    stream: int, observer: Observer | None, given: QTensor | None, sink: Sink | None,
) -> Tensor:  # fmt: skip
    """Never traced: a compiled model has a graph break where a layer is watched, keeps a quantised weight, or has a
    weight gradient on some steps only."""
    step, micro = clock.state.tolist()
    plan = Plan(
        products=products, dtype=dtype, seed=seed, stream=stream, step=step, micro=micro, observer=observer
    )  # fmt: skip
    return _Linear.apply(x, weight, bias, plan, given, sink)  # type: ignore[no-any-return]


class LowPrecisionLinear(nn.Linear):
    """An `nn.Linear` whose products run in the precisions of `products`.

    Parameters, their names and the state_dict are those of `nn.Linear`, so checkpoints move both ways. An input of less
    than `min_tokens` rows goes through a plain linear layer, where the weight has a gradient on every step: `convert`
    sets it on cards for which `gem_lowprec.speed` knows from how many rows on low precision is faster.
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
        self.min_tokens = 0

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

    def too_few(self, x: Tensor) -> bool:
        """Whether x has less than `min_tokens` rows."""
        always = self.products.wgrad != "skip" and self.products.wgrad_every == 1
        return always and self.min_tokens > 0 and x.numel() < self.min_tokens * self.in_features

    def plan(self, x: Tensor) -> Plan:
        """What the products of an input like x need beside tensors, now."""
        step, micro = self.clock.state.tolist()
        return Plan(
            products=self.products, dtype=_dtype(x), seed=self.seed, stream=self.stream, step=step, micro=micro,
            observer=self.observer,
        )  # fmt: skip

    def takes_fp8(self, like: Tensor, rows: int) -> bool:
        """Whether the product of so many rows would now read FP8 that a kernel before it writes. `like`: of the rows'
        device and dtype.
        """
        few = rows < max(self.min_tokens, 1)
        return not few and not torch.compiler.is_compiling() and self.plan(like).blockwise("forward", like)

    def forward(self, input: Tensor, given: QTensor | None = None, sink: Sink | None = None) -> Tensor:
        """[..., in_features] -> [..., out_features]; `given`, `sink`: see `low_precision_linear`."""
        if self.too_few(input) and sink is None:
            return nn.functional.linear(input, self.weight, self.bias)
        return low_precision_linear(
            input, self.weight, self.bias, products=self.products, clock=self.clock, seed=self.seed, stream=self.stream,
            observer=self.observer, given=given, sink=sink,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Sizes and precisions."""
        p = self.products
        return f"{super().extra_repr()}, forward={p.forward}, dgrad={p.dgrad}, wgrad={p.wgrad}"
