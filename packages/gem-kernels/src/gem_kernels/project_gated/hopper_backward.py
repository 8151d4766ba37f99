"""dh = dy W_down and, in its registers, the gate's backward pass, on Hopper: dh itself is never written.

One persistent kernel (`hopper_tiles`): tiles of 128 columns of dh, whose gate and up come by TMA while the products are
made and are overwritten by their gradients, which leave from the same buffers; and, by other programs at the same time,
tiles of 128 columns of what else reads dy, as they are: these wait for products, those for memory. The weight [K, N] is
read as it lies: K are its rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from gem_kernels.project_gated.hopper_tiles import (
    COLUMNS,
    HALF,
    NC,
    ROWS,
    halves,
    load_rows,
    product,
    put,
    share,
    sigmoid,
)


@gluon.jit
def _rows_loader(
    x_desc, w_desc, buffers, barriers, sizes,
    STEPS: gl.constexpr, SLOTS: gl.constexpr, PHASES: gl.constexpr,
):  # fmt: skip
    x_buf, w_buf, _sets = buffers
    full, empty, weight = barriers[0], barriers[1], barriers[2]
    tiles, gates, rests = sizes
    column, first, across = share(gates + rests, tiles)
    mbarrier.expect(weight, STEPS * w_desc.block_type.nbytes)
    for k in gl.static_range(STEPS):
        tma.async_copy_global_to_shared(w_desc, [k * HALF, column * COLUMNS], weight, w_buf.index(k))
    load_rows(x_desc, x_buf, full, empty, first, tiles, across, 0, STEPS, SLOTS, PHASES)


@gluon.jit
def _to_l2(pointers):
    """Asks for lines of memory that will be wanted."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _gates_loader(
    packed_desc, packed_ptr, packed_row, tokens, buffers, barriers, sizes, hidden,
    SETS: gl.constexpr, PER: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Gate and up of 64 columns at a time: a set, of which a tile has two. AHEAD: of how many tiles later a set is
    asked for to come to L2.
    """
    sets = buffers[2]
    there, taken = barriers[3], barriers[4]
    tiles, gates, rests = sizes
    column, first, across = share(gates + rests, tiles)
    first = gl.where(column < gates, first, tiles)
    number = 0
    for tile in range(first, tiles, across):
        for part in range(2):
            s = number % SETS
            at = column * COLUMNS + part * HALF
            if AHEAD > 0:
                r = (tile + AHEAD * across) * ROWS + gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [1], [0]))
                lines = packed_ptr + gl.minimum(r, tokens - 1).to(gl.int64) * packed_row + at
                _to_l2(lines)
                _to_l2(lines + hidden)
            mbarrier.wait(taken.index(s), ((number // SETS) & 1) ^ 1)
            barrier = there.index(number % (2 * NC * SETS))
            mbarrier.expect(barrier, 2 * packed_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(packed_desc, [tile * ROWS, at], barrier, sets.index(s * PER))
            tma.async_copy_global_to_shared(packed_desc, [tile * ROWS, hidden + at], barrier, sets.index(s * PER + 1))
            number += 1


@gluon.jit
def _folded(x):
    """[ROWS, HALF] with the two rows of a thread added."""
    return gl.sum(gl.reshape(x, [4, 2, 8, HALF]), 1)


@gluon.jit
def _gate(dh, outs, sets, there, number, row, at, hidden, SETS: gl.constexpr, PER: gl.constexpr, AGAIN: gl.constexpr):
    """The gradients of a set's gate and up leave from where these came; returns them, float32."""
    dpacked_desc, again_desc = outs[0], outs[1]
    HL: gl.constexpr = dh.type.layout
    s = number % SETS
    mbarrier.wait(there.index(number % (2 * NC * SETS)), (number // (2 * NC * SETS)) & 1)
    gate = sets.index(s * PER).load(HL).to(gl.float32)
    up = sets.index(s * PER + 1).load(HL).to(gl.float32)
    open_ = sigmoid(gate)
    silu = gate * open_
    if AGAIN:
        sets.index(s * PER + 2).store((silu * up).to(again_desc.dtype))
    dup = dh * silu
    dgate = dh * up * (open_ + silu * (1.0 - open_))
    sets.index(s * PER).store(dgate.to(dpacked_desc.dtype))
    sets.index(s * PER + 1).store(dup.to(dpacked_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dpacked_desc, [row, at], sets.index(s * PER))
    tma.async_copy_shared_to_global(dpacked_desc, [row, hidden + at], sets.index(s * PER + 1))
    if AGAIN:
        tma.async_copy_shared_to_global(again_desc, [row, at], sets.index(s * PER + 2))
    return dgate, dup


@gluon.jit
def _leave_sum(total, parts_f32, part, width, at):
    """Sums of a thread's rows [4, 8, HALF] to rows 4 part .. 4 part + 3 of [., width]."""
    sums = gl.sum(total, 1)
    L: gl.constexpr = sums.type.layout
    warp = gl.arange(0, 4, gl.SliceLayout(1, L))
    lane = gl.arange(0, HALF, gl.SliceLayout(0, L))
    gl.store(parts_f32 + ((part * 4 + warp) * width)[:, None] + (at + lane)[None, :], sums)


@gluon.jit
def _consumer(
    W: gl.constexpr, outs, buffers, barriers, parts_f32, sizes, hidden,
    STEPS: gl.constexpr, SLOTS: gl.constexpr, PHASES: gl.constexpr, SETS: gl.constexpr, PER: gl.constexpr,
    REST: gl.constexpr, AGAIN: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    x_buf, w_buf, sets = buffers
    full, empty, weight, there, taken = barriers
    tiles, gates, rests = sizes
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    step = W * STEPS + 0
    number = 2 * W + 0
    column, first, across = share(gates + rests, tiles)
    gated = gl.where(column < gates, tiles, 0)  # where this program's tiles of either kind end
    if BIAS:
        none, _right = halves(gl.zeros([ROWS, COLUMNS], gl.float32, AL))
        gates_left = _folded(none)
        gates_right = _folded(none)
        ups_left = _folded(none)
        ups_right = _folded(none)
    mbarrier.wait(weight, 0)
    for tile in range(first + W * across, gated, NC * across):
        acc = product(x_buf, w_buf, full, empty, step, STEPS, SLOTS, PHASES, False, AL)
        step += NC * STEPS
        left, right = halves(acc)
        row = tile * ROWS
        at = column * COLUMNS
        dgate, dup = _gate(left, outs, sets, there, number, row, at, hidden, SETS, PER, AGAIN)
        if BIAS:
            gates_left += _folded(dgate)
            ups_left += _folded(dup)
        dgate, dup = _gate(right, outs, sets, there, number + 1, row, at + HALF, hidden, SETS, PER, AGAIN)
        if BIAS:
            gates_right += _folded(dgate)
            ups_right += _folded(dup)
        tma.store_wait(3 if AGAIN else 2)
        mbarrier.arrive(taken.index(number % SETS), count=1)
        tma.store_wait(0)
        mbarrier.arrive(taken.index((number + 1) % SETS), count=1)
        number += 2 * NC
    if BIAS:
        part = gl.program_id(0) // (gates + rests) * NC + W
        at = column * COLUMNS
        if first < gated:
            _leave_sum(gates_left, parts_f32, part, 2 * hidden, at)
            _leave_sum(gates_right, parts_f32, part, 2 * hidden, at + HALF)
            _leave_sum(ups_left, parts_f32, part, 2 * hidden, hidden + at)
            _leave_sum(ups_right, parts_f32, part, 2 * hidden, hidden + at + HALF)
    if REST:
        rest_desc = outs[2]
        n = 0
        begin = gl.where(column < gates, tiles, first + W * across)
        for tile in range(begin, tiles, NC * across):
            acc = product(x_buf, w_buf, full, empty, step, STEPS, SLOTS, PHASES, False, AL)
            step += NC * STEPS
            left, right = halves(acc)
            at = (column - gates) * COLUMNS
            n = put(left.to(rest_desc.dtype), rest_desc, tile * ROWS, at, sets, W, n, 2)
            n = put(right.to(rest_desc.dtype), rest_desc, tile * ROWS, at + HALF, sets, W, n, 2)
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "gates", "rests", "hidden", "tokens"])
def kernel(
    x_desc, w_desc, packed_desc, dpacked_desc, again_desc, rest_desc, packed_ptr, parts_f32, tiles, gates, rests,
    hidden, tokens, packed_row,
    STEPS: gl.constexpr, SLOTS: gl.constexpr, PHASES: gl.constexpr, SETS: gl.constexpr, REST: gl.constexpr,
    AGAIN: gl.constexpr, BIAS: gl.constexpr, AHEAD: gl.constexpr, REGS: gl.constexpr,
):  # fmt: skip
    """`tiles` of 64 rows; `gates` tiles of 128 columns of dh, `rests` of what is behind them in w_desc (REST: there are
    any). AGAIN: h is written as well. BIAS: sums of the gradients of gate and up over each consumer's rows go to
    parts_f32 [4 NC programs of a column, 2 hidden]. K = 64 STEPS.
    """
    PER: gl.constexpr = 3 if AGAIN else 2
    gl.static_assert(SETS * PER >= 4)
    x_buf = gl.allocate_shared_memory(x_desc.dtype, [SLOTS, ROWS, HALF], x_desc.layout)
    w_buf = gl.allocate_shared_memory(x_desc.dtype, [STEPS, HALF, COLUMNS], w_desc.layout)
    sets = gl.allocate_shared_memory(x_desc.dtype, [SETS * PER, ROWS, HALF], packed_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [PHASES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    weight = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    there = gl.allocate_shared_memory(gl.int64, [2 * NC * SETS, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [SETS, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(PHASES):
        mbarrier.init(full.index(s), count=1)
    for s in gl.static_range(SLOTS):
        mbarrier.init(empty.index(s), count=1)
    for s in gl.static_range(2 * NC * SETS):
        mbarrier.init(there.index(s), count=1)
    for s in gl.static_range(SETS):
        mbarrier.init(taken.index(s), count=1)
    mbarrier.init(weight, count=1)
    buffers = (x_buf, w_buf, sets)
    barriers = (full, empty, weight, there, taken)
    sizes = (tiles, gates, rests)
    outs = (dpacked_desc, again_desc, rest_desc)
    gl.warp_specialize(
        [
            (_consumer, (0, outs, buffers, barriers, parts_f32, sizes, hidden,
                         STEPS, SLOTS, PHASES, SETS, PER, REST, AGAIN, BIAS)),
            (_consumer, (1, outs, buffers, barriers, parts_f32, sizes, hidden,
                         STEPS, SLOTS, PHASES, SETS, PER, REST, AGAIN, BIAS)),
            (_rows_loader, (x_desc, w_desc, buffers, barriers, sizes, STEPS, SLOTS, PHASES)),
            (_gates_loader, (packed_desc, packed_ptr, packed_row, tokens, buffers, barriers, sizes, hidden,
                             SETS, PER, AHEAD)),
        ],
        [4, 1, 1],
        [REGS, 24, 24],
    )  # fmt: skip
