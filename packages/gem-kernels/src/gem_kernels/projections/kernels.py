"""The Triton kernels of heads in packed projections. `triton` has their launches.

HEADS heads of D dims, padded to HP and DP (powers of two), are a tile [BM, HP, DP] of BM rows. A slot is a part that is
normed and turned: q or k; what is behind the slots, v, passes through.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _angles(
    first_f32, second_f32, row, inside, TURNS: tl.constexpr, HEADS: tl.constexpr, HP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, LOG2_FIRST: tl.constexpr, LOG2_SECOND: tl.constexpr,
):  # fmt: skip
    """cos and sin of positions times base^(-2 i / D), [BM, 1 or HP, DP / 2]; float64 keeps the frequencies exact."""
    pair = tl.arange(0, DP // 2).to(tl.float64) * (-2.0 / D)
    place = tl.load(first_f32 + row, mask=inside, other=0).to(tl.float32)
    angle = place[:, None, None] * tl.exp2(pair * LOG2_FIRST).to(tl.float32)[None, None, :]
    if TURNS == 2:
        place = tl.load(second_f32 + row, mask=inside, other=0).to(tl.float32)
        other = place[:, None, None] * tl.exp2(pair * LOG2_SECOND).to(tl.float32)[None, None, :]
        angle = tl.where((tl.arange(0, HP) < HEADS // 2)[None, :, None], angle, other)
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def _turn(x, cos, sin, BM: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr):
    """Rotate interleaved pairs of float32 heads [BM, HP, DP]; -sin turns back."""
    even, odd = tl.split(tl.reshape(x, (BM, HP, DP // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (BM, HP, DP))


@triton.jit
def _scale(x, D: tl.constexpr, EPS: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of heads [BM, HP, DP]: [BM, HP, 1]."""
    return tl.rsqrt(tl.sum(x * x, axis=2) / D + EPS)[:, :, None]


@triton.jit
def _weight(weight_f32, D: tl.constexpr, DP: tl.constexpr):
    dim = tl.arange(0, DP)
    return tl.load(weight_f32 + dim, mask=dim < D, other=0.0).to(tl.float32)[None, None, :]


