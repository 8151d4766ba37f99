"""The two products with their gradients, for whichever backend runs them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

from gem_kernels import dispatch
from gem_kernels.project_gated import reference
from gem_kernels.project_gated import triton as separate
from gem_kernels.projections import gates

__all__ = ["GatedDown", "project", "watched"]


def watched() -> bool:
    """Whether somebody who knows them apart looks at operators (torch.compile, a dispatch mode), or at what they keep
    (hooks on saved tensors: checkpoints, offloading, plans of what is kept).
    """
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return True
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class GatedDown:
    """y = h W^T + told V^T + b for the h [T, hidden] that `project_gated` makes with this as its `down`, and whose only
    reader this is: its backward pass goes through the gate as well, in one kernel on Hopper.

    One such object serves one forward pass. Where h comes from an operator that does not take it (the reference; under
    torch.compile, a dispatch mode or hooks on saved tensors), the products are ordinary ones.

    Args:
        again: h is not kept for the gradient of W, but written again by the backward pass.
        backend: as of `project_gated`, for this product's backward pass; None: as asked for there.

    Attributes:
        taken: whether the backward pass goes through the gate.
    """

    def __init__(self, *, again: bool = False, backend: str | None = None) -> None:
        self.again, self.backend, self.taken = again, backend, False
        self._packed: tuple[Tensor, Tensor | None, int] | None = None
        self._made: tuple[Tensor, Tensor | None] | None = None

    def __call__(
        self, h: Tensor, weight: Tensor, bias: Tensor | None = None, told: Tensor | None = None,
        other: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """h [T, hidden], W [N, hidden], b [N], told [T, C] and V [N, C] of one dtype -> y [T, N].

        Raises:
            ValueError: where only one of told and V is given, or h is not the one that was made with this.
        """
        if (told is None) != (other is None):
            raise ValueError("told and its weight must be given together; got one of them")
        if not self.taken:
            return reference.down(h, weight, told, other, bias)
        if self._packed is None:
            raise ValueError("h must be that of the last project_gated(down=...), once; it has been multiplied already")
        (packed, up_bias, hidden), self._packed = self._packed, None
        features = (f"hidden:{hidden}", f"behind:{0 if told is None else told.shape[1]}")
        name = dispatch.choose("project_gated", weight.t(), self.backend, features)
        return _Down.apply(h, weight, told, other, bias, packed, up_bias, hidden, name, self)  # type: ignore[no-any-return]

    def _give(self, packed: Tensor, bias: Tensor | None, hidden: int, backend: str | None) -> None:
        """What h was made of: [gate || up || ..], the projection's bias, whose gradient is wanted, and the backend that
        was asked for.
        """
        self.taken, self._packed = True, (packed, bias, hidden)
        self.backend = self.backend or backend

    def _leave(self, dpacked: Tensor, dbias: Tensor | None) -> None:
        """Gradients whose columns of gate and up are there."""
        self._made = dpacked, dbias

    def _take(self) -> tuple[Tensor, Tensor | None] | None:
        """What was left, once."""
        made, self._made = self._made, None
        return made


def _bias_gradient(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else torch.empty_like(bias)


class _Project(torch.autograd.Function):
    """x, W, the norm's weight and the bias -> h and q."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, gain: Tensor | None, bias: Tensor | None, hidden: int, heads: int,
        eps: float, name: str, asked: str | None, down: GatedDown | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        forward = dispatch.module("project_gated", name).forward
        packed, h, q = forward(x, weight, bias, gain, hidden, heads, eps)
        ctx.save_for_backward(x, weight, gain, bias, packed)
        ctx.rest, ctx.down = (hidden, heads, eps), down
        if down is not None:
            down._give(packed, bias, hidden, asked)
        return h, q

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor, dq: Tensor) -> tuple[Any, ...]:
        x, weight, gain, bias, packed = ctx.saved_tensors
        hidden, heads, eps = ctx.rest
        made = None if ctx.down is None else ctx.down._take()
        if made is None:
            dpacked, dbias = torch.empty_like(packed), _bias_gradient(bias)
            front = None if dbias is None else dbias[: 2 * hidden]
            gates.swiglu_backward(dh.contiguous(), packed, dpacked, front, hidden)
        else:
            dpacked, dbias = made
        dgain = separate.heads_backward(dq, packed, dpacked, gain, dbias, hidden, heads, eps)
        dweight = dpacked.t() @ x if ctx.needs_input_grad[1] else None
        dx = dpacked @ weight if ctx.needs_input_grad[0] else None
        return dx, dweight, dgain, dbias, *(None,) * 6


def project(*given: Any) -> tuple[Tensor, Tensor]:
    """h and q, as `_Project.forward` takes what is given."""
    return _Project.apply(*given)  # type: ignore[no-any-return]


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, told: Tensor | None, other: Tensor | None, bias: Tensor | None,
        packed: Tensor, up_bias: Tensor | None, hidden: int, name: str, down: GatedDown,
    ) -> Tensor:  # fmt: skip
        y = F.linear(h, weight, bias)
        both = weight
        if told is not None and other is not None:
            torch.addmm(y, told, other.t(), out=y)
            both = torch.cat((weight, other), dim=1)
        ctx.save_for_backward(None if down.again else h, told, both, packed, up_bias)
        ctx.hidden, ctx.name, ctx.down = hidden, name, down
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        h, told, both, packed, up_bias = ctx.saved_tensors
        hidden = ctx.hidden
        dpacked, dbias = torch.empty_like(packed), _bias_gradient(up_bias)
        backward = dispatch.module("project_gated", ctx.name).backward
        front = None if dbias is None else dbias[: 2 * hidden]
        dtold, made = backward(dy.contiguous(), both, packed, dpacked, front, hidden, again=h is None)
        ctx.down._leave(dpacked, dbias)
        dweight = dy.t() @ (made if h is None else h) if ctx.needs_input_grad[1] else None
        dother = dy.t() @ told if ctx.needs_input_grad[3] else None
        if told is None:
            dtold = None
        # nobody reads the gradient of h: it has gone through the gate. Whoever else had read h would find it
        dh = dy.new_full((), float("nan")).expand(dy.shape[0], hidden)
        return dh, dweight, dtold, dother, dy.sum(0) if ctx.needs_input_grad[4] else None, *(None,) * 5
