"""The small memory-bound kernels around the Hopper backward."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["query_blocks"])
def row_statistics(
    out, dout, lse, dlse, rows, q_offsets, query_blocks, o_stride, do_stride, o_head, do_head,
    H: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr, HAS_OUT: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """LSE in base 2 and delta = rowsum(O dO) - dLSE (without `out`: -dLSE) of every block of 64 queries, [H,
    query_blocks, 2, 64] float32. The blocks of sequence b are numbered from q_offsets[b] // 64 + b on; rows past its
    end and queries that see no key (LSE -inf) get LSE = inf, that is weight 0. COLS: D up to a power of two.
    """
    b = tl.program_id(1)
    start = tl.load(q_offsets + b).to(tl.int64)
    length = tl.load(q_offsets + b + 1).to(tl.int64) - start
    block = tl.program_id(0)
    if block * 64 >= length:
        return
    lane = tl.arange(0, 64)
    inside = block * 64 + lane < length
    row = start + block * 64 + lane
    d = tl.arange(0, COLS)
    there = inside[:, None] & (d < D)[None, :]
    for h in range(H):
        s = tl.zeros([64], tl.float32)
        if HAS_OUT:
            o = tl.load(out + (row * o_stride + h * o_head)[:, None] + d[None, :], mask=there, other=0.0)
            do = tl.load(dout + (row * do_stride + h * do_head)[:, None] + d[None, :], mask=there, other=0.0)
            s = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        if HAS_DLSE:
            s -= tl.load(dlse + row * H + h, mask=inside, other=0.0)
        lse2 = tl.load(lse + row * H + h, mask=inside, other=float("inf")) * 1.4426950408889634
        lse2 = tl.where(lse2 == float("-inf"), float("inf"), lse2)
        at = rows + ((h * query_blocks + start // 64 + b + block) * 128).to(tl.int64) + lane
        tl.store(at, lse2)
        tl.store(at + 64, s)


@triton.jit
def clear_without_keys(dq, q_offsets, k_offsets, HD: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr):
    """dQ [Tq, HD] = 0 for sequences without keys."""
    b = tl.program_id(0)
    if tl.load(k_offsets + b + 1) > tl.load(k_offsets + b):
        return
    start = tl.load(q_offsets + b).to(tl.int64)
    length = tl.load(q_offsets + b + 1).to(tl.int64) - start
    c = tl.arange(0, COLS)
    for first in range(0, length, ROWS):
        r = first + tl.arange(0, ROWS)
        at = dq + (start + r)[:, None] * HD + c[None, :]
        tl.store(at, tl.zeros([ROWS, COLS], dq.dtype.element_ty), mask=(r < length)[:, None] & (c < HD)[None, :])