@triton.jit
def _places(row, row_stride, inside, HEADS: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Element offsets of a tile of heads, and which of them there are."""
    head, dim = tl.arange(0, HP), tl.arange(0, DP)
    at = row[:, None, None] * row_stride + (head * D)[None, :, None] + dim[None, None, :]
    return at, inside[:, None, None] & (head < HEADS)[None, :, None] & (dim < D)[None, None, :]


@triton.jit
def _numbers(row, inside, slot, SLOTS: tl.constexpr, HEADS: tl.constexpr, HP: tl.constexpr):
    """Where one number of each head of a slot is, [BM, HP, 1], and which there are."""
    head = tl.arange(0, HP)
    where = (row * (SLOTS * HEADS))[:, None, None] + (slot * HEADS + head)[None, :, None]
    return where, inside[:, None, None] & (head < HEADS)[None, :, None]


@triton.jit
def _slot(
    source, target, weight_f32, at, to, mask, cos, sin,
    D: tl.constexpr, DP: tl.constexpr, HP: tl.constexpr, BM: tl.constexpr, EPS: tl.constexpr, NORM: tl.constexpr,
    TURNS: tl.constexpr,
):  # fmt: skip
    x = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        x = x * _scale(x, D, EPS) * _weight(weight_f32, D, DP)
    if TURNS:
        x = _turn(x, cos, sin, BM, HP, DP)
    tl.store(target + to, x.to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def heads_kernel(
    packed_ptr, weight0_f32, weight1_f32, first_f32, second_f32, places_offsets, out0_ptr, out1_ptr, packed_row, rows,
    PLACES: tl.constexpr, SLOTS: tl.constexpr, HEADS: tl.constexpr, HP: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, BM: tl.constexpr,
    EPS: tl.constexpr, NORM: tl.constexpr, TURNS: tl.constexpr, LOG2_FIRST: tl.constexpr, LOG2_SECOND: tl.constexpr,
    scales_f32=None,
):  # fmt: skip
    """PLACES: row i of the first slot goes to row places[i]. What the heads of row i are divided by goes into the
    SLOTS * HEADS numbers of `scales_f32` that are its own, if given, as its inverse.
    """
    SCALES: tl.constexpr = scales_f32 is not None
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < rows
    at, mask = _places(row, packed_row, inside, HEADS, HP, D, DP)
    to, _ = _places(row, HEADS * D, inside, HEADS, HP, D, DP)
    cos, sin = 0.0, 0.0
    if TURNS:
        cos, sin = _angles(first_f32, second_f32, row, inside, TURNS, HEADS, HP, D, DP, LOG2_FIRST, LOG2_SECOND)
    first_to = to
    if PLACES:
        place = tl.load(places_offsets + row, mask=inside, other=0)
        first_to, _ = _places(place, HEADS * D, inside, HEADS, HP, D, DP)
    if SCALES:
        for slot in tl.static_range(SLOTS):
            x = tl.load(packed_ptr + slot * HEADS * D + at, mask=mask, other=0.0).to(tl.float32)
            where, there = _numbers(row, inside, slot, SLOTS, HEADS, HP)
            tl.store(scales_f32 + where, _scale(x, D, EPS), mask=there)
    _slot(packed_ptr, out0_ptr, weight0_f32, at, first_to, mask, cos, sin, D, DP, HP, BM, EPS, NORM, TURNS)
    if SLOTS == 2:
        source = packed_ptr + HEADS * D
        _slot(source, out1_ptr, weight1_f32, at, to, mask, cos, sin, D, DP, HP, BM, EPS, NORM, TURNS)


@triton.jit
def _slot_backward(
    source, target, grad, again, weight_f32, at, to, from_, mask, cos, sin,
    D: tl.constexpr, DP: tl.constexpr, HP: tl.constexpr, BM: tl.constexpr, EPS: tl.constexpr, NORM: tl.constexpr,
    TURNS: tl.constexpr, AGAIN: tl.constexpr, scales=None,
):  # fmt: skip
    """Writes the gradient of a slot; returns what to sum up for that of the weight, and itself, [BM, HP, DP] each.

    With the `scales` of its heads [BM, HP, 1] the source is what the forward kernel made. Where a weight is 0, that
    holds nothing of what was normed, and 0 stands for it.
    """
    MADE: tl.constexpr = scales is not None
    d = tl.load(grad + from_, mask=mask, other=0.0).to(tl.float32)
    if AGAIN:
        d += tl.load(again + from_, mask=mask, other=0.0).to(tl.float32)
    if TURNS:
        d = _turn(d, cos, -sin, BM, HP, DP)
    dweight = d
    if NORM:
        if MADE:
            x = tl.load(source + from_, mask=mask, other=0.0).to(tl.float32)
            if TURNS:
                x = _turn(x, cos, -sin, BM, HP, DP)
            weight = _weight(weight_f32, D, DP)
            normal = tl.where(weight == 0.0, 0.0, x / tl.where(weight == 0.0, 1.0, weight))
            scale = scales
        else:
            x = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
            scale = _scale(x, D, EPS)
            normal = x * scale
        dweight = d * normal
        d = d * _weight(weight_f32, D, DP)
        along = (tl.sum(d * normal, axis=2) / D)[:, :, None]
        d = (d - normal * along) * scale
    tl.store(target + to, d.to(target.dtype.element_ty), mask=mask)
    return dweight, d


@triton.jit
def _store_heads(parts_f32, total, HEADS: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Column sums of [BM, HP, DP] to [HEADS * D]."""
    head, dim = tl.arange(0, HP), tl.arange(0, DP)
    mask = (head < HEADS)[:, None] & (dim < D)[None, :]
    tl.store(parts_f32 + (head * D)[:, None] + dim[None, :], tl.sum(total, axis=0), mask=mask)


@triton.jit(do_not_specialize=["rows", "tiles"])
def heads_backward_kernel(
    packed_ptr, weight0_f32, weight1_f32, first_f32, second_f32, places_offsets, d0_ptr, d1_ptr, d1_again_ptr, dv_ptr,
    dv_again_ptr, dpacked_ptr, parts_f32, sums_f32, packed_row, dpacked_row, rows, tiles,
    PLACES: tl.constexpr, SLOTS: tl.constexpr, VALUES: tl.constexpr, AGAIN: tl.constexpr, BIAS: tl.constexpr,
    HEADS: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, EPS: tl.constexpr,
    NORM: tl.constexpr, TURNS: tl.constexpr, LOG2_FIRST: tl.constexpr, LOG2_SECOND: tl.constexpr, STAGES: tl.constexpr,
    scales_f32=None, made0_ptr=None, made1_ptr=None,
):  # fmt: skip
    """d0 is of the first slot and d1 of the second; of one slot alone, d1 and its second reader's. PLACES: above. With
    the forward kernel's `scales_f32`, what it made is read in the place of packed.
    """
    SCALES: tl.constexpr = scales_f32 is not None
    part = tl.program_id(0).to(tl.int64)
    if NORM:
        dweight0 = tl.zeros((BM, HP, DP), tl.float32)
        if SLOTS == 2:
            dweight1 = tl.zeros((BM, HP, DP), tl.float32)
    if BIAS:
        sum0 = tl.zeros((BM, HP, DP), tl.float32)
        if SLOTS == 2:
            sum1 = tl.zeros((BM, HP, DP), tl.float32)
        if VALUES:
            sum_v = tl.zeros((BM, HP, DP), tl.float32)
    for i in tl.range(0, tiles, num_stages=STAGES):
        row = (i * tl.num_programs(0).to(tl.int64) + part) * BM + tl.arange(0, BM)
        inside = row < rows
        at, mask = _places(row, packed_row, inside, HEADS, HP, D, DP)
        to, _ = _places(row, dpacked_row, inside, HEADS, HP, D, DP)
        from_, _ = _places(row, HEADS * D, inside, HEADS, HP, D, DP)
        cos, sin = 0.0, 0.0
        if TURNS:
            cos, sin = _angles(first_f32, second_f32, row, inside, TURNS, HEADS, HP, D, DP, LOG2_FIRST, LOG2_SECOND)
        if SLOTS == 2:
            first_from = from_
            if PLACES:
                place = tl.load(places_offsets + row, mask=inside, other=0)
                first_from, _ = _places(place, HEADS * D, inside, HEADS, HP, D, DP)
            if SCALES:
                where, there = _numbers(row, inside, 0, SLOTS, HEADS, HP)
                scales = tl.load(scales_f32 + where, mask=there, other=0.0)
                dw, d = _slot_backward(
                    made0_ptr, dpacked_ptr, d0_ptr, d0_ptr, weight0_f32, at, to, first_from, mask, cos, sin,
                    D, DP, HP, BM, EPS, NORM, TURNS, False, scales,
                )  # fmt: skip
            else:
                dw, d = _slot_backward(
                    packed_ptr, dpacked_ptr, d0_ptr, d0_ptr, weight0_f32, at, to, first_from, mask, cos, sin,
                    D, DP, HP, BM, EPS, NORM, TURNS, False,
                )  # fmt: skip
            if NORM:
                dweight0 += dw
            if BIAS:
                sum0 += d
            if SCALES:
                where, there = _numbers(row, inside, 1, SLOTS, HEADS, HP)
                scales = tl.load(scales_f32 + where, mask=there, other=0.0)
                dw, d = _slot_backward(
                    made1_ptr, dpacked_ptr + HEADS * D, d1_ptr, d1_again_ptr, weight1_f32, at, to, from_, mask,
                    cos, sin, D, DP, HP, BM, EPS, NORM, TURNS, AGAIN, scales,
                )  # fmt: skip
            else:
                dw, d = _slot_backward(
                    packed_ptr + HEADS * D, dpacked_ptr + HEADS * D, d1_ptr, d1_again_ptr, weight1_f32, at, to, from_,
                    mask, cos, sin, D, DP, HP, BM, EPS, NORM, TURNS, AGAIN,
                )  # fmt: skip
            if NORM:
                dweight1 += dw
            if BIAS:
                sum1 += d
        else:
            if SCALES:
                where, there = _numbers(row, inside, 0, SLOTS, HEADS, HP)
                scales = tl.load(scales_f32 + where, mask=there, other=0.0)
                dw, d = _slot_backward(
                    made0_ptr, dpacked_ptr, d1_ptr, d1_again_ptr, weight0_f32, at, to, from_, mask, cos, sin,
                    D, DP, HP, BM, EPS, NORM, TURNS, AGAIN, scales,
                )  # fmt: skip
            else:
                dw, d = _slot_backward(
                    packed_ptr, dpacked_ptr, d1_ptr, d1_again_ptr, weight0_f32, at, to, from_, mask, cos, sin,
                    D, DP, HP, BM, EPS, NORM, TURNS, AGAIN,
                )  # fmt: skip
            if NORM:
                dweight0 += dw
            if BIAS:
                sum0 += d
        if VALUES:
            dv = tl.load(dv_ptr + from_, mask=mask, other=0.0).to(tl.float32)
            if AGAIN:
                dv += tl.load(dv_again_ptr + from_, mask=mask, other=0.0).to(tl.float32)
            tl.store(dpacked_ptr + SLOTS * HEADS * D + to, dv.to(dpacked_ptr.dtype.element_ty), mask=mask)
            if BIAS:
                sum_v += dv
    if NORM:
        dim = tl.arange(0, DP)
        tl.store(parts_f32 + part * (SLOTS * D) + dim, tl.sum(tl.sum(dweight0, axis=0), axis=0), mask=dim < D)
        if SLOTS == 2:
            tl.store(parts_f32 + part * (SLOTS * D) + D + dim, tl.sum(tl.sum(dweight1, axis=0), axis=0), mask=dim < D)
    if BIAS:
        base = sums_f32 + part * ((SLOTS + VALUES) * HEADS * D)
        _store_heads(base, sum0, HEADS, HP, D, DP)
        if SLOTS == 2:
            _store_heads(base + HEADS * D, sum1, HEADS, HP, D, DP)
        if VALUES:
            _store_heads(base + SLOTS * HEADS * D, sum_v, HEADS, HP, D, DP)
