"""A norm and the projection after it, with the norm writing the projection's quantised input.

    n = norm(x),   Y = Q(n) Q(W)^T + bias

Of n only E4M3 and scales are ever written. The backward pass makes Q(n^T) for the weight's gradient from x and the two
numbers of each row that the norm kept, so that x, which the norm's own backward needs, is the only activation saved.
"""

from __future__ import annotations

from typing import Any

import torch
from gem_kernels.nn import NormLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gem_lowprec.linear import LowPrecisionLinear
from gem_lowprec.products import Plan, Sink, backward, into, unwritten
from gem_lowprec.quantize import FP8_128X128, QTensor


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
        plan: Plan, sink: Sink | None,
    ) -> Tensor:  # fmt: skip
        from gem_lowprec.gemm import Operand
        from gem_lowprec.norms import norm_quantize  # imports Triton

        q, norm = norm_quantize(x, gain, shift, eps=eps)
        ctx.save_for_backward(x, gain, shift, weight, norm.rstd, norm.mean)
        ctx.plan, ctx.eps, ctx.bias_dtype = plan, eps, None if bias is None else bias.dtype
        if sink is not None:
            into(sink, q, plan.weight("forward", weight), bias)
            return unwritten(x.shape[0], weight, plan.dtype)
        a = Operand(value=x, role="input", quantized=q)
        return plan.run("forward", a, plan.weight("forward", weight), plan.dtype, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from gem_lowprec.orientations import Norm, quantize_both

        x, gain, shift, weight, rstd, mean = ctx.saved_tensors
        plan: Plan = ctx.plan
        of_x, of_gain, of_shift, of_weight, of_bias = ctx.needs_input_grad[:5]
        settings = ("rms" if shift is None else "layer", ctx.eps, False, "triton")
        n: Tensor | QTensor = x
        if of_weight and plan.has_wgrad:
            if plan.blockwise("wgrad", x) and not plan.products.stochastic:
                norm = Norm(gain=gain, bias=shift, rstd=rstd, mean=mean)
                col = quantize_both(x, FP8_128X128, row=False, norm=norm).col
                assert col is not None
                n = col
            else:
                n = torch.ops.gem_kernels.norm(x, None, gain, shift, *settings)[0].to(plan.dtype)
        of_n = of_x or of_gain or of_shift
        grad_n, grad_weight, grad_bias = backward(
            grad, n, weight, plan, bias_dtype=ctx.bias_dtype, needs=(of_n, of_weight, of_bias)
        )
        grad_x = grad_gain = grad_shift = None
        if of_n:
            assert grad_n is not None
            grad_x, grad_gain, grad_shift = torch.ops.gem_kernels.norm_backward(
                grad_n.to(x.dtype), None, x, gain, shift, *settings
            )
        return grad_x, grad_gain, grad_shift if shift is not None else None, grad_weight, grad_bias, None, None, None


class LowPrecisionNormLinear(NormLinear):
    """A `NormLinear` whose norm writes FP8 and scales, where the projection's block-wise product runs natively.

    Elsewhere, while the projection is watched and under torch.compile it is the norm, then the low-precision layer.
    Submodules, parameters and state_dict are those of `NormLinear`.
    """

    linear: LowPrecisionLinear  # type: ignore[assignment]

    @classmethod
    def from_norm_linear(cls, module: NormLinear) -> LowPrecisionNormLinear:
        """The same norm and projection (which must be a LowPrecisionLinear) in the fused module."""
        assert isinstance(module.linear, LowPrecisionLinear)
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new.in_features, new.out_features = module.in_features, module.out_features
        new.norm, new.linear = module.norm, module.linear
        return new.train(module.training)

    def forward(self, x: Tensor, *residual: Any, sink: Sink | None = None, **named: Any) -> Any:
        """[..., in_features] -> [..., out_features]; with a residual as `NormLinear` does it, unfused. A `sink` (see
        `low_precision_linear`) wants a module that `takes_fp8`.
        """
        plain = all(r is None for r in (*residual, *named.values()))
        if not plain or not self.takes_fp8(x):
            assert sink is None
            return super().forward(x, *residual, **named)
        gain, shift = self.norm.weight, getattr(self.norm, "bias", None)
        out = _NormLinear.apply(
            x.flatten(0, -2),
            gain,
            shift,
            self.linear.weight,
            self.linear.bias,
            self.norm.eps,
            self.linear.plan(x),
            sink,
        )
        return out.view(*x.shape[:-1], self.out_features)

    def takes_fp8(self, x: Tensor) -> bool:
        """Whether the norm of x would now write FP8 for the projection."""
        rows = x.numel() // x.shape[-1] if x.ndim > 1 else 0
        return x.is_cuda and x.shape[-1] <= 8192 and self.linear.takes_fp8(x, rows)
