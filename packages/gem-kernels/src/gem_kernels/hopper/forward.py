"""The forward of jagged attention and GDPA on Hopper: one persistent, warp-specialised Gluon kernel.

A program owns one SM and takes tiles off a list (`gem_kernels.schedule`). Two warps load by TMA (`loaders`); three
consumer warpgroups own 64 query rows each (`consumers`) and share the K and V tiles. K tiles are visited from the last
to the first: one or two short steps of 64 keys with what does not fill a whole step, then whole steps, which need no
mask unless one is asked for.

Shapes: Q [Tq, H, DIM], K and V [Tk, Hkv, DIM] as descriptors of one head's rows, DIM up to D: what is over reads as 0;
O [Tq, H, DIM] contiguous, LSE [Tq, H] float32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gem_kernels.hopper.consumers import consume
from gem_kernels.hopper.loaders import load_keys, load_queries
from gem_kernels.hopper.records import BLOCK, FIELDS, RECORDS

__all__ = ["forward_kernel"]


@gluon.jit(do_not_specialize=["heads", "left", "right", "bias_batch", "bias_head", "bias_row", "max_q", "max_k"])
def forward_kernel(
    q_desc, k_desc, v_desc, k_short, v_short, o_desc, o_ptr, lse_ptr, heads, tiles_ptr, count_ptr, cursor_ptr, own_ptr,
    scale, out_scale, residual_ptr, left, right, bias_ptr, bias_batch, bias_head, bias_row, max_q, max_k,
    BN: gl.constexpr, D: gl.constexpr, DIM: gl.constexpr, NC: gl.constexpr, KS: gl.constexpr, QS: gl.constexpr,
    TURNS: gl.constexpr, GROUP: gl.constexpr, ACT: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    SHARED: gl.constexpr, REGS: gl.constexpr, LOADER_REGS: gl.constexpr,
    LEAN: gl.constexpr, ONCE: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """O = softmax(scale Q K^T) V, or out_scale * act(scale Q K^T) V, with RESIDUAL plus what is at `residual_ptr`, laid
    out as O; for softmax `scale` holds log2(e) as a factor.

    A query at position p = i + (Lk - Lq) sees keys p - left (with LEFT) to p + right (with RIGHT).
    """
    gl.static_assert(NC == 3, "a partition for each consumer is written out below")
    dtype: gl.constexpr = o_ptr.dtype.element_ty
    q_buf = gl.allocate_shared_memory(dtype, [QS * NC, BLOCK, 1, D], q_desc.layout)
    k_buf = gl.allocate_shared_memory(dtype, [KS, BN, 1, D], k_desc.layout)
    v_buf = gl.allocate_shared_memory(dtype, [KS, BN, 1, D], v_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [QS * NC, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [QS * NC, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [KS, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [KS, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [KS, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [KS, 1], BARRIER)
    for i in gl.static_range(QS * NC):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(KS):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=NC)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=NC)
    record = gl.allocate_shared_memory(gl.int32, [RECORDS, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    record_full = gl.allocate_shared_memory(gl.int64, [RECORDS, 1], BARRIER)
    record_empty = gl.allocate_shared_memory(gl.int64, [RECORDS, 1], BARRIER)
    for i in gl.static_range(RECORDS):
        mbarrier.init(record_full.index(i), count=1)
        mbarrier.init(record_empty.index(i), count=NC + 1)
    records = (record, record_full, record_empty)
    buffers = (q_buf, k_buf, v_buf)
    q_barriers = (q_full, q_empty)
    barriers = (k_full, k_empty, v_full, v_empty)
    SHORT: gl.constexpr = k_short.layout
    window = (left, right)
    out = (o_desc, o_ptr, lse_ptr, heads, out_scale, residual_ptr)
    bias = (bias_ptr, bias_batch, bias_head, bias_row, max_q)
    queries = (q_desc, tiles_ptr, count_ptr, cursor_ptr, own_ptr, max_k)
    keys = (k_desc, v_desc, k_short, v_short)
    gl.warp_specialize(
        [
            (consume, (gl.to_tensor(0), scale, out, bias, records, buffers, q_barriers, barriers, window, SHORT,
                       BN, D, DIM, NC, KS, QS, TURNS, ACT, LEFT, RIGHT, LEAN, ONCE, BIAS, RESIDUAL, HALVES)),
            (consume, (gl.to_tensor(1), scale, out, bias, records, buffers, q_barriers, barriers, window, SHORT,
                       BN, D, DIM, NC, KS, QS, TURNS, ACT, LEFT, RIGHT, LEAN, ONCE, BIAS, RESIDUAL, HALVES)),
            (consume, (gl.to_tensor(2), scale, out, bias, records, buffers, q_barriers, barriers, window, SHORT,
                       BN, D, DIM, NC, KS, QS, TURNS, ACT, LEFT, RIGHT, LEAN, ONCE, BIAS, RESIDUAL, HALVES)),
            (load_queries, (queries, records, q_buf, q_full, q_empty, window,
                            BN, NC, QS, LEFT, RIGHT, SHARED, ONCE, BIAS, TURNS)),
            (load_keys, (keys, records, (k_buf, v_buf), barriers, window, BN, KS, GROUP, LEFT, RIGHT, LEAN)),
        ],
        [4, 4, 1, 1],
        [REGS, REGS, LOADER_REGS, LOADER_REGS],
    )  # fmt: skip
