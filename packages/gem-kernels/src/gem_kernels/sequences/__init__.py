"""Jagged sequences: the most recent rows, one sequence after another, a vector for each sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem_kernels import dispatch
from gem_kernels.checks import FLOATS, check_count, check_offsets
from gem_kernels.operator import operator
from gem_kernels.sequences import reference

__all__ = ["jagged_add", "jagged_concat", "jagged_split", "most_recent"]


def most_recent(
    values: Tensor, offsets: Tensor, k: int, *, backend: str | None = None, validate: bool = False
) -> Tensor:
    """The last k tokens of each sequence, latest first; zeros where it is shorter.

    out[b, j] = values[offsets[b + 1] - 1 - j] for j < min(k, length of b)

    Args:
        values: [T, ...] float16, bfloat16, float32 or float64.
        offsets: [B + 1] int32 or int64, from 0 to T.
        k: tokens kept, at least 1. A Triton kernel is compiled for each k.
        backend: "reference" or "triton"; None lets `dispatch` choose.
        validate: also check the offsets' values on a GPU, which waits for the device; on a CPU they always are.

    Returns:
        [B, k, ...] in values' dtype.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or offsets that do not fit together.
        RuntimeError: the backend asked for cannot run this.
    """
    rows = _rows("values", values)
    _check_offsets("offsets", offsets, rows, validate)
    check_count("k", k, 1)
    name = dispatch.choose("sequences", rows, backend, ())
    if name == dispatch.REFERENCE:
        out = reference.most_recent(rows, offsets, k)
    else:
        out = _most_recent(rows, offsets, k, name)
    return out.view(*out.shape[:2], *values.shape[1:])


def jagged_concat(
    a: Tensor, b: Tensor, a_offsets: Tensor, b_offsets: Tensor, *, backend: str | None = None, validate: bool = False
) -> tuple[Tensor, Tensor]:
    """Put each sequence of b behind that of a.

    Args:
        a: [Ta, ...] float16, bfloat16, float32 or float64.
        b: [Tb, ...] of a's dtype and trailing shape.
        a_offsets, b_offsets: [B + 1] int32 or int64, from 0 to Ta and to Tb.
        backend, validate: see `most_recent`.

    Returns:
        The values [Ta + Tb, ...], and their offsets a_offsets + b_offsets.

    Raises:
        TypeError, ValueError, RuntimeError: as `most_recent`.
    """
    rows_a, rows_b = _rows("a", a), _rows("b", b)
    if a.dtype != b.dtype or a.device != b.device or a.shape[1:] != b.shape[1:]:
        raise ValueError(
            "a and b must agree in dtype, device and all but the first dim; "
            f"got {tuple(a.shape)} {a.dtype} on {a.device} and {tuple(b.shape)} {b.dtype} on {b.device}"
        )
    _check_offsets("a_offsets", a_offsets, rows_a, validate)
    _check_offsets("b_offsets", b_offsets, rows_b, validate)
    offsets = _sum_of(a_offsets, b_offsets)
    name = dispatch.choose("sequences", rows_a, backend, ())
    if name == dispatch.REFERENCE:
        out = reference.concat(rows_a, rows_b, a_offsets, offsets)
    else:
        out = _concat(rows_a, rows_b, a_offsets, offsets, name)
    return _as(out, a), offsets


def jagged_split(
    values: Tensor,
    a_offsets: Tensor,
    b_offsets: Tensor,
    a_total: int,
    *,
    backend: str | None = None,
    validate: bool = False,
) -> tuple[Tensor, Tensor]:
    """The inverse of `jagged_concat`: the first tokens of each sequence, as many as a has, and the others.

    Args:
        values: [Ta + Tb, ...] float16, bfloat16, float32 or float64.
        a_offsets, b_offsets: [B + 1] int32 or int64, of the two parts.
        a_total: Ta, a host int: it sizes the results without asking the device.
        backend, validate: see `most_recent`.

    Returns:
        a [Ta, ...] and b [Tb, ...].

    Raises:
        TypeError, ValueError, RuntimeError: as `most_recent`.
    """
    rows = _rows("values", values)
    check_count("a_total", a_total, 0)
    if a_total > values.shape[0]:
        raise ValueError(f"a_total must be from 0 to the number of tokens, {values.shape[0]}; got {a_total}")
    _check_offsets("a_offsets", a_offsets, rows[:a_total], validate)
    _check_offsets("b_offsets", b_offsets, rows[a_total:], validate)
    offsets = _sum_of(a_offsets, b_offsets)
    name = dispatch.choose("sequences", rows, backend, ())
    if name == dispatch.REFERENCE:
        parts = reference.split(rows, a_offsets, offsets, a_total)
    else:
        parts = _split(rows, a_offsets, offsets, a_total, name)
    a, b = (_as(part, values) for part in parts)
    return a, b


def jagged_add(
    values: Tensor, bias: Tensor, offsets: Tensor, *, backend: str | None = None, validate: bool = False
) -> Tensor:
    """Add to each token the vector of its sequence: out[t] = values[t] + bias[b], in float32 (float64 for float64).

    Args:
        values: [T, ...] float16, bfloat16, float32 or float64.
        bias: [B, ...] of values' trailing shape, floating; its gradient is summed over each sequence in float32.
        offsets: [B + 1] int32 or int64, from 0 to T.
        backend, validate: see `most_recent`.

    Returns:
        [T, ...] in values' dtype.

    Raises:
        TypeError, ValueError, RuntimeError: as `most_recent`.
    """
    rows, vectors = _rows("values", values), _rows("bias", bias)
    _check_offsets("offsets", offsets, rows, validate)
    if bias.shape != (offsets.shape[0] - 1, *values.shape[1:]) or bias.device != values.device:
        raise ValueError(
            f"bias must be {(offsets.shape[0] - 1, *values.shape[1:])} on {values.device}, one row for each sequence; "
            f"got {tuple(bias.shape)} on {bias.device}"
        )
    name = dispatch.choose("sequences", rows, backend, ())
    if name == dispatch.REFERENCE:
        return _as(reference.add(rows, vectors, offsets), values)
    return _as(_add(rows, vectors, offsets, name), values)


def _rows(name: str, x: Tensor) -> Tensor:
    """x [T, ...] as rows [T, C]."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(x).__name__}")
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64; got {x.dtype}")
    if x.dim() == 0 or 0 in x.shape[1:]:
        raise ValueError(f"{name} must be [T, ...] with at least one element for a token; got {tuple(x.shape)}")
    return x[:, None] if x.dim() == 1 else x.flatten(1)


