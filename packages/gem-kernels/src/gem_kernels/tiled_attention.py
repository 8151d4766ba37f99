"""The portable Triton kernels of jagged attention and GDPA: the same loops over tiles, with the online softmax or an
activation between the two products (`ACT`: "softmax" or an activation of `gdpa.tile_activations`).

The backward is split, without atomics, so that every run gives the same bits: one kernel for dQ (with softmax it also
makes delta = rowsum(dO o O) - dLSE, which the next one reads), one for dK and dV. The softmax is kept in base 2. With
an activation, zero-filled padding needs no mask in either pass, as act(0) = 0 and the padded rows of V and dO are 0:
only the edges of a causal mask or a window do. See `tiling` for the legend; `scale` and `out_scale` as in `gdpa`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gem_kernels.gdpa.tile_activations import activate, slope
from gem_kernels.tiling import LN2, LOG2E, hide, key_ranges, load_rows, query_ranges, span, store_rows


@triton.jit
def scores(
    q, k, rows, cols, len_k, max_q, max_k, diag, scale, bias_ptr, left, right, ACT: tl.constexpr,
    BIAS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of rows [BM, 1] against cols [1, BN], or with both turned; for softmax in base 2. Where hidden, if MASKED:
    -inf, or 0 for an activation.
    """
    if ACT == "softmax":
        s = tl.dot(q, k, input_precision=PRECISION) * (scale * LOG2E)
    else:
        s = tl.dot(q, k, input_precision=PRECISION) * scale
    if BIAS:
        at = bias_ptr + rows.to(tl.int64) * max_k + cols
        s += tl.load(at, mask=(rows < max_q) & (cols < max_k), other=0.0).to(tl.float32) * LOG2E
    if MASKED and ACT == "softmax":
        s = hide(s, rows + diag, cols, len_k, left, right, LEFT, RIGHT, float("-inf"))
    if MASKED and ACT != "softmax" and (LEFT or RIGHT):
        s = hide(s, rows + diag, cols, len_k, left, right, LEFT, RIGHT, 0.0)
    return s


