"""A projection with an RMSNorm before or after it on Hopper: one persistent, warp-specialised Gluon kernel.

One warp loads by TMA; two consumer warpgroups own 64 rows of the result each and share the weight's tiles. A slot of
the ring holds BK columns of 128 rows of x and of BN rows of the weight. The result leaves in quarters through two small
buffers, while the next tile's loads are on their way.

BEFORE: the norm's. A row's scale commutes with the product, so consumers multiply x as it is and add up its squares
from the same buffers meanwhile; the slot goes back when both have read it. Else the result's rows are normalised, which
must fit in one tile, N <= BN.
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

ROWS = gl.constexpr(64)  # of a consumer: the M of one warpgroup MMA
NC = gl.constexpr(2)  # consumers: with three, 512 threads leave no room for 256 columns each
PARTS = gl.constexpr(4)  # in which a consumer's result leaves


@gluon.jit
def _loader(
    x_desc, w_desc, buffers, shape,
    BN: gl.constexpr, BK: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    x_buf, w_buf, full, empty = buffers
    tiles, K, _N, columns = shape
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row = tile // columns * (NC * ROWS)
        column = tile % columns * BN
        for k in range(0, K, BK):
            slot = step % SLOTS
            barrier = full.index(slot)
            mbarrier.wait(empty.index(slot), ((step // SLOTS) & 1) ^ 1)
            mbarrier.expect(barrier, NC * x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            for w in gl.static_range(NC):
                tma.async_copy_global_to_shared(x_desc, [row + w * ROWS, k], barrier, x_buf.index(slot * NC + w))
            tma.async_copy_global_to_shared(w_desc, [column, k], barrier, w_buf.index(slot))
            step += 1


@gluon.jit
def _halves(x, N: gl.constexpr):
    """The left and the right half of [ROWS, N]."""
    return gl.split(gl.permute(gl.reshape(x, [ROWS, 2, N // 2]), (0, 2, 1)))


@gluon.jit
def _quarters(x, N: gl.constexpr):
    left, right = _halves(x, N)
    first, second = _halves(left, N // 2)
    third, fourth = _halves(right, N // 2)
    return first, second, third, fourth


@gluon.jit
def _finish(
    acc, squares, result, column, K, N,
    BN: gl.constexpr, BEFORE: gl.constexpr, BIAS: gl.constexpr, AL: gl.constexpr,
):  # fmt: skip
    """The result [ROWS, BN] of a product, and of the squares of what was multiplied (BEFORE)."""
    _y_desc, _y_buf, gain_ptr, bias_ptr, eps = result
    at = column + gl.arange(0, BN, gl.SliceLayout(0, AL))
    if BEFORE:
        inverse = gl.rsqrt(squares / K + eps)
        y = acc * gl.convert_layout(inverse, gl.SliceLayout(1, AL))[:, None]
        if BIAS:
            y += gl.load(bias_ptr + at, mask=at < N, other=0.0).to(gl.float32)[None, :]
    else:
        if BIAS:
            acc += gl.load(bias_ptr + at, mask=at < N, other=0.0).to(gl.float32)[None, :]
        inverse = gl.rsqrt(gl.sum(acc * acc, 1) / N + eps)
        y = acc * inverse[:, None] * gl.load(gain_ptr + at, mask=at < N, other=0.0).to(gl.float32)[None, :]
    return y


@gluon.jit
def _leave(part, y_desc, y_buf, W: gl.constexpr, n: gl.constexpr, row, column, N: gl.constexpr):
    """Part n of the result goes out through one of two buffers."""
    buf = y_buf.index(2 * W + n % 2)
    tma.store_wait(1)  # the copy before the last has read its buffer
    buf.store(part.to(y_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(y_desc, [row, column + n * N], buf)


@gluon.jit
def _consumer(
    W: gl.constexpr, buffers, result, shape,
    BN: gl.constexpr, BK: gl.constexpr, SLOTS: gl.constexpr, BEFORE: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    x_buf, w_buf, full, empty = buffers
    tiles, K, N, columns = shape
    y_desc, y_buf = result[0], result[1]
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    XL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BK, 16])
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row = tile // columns * (NC * ROWS) + W * ROWS
        column = tile % columns * BN
        acc = gl.zeros([ROWS, BN], gl.float32, AL)
        squares = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, XL))
        for k in range(0, K, BK):
            slot = step % SLOTS
            mbarrier.wait(full.index(slot), (step // SLOTS) & 1)
            x = x_buf.index(slot * NC + W)
            acc = warpgroup_mma(x, w_buf.index(slot).permute((1, 0)), acc, is_async=True)
            if BEFORE:
                wide = x.load(XL).to(gl.float32)
                squares += gl.sum(wide * wide, 1)
            acc = warpgroup_mma_wait(1, deps=(acc,))  # the step before: its slot is free
            mbarrier.arrive(empty.index((step + SLOTS - 1) % SLOTS), count=1, pred=k > 0)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((step + SLOTS - 1) % SLOTS), count=1)
        y = _finish(acc, squares, result, column, K, N, BN, BEFORE, BIAS, AL)
        first, second, third, fourth = _quarters(y, BN)
        _leave(first, y_desc, y_buf, W, 0, row, column, BN // PARTS)
        _leave(second, y_desc, y_buf, W, 1, row, column, BN // PARTS)
        _leave(third, y_desc, y_buf, W, 2, row, column, BN // PARTS)
        _leave(fourth, y_desc, y_buf, W, 3, row, column, BN // PARTS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "K", "N", "columns"])
def kernel(
    x_desc, w_desc, y_desc, gain_ptr, bias_ptr, tiles, K, N, columns, eps,
    BN: gl.constexpr, BK: gl.constexpr, SLOTS: gl.constexpr, BEFORE: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """y [M, N] of x [M, K] and the weight [N, K]; programs walk the tiles of a row of tiles one after the other, so
    that x comes from memory once.
    """
    x_buf = gl.allocate_shared_memory(x_desc.dtype, [SLOTS * NC, ROWS, BK], x_desc.layout)
    w_buf = gl.allocate_shared_memory(x_desc.dtype, [SLOTS, BN, BK], w_desc.layout)
    y_buf = gl.allocate_shared_memory(x_desc.dtype, [2 * NC, ROWS, BN // PARTS], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(SLOTS):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=NC)
    buffers = (x_buf, w_buf, full, empty)
    shape = (tiles, K, N, columns)
    result = (y_desc, y_buf, gain_ptr, bias_ptr, eps)
    gl.warp_specialize(
        [
            (_consumer, (0, buffers, result, shape, BN, BK, SLOTS, BEFORE, BIAS)),
            (_consumer, (1, buffers, result, shape, BN, BK, SLOTS, BEFORE, BIAS)),
            (_loader, (x_desc, w_desc, buffers, shape, BN, BK, SLOTS)),
        ],
        [4, 1],
        [232, 24],
    )
