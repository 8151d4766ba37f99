"""The Triton kernels of norms. `triton` has their launches and says how rows lie in a program.

A program holds whole rows in registers as float32, as tiles [rows, cuts, span]: C columns in CUTS pieces of SPAN.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def columns(CUTS: tl.constexpr, SPAN: tl.constexpr):
    """[CUTS, SPAN]."""
    return tl.arange(0, CUTS)[:, None] * SPAN + tl.arange(0, SPAN)[None, :]


@triton.jit
def in_width(C: tl.constexpr, CUTS: tl.constexpr, SPAN: tl.constexpr):
    """Which columns there are, as a comparison that is a constant of every register where whole cuts are missing."""
    if C % SPAN == 0:
        return (tl.arange(0, CUTS) * SPAN < C)[:, None]
    else:
        return columns(CUTS, SPAN) < C


@triton.jit
def _load(base, at, inside, C: tl.constexpr, CUTS: tl.constexpr, SPAN: tl.constexpr):
    """Float32 [BM, CUTS, SPAN] of the rows at the element offsets `at`; 0 outside."""
    where = base + at[:, None, None] + columns(CUTS, SPAN)[None, :, :]
    mask = inside[:, None, None]
    if C != CUTS * SPAN:
        within = in_width(C, CUTS, SPAN)[None, :, :]
        return tl.where(within, tl.load(where, mask=mask & within, other=0.0).to(tl.float32), 0.0)
    else:
        return tl.load(where, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store(base, x, row, inside, C: tl.constexpr, CUTS: tl.constexpr, SPAN: tl.constexpr):
    """Into rows C apart."""
    where = base + (row * C)[:, None, None] + columns(CUTS, SPAN)[None, :, :]
    mask = inside[:, None, None]
    if C != CUTS * SPAN:
        mask = mask & in_width(C, CUTS, SPAN)[None, :, :]
    tl.store(where, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _vector(base, C: tl.constexpr, CUTS: tl.constexpr, SPAN: tl.constexpr, BM: tl.constexpr, TOGETHER: tl.constexpr):
    """[1 or BM, CUTS, SPAN] of a vector, 0 past its end. Where a thread has one row it loads what it needs of the
    vector itself, and no warp hands it to another.
    """
    column = columns(CUTS, SPAN)
    if TOGETHER == BM:
        column = column[None, :, :] + tl.zeros((BM, 1, 1), tl.int32)
        x = tl.load(base + column, mask=column < C, other=0.0).to(tl.float32)
    else:
        x = tl.load(base + column, mask=column < C, other=0.0).to(tl.float32)[None, :, :]
    return tl.where(in_width(C, CUTS, SPAN)[None, :, :], x, 0.0)


@triton.jit
def _row_sum(x):
    """[BM, CUTS, SPAN] -> [BM, 1, 1]; what a thread has first."""
    return tl.sum(tl.sum(x, axis=1), axis=1)[:, None, None]


@triton.jit
def _at(rows, row, head, HEADS: tl.constexpr):
    """Element offsets of rows t * HEADS + h in a [T, H, C] tensor."""
    return rows // HEADS * row + rows % HEADS * head


@triton.jit
def _normalise(
    x, C: tl.constexpr, CUTS: tl.constexpr, SPAN: tl.constexpr,
    EPS: tl.constexpr, LAYER: tl.constexpr,
):  # fmt: skip
    """Float32 rows, zero from C on -> the normalised rows, also zero there, and 1 / deviation [BM, 1, 1]."""
    if LAYER:
        x -= _row_sum(x) / C
        if C != CUTS * SPAN:
            x = tl.where(in_width(C, CUTS, SPAN)[None, :, :], x, 0.0)
    inverse = tl.rsqrt(_row_sum(x * x) / C + EPS)
    return x * inverse, inverse


@triton.jit
def _sigmoid(x, FAST: tl.constexpr):
    """1 / (1 + e^-x). FAST: two special-function instructions of the card, right to 3e-7, where a division of float32
    takes ten instructions.
    """
    if FAST:
        e = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], tl.float32, is_pure=True, pack=1
        )
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [e + 1.0], tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.sigmoid(x)


@triton.jit(do_not_specialize=["rows", "tiles"])
def forward_kernel(
    x_ptr, residual_ptr, weight_f32, bias_f32, y_ptr, total_ptr,
    x_row, x_head, residual_row, residual_head, rows, tiles,
    HEADS: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, CUTS: tl.constexpr, SPAN: tl.constexpr,
    EPS: tl.constexpr, LAYER: tl.constexpr, SWISH: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, FAST: tl.constexpr, STAGES: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """STAGES 1: a program has one tile. More: it has several, of which so many are on their way or in use."""
    if WEIGHT:  # asked for before the rows, so that no row waits for it
        weight = _vector(weight_f32, C, CUTS, SPAN, BM, TOGETHER)
    else:
        weight = 1.0
    if BIAS:
        bias = _vector(bias_f32, C, CUTS, SPAN, BM, TOGETHER)
    else:
        bias = 0.0
    if STAGES == 1:
        tiles = 1
    for i in tl.range(0, tiles, num_stages=STAGES):
        row = (i * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * BM + tl.arange(0, BM)
        inside = row < rows
        x = _load(x_ptr, _at(row, x_row, x_head, HEADS), inside, C, CUTS, SPAN)
        if RESIDUAL:
            x += _load(residual_ptr, _at(row, residual_row, residual_head, HEADS), inside, C, CUTS, SPAN)
            rounded = x.to(total_ptr.dtype.element_ty)  # what is normalised is the sum that the caller gets
            store(total_ptr, rounded, row, inside, C, CUTS, SPAN)
            x = rounded.to(tl.float32)
        y, _ = _normalise(x, C, CUTS, SPAN, EPS, LAYER)
        if WEIGHT:
            y *= weight
        if BIAS:
            y += bias
        if SWISH:
            y = x * _sigmoid(y, FAST)
        store(y_ptr, y, row, inside, C, CUTS, SPAN)


@triton.jit
def _fold(x, TOGETHER: tl.constexpr):
    """Sums [TOGETHER, CUTS, SPAN] of the rows that are TOGETHER apart, which are in one thread."""
    apart: tl.constexpr = x.shape[0] // TOGETHER
    if apart > 1:
        x = tl.sum(tl.reshape(x, (apart, TOGETHER, x.shape[1], x.shape[2])), axis=0)
    return x


@triton.jit(do_not_specialize=["rows", "tiles"])
def backward_kernel(
    x_ptr, dy_ptr, dtotal_ptr, weight_f32, bias_f32, dx_ptr, rows_ptr, parts_f32,
    x_row, x_head, dy_row, dy_head, dtotal_row, dtotal_head, rows, tiles,
    HEADS: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, CUTS: tl.constexpr, SPAN: tl.constexpr,
    EPS: tl.constexpr, LAYER: tl.constexpr, SWISH: tl.constexpr, DTOTAL: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, TOGETHER: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """The sum's gradient, and of a program's rows the sums for weight, bias and a bias in the residual, one after the
    other, into its part of `parts_f32`.
    """
    part = tl.program_id(0).to(tl.int64)
    if WEIGHT:
        weight = _vector(weight_f32, C, CUTS, SPAN, BM, TOGETHER)
        dweight = tl.zeros((TOGETHER, CUTS, SPAN), tl.float32)
    if BIAS:
        bias = _vector(bias_f32, C, CUTS, SPAN, BM, TOGETHER)
        dbias = tl.zeros((TOGETHER, CUTS, SPAN), tl.float32)
    if SUMS:
        sums = tl.zeros((TOGETHER, CUTS, SPAN), tl.float32)
    for i in tl.range(0, tiles, num_stages=STAGES):
        row = (i * tl.num_programs(0) + part) * BM + tl.arange(0, BM)  # all programs read neighbouring rows at a time
        inside = row < rows
        x = _load(x_ptr, _at(row, x_row, x_head, HEADS), inside, C, CUTS, SPAN)
        dy = _load(dy_ptr, _at(row, dy_row, dy_head, HEADS), inside, C, CUTS, SPAN)
        normal, inverse = _normalise(x, C, CUTS, SPAN, EPS, LAYER)
        if ROWS:  # what the forward pass made, for a caller who did not keep it
            y = normal
            if WEIGHT:
                y = y * weight
            if BIAS:
                y = y + bias
            store(rows_ptr, y, row, inside, C, CUTS, SPAN)
        if SWISH:  # y = x sigmoid(a): x is a factor itself, and a carries the rest
            a = normal
            if WEIGHT:
                a = a * weight
            if BIAS:
                a = a + bias
            gate = _sigmoid(a, FAST)
            straight = dy * gate
            dy = straight * x
            dy -= dy * gate
        if BIAS:
            dbias += _fold(dy, TOGETHER)
        if WEIGHT:
            dweight += _fold(dy * normal, TOGETHER)
            dy *= weight
        along = _row_sum(dy * normal) / C
        if LAYER:
            dy -= _row_sum(dy) / C
        dx = (dy - normal * along) * inverse
        if SWISH:
            dx += straight
        if DTOTAL:
            dx += _load(dtotal_ptr, _at(row, dtotal_row, dtotal_head, HEADS), inside, C, CUTS, SPAN)
        store(dx_ptr, dx, row, inside, C, CUTS, SPAN)
        if SUMS:
            sums += _fold(dx, TOGETHER)
    column = columns(CUTS, SPAN)
    within = column < C
    into = parts_f32 + part * ((WEIGHT + BIAS + SUMS) * C) + column
    if WEIGHT:
        tl.store(into, tl.sum(dweight, axis=0), mask=within)
    if BIAS:
        tl.store(into + C, tl.sum(dbias, axis=0), mask=within)
    if SUMS:
        tl.store(into + (WEIGHT + BIAS) * C, tl.sum(sums, axis=0), mask=within)


@triton.jit(do_not_specialize=["parts"])
def sum_kernel(
    parts_f32, first_f32, second_f32, parts, C: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    third_f32=None,
):  # fmt: skip
    """The second stage: column sums of [parts, vectors, C], one for each vector: one, two (BIAS) or three of them."""
    THIRD: tl.constexpr = third_f32 is not None
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    columns: tl.constexpr = (1 + BIAS + THIRD) * C
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, parts, BM):
        part = first + tl.arange(0, BM)
        mask = (part < parts)[:, None] & (column < columns)[None, :]
        total += tl.load(parts_f32 + part.to(tl.int64)[:, None] * columns + column[None, :], mask=mask, other=0.0)
    summed = tl.sum(total, axis=0)
    tl.store(first_f32 + column, summed.to(first_f32.dtype.element_ty), mask=column < C)
    if BIAS:
        mask = (column >= C) & (column < 2 * C)
        tl.store(second_f32 + column - C, summed.to(second_f32.dtype.element_ty), mask=mask)
    if THIRD:
        mask = (column >= 2 * C) & (column < columns)
        tl.store(third_f32 + column - 2 * C, summed.to(third_f32.dtype.element_ty), mask=mask)