@triton.jit
def forward_range(
    acc, m, total, q, rows, lo, hi, k_ptr, v_ptr, bias_ptr, k_row, v_row, len_k, max_q, max_k, diag, scale, left, right,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, ACT: tl.constexpr,
    BIAS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O, maximum and sum of a row tile over the keys lo .. hi - 1."""
    for start in range(lo, hi, BN):
        cols = start + tl.arange(0, BN)
        k = load_rows(k_ptr, cols, cols < len_k, k_row, D, DP, MASKED)
        s = scores(q, tl.trans(k), rows[:, None], cols[None, :], len_k, max_q, max_k, diag, scale, bias_ptr,
                   left, right, ACT, BIAS, LEFT, RIGHT, MASKED, PRECISION)  # fmt: skip
        if ACT == "softmax":
            m_new = tl.maximum(m, tl.max(s, 1))
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet
            p = tl.exp2(s - shift[:, None])
            alpha = tl.exp2(m - shift)
            total = total * alpha + tl.sum(p, 1)
            acc = acc * alpha[:, None]
            m = m_new
        else:
            p = activate(s, ACT)
        v = load_rows(v_ptr, cols, cols < len_k, v_row, D, DP, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, m, total


@triton.jit
def subtracted_tile(
    acc, m, total, q, rows, start, k_ptr, v_ptr, bias_ptr, k_row, v_row, len_q, len_k, max_q, max_k, scale,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr, LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The softmax of `forward_range` over a last tile of keys, which is not full: what the missing ones add to the sum
    is subtracted, or they are masked after all (see `jagged_attention.subtraction`).
    """
    cols = start + tl.arange(0, BN)
    k = load_rows(k_ptr, cols, cols < len_k, k_row, D, DP, True)
    bias_ok = tl.where(cols < len_k, cols, max_k)  # missing keys read a bias of 0
    s = scores(q, tl.trans(k), rows[:, None], bias_ok[None, :], len_k, max_q, max_k, 0, scale, bias_ptr,
               -1, -1, "softmax", BIAS, False, False, False, PRECISION)  # fmt: skip
    safe = (tl.max(s, 1) > 0.0) | (m >= -LIMIT) | (rows >= len_q)
    surplus = (start + BN - len_k).to(tl.float32)
    if tl.min(safe.to(tl.int32), 0) == 0:
        s = tl.where((cols < len_k)[None, :], s, float("-inf"))
        surplus = surplus * 0.0
    m_new = tl.maximum(m, tl.max(s, 1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a bias of -inf
    p = tl.exp2(s - shift[:, None])
    alpha = tl.exp2(m - shift)
    total = total * alpha + (tl.sum(p, 1) - surplus * tl.exp2(-tl.maximum(shift, 0.0)))
    v = load_rows(v_ptr, cols, cols < len_k, v_row, D, DP, True)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, m_new, total


@triton.jit(do_not_specialize=["max_q", "max_k", "tiles", "left", "right"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr, lse_f32, q_offsets, k_offsets, scale, out_scale,
    q_row, q_head, k_row, k_head, v_row, v_head, bias_batch, bias_head,
    max_q, max_k, tiles, left, right,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SHARED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr, SUBTRACT: tl.constexpr = None, residual_ptr=None,
):  # fmt: skip
    """O and LSE of one row tile of one (sequence, head). SUBTRACT: the limit of `subtracted_tile`, which then takes the
    mask's place, without causal masks and windows. With an activation what is at `residual_ptr`, laid out as O, is
    added to it.
    """
    tile, rest = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    h, b = rest % HEADS, rest // HEADS
    if SHARED:
        start_q, len_q, start_o = tl.cast(0, tl.int64), max_q, b.to(tl.int64) * max_q
    else:
        start_q, len_q = span(q_offsets, b)
        start_o = start_q
    if tile * BM >= len_q:
        return
    start_k, len_k = span(k_offsets, b)
    rows = tile * BM + tl.arange(0, BM)
    inside = rows < len_q
    q = load_rows(q_ptr + start_q * q_row + h * q_head, rows, inside, q_row, D, DP, True)
    k_ptr += start_k * k_row + (h // GROUP) * k_head
    v_ptr += start_k * v_row + (h // GROUP) * v_head
    if BIAS:
        bias_ptr += b.to(tl.int64) * bias_batch + h.to(tl.int64) * bias_head
    diag = len_k - len_q
    last = tl.minimum(tile * BM + BM, len_q) - 1
    lo, full_lo, full_hi, hi = key_ranges(tile * BM + diag, last + diag, len_k, left, right, BN, LEFT, RIGHT)
    if NARROW:  # a few tiles: one loop over all of them, with the mask
        full_lo = hi
    acc = tl.zeros((BM, DP), tl.float32)
    m = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    if LEFT:
        acc, m, total = forward_range(
            acc, m, total, q, rows, lo, tl.minimum(full_lo, hi), k_ptr, v_ptr, bias_ptr, k_row, v_row, len_k,
            max_q, max_k, diag, scale, left, right, D, DP, BN, ACT, BIAS, LEFT, RIGHT, True, PRECISION)  # fmt: skip
    if not NARROW:
        acc, m, total = forward_range(
            acc, m, total, q, rows, full_lo, full_hi, k_ptr, v_ptr, bias_ptr, k_row, v_row, len_k, max_q, max_k,
            diag, scale, left, right, D, DP, BN, ACT, BIAS, LEFT, RIGHT, False, PRECISION)  # fmt: skip
        if SUBTRACT is None:
            acc, m, total = forward_range(
                acc, m, total, q, rows, full_hi, hi, k_ptr, v_ptr, bias_ptr, k_row, v_row, len_k, max_q, max_k,
                diag, scale, left, right, D, DP, BN, ACT, BIAS, LEFT, RIGHT, True, PRECISION)  # fmt: skip
        elif full_hi < hi:
            acc, m, total = subtracted_tile(
                acc, m, total, q, rows, full_hi, k_ptr, v_ptr, bias_ptr, k_row, v_row, len_q, len_k, max_q, max_k,
                scale, D, DP, BN, BIAS, SUBTRACT, PRECISION)  # fmt: skip
    if ACT == "softmax":
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        lse = tl.where(total == 0.0, float("-inf"), (m + tl.log2(tl.where(total == 0.0, 1.0, total))) * LN2)
        tl.store(lse_f32 + (start_o + rows) * HEADS + h, lse, mask=inside)
    else:
        acc = acc * out_scale
        if residual_ptr is not None:
            acc += load_rows(residual_ptr + (start_o * HEADS + h) * D, rows, inside, HEADS * D, D, DP, True)
    store_rows(out_ptr + (start_o * HEADS + h) * D, acc, rows, inside, HEADS * D, D, DP)


@triton.jit
def _dq_range(
    dq, q, do, lse2, delta, rows, lo, hi, k_ptr, v_ptr, bias_ptr, k_row, v_row, len_k, max_q, max_k, diag, scale,
    left, right, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, ACT: tl.constexpr,
    BIAS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for start in range(lo, hi, BN):
        cols = start + tl.arange(0, BN)
        k = load_rows(k_ptr, cols, cols < len_k, k_row, D, DP, MASKED)
        v = load_rows(v_ptr, cols, cols < len_k, v_row, D, DP, MASKED)
        s = scores(q, tl.trans(k), rows[:, None], cols[None, :], len_k, max_q, max_k, diag, scale, bias_ptr,
                   left, right, ACT, BIAS, LEFT, RIGHT, MASKED, PRECISION)  # fmt: skip
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        if ACT == "softmax":
            ds = tl.exp2(s - lse2[:, None]) * (dp - delta[:, None])
        else:
            ds = slope(s, ACT) * dp
            if MASKED and (LEFT or RIGHT):
                ds = hide(ds, (rows + diag)[:, None], cols[None, :], len_k, left, right, LEFT, RIGHT, 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["max_q", "max_k", "tiles", "left", "right"])
def dq_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr, lse_f32, dlse_f32, delta_f32, dq_ptr, q_offsets, k_offsets,
    scale, out_scale,
    do_row, do_head, q_row, q_head, k_row, k_head, v_row, v_head, bias_batch, bias_head,
    max_q, max_k, tiles, left, right,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SHARED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, DLSE: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of one row tile, and with softmax its delta."""
    tile, rest = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    h, b = rest % HEADS, rest // HEADS
    if SHARED:  # dQ of each sample goes to its own rows, and is summed over the batch outside
        start_q, len_q, start_o = tl.cast(0, tl.int64), max_q, b.to(tl.int64) * max_q
    else:
        start_q, len_q = span(q_offsets, b)
        start_o = start_q
    if tile * BM >= len_q:
        return
    start_k, len_k = span(k_offsets, b)
    rows = tile * BM + tl.arange(0, BM)
    inside = rows < len_q
    q = load_rows(q_ptr + start_q * q_row + h * q_head, rows, inside, q_row, D, DP, True)
    do = load_rows(do_ptr + start_o * do_row + h * do_head, rows, inside, do_row, D, DP, True)
    if ACT == "softmax":
        out = load_rows(out_ptr + (start_o * HEADS + h) * D, rows, inside, HEADS * D, D, DP, True)
        at = (start_o + rows) * HEADS + h
        delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
        if DLSE:
            delta -= tl.load(dlse_f32 + at, mask=inside, other=0.0)
        tl.store(delta_f32 + at, delta, mask=inside)
        lse = tl.load(lse_f32 + at, mask=inside, other=0.0)
        lse2 = tl.where(
            lse == float("-inf"), 0.0, lse * LOG2E
        )  # a row that sees no key: its scores are -inf, so P is 0
    else:
        lse2 = 0.0
        delta = 0.0
    k_ptr += start_k * k_row + (h // GROUP) * k_head
    v_ptr += start_k * v_row + (h // GROUP) * v_head
    if BIAS:
        bias_ptr += b.to(tl.int64) * bias_batch + h.to(tl.int64) * bias_head
    diag = len_k - len_q
    last = tl.minimum(tile * BM + BM, len_q) - 1
    lo, full_lo, full_hi, hi = key_ranges(tile * BM + diag, last + diag, len_k, left, right, BN, LEFT, RIGHT)
    if NARROW:  # a few tiles: one loop over all of them, with the mask
        full_lo = hi
    dq = tl.zeros((BM, DP), tl.float32)
    if LEFT:
        dq = _dq_range(
            dq, q, do, lse2, delta, rows, lo, tl.minimum(full_lo, hi), k_ptr, v_ptr, bias_ptr, k_row, v_row, len_k,
            max_q, max_k, diag, scale, left, right, D, DP, BN, ACT, BIAS, LEFT, RIGHT, True, PRECISION)  # fmt: skip
    if not NARROW:
        dq = _dq_range(
            dq, q, do, lse2, delta, rows, full_lo, full_hi, k_ptr, v_ptr, bias_ptr, k_row, v_row, len_k,
            max_q, max_k, diag, scale, left, right, D, DP, BN, ACT, BIAS, LEFT, RIGHT, False, PRECISION)  # fmt: skip
        dq = _dq_range(
            dq, q, do, lse2, delta, rows, full_hi, hi, k_ptr, v_ptr, bias_ptr, k_row, v_row, len_k,
            max_q, max_k, diag, scale, left, right, D, DP, BN, ACT, BIAS, LEFT, RIGHT, True, PRECISION)  # fmt: skip
    store_rows(dq_ptr + (start_o * HEADS + h) * D, dq * (scale * out_scale), rows, inside, HEADS * D, D, DP)


@triton.jit
def _dkv_range(
    dk, dv, k, v, cols, lo, hi, q_ptr, do_ptr, lse_f32, delta_f32, bias_ptr, q_row, do_row, len_q, len_k, max_q, max_k,
    diag, scale, left, right, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
    ACT: tl.constexpr, BIAS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    for start in range(lo, hi, BM):
        rows = start + tl.arange(0, BM)
        inside = rows < len_q
        q = load_rows(q_ptr, rows, inside, q_row, D, DP, MASKED)
        do = load_rows(do_ptr, rows, inside, do_row, D, DP, MASKED)
        # Transposed, [BN, BM]. Padded query rows are 0 in q, do and delta and add nothing, unless a bias makes their P
        # infinite.
        s = scores(k, tl.trans(q), rows[None, :], cols[:, None], len_k, max_q, max_k, diag, scale, bias_ptr,
                   left, right, ACT, BIAS, LEFT, RIGHT, MASKED, PRECISION)  # fmt: skip
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        if ACT == "softmax":
            if MASKED:
                lse = tl.load(lse_f32 + rows.to(tl.int64) * HEADS, mask=inside, other=0.0)
                delta = tl.load(delta_f32 + rows.to(tl.int64) * HEADS, mask=inside, other=0.0)
            else:
                lse = tl.load(lse_f32 + rows.to(tl.int64) * HEADS)
                delta = tl.load(delta_f32 + rows.to(tl.int64) * HEADS)
            lse2 = tl.where(lse == float("-inf"), 0.0, lse * LOG2E)
            p = tl.exp2(s - lse2[None, :])
            if BIAS and MASKED:
                p = tl.where(inside[None, :], p, 0.0)
            ds = p * (dp - delta[None, :])
        else:
            p = activate(s, ACT)
            ds = slope(s, ACT) * dp
            if MASKED and (LEFT or RIGHT):
                ds = hide(ds, (rows + diag)[None, :], cols[:, None], len_k, left, right, LEFT, RIGHT, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["max_q", "max_k", "tiles", "left", "right"])
def dkv_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, bias_ptr, lse_f32, delta_f32, dk_ptr, dv_ptr, q_offsets, k_offsets, scale, out_scale,
    do_row, do_head, q_row, q_head, k_row, k_head, v_row, v_head, bias_batch, bias_head,
    max_q, max_k, tiles, left, right,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SHARED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of one key tile of one (sequence, key head)."""
    KV_HEADS: tl.constexpr = HEADS // GROUP
    tile, rest = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    hk, b = rest % KV_HEADS, rest // KV_HEADS
    start_k, len_k = span(k_offsets, b)
    if tile * BN >= len_k:
        return
    if SHARED:
        start_q, len_q, start_o = tl.cast(0, tl.int64), max_q, b.to(tl.int64) * max_q
    else:
        start_q, len_q = span(q_offsets, b)
        start_o = start_q
    cols = tile * BN + tl.arange(0, BN)
    inside = cols < len_k
    k = load_rows(k_ptr + start_k * k_row + hk * k_head, cols, inside, k_row, D, DP, True)
    v = load_rows(v_ptr + start_k * v_row + hk * v_head, cols, inside, v_row, D, DP, True)
    diag = len_k - len_q
    last = tl.minimum(tile * BN + BN, len_k) - 1
    lo, full_lo, full_hi, hi = query_ranges(tile * BN, last, diag, len_q, left, right, BM, LEFT, RIGHT)
    if NARROW:
        full_lo = hi
    dk = tl.zeros((BN, DP), tl.float32)
    dv = tl.zeros((BN, DP), tl.float32)
    for g in range(GROUP):
        h = hk * GROUP + g
        q_at = q_ptr + start_q * q_row + h * q_head
        do_at = do_ptr + start_o * do_row + h * do_head
        lse_at = lse_f32
        delta_at = delta_f32
        if ACT == "softmax":
            lse_at += start_o * HEADS + h
            delta_at += start_o * HEADS + h
        bias_at = bias_ptr
        if BIAS:
            bias_at += b.to(tl.int64) * bias_batch + h.to(tl.int64) * bias_head
        if RIGHT:
            dk, dv = _dkv_range(
                dk, dv, k, v, cols, lo, tl.minimum(full_lo, hi), q_at, do_at, lse_at, delta_at, bias_at, q_row, do_row,
                len_q, len_k, max_q, max_k, diag, scale, left, right, HEADS, D, DP, BM, ACT, BIAS, LEFT, RIGHT, True,
                PRECISION)  # fmt: skip
        if not NARROW:
            dk, dv = _dkv_range(
                dk, dv, k, v, cols, full_lo, full_hi, q_at, do_at, lse_at, delta_at, bias_at, q_row, do_row,
                len_q, len_k, max_q, max_k, diag, scale, left, right, HEADS, D, DP, BM, ACT, BIAS, LEFT, RIGHT, False,
                PRECISION)  # fmt: skip
            dk, dv = _dkv_range(
                dk, dv, k, v, cols, full_hi, hi, q_at, do_at, lse_at, delta_at, bias_at, q_row, do_row,
                len_q, len_k, max_q, max_k, diag, scale, left, right, HEADS, D, DP, BM, ACT, BIAS, LEFT, RIGHT, True,
                PRECISION)  # fmt: skip
    at = (start_k * KV_HEADS + hk) * D
    store_rows(dk_ptr + at, dk * (scale * out_scale), cols, inside, KV_HEADS * D, D, DP)
    store_rows(dv_ptr + at, dv * out_scale, cols, inside, KV_HEADS * D, D, DP)
