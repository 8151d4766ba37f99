"""As `hopper_kernels`, for inputs so narrow that the weight stays in shared memory: K <= 256.

A program keeps BN rows of the weight, [BN, K], and walks rows of x. So nothing but x and the result moves, and two
consumers take tiles of 64 rows in turn: one's end, squares, scale and stores, hides under the other's products. A slot
of the ring is 64 rows of x, all K columns; the result leaves from the slot that x came in.

A wait by parity tells two phases that follow each other apart and no others: who waits for phase n of a barrier while
n - 1 is not complete passes at once. So a barrier that says a slot is full belongs to one consumer, which waits for
each of its phases; with a barrier to a slot, an odd number of slots and consumers in turn it would see every other one.
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

from gem_kernels.norm_linear.hopper_kernels import NC, PARTS, ROWS, _finish, _quarters


@gluon.jit
def full_at(step, SLOTS: gl.constexpr):
    """Which barrier says that the rows of a step are there, and the parity of its phase."""
    return step % (NC * SLOTS), (step // (NC * SLOTS)) & 1


@gluon.jit
def _loader(
    x_desc, w_desc, buffers, shape,
    BN: gl.constexpr, BK: gl.constexpr, STEPS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    x_buf, w_buf, full, empty, weight = buffers
    tiles, _K, _N, columns = shape
    column = gl.program_id(0) % columns * BN
    mbarrier.expect(weight, STEPS * w_desc.block_type.nbytes)
    for k in gl.static_range(STEPS):
        tma.async_copy_global_to_shared(w_desc, [column, k * BK], weight, w_buf.index(k))
    step = 0
    for tile in range(gl.program_id(0) // columns, tiles, gl.num_programs(0) // columns):
        slot = step % SLOTS
        mbarrier.wait(empty.index(slot), ((step // SLOTS) & 1) ^ 1)
        which, _parity = full_at(step, SLOTS)
        barrier = full.index(which)
        mbarrier.expect(barrier, STEPS * x_desc.block_type.nbytes)
        for k in gl.static_range(STEPS):
            tma.async_copy_global_to_shared(x_desc, [tile * ROWS, k * BK], barrier, x_buf.index(slot * PARTS + k))
        step += 1  # noqa: SIM113


@gluon.jit
def _consumer(
    W: gl.constexpr, buffers, result, shape,
    BN: gl.constexpr, BK: gl.constexpr, STEPS: gl.constexpr, SLOTS: gl.constexpr,
    BEFORE: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    x_buf, w_buf, full, empty, weight = buffers
    tiles, K, N, columns = shape
    y_desc = result[0]
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    XL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BK, 16])
    column = gl.program_id(0) % columns * BN
    programs = gl.num_programs(0) // columns
    step = W + 0
    mbarrier.wait(weight, 0)
    for tile in range(gl.program_id(0) // columns + W * programs, tiles, NC * programs):
        slot = step % SLOTS
        which, parity = full_at(step, SLOTS)
        mbarrier.wait(full.index(which), parity)
        acc = gl.zeros([ROWS, BN], gl.float32, AL)
        squares = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, XL))
        for k in range(STEPS):
            x = x_buf.index(slot * PARTS + k)
            acc = warpgroup_mma(x, w_buf.index(k).permute((1, 0)), acc, is_async=True)
            if BEFORE:
                wide = x.load(XL).to(gl.float32)
                squares += gl.sum(wide * wide, 1)
            acc = warpgroup_mma_wait(1, deps=(acc,))
        acc = warpgroup_mma_wait(0, deps=(acc,))
        y = _finish(acc, squares, result, column, K, N, BN, BEFORE, BIAS, AL)
        first, second, third, fourth = _quarters(y, BN)
        x_buf.index(slot * PARTS).store(first.to(y_desc.dtype))
        x_buf.index(slot * PARTS + 1).store(second.to(y_desc.dtype))
        x_buf.index(slot * PARTS + 2).store(third.to(y_desc.dtype))
        x_buf.index(slot * PARTS + 3).store(fourth.to(y_desc.dtype))
        fence_async_shared()
        for n in gl.static_range(PARTS):
            tma.async_copy_shared_to_global(
                y_desc, [tile * ROWS, column + n * (BN // PARTS)], x_buf.index(slot * PARTS + n)
            )
        tma.store_wait(0)  # it has been read
        mbarrier.arrive(empty.index(slot), count=1)
        step += NC


@gluon.jit(do_not_specialize=["tiles", "K", "N", "columns"])
def kernel(
    x_desc, w_desc, y_desc, gain_ptr, bias_ptr, tiles, K, N, columns, eps,
    BN: gl.constexpr, BK: gl.constexpr, STEPS: gl.constexpr, SLOTS: gl.constexpr,
    BEFORE: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """y [M, N] of x [M, K] and the weight [N, K], K <= STEPS BK; `tiles` of 64 rows, and a multiple of `columns`
    programs, of which neighbours read the same rows.
    """
    x_buf = gl.allocate_shared_memory(x_desc.dtype, [SLOTS * PARTS, ROWS, BK], x_desc.layout)
    w_buf = gl.allocate_shared_memory(x_desc.dtype, [STEPS, BN, BK], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [NC * SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    weight = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(NC * SLOTS):
        mbarrier.init(full.index(s), count=1)
    for s in gl.static_range(SLOTS):
        mbarrier.init(empty.index(s), count=1)
    mbarrier.init(weight, count=1)
    buffers = (x_buf, w_buf, full, empty, weight)
    shape = (tiles, K, N, columns)
    result = (y_desc, x_buf, gain_ptr, bias_ptr, eps)
    gl.warp_specialize(
        [
            (_consumer, (0, buffers, result, shape, BN, BK, STEPS, SLOTS, BEFORE, BIAS)),
            (_consumer, (1, buffers, result, shape, BN, BK, STEPS, SLOTS, BEFORE, BIAS)),
            (_loader, (x_desc, w_desc, buffers, shape, BN, BK, STEPS, SLOTS)),
        ],
        [4, 1],
        [232, 24],
    )
