"""packed = x W^T + b, the gate's product and the norm of q's heads from the product's registers, on Hopper.

Two phases of one persistent kernel (`hopper_tiles`): tiles of 64 columns of gate beside the same 64 of up, then tiles
of 128 columns of q. The weight's rows are not moved for that: a descriptor that sees gate and up as [2, hidden, K]
loads 64 rows of both at once. What is written: packed for the backward pass, h = silu(gate) * up, and q normed.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from gem_kernels.project_gated.hopper_tiles import (
    COLUMNS,
    HALF,
    NC,
    ROWS,
    halves,
    load_rows,
    own,
    product,
    put,
    share,
    sigmoid,
)


@gluon.jit
def _loader(
    x_desc, gate_desc, q_desc, buffers, barriers, sizes,
    STEPS: gl.constexpr, SLOTS: gl.constexpr, PHASES: gl.constexpr, Q: gl.constexpr,
):  # fmt: skip
    x_buf, w_buf, _out = buffers
    full, empty, weight, released = barriers
    tiles, gates, qs = sizes
    column, first, across = share(gates, tiles)
    mbarrier.expect(weight, STEPS * gate_desc.block_type.nbytes)
    for k in gl.static_range(STEPS):
        tma.async_copy_global_to_shared(gate_desc, [0, column * HALF, k * HALF], weight, w_buf.index(k))
    step = load_rows(x_desc, x_buf, full, empty, first, tiles, across, 0, STEPS, SLOTS, PHASES)
    if Q:
        column, first, across = share(qs, tiles)
        mbarrier.wait(released, 0)
        mbarrier.expect(weight, STEPS * q_desc.block_type.nbytes)
        for k in gl.static_range(STEPS):
            tma.async_copy_global_to_shared(q_desc, [2 * column, 0, k * HALF], weight, w_buf.index(k))
        load_rows(x_desc, x_buf, full, empty, first, tiles, across, step, STEPS, SLOTS, PHASES)


@gluon.jit
def vector(ptr, at, there: gl.constexpr):
    """float32 numbers of a vector, or zeros."""
    if there:
        return gl.load(ptr + at).to(gl.float32)
    else:
        L: gl.constexpr = at.type.layout
        return gl.zeros([HALF], gl.float32, L)


@gluon.jit
def _consumer(
    W: gl.constexpr, outs, buffers, barriers, vectors, sizes, hidden, eps,
    STEPS: gl.constexpr, SLOTS: gl.constexpr, PHASES: gl.constexpr, OUT: gl.constexpr, Q: gl.constexpr,
    DIM: gl.constexpr, BIAS: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    packed_desc, h_desc, told_desc = outs
    x_buf, w_buf, out = buffers
    full, empty, weight, released = barriers
    bias_ptr, gain_ptr = vectors
    tiles, gates, qs = sizes
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    left, _right = halves(gl.zeros([ROWS, COLUMNS], gl.float32, AL))
    HL: gl.constexpr = left.type.layout
    lane = gl.arange(0, HALF, gl.SliceLayout(0, HL))
    n = 0
    step = W * STEPS + 0
    column, first, across = share(gates, tiles)
    gate_bias = vector(bias_ptr, column * HALF + lane, BIAS)
    up_bias = vector(bias_ptr, hidden + column * HALF + lane, BIAS)
    mbarrier.wait(weight, 0)
    for tile in range(first + W * across, tiles, NC * across):
        acc = product(x_buf, w_buf, full, empty, step, STEPS, SLOTS, PHASES, True, AL)
        step += NC * STEPS
        gate, up = halves(acc)
        if BIAS:
            gate += gate_bias[None, :]
            up += up_bias[None, :]
        row = tile * ROWS
        gate = gate.to(packed_desc.dtype)
        n = put(gate, packed_desc, row, column * HALF, out, W, n, OUT)
        up = up.to(packed_desc.dtype)
        n = put(up, packed_desc, row, hidden + column * HALF, out, W, n, OUT)
        g = gate.to(gl.float32)
        h = g * sigmoid(g) * up.to(gl.float32)
        n = put(h.to(h_desc.dtype), h_desc, row, column * HALF, out, W, n, OUT)
    if Q:
        mbarrier.arrive(released, count=1)
        before = own(first, tiles, across)
        turn = (before + W) % NC
        step = (before + turn) * STEPS
        column, first, across = share(qs, tiles)
        at = column * COLUMNS + lane
        left_bias = vector(bias_ptr, 2 * hidden + at, BIAS)
        right_bias = vector(bias_ptr, 2 * hidden + at + HALF, BIAS)
        left_gain = vector(gain_ptr, at % DIM, NORM)
        right_gain = vector(gain_ptr, (at + HALF) % DIM, NORM)
        mbarrier.wait(weight, 1)
        for tile in range(first + turn * across, tiles, NC * across):
            acc = product(x_buf, w_buf, full, empty, step, STEPS, SLOTS, PHASES, True, AL)
            step += NC * STEPS
            left, right = halves(acc)
            if BIAS:
                left += left_bias[None, :]
                right += right_bias[None, :]
            row = tile * ROWS
            here = column * COLUMNS
            raw = left.to(packed_desc.dtype)
            n = put(raw, packed_desc, row, 2 * hidden + here, out, W, n, OUT)
            left = raw.to(gl.float32)
            raw = right.to(packed_desc.dtype)
            n = put(raw, packed_desc, row, 2 * hidden + here + HALF, out, W, n, OUT)
            right = raw.to(gl.float32)
            if NORM:
                squares = gl.sum(left * left, 1)
                others = gl.sum(right * right, 1)
                if DIM == COLUMNS:
                    squares += others
                    others = squares
                left = left * gl.rsqrt(squares / DIM + eps)[:, None] * left_gain[None, :]
                right = right * gl.rsqrt(others / DIM + eps)[:, None] * right_gain[None, :]
            n = put(left.to(told_desc.dtype), told_desc, row, here, out, W, n, OUT)
            n = put(right.to(told_desc.dtype), told_desc, row, here + HALF, out, W, n, OUT)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "gates", "qs", "hidden"])
def kernel(
    x_desc, gate_desc, q_desc, packed_desc, h_desc, told_desc, bias_ptr, gain_ptr, tiles, gates, qs, hidden, eps,
    STEPS: gl.constexpr, SLOTS: gl.constexpr, PHASES: gl.constexpr, OUT: gl.constexpr, Q: gl.constexpr,
    DIM: gl.constexpr, BIAS: gl.constexpr, NORM: gl.constexpr, REGS: gl.constexpr,
):  # fmt: skip
    """`tiles` of 64 rows; `gates` tiles of 64 columns of gate and up, `qs` of 128 columns of q (Q: there are any),
    whose heads are DIM wide: 64 or 128. K = 64 STEPS.
    """
    x_buf = gl.allocate_shared_memory(x_desc.dtype, [SLOTS, ROWS, HALF], x_desc.layout)
    w_buf = gl.allocate_shared_memory(x_desc.dtype, [STEPS, 2, HALF, HALF], gate_desc.layout)
    out = gl.allocate_shared_memory(x_desc.dtype, [NC * OUT, ROWS, HALF], packed_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [PHASES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    weight = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    released = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(PHASES):
        mbarrier.init(full.index(s), count=1)
    for s in gl.static_range(SLOTS):
        mbarrier.init(empty.index(s), count=1)
    mbarrier.init(weight, count=1)
    mbarrier.init(released, count=NC)
    buffers = (x_buf, w_buf, out)
    barriers = (full, empty, weight, released)
    sizes = (tiles, gates, qs)
    outs = (packed_desc, h_desc, told_desc)
    vectors = (bias_ptr, gain_ptr)
    gl.warp_specialize(
        [
            (_consumer, (0, outs, buffers, barriers, vectors, sizes, hidden, eps,
                         STEPS, SLOTS, PHASES, OUT, Q, DIM, BIAS, NORM)),
            (_consumer, (1, outs, buffers, barriers, vectors, sizes, hidden, eps,
                         STEPS, SLOTS, PHASES, OUT, Q, DIM, BIAS, NORM)),
            (_loader, (x_desc, gate_desc, q_desc, buffers, barriers, sizes, STEPS, SLOTS, PHASES, Q)),
        ],
        [4, 1],
        [REGS, 24],
    )  # fmt: skip
