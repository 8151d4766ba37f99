"""Jagged helpers in portable Triton: every row is read once and written once.

A program takes BM rows and goes over their C columns BN at a time. Which sequence a row belongs to is found by
bisection of the offsets, so that neither a longest length nor padded programs are needed. Gradients of copies are
gathers by the same arithmetic, without atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels import tiling
from gem_kernels.tiling import CompileCase, Tile, launch, rows_of, signature

__all__ = [
    "add",
    "add_to_most_recent",
    "applies",
    "compile_cases",
    "concat",
    "from_padded",
    "most_recent",
    "most_recent_backward",
    "segment_sum",
    "split",
    "to_padded",
]

applies = tiling.applies_to_dtype


@triton.jit
def _sequence_of(offsets, row, batch, steps):
    """The last sequence that begins at or before each row, which is the one that holds it; int64."""
    low = row * 0
    high = low + batch - 1
    for _ in range(steps):
        middle = (low + high + 1) // 2
        begun = tl.load(offsets + middle).to(tl.int64) <= row
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle - 1)
    return low


@triton.jit
def _load(base, row, stride, mask, first, C: tl.constexpr, BN: tl.constexpr):
    column = first + tl.arange(0, BN)
    return tl.load(
        base + row[:, None] * stride + column[None, :], mask=mask[:, None] & (column < C)[None, :], other=0.0
    )


@triton.jit
def _store(base, x, row, mask, first, C: tl.constexpr, BN: tl.constexpr):
    """Into rows C apart."""
    column = first + tl.arange(0, BN)
    mask = mask[:, None] & (column < C)[None, :]
    tl.store(base + row[:, None] * C + column[None, :], x.to(base.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _recent_kernel(
    values_ptr, out_ptr, row_offsets, values_row, rows,
    K: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < rows
    sequence = row // K
    begin = tl.load(row_offsets + sequence, mask=inside, other=0).to(tl.int64)
    at = tl.load(row_offsets + sequence + 1, mask=inside, other=0).to(tl.int64) - 1 - row % K
    there = inside & (at >= begin)
    for first in range(0, C, BN):
        _store(out_ptr, _load(values_ptr, at, values_row, there, first, C, BN), row, inside, first, C, BN)


@triton.jit(do_not_specialize=["rows", "batch", "steps"])
def _recent_backward_kernel(
    dout_ptr, dvalues_ptr, row_offsets, dout_batch, dout_row, rows, batch, steps,
    K: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < rows
    sequence = _sequence_of(row_offsets, row, batch, steps)
    back = tl.load(row_offsets + sequence + 1).to(tl.int64) - 1 - row
    taken = inside & (back < K)
    base = sequence * dout_batch + back * dout_row
    for first in range(0, C, BN):
        _store(dvalues_ptr, _load(dout_ptr, base, 1, taken, first, C, BN), row, inside, first, C, BN)


@triton.jit(do_not_specialize=["rows"])
def _recent_add_kernel(
    dout_ptr, values_ptr, row_offsets, dout_batch, dout_row, values_row, rows,
    K: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < rows
    sequence = row // K
    begin = tl.load(row_offsets + sequence, mask=inside, other=0).to(tl.int64)
    at = tl.load(row_offsets + sequence + 1, mask=inside, other=0).to(tl.int64) - 1 - row % K
    there = inside & (at >= begin)
    base = sequence * dout_batch + row % K * dout_row
    for first in range(0, C, BN):
        x = _load(values_ptr, at, values_row, there, first, C, BN).to(tl.float32)
        x += _load(dout_ptr, base, 1, there, first, C, BN).to(tl.float32)
        column = first + tl.arange(0, BN)
        place = values_ptr + at[:, None] * values_row + column[None, :]
        tl.store(place, x.to(values_ptr.dtype.element_ty), mask=there[:, None] & (column < C)[None, :])


@triton.jit(do_not_specialize=["rows", "batch", "steps"])
def _join_kernel(
    a_ptr, b_ptr, out_ptr, a_offsets, both_offsets, a_row, b_row, out_row, rows, batch, steps,
    C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Concatenation, or with SPLIT its inverse."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < rows
    sequence = _sequence_of(both_offsets, row, batch, steps)
    start = tl.load(both_offsets + sequence).to(tl.int64)
    a_start = tl.load(a_offsets + sequence).to(tl.int64)
    a_length = tl.load(a_offsets + sequence + 1).to(tl.int64) - a_start
    place = row - start
    in_a, in_b = inside & (place < a_length), inside & (place >= a_length)
    a_at = a_start + place
    b_at = start - a_start + place - a_length
    for first in range(0, C, BN):
        if SPLIT:
            x = _load(out_ptr, row, out_row, inside, first, C, BN)
            _store(a_ptr, x, a_at, in_a, first, C, BN)
            _store(b_ptr, x, b_at, in_b, first, C, BN)
        else:
            x = _load(a_ptr, a_at, a_row, in_a, first, C, BN)
            y = _load(b_ptr, b_at, b_row, in_b, first, C, BN)
            _store(out_ptr, tl.where(in_a[:, None], x, y), row, inside, first, C, BN)


@triton.jit(do_not_specialize=["rows", "longest"])
def _pad_kernel(
    values_ptr, out_ptr, row_offsets, values_row, rows, longest, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Rows of [B * longest, C] from their sequences."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < rows
    sequence = row // longest
    at = tl.load(row_offsets + sequence, mask=inside, other=0).to(tl.int64) + row % longest
    there = inside & (at < tl.load(row_offsets + sequence + 1, mask=inside, other=0).to(tl.int64))
    for first in range(0, C, BN):
        _store(out_ptr, _load(values_ptr, at, values_row, there, first, C, BN), row, inside, first, C, BN)


@triton.jit(do_not_specialize=["rows", "longest", "batch", "steps"])
def _unpad_kernel(
    padded_ptr, out_ptr, row_offsets, padded_batch, padded_row, rows, longest, batch, steps,
    C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Rows of [T, C] from [B, longest, C]."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < rows
    sequence = _sequence_of(row_offsets, row, batch, steps)
    place = row - tl.load(row_offsets + sequence).to(tl.int64)
    base = sequence * padded_batch + place * padded_row
    for first in range(0, C, BN):
        x = _load(padded_ptr, base, 1, inside & (place < longest), first, C, BN)
        _store(out_ptr, x, row, inside, first, C, BN)


@triton.jit(do_not_specialize=["rows", "batch", "steps"])
def _add_kernel(
    values_ptr, bias_f32, out_ptr, row_offsets, values_row, bias_row, rows, batch, steps,
    C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < rows
    sequence = _sequence_of(row_offsets, row, batch, steps)
    for first in range(0, C, BN):
        x = _load(values_ptr, row, values_row, inside, first, C, BN).to(tl.float32)
        x += _load(bias_f32, sequence, bias_row, inside, first, C, BN).to(tl.float32)
        _store(out_ptr, x, row, inside, first, C, BN)


@triton.jit
def _sum_kernel(
    values_ptr, out_f32, row_offsets, values_row, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The sum of a sequence's rows; a program has one sequence and BN columns, and the order of the sum is fixed."""
    blocks: tl.constexpr = (C + BN - 1) // BN
    program = tl.program_id(0).to(tl.int64)
    sequence = program // blocks
    first = (program % blocks) * BN
    start, length = tiling.span(row_offsets, sequence)
    total = tl.zeros((BM, BN), tl.float32)
    for place in tl.range(0, length, BM, num_stages=STAGES):
        here = place + tl.arange(0, BM)
        total += _load(values_ptr, start + here, values_row, here < length, first, C, BN).to(tl.float32)
    column = first + tl.arange(0, BN)
    summed = tl.sum(total, axis=0).to(out_f32.dtype.element_ty)
    tl.store(out_f32 + sequence * C + column, summed, mask=column < C)