def _as(rows: Tensor, like: Tensor) -> Tensor:
    """Rows [T, C] with the trailing shape of `like`."""
    return rows.view(rows.shape[0], *like.shape[1:])


def _check_offsets(name: str, offsets: Tensor, rows: Tensor, validate: bool) -> None:
    values = validate or rows.device.type == "cpu"
    check_offsets(name, offsets, rows.shape[0], rows.shape[0], rows.device, values=values)


def _sum_of(a_offsets: Tensor, b_offsets: Tensor) -> Tensor:
    if a_offsets.shape != b_offsets.shape:
        raise ValueError(
            "a_offsets and b_offsets must hold as many sequences; "
            f"got {a_offsets.shape[0] - 1} and {b_offsets.shape[0] - 1}"
        )
    return a_offsets + b_offsets


@operator("most_recent")
def _most_recent(values: Tensor, offsets: Tensor, k: int, backend: str) -> Tensor:
    return dispatch.module("sequences", backend).most_recent(values, offsets, k)


@_most_recent.register_fake
def _(values, offsets, k, backend):  # type: ignore[no-untyped-def]
    return values.new_empty(offsets.shape[0] - 1, k, values.shape[1])


@operator("most_recent_backward")
def _most_recent_backward(dout: Tensor, offsets: Tensor, total: int, backend: str) -> Tensor:
    return dispatch.module("sequences", backend).most_recent_backward(dout, offsets, total)


@_most_recent_backward.register_fake
def _(dout, offsets, total, backend):  # type: ignore[no-untyped-def]
    return dout.new_empty(total, dout.shape[2])


def _most_recent_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, offsets, _, ctx.backend = inputs
    ctx.total = values.shape[0]
    ctx.save_for_backward(offsets)


def _most_recent_autograd(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    return _most_recent_backward(dout, *ctx.saved_tensors, ctx.total, ctx.backend), None, None, None


_most_recent.register_autograd(_most_recent_autograd, setup_context=_most_recent_setup)


@operator("jagged_concat")
def _concat(a: Tensor, b: Tensor, a_offsets: Tensor, offsets: Tensor, backend: str) -> Tensor:
    return dispatch.module("sequences", backend).concat(a, b, a_offsets, offsets)


@_concat.register_fake
def _(a, b, a_offsets, offsets, backend):  # type: ignore[no-untyped-def]
    return a.new_empty(a.shape[0] + b.shape[0], a.shape[1])


@operator("jagged_split")
def _split(values: Tensor, a_offsets: Tensor, offsets: Tensor, a_total: int, backend: str) -> tuple[Tensor, Tensor]:
    return dispatch.module("sequences", backend).split(values, a_offsets, offsets, a_total)


@_split.register_fake
def _(values, a_offsets, offsets, a_total, backend):  # type: ignore[no-untyped-def]
    return values.new_empty(a_total, values.shape[1]), values.new_empty(values.shape[0] - a_total, values.shape[1])


def _concat_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, _, a_offsets, offsets, ctx.backend = inputs
    ctx.a_total = a.shape[0]
    ctx.save_for_backward(a_offsets, offsets)


def _concat_autograd(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    return *_split(dout, *ctx.saved_tensors, ctx.a_total, ctx.backend), None, None, None


def _split_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, a_offsets, offsets, _, ctx.backend = inputs
    ctx.save_for_backward(a_offsets, offsets)


def _split_autograd(ctx: Any, da: Tensor, db: Tensor) -> tuple[Any, ...]:
    return _concat(da, db, *ctx.saved_tensors, ctx.backend), None, None, None, None


_concat.register_autograd(_concat_autograd, setup_context=_concat_setup)
_split.register_autograd(_split_autograd, setup_context=_split_setup)


@operator("jagged_add")
def _add(values: Tensor, bias: Tensor, offsets: Tensor, backend: str) -> Tensor:
    return dispatch.module("sequences", backend).add(values, bias, offsets)


@_add.register_fake
def _(values, bias, offsets, backend):  # type: ignore[no-untyped-def]
    return values.new_empty(values.shape)


@operator("segment_sum")
def _segment_sum(values: Tensor, offsets: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    return dispatch.module("sequences", backend).segment_sum(values, offsets, dtype)


@_segment_sum.register_fake
def _(values, offsets, dtype, backend):  # type: ignore[no-untyped-def]
    return values.new_empty(offsets.shape[0] - 1, values.shape[1], dtype=dtype)


def _add_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, offsets, ctx.backend = inputs
    ctx.dtype = bias.dtype
    ctx.save_for_backward(offsets)


def _add_autograd(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    dbias = _segment_sum(dout, *ctx.saved_tensors, ctx.dtype, ctx.backend) if ctx.needs_input_grad[1] else None
    return dout, dbias, None, None


_add.register_autograd(_add_autograd, setup_context=_add_setup)
