"""The backward of jagged attention and GDPA on Hopper, second of two kernels: dQ = dS K.

Like the others: a program walks a list of tiles, one warp loads, NC consumers own 64 query rows each and share the
blocks of 64 keys. What `backward` wrote is dS^T in blocks of 64 keys x 64 queries; the product reads them transposed,
with a mask those only that it wrote. It moves 8 KB of dS for 1 MFLOP, so memory and L2 are what it waits for, and NC is
large so that K is read seldom.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gem_kernels.hopper.backward_block import BLOCK, in_sight, put_rows
from gem_kernels.hopper.exchange import pack, take, tile_row, unpack
from gem_kernels.hopper.records import FIELDS, RECORDS


@gluon.jit
def _loader(
    inputs, records, buffers, barriers, mask,
    NC: gl.constexpr, KS: gl.constexpr, GROUP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    ds_desc, k_desc, tiles_ptr, count_ptr, cursor_ptr, own_ptr, window, workspace = inputs
    first, last = window
    window_blocks, key_blocks = workspace
    left, right = mask
    record, record_full, record_empty = records
    ds_buf, k_buf = buffers
    ds_full, k_full, empty = barriers
    L: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [1], [0])
    total = gl.load(count_ptr)
    t = gl.program_id(0)
    step = 0
    tile = 0
    while t >= 0:
        q_row, rows, k_row, k_len, head, _out, b, first_block = unpack(tile_row(tiles_ptr, t, total, L), L)
        block = q_row // BLOCK + b
        number = block - first_block  # of the sequence's first query block
        # Not one tile ahead: see backward.py.
        if t < total:
            following = gl.num_programs(0) + take(cursor_ptr, total)
        else:
            following = -1
        if (t >= total) | ((number >= first) & (number < last)):
            begin = 0
            end = gl.cdiv(k_len, BLOCK)
            n = end
            diagonal = 0
            if LEFT or RIGHT:
                q_len = (gl.load(own_ptr + b + 1) - gl.load(own_ptr + b)).to(gl.int32)
                # Where the tile's first query stands, counted from the sequence's first key.
                diagonal = first_block * BLOCK + k_len - q_len
                begin, _end = in_sight(diagonal, left, right, n, LEFT, RIGHT)
                final = diagonal + (gl.cdiv(rows, BLOCK) - 1) * BLOCK
                _begin, end = in_sight(final, left, right, n, LEFT, RIGHT)
            r = tile % RECORDS
            mbarrier.wait(record_empty.index(r), ((tile // RECORDS) & 1) ^ 1)
            record.index(r).store(pack(q_row, rows, begin, end, head, n, diagonal, 0, L))
            mbarrier.arrive(record_full.index(r), count=1)
            tile += 1
            if t < total:
                ds_row = (head * window_blocks + block - first) * key_blocks
                for i in range(begin, end):
                    s = step % KS
                    mbarrier.wait(empty.index(s), ((step // KS) & 1) ^ 1)
                    mbarrier.expect(k_full.index(s), k_desc.block_type.nbytes)
                    at = [k_row + i * BLOCK, head // GROUP, 0]
                    tma.async_copy_global_to_shared(k_desc, at, k_full.index(s), k_buf.index(s))
                    for w in gl.static_range(NC):
                        wanted = rows > w * BLOCK
                        if LEFT or RIGHT:
                            lo, hi = in_sight(diagonal + w * BLOCK, left, right, n, LEFT, RIGHT)
                            wanted = wanted & (i >= lo) & (i < hi)
                        full = ds_full.index(s * NC + w)
                        if wanted:
                            mbarrier.expect(full, ds_desc.block_type.nbytes)
                            at = [(ds_row + w * key_blocks + i % key_blocks) * BLOCK, 0, 0]
                            tma.async_copy_global_to_shared(ds_desc, at, full, ds_buf.index(s * NC + w))
                        else:
                            mbarrier.arrive(full, count=1)
                    step += 1
        t = following


@gluon.jit
def _consumer(
    W: gl.constexpr, output, records, buffers, stage, barriers, mask,
    D: gl.constexpr, DIM: gl.constexpr, NC: gl.constexpr, KS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    dq_desc, dq_ptr, stride, q_scale = output
    left, right = mask
    record, record_full, record_empty = records
    ds_buf, k_buf = buffers
    ds_full, k_full, empty = barriers
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    RL: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    step = 0
    tile = 0
    rows = 1
    out = stage.index(W)
    flat = out.reshape([BLOCK, D])
    while rows > 0:
        r = tile % RECORDS
        mbarrier.wait(record_full.index(r), (tile // RECORDS) & 1)
        q_row, rows, begin, end, head, n, diagonal, _none = unpack(record.index(r).load(RL), RL)
        mbarrier.arrive(record_empty.index(r), count=1)
        tile += 1
        mine = rows - W * BLOCK
        lo, hi = in_sight(diagonal + W * BLOCK, left, right, n, LEFT, RIGHT)
        dq = gl.zeros([BLOCK, D], gl.float32, AL)
        for i in range(begin, end):
            s = step % KS
            phase = (step // KS) & 1
            mbarrier.wait(k_full.index(s), phase)
            mbarrier.wait(ds_full.index(s * NC + W), phase)
            if (mine > 0) & (i >= lo) & (i < hi):
                ds = ds_buf.index(s * NC + W).reshape([BLOCK, BLOCK])
                dq = warpgroup_mma(ds.permute((1, 0)), k_buf.index(s).reshape([BLOCK, D]), dq, is_async=True)
                dq = warpgroup_mma_wait(0, deps=(dq,))
            mbarrier.arrive(empty.index(s), count=1)
            step += 1
        if mine > 0:
            tma.store_wait(0)
            flat.store((dq * q_scale).to(dq_ptr.dtype.element_ty))
            at_row = q_row + W * BLOCK
            if mine >= BLOCK:
                fence_async_shared()
                tma.async_copy_shared_to_global(dq_desc, [at_row, head, 0], out)
            else:
                put_rows(dq_ptr, stride, flat, at_row, head * DIM, mine, D, DIM)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["first", "last", "window_blocks", "key_blocks", "left", "right"])
def query_gradient_kernel(
    ds_desc, k_desc, dq_desc, dq_ptr, stride, tiles_ptr, count_ptr, cursor_ptr, own_ptr,
    first, last, window_blocks, key_blocks, left, right, q_scale,
    D: gl.constexpr, DIM: gl.constexpr, NC: gl.constexpr, KS: gl.constexpr, GROUP: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """dQ = q_scale dS K of the sequences whose first query block is in the window; 0 without keys in sight."""
    gl.static_assert(NC == 4)
    dtype: gl.constexpr = dq_ptr.dtype.element_ty
    ds_buf = gl.allocate_shared_memory(dtype, [KS * NC, BLOCK, 1, BLOCK], ds_desc.layout)
    k_buf = gl.allocate_shared_memory(dtype, [KS, BLOCK, 1, D], k_desc.layout)
    stage = gl.allocate_shared_memory(dtype, [NC, BLOCK, 1, D], dq_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    ds_full = gl.allocate_shared_memory(gl.int64, [KS * NC, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [KS, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [KS, 1], BARRIER)
    for i in gl.static_range(KS):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=NC)
    for i in gl.static_range(KS * NC):
        mbarrier.init(ds_full.index(i), count=1)
    record = gl.allocate_shared_memory(gl.int32, [RECORDS, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    record_full = gl.allocate_shared_memory(gl.int64, [RECORDS, 1], BARRIER)
    record_empty = gl.allocate_shared_memory(gl.int64, [RECORDS, 1], BARRIER)
    for i in gl.static_range(RECORDS):
        mbarrier.init(record_full.index(i), count=1)
        mbarrier.init(record_empty.index(i), count=NC)
    mask = (left, right)
    records = (record, record_full, record_empty)
    buffers = (ds_buf, k_buf)
    barriers = (ds_full, k_full, empty)
    output = (dq_desc, dq_ptr, stride, q_scale)
    workspace = (window_blocks, key_blocks)
    inputs = (ds_desc, k_desc, tiles_ptr, count_ptr, cursor_ptr, own_ptr, (first, last), workspace)
    gl.warp_specialize(
        [
            (_consumer, (0, output, records, buffers, stage, barriers, mask, D, DIM, NC, KS, LEFT, RIGHT)),
            (_consumer, (1, output, records, buffers, stage, barriers, mask, D, DIM, NC, KS, LEFT, RIGHT)),
            (_consumer, (2, output, records, buffers, stage, barriers, mask, D, DIM, NC, KS, LEFT, RIGHT)),
            (_consumer, (3, output, records, buffers, stage, barriers, mask, D, DIM, NC, KS, LEFT, RIGHT)),
            (_loader, (inputs, records, buffers, barriers, mask, NC, KS, GROUP, LEFT, RIGHT)),
        ],
        [4, 4, 4, 1],
        [112, 112, 112, 56],
    )
