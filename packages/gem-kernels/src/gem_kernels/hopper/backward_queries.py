"""What a consumer of the Hopper backward does with a tile of queries: dQ = dS K of 64 of them."""

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
from gem_kernels.hopper.backward_keys import settle


@gluon.jit
def query_tile(
    W: gl.constexpr, tile, visit, word, output, buffers, ds_stage, barriers, mask,
    D: gl.constexpr, DIM: gl.constexpr, NC: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """Adds up dS K in registers, block after block of keys: dS lies where V does in a tile of keys, several blocks of
    it where D is larger than a block. dQ goes out through that buffer. Returns how many times buffers were filled.
    """
    dq_desc, dq_ptr, stride, q_scale = output
    q_row, rows, begin, end, head, n, diagonal = tile
    left, right = mask
    _q_buf, _do_buf, k_buf, v_buf, _rows_buf = buffers
    _q_full, _do_full, _step_empty, kv_full, kv_empty = barriers
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    BLOCKS: gl.constexpr = D // BLOCK
    dtype: gl.constexpr = dq_ptr.dtype.element_ty
    mine = rows - W * BLOCK
    lo, hi = in_sight(diagonal + W * BLOCK, left, right, n, LEFT, RIGHT)
    hi = gl.where(mine > 0, gl.minimum(hi, end), 0)
    dq = gl.zeros([BLOCK, D], gl.float32, AL)
    settle(kv_empty.index((visit + 1) % 2), visit > 0, word, True)
    for i in range(begin, gl.maximum(end, begin + 1), BLOCKS):
        slot = visit % 2
        for w in gl.static_range(NC):
            mbarrier.wait(kv_full.index(slot * NC + w), (visit // 2) & 1)
        ds_buf = v_buf.index(slot * NC + W)._reinterpret(dtype, [BLOCKS, BLOCK, 1, BLOCK], ds_stage.layout)
        for j in gl.static_range(BLOCKS):
            if (i + j >= lo) & (i + j < hi):
                ds = ds_buf.index(j).reshape([BLOCK, BLOCK])
                dq = warpgroup_mma(
                    ds.permute((1, 0)), k_buf.index(slot * NC + j).reshape([BLOCK, D]), dq, is_async=True
                )
                dq = warpgroup_mma_wait(0, deps=(dq,))
        mbarrier.arrive(kv_empty.index(slot), count=1, pred=i + BLOCKS < end)
        visit += 1
    if mine > 0:
        out = v_buf.index(((visit - 1) % 2) * NC + W)
        flat = out.reshape([BLOCK, D])
        flat.store((dq * q_scale).to(dtype))
        at_row = q_row + W * BLOCK
        if mine >= BLOCK:
            fence_async_shared()
            tma.async_copy_shared_to_global(dq_desc, [at_row, head, 0], out)
        else:
            put_rows(dq_ptr, stride, flat, at_row, head * DIM, mine, D, DIM)
    return visit
