"""The backward of jagged attention and GDPA on Hopper, second of two kernels: dQ = dS K.

Like the others: a program walks a list of tiles, one warp loads, NC consumers own 64 query rows each and share the
blocks of 64 keys. What `backward` wrote is dS^T in blocks of 64 keys x 64 queries; the product reads them transposed.
It moves 8 KB of dS for 1 MFLOP, so memory and L2 are what it waits for, and NC is large so that K is read seldom.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.hopper.backward import BLOCK, put, tile_record
from gem_kernels.hopper.forward import tile_count


@gluon.jit
def _producer(inputs, buffers, barriers, D: gl.constexpr, NC: gl.constexpr, KS: gl.constexpr):
    ds_desc, k_desc, tiles_ptr, count_ptr, window, window_blocks, key_blocks = inputs
    first, last = window
    ds_buf, k_buf = buffers
    ds_full, k_full, empty = barriers
    step = 0
    count = tile_count(count_ptr)
    for t in range(count):
        # Read here and not one tile ahead: see backward.py.
        q_start, rows, k_start, k_len, head, b, first_block = tile_record(tiles_ptr, t, count)
        block = q_start // BLOCK + b
        begin = block - first_block  # the number of the sequence's first query block
        if (begin >= first) & (begin < last):
            column = head * D
            ds_row = (head * window_blocks + block - first) * key_blocks * BLOCK
            for i in range(gl.cdiv(k_len, BLOCK)):
                s = step % KS
                mbarrier.wait(empty.index(s), ((step // KS) & 1) ^ 1)
                mbarrier.expect(k_full.index(s), k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(k_desc, [k_start + i * BLOCK, column], k_full.index(s), k_buf.index(s))
                for w in gl.static_range(NC):
                    if rows > w * BLOCK:
                        full = ds_full.index(s * NC + w)
                        mbarrier.expect(full, ds_desc.block_type.nbytes)
                        tma.async_copy_global_to_shared(
                            ds_desc, [ds_row + (w * key_blocks + i) * BLOCK, 0], full, ds_buf.index(s * NC + w)
                        )
                    else:
                        mbarrier.arrive(ds_full.index(s * NC + w), count=1)
                step += 1


@gluon.jit
def _consumer(W: gl.constexpr, problem, buffers, stage, barriers, D: gl.constexpr, NC: gl.constexpr, KS: gl.constexpr):
    dq_desc, dq_ptr, stride, tiles_ptr, count_ptr, q_scale, window = problem
    first, last = window
    ds_buf, k_buf = buffers
    ds_full, k_full, empty = barriers
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    step = 0
    count = tile_count(count_ptr)
    for t in range(count):
        q_start, rows, _k, k_len, head, b, first_block = tile_record(tiles_ptr, t, count)
        begin = q_start // BLOCK + b - first_block
        if (begin >= first) & (begin < last):
            mine = rows - W * BLOCK
            dq = gl.zeros([BLOCK, D], gl.float32, AL)
            for _ in range(gl.cdiv(k_len, BLOCK)):
                s = step % KS
                phase = (step // KS) & 1
                mbarrier.wait(k_full.index(s), phase)
                mbarrier.wait(ds_full.index(s * NC + W), phase)
                if mine > 0:
                    dq = warpgroup_mma(ds_buf.index(s * NC + W).permute((1, 0)), k_buf.index(s), dq, is_async=True)
                    dq = warpgroup_mma_wait(0, deps=(dq,))
                mbarrier.arrive(empty.index(s), count=1)
                step += 1
            if mine > 0:
                tma.store_wait(0)
                put(dq * q_scale, dq_desc, dq_ptr, stride, stage.index(W), q_start + W * BLOCK, head * D, mine, D, AL)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["first", "last", "window_blocks", "key_blocks"])
def query_gradient_kernel(
    ds_desc, k_desc, dq_desc, dq_ptr, stride, tiles_ptr, count_ptr, first, last, window_blocks, key_blocks, q_scale,
    D: gl.constexpr, NC: gl.constexpr, KS: gl.constexpr,
):  # fmt: skip
    """dQ = q_scale dS K of the sequences whose first query block is in the window; 0 where there are no keys."""
    gl.static_assert(NC == 4)
    dtype: gl.constexpr = dq_ptr.dtype.element_ty
    ds_buf = gl.allocate_shared_memory(dtype, [KS * NC, BLOCK, BLOCK], ds_desc.layout)
    k_buf = gl.allocate_shared_memory(dtype, [KS, BLOCK, D], k_desc.layout)
    stage = gl.allocate_shared_memory(dtype, [NC, BLOCK, D], dq_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    ds_full = gl.allocate_shared_memory(gl.int64, [KS * NC, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [KS, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [KS, 1], BARRIER)
    for i in gl.static_range(KS):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=NC)
    for i in gl.static_range(KS * NC):
        mbarrier.init(ds_full.index(i), count=1)
    window = (first, last)
    buffers = (ds_buf, k_buf)
    barriers = (ds_full, k_full, empty)
    problem = (dq_desc, dq_ptr, stride, tiles_ptr, count_ptr, q_scale, window)
    inputs = (ds_desc, k_desc, tiles_ptr, count_ptr, window, window_blocks, key_blocks)
    gl.warp_specialize(
        [
            (_consumer, (0, problem, buffers, stage, barriers, D, NC, KS)),
            (_consumer, (1, problem, buffers, stage, barriers, D, NC, KS)),
            (_consumer, (2, problem, buffers, stage, barriers, D, NC, KS)),
            (_consumer, (3, problem, buffers, stage, barriers, D, NC, KS)),
            (_producer, (inputs, buffers, barriers, D, NC, KS)),
        ],
        [4, 4, 4, 1],
        [112, 112, 112, 56],
    )
