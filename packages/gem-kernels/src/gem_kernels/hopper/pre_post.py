"""The two memory-bound kernels around the Hopper backward: row statistics before it, the workspace's way to dQ
after it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["total"])
def row_statistics(
    out, dout, lse, dlse, lse2, delta, total, o_stride, do_stride, do_head,
    H: tl.constexpr, D: tl.constexpr, HAS_DLSE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(O dO) - dLSE and LSE in base 2, both [H, T] float32. `out` is [T, H, D] with its heads side by
    side.
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = (r // H).to(tl.int64)
    head = r % H
    inside = row < total
    d = tl.arange(0, D)
    o = tl.load(out + (row * o_stride + head * D)[:, None] + d[None, :], mask=inside[:, None], other=0.0)
    do = tl.load(dout + (row * do_stride + head * do_head)[:, None] + d[None, :], mask=inside[:, None], other=0.0)
    s = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if HAS_DLSE:
        s -= tl.load(dlse + row * H + head, mask=inside, other=0.0)
    at = head.to(tl.int64) * total + row
    tl.store(delta + at, s, mask=inside)
    tl.store(lse2 + at, tl.load(lse + row * H + head, mask=inside, other=0.0) * 1.4426950408889634, mask=inside)


@triton.jit
def finish_query_gradient(
    work, dq, q_offsets, k_offsets, q_scale,
    HD: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """dQ = q_scale * workspace; 0 for sequences without keys. Sequence b's workspace begins at row q_offsets[b] +
    PAD * b.
    """
    b = tl.program_id(1)
    start = tl.load(q_offsets + b).to(tl.int64)
    length = tl.load(q_offsets + b + 1).to(tl.int64) - start
    first = tl.program_id(0) * ROWS
    if first >= length:
        return
    keys = tl.load(k_offsets + b + 1) - tl.load(k_offsets + b)
    r = first + tl.arange(0, ROWS)
    c = tl.arange(0, COLS)
    mask = (r < length)[:, None] & (c < HD)[None, :]
    x = tl.load(work + (start + PAD * b + r)[:, None] * HD + c[None, :], mask=mask & (keys > 0), other=0.0)
    tl.store(dq + (start + r)[:, None] * HD + c[None, :], (x * q_scale).to(dq.dtype.element_ty), mask=mask)
