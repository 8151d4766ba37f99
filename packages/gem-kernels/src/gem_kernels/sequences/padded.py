"""Jagged rows into a padded tensor and back."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gem_kernels import dispatch
from gem_kernels.checks import check_count
from gem_kernels.operator import operator
from gem_kernels.sequences import _as, _check_offsets, _rows, reference

__all__ = ["jagged_to_padded", "padded_to_jagged"]


def jagged_to_padded(
    values: Tensor, offsets: Tensor, longest: int, *, backend: str | None = None, validate: bool = False
) -> Tensor:
    """Every sequence in a row of its own, zeros behind it; a longer one is cut.

    out[b, j] = values[offsets[b] + j] for j < min(longest, length of b)

    Args:
        values: [T, ...] float16, bfloat16, float32 or float64.
        offsets: [B + 1] int32 or int64, from 0 to T.
        longest: tokens of a padded sequence, at least 1; a host int: it sizes the result without asking the device.
        backend: "reference" or "triton"; None lets `dispatch` choose.
        validate: also check the offsets' values on a GPU, which waits for the device; on a CPU they always are.

    Returns:
        [B, longest, ...] in values' dtype.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or offsets that do not fit together.
        RuntimeError: the backend asked for cannot run this.
    """
    rows = _rows("values", values)
    _check_offsets("offsets", offsets, rows, validate)
    check_count("longest", longest, 1)
    name = dispatch.choose("sequences", rows, backend, ())
    if name == dispatch.REFERENCE:
        out = reference.to_padded(rows, offsets, longest)
    else:
        out = _to_padded(rows, offsets, longest, name)
    return out.view(*out.shape[:2], *values.shape[1:])


def padded_to_jagged(
    padded: Tensor, offsets: Tensor, total: int, *, backend: str | None = None, validate: bool = False
) -> Tensor:
    """The inverse of `jagged_to_padded`; zeros for what a padded sequence was too short for.

    Args:
        padded: [B, L, ...] float16, bfloat16, float32 or float64.
        offsets: [B + 1] int32 or int64, from 0 to `total`.
        total: T, a host int: it sizes the result without asking the device.
        backend, validate: see `jagged_to_padded`.

    Returns:
        [T, ...] in padded's dtype.

    Raises:
        TypeError, ValueError, RuntimeError: as `jagged_to_padded`.
    """
    if padded.dim() < 2 or offsets.dim() != 1 or padded.shape[0] != offsets.shape[0] - 1 or padded.shape[1] < 1:
        raise ValueError(
            f"padded must be [B, L, ...] for offsets [B + 1]; got {tuple(padded.shape)} and {tuple(offsets.shape)}"
        )
    check_count("total", total, 0)
    rows = _rows("padded", padded.flatten(0, 1))
    _check_offsets("offsets", offsets, rows.new_empty(total, 0), validate)
    name = dispatch.choose("sequences", rows, backend, ())
    three = rows.view(*padded.shape[:2], rows.shape[1])
    if name == dispatch.REFERENCE:
        out = reference.from_padded(three, offsets, total)
    else:
        out = _from_padded(three, offsets, total, name)
    return _as(out, padded.flatten(0, 1))


@operator("jagged_to_padded")
def _to_padded(values: Tensor, offsets: Tensor, longest: int, backend: str) -> Tensor:
    return dispatch.module("sequences", backend).to_padded(values, offsets, longest)


@_to_padded.register_fake
def _(values, offsets, longest, backend):  # type: ignore[no-untyped-def]
    return values.new_empty(offsets.shape[0] - 1, longest, values.shape[1])


@operator("padded_to_jagged")
def _from_padded(padded: Tensor, offsets: Tensor, total: int, backend: str) -> Tensor:
    return dispatch.module("sequences", backend).from_padded(padded, offsets, total)


@_from_padded.register_fake
def _(padded, offsets, total, backend):  # type: ignore[no-untyped-def]
    return padded.new_empty(total, padded.shape[2])


def _to_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, offsets, _, ctx.backend = inputs
    ctx.total = values.shape[0]
    ctx.save_for_backward(offsets)


def _to_autograd(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    return _from_padded(dout, *ctx.saved_tensors, ctx.total, ctx.backend), None, None, None


def _from_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    padded, offsets, _, ctx.backend = inputs
    ctx.longest = padded.shape[1]
    ctx.save_for_backward(offsets)


def _from_autograd(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    return _to_padded(dout, *ctx.saved_tensors, ctx.longest, ctx.backend), None, None, None


_to_padded.register_autograd(_to_autograd, setup_context=_to_setup)
_from_padded.register_autograd(_from_autograd, setup_context=_from_setup)