def tile(width: int) -> Tile:
    """4096 elements of at most 256 columns for a program of 4 warps. Untimed."""
    columns = min(256, max(16, triton.next_power_of_2(width)))
    return Tile(bm=4096 // columns, bn=columns, stages=1)


def recent_tile(width: int) -> Tile:
    """Four times the rows, so that finding their sequences is a smaller part (0.78 of the copy rate with `tile`)."""
    t = tile(width)
    return Tile(bm=4 * t.bm, bn=t.bn, warps=8, stages=1)


def _rows(offsets: Tensor) -> dict[str, int]:
    """How the kernels bisect these offsets."""
    batch = offsets.shape[0] - 1
    return {"batch": batch, "steps": batch.bit_length()}


def _empty(rows: int, like: Tensor) -> Tensor:
    return torch.empty(rows, like.shape[-1], dtype=like.dtype, device=like.device)


def most_recent(values: Tensor, offsets: Tensor, k: int) -> Tensor:
    """[T, C] -> [B, k, C]."""
    values, batch, width = rows_of(values), offsets.shape[0] - 1, values.shape[1]
    out = _empty(batch * k, values)
    t = tile(width)
    launch(
        _recent_kernel, triton.cdiv(batch * k, t.bm), values.device, t,
        values, out, offsets.contiguous(), values.stride(0), batch * k, K=k, C=width, BM=t.bm, BN=t.bn,
    )  # fmt: skip
    return out.view(batch, k, width)


def most_recent_backward(dout: Tensor, offsets: Tensor, total: int) -> Tensor:
    """[B, k, C] -> [T, C]."""
    dout, (_, k, width) = rows_of(dout), dout.shape
    dvalues = _empty(total, dout)
    t = recent_tile(width)
    launch(
        _recent_backward_kernel, triton.cdiv(total, t.bm), dout.device, t,
        dout, dvalues, offsets.contiguous(), *dout.stride()[:2], total, **_rows(offsets),
        K=k, C=width, BM=t.bm, BN=t.bn,
    )  # fmt: skip
    return dvalues


def add_to_most_recent(values: Tensor, dout: Tensor, offsets: Tensor) -> None:
    """values [T, C], in place, plus what `most_recent_backward` makes of [B, k, C]."""
    dout, (batch, k, width) = rows_of(dout), dout.shape
    t = tile(width)
    launch(
        _recent_add_kernel, triton.cdiv(batch * k, t.bm), values.device, t,
        dout, values, offsets.contiguous(), *dout.stride()[:2], values.stride(0), batch * k,
        K=k, C=width, BM=t.bm, BN=t.bn,
    )  # fmt: skip


def _join(a: Tensor, b: Tensor, out: Tensor, a_offsets: Tensor, offsets: Tensor, split: bool) -> None:
    rows, width = out.shape
    t = tile(width)
    launch(
        _join_kernel, triton.cdiv(rows, t.bm), out.device, t,
        a, b, out, a_offsets.contiguous(), offsets.contiguous(), a.stride(0), b.stride(0), out.stride(0), rows,
        **_rows(offsets), C=width, BM=t.bm, BN=t.bn, SPLIT=split,
    )  # fmt: skip


def concat(a: Tensor, b: Tensor, a_offsets: Tensor, offsets: Tensor) -> Tensor:
    """[Ta, C] and [Tb, C] -> [Ta + Tb, C]."""
    out = _empty(a.shape[0] + b.shape[0], a)
    _join(rows_of(a), rows_of(b), out, a_offsets, offsets, False)
    return out


def split(values: Tensor, a_offsets: Tensor, offsets: Tensor, a_total: int) -> tuple[Tensor, Tensor]:
    """[Ta + Tb, C] -> [Ta, C] and [Tb, C]."""
    a, b = _empty(a_total, values), _empty(values.shape[0] - a_total, values)
    _join(a, b, rows_of(values), a_offsets, offsets, True)
    return a, b


def to_padded(values: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """[T, C] -> [B, longest, C]."""
    values, batch, width = rows_of(values), offsets.shape[0] - 1, values.shape[1]
    out = _empty(batch * longest, values)
    t = tile(width)
    launch(
        _pad_kernel, triton.cdiv(batch * longest, t.bm), values.device, t,
        values, out, offsets.contiguous(), values.stride(0), batch * longest, longest, C=width, BM=t.bm, BN=t.bn,
    )  # fmt: skip
    return out.view(batch, longest, width)


def from_padded(padded: Tensor, offsets: Tensor, total: int) -> Tensor:
    """[B, longest, C] -> [total, C]."""
    padded, (_, longest, width) = rows_of(padded), padded.shape
    out = _empty(total, padded)
    t = tile(width)
    launch(
        _unpad_kernel, triton.cdiv(total, t.bm), padded.device, t,
        padded, out, offsets.contiguous(), *padded.stride()[:2], total, longest, **_rows(offsets),
        C=width, BM=t.bm, BN=t.bn,
    )  # fmt: skip
    return out


def add(values: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """[T, C] + [B, C] of each row's sequence."""
    values, bias = rows_of(values), rows_of(bias)
    rows, width = values.shape
    out = _empty(rows, values)
    t = tile(width)
    launch(
        _add_kernel, triton.cdiv(rows, t.bm), values.device, t,
        values, bias, out, offsets.contiguous(), values.stride(0), bias.stride(0), rows, **_rows(offsets),
        C=width, BM=t.bm, BN=t.bn,
    )  # fmt: skip
    return out


def segment_sum(values: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, C] -> [B, C] in dtype, summed in float32."""
    values, batch, width = rows_of(values), offsets.shape[0] - 1, values.shape[1]
    out = torch.empty(batch, width, dtype=dtype, device=values.device)
    t = sum_tile(width)
    launch(
        _sum_kernel, batch * triton.cdiv(width, t.bn), values.device, t,
        values, out, offsets.contiguous(), values.stride(0), C=width, BM=t.bm, BN=t.bn, STAGES=t.stages,
    )  # fmt: skip
    return out


def sum_tile(width: int) -> Tile:
    """Few columns for a program, so that a batch of long sequences has many of them; its loads two steps ahead."""
    return Tile(bm=64, bn=min(64, max(16, triton.next_power_of_2(width))), stages=3)


def compile_cases() -> list[CompileCase]:
    """Every kernel at a width that is a power of two and at one that is not."""
    cases = []
    for width in (512, 72):
        for name, kernel, extra in (
            ("recent", _recent_kernel, {"K": 16}),
            ("recent backward", _recent_backward_kernel, {"K": 16}),
            ("recent add", _recent_add_kernel, {"K": 16}),
            ("concat", _join_kernel, {"SPLIT": False}),
            ("split", _join_kernel, {"SPLIT": True}),
            ("pad", _pad_kernel, {}),
            ("unpad", _unpad_kernel, {}),
            ("add", _add_kernel, {}),
            ("sum", _sum_kernel, {"STAGES": sum_tile(width).stages}),
        ):
            t = {"sum": sum_tile, "recent backward": recent_tile}.get(name, tile)(width)
            constants: dict[str, object] = {**extra, "C": width, "BM": t.bm, "BN": t.bn}
            types, divisible = signature(kernel, "bf16", constants)
            cases.append(CompileCase(f"sequences {name} bf16 c{width}", kernel, types, constants, t, divisible))
    return cases
