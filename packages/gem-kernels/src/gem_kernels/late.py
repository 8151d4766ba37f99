"""Products whose operand is not kept: whoever made it writes it once more on its way back.

The gradient of a weight, dW = dy^T x, is made where the product runs backward, so that x is kept until then. But a norm
or a gate that made x reads in its own backward pass all that x is made of. It comes after the product's, because dx
goes there. So it can write x in passing, and dW is made then: one byte written for one that was not kept, where to
compute x anew by itself would also read its source.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["LateProduct"]


class LateProduct:
    """y = x W^T + b for an x [T, K] that `norm_rows` or `gated_heads` makes with this as its `product`.

    One such object serves one product of one forward pass. Where x comes from an operator that does not take it (under
    torch.compile or a dispatch mode), it is an ordinary product, and x is kept.

    Args:
        weight: W [N, K] in x's dtype.

    Attributes:
        taken: whether the operator that made x makes the gradient of W.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.taken = weight, False
        self._dy: Tensor | None = None

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """y [T, N]; b is [N] in x's dtype."""
        if not self.taken:
            return F.linear(x, self.weight, bias)
        return _Product.apply(x, self.weight, bias, self)  # type: ignore[no-any-return]

    def leave(self, dy: Tensor) -> None:
        """What an operator that multiplies x by W itself calls in its backward pass, with the gradient [T, N]."""
        self._dy = dy

    @property
    def waits(self) -> bool:
        """Whether a gradient has been left."""
        return self._dy is not None

    def gradient(self, x: Tensor) -> Tensor | None:
        """dy^T x [N, K], once; None where nothing was left, because nobody asked for a gradient of W."""
        dy, self._dy = self._dy, None
        return None if dy is None else dy.t() @ x


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, late: LateProduct) -> Tensor:
        ctx.save_for_backward(weight, bias)  # the bias for whoever computes the product again
        ctx.late = late
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, _ = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.late.leave(dy)
        return dy @ weight, None, dy.sum(0) if ctx.needs_input_grad[2] else None, None
