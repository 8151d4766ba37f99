"""Products whose operand is not kept: whoever made it writes it once more on its way back.

The gradient of a weight, dW = dy^T x, is made where the product runs backward, so that x is kept until then. But a norm
or a gate that made x reads in its own backward pass all that x is made of. It comes after the product's, because dx
goes there. So it can write x in passing, and dW is made then: one byte written for one that was not kept, where to
compute x anew by itself would also read its source.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def parts(self, x: Tensor, sizes: Sequence[int], bias: Tensor | None = None) -> tuple[Tensor, ...]:
        """The columns of y in parts [T, size], each in memory of its own, so that one may be kept without the others.
        Their gradients become one without a copy where they lie side by side.
        """
        if not self.taken:
            return F.linear(x, self.weight, bias).split(list(sizes), dim=1)
        return _Parts.apply(x, self.weight, bias, self, list(sizes))  # type: ignore[no-any-return]

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


class _Parts(torch.autograd.Function):
    """The same, in parts."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, late: LateProduct, sizes: list[int]
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(weight, bias)
        ctx.late, ctx.sizes = late, sizes
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        return tuple(F.linear(x, w, b) for w, b in zip(weight.split(sizes), biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *parts: Tensor) -> tuple[Tensor | None, ...]:
        weight, _ = ctx.saved_tensors
        dy = side_by_side(parts)
        if ctx.needs_input_grad[1]:
            ctx.late.leave(dy)
        return dy @ weight, None, dy.sum(0) if ctx.needs_input_grad[2] else None, None, None


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """[T, .] tensors as one, without a copy where they are columns of one that follow each other."""
    first, at = parts[0], parts[0].storage_offset()
    storage = first.untyped_storage().data_ptr()
    for part in parts:
        alike = part.stride() == first.stride() and part.untyped_storage().data_ptr() == storage
        if not alike or part.stride(1) != 1 or part.storage_offset() != at:
            return torch.cat(list(parts), dim=1)
        at += part.shape[1]
    width = at - first.storage_offset()
    return (
        first.as_strided((first.shape[0], width), first.stride())
        if width <= first.stride(0)
        else torch.cat(list(parts), 1)
    )
