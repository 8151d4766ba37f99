"""Rotary position embedding on jagged tensors: by place in the sequence (RoPE) or by elapsed time (ROTE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gem_kernels import dispatch, jagged
from gem_kernels.checks import check_heads, check_number, check_offsets
from gem_kernels.operator import operator
from gem_kernels.rotary import reference

__all__ = ["Rope", "rope", "rote", "rote_positions"]


@dataclass(frozen=True, kw_only=True)
class Rope:
    """A rotary embedding that another operator fuses: its base, positions [T] where they are not to be counted, and
    whether the values are turned too.
    """

    base: float = 10000.0
    positions: Tensor | None = None
    values: bool = False

    def at(self, x: Tensor, offsets: Tensor) -> Tensor:
        """The positions of x's tokens, [T]."""
        return _positions(x, offsets, self.base, self.positions)

    def check(self, x: Tensor) -> None:
        """Raise ValueError unless this fits x [T, H, D]."""
        _check(x, self.base, self.positions)


def _check(x: Tensor, base: float, positions: Tensor | None) -> None:
    if x.shape[2] % 2:
        raise ValueError(f"rotary embedding needs an even head dimension; got {x.shape[2]}")
    check_number("base", base, positive=True)
    if positions is not None and positions.shape != x.shape[:1]:
        raise ValueError(f"positions must be [{x.shape[0]}], one for each token; got {tuple(positions.shape)}")
    if positions is not None and positions.device != x.device:
        raise ValueError(f"positions must be on {x.device} with x; they are on {positions.device}")


def _positions(x: Tensor, offsets: Tensor | None, base: float, positions: Tensor | None) -> Tensor:
    _check(x, base, positions)
    if positions is None:
        if offsets is None:
            raise ValueError("either offsets or positions must be given")
        return jagged.positions(offsets, x.shape[0])
    return positions.detach()


def rope(
    x: Tensor,
    offsets: Tensor | None,
    *,
    base: float = 10000.0,
    positions: Tensor | None = None,
    backend: str | None = None,
    validate: bool = False,
) -> Tensor:
    """Rotate interleaved pairs of every head by an angle that grows with the token's position.

    For token t at position p and pair i of D / 2, in float32 (float64 for float64)::

        a = p * base^(-2 i / D)
        y[2 i]     = x[2 i] cos a - x[2 i + 1] sin a
        y[2 i + 1] = x[2 i] sin a + x[2 i + 1] cos a

    Args:
        x: [T, H, D] floating, D even; any strides with the last one 1.
        offsets: [B + 1] int32 or int64; positions count from 0 in every sequence. May be None when `positions` is
            given.
        base: of the geometric series of frequencies.
        positions: [T], integers or floats, instead of counting. No gradient flows to them.
        backend: "reference" or "triton"; None lets `dispatch` choose.
        validate: also check the offsets' values on a GPU, which waits for the device.

    Returns:
        y: [T, H, D] in x's dtype.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or offsets that do not fit together.

    Source: RoFormer (Su et al., 2021).
    """
    check_heads("x", x)
    if offsets is not None:
        check_offsets("offsets", offsets, x.shape[0], x.shape[0], x.device, values=validate or x.device.type == "cpu")
    positions = _positions(x, offsets, base, positions)
    name = dispatch.choose("rotary", x, backend, ())
    if name == dispatch.REFERENCE:
        return reference.rotate(x, positions, float(base))
    return _rotate(x, positions.float(), float(base), False, name)


def rote(x: Tensor, elapsed: Tensor, *, t_scale: float, base: float = 10000.0, backend: str | None = None) -> Tensor:
    """Rotary embedding of elapsed time (ROTE): `rope` at positions log(1 + elapsed / t_scale).

    Args:
        x: [T, H, D] floating, D even.
        elapsed: [T], the time between the token and the moment of the request, in the unit of `t_scale`; not negative.
        t_scale: the time at which the logarithm bends, positive.
        base: of the geometric series of frequencies.
        backend: "reference" or "triton"; None lets `dispatch` choose.

    Returns:
        y: [T, H, D] in x's dtype.

    Raises:
        TypeError, ValueError: as `rope`; a negative elapsed time is not looked for (below -t_scale it gives NaN).

    Source: Meta's Kunlun.
    """
    positions = rote_positions(elapsed, t_scale, torch.promote_types(x.dtype, torch.float32))
    return rope(x, None, base=base, positions=positions, backend=backend)


def rote_positions(elapsed: Tensor, t_scale: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """ROTE's positions, log(1 + elapsed / t_scale): for `rope`, and for `Rope` where an operator fuses it.

    Args:
        elapsed: [T], any numbers from 0 on, in seconds say.
        t_scale: what is added to 1 in the same unit; above 0.
        dtype: of the result, and of the arithmetic.

    Returns:
        [T].

    Raises:
        ValueError: a t_scale that is not positive and finite.

    Source: Meta's Kunlun.
    """
    check_number("t_scale", t_scale, positive=True)
    return torch.log1p(elapsed.to(dtype) / t_scale)


@operator("rotary")
def _rotate(x: Tensor, positions: Tensor, base: float, inverse: bool, backend: str) -> Tensor:
    return dispatch.module("rotary", backend).forward(x, positions, base, inverse)


@_rotate.register_fake
def _(x, positions, base, inverse, backend):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, positions, ctx.base, ctx.inverse, ctx.backend = inputs
    ctx.save_for_backward(positions)


def _autograd(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (positions,) = ctx.saved_tensors
    dx = _rotate(dy, positions, ctx.base, not ctx.inverse, ctx.backend)  # the transpose is the inverse
    return dx, None, None, None, None


_rotate.register_autograd(_autograd, setup_context=_setup)
