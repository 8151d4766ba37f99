"""packed = x W^T + b, and the heads of q and k normed and turned in the product's registers, on Hopper.

A phase of `project_gated.hopper_tiles` for each of q, k and v, whose tiles end in other work: tiles of 128 columns, one
or two heads each; a program has the same columns of every part. q may go to rows of its own among others: those threads
store, all else TMA.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from gem_kernels.project_gated.hopper_forward import vector
from gem_kernels.project_gated.hopper_tiles import COLUMNS, HALF, NC, ROWS, halves, load_rows, own, product, put, share


@gluon.jit
def _loader(
    x_desc, w_desc, buffers, barriers, tiles, columns, parts,
    STEPS: gl.constexpr, SLOTS: gl.constexpr, PHASES: gl.constexpr,
):  # fmt: skip
    x_buf, w_buf, _out = buffers
    full, empty, weight, released = barriers
    column, first, across = share(columns, tiles)
    step = 0
    for part in range(parts):
        mbarrier.wait(released, (part & 1) ^ 1)
        mbarrier.expect(weight, STEPS * w_desc.block_type.nbytes)
        for k in gl.static_range(STEPS):
            tma.async_copy_global_to_shared(
                w_desc, [2 * (part * columns + column), 0, k * HALF], weight, w_buf.index(k)
            )
        step = load_rows(x_desc, x_buf, full, empty, first, tiles, across, step, STEPS, SLOTS, PHASES)


@gluon.jit
def _cos_sin(angle):
    """Of angles up to some 10^5, to 1e-6: whole turns are taken off in two steps, of which the first is exact."""
    turns = (angle * 0.15915494309189535 + 12582912.0) - 12582912.0  # the nearest whole number, by rounding to 2^0
    rest = angle - turns * 6.28125
    rest = rest - turns * 0.0019353071795864769
    cos = gl.inline_asm_elementwise(
        "cos.approx.ftz.f32 $0, $1;", "=f,f", [rest], dtype=gl.float32, is_pure=True, pack=1
    )
    sin = gl.inline_asm_elementwise(
        "sin.approx.ftz.f32 $0, $1;", "=f,f", [rest], dtype=gl.float32, is_pure=True, pack=1
    )
    return cos, sin


@gluon.jit
def _pairs(x):
    """Even and odd columns of [ROWS, HALF]."""
    return gl.split(gl.reshape(x, [ROWS, HALF // 2, 2]))


@gluon.jit
def _frequencies(like, column, at: gl.constexpr, half_of_heads, log_bases, DIM: gl.constexpr, TURNS: gl.constexpr):
    """base^(-2 i / DIM) of the pairs of a half tile that begins at column `at` of the tile; `half_of_heads`: columns of
    a part's heads that turn by the first positions, the part's width being twice that or more.
    """
    base = log_bases[0]
    if TURNS == 2:
        base = gl.where(column * COLUMNS + at < half_of_heads, log_bases[0], log_bases[1])
    pair = gl.arange(0, HALF // 2, gl.SliceLayout(0, like.type.layout)) + at % DIM // 2
    return gl.exp2(pair.to(gl.float32) * (base * (-2.0 / DIM)))


@gluon.jit
def _position(like, row, tokens, column, at: gl.constexpr, places, half_of_heads, TURNS: gl.constexpr):
    """Of the rows, by which a half tile that begins at column `at` of the tile turns."""
    first_ptr, second_ptr = places
    r = row + gl.arange(0, ROWS, gl.SliceLayout(1, like.type.layout))
    if TURNS == 0:
        return gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, like.type.layout))
    place = gl.load(first_ptr + r, mask=r < tokens, other=0).to(gl.float32)
    if TURNS == 2:
        other = gl.load(second_ptr + r, mask=r < tokens, other=0).to(gl.float32)
        place = gl.where(column * COLUMNS + at < half_of_heads, place, other)
    return place


@gluon.jit
def _turned(x, place, frequency):
    """[ROWS, HALF] with its pairs turned by place * frequency."""
    even, odd = _pairs(x)
    cos, sin = _cos_sin(place[:, None] * frequency[None, :])
    return gl.reshape(gl.join(even * cos - odd * sin, even * sin + odd * cos), [ROWS, HALF])


@gluon.jit
def _told(left, right, given, eps, DIM: gl.constexpr, NORM: gl.constexpr, TURNS: gl.constexpr):
    """The two halves of a tile of q or k as attention reads them."""
    left_gain, right_gain, left_frequency, right_frequency, left_place, right_place = given
    if NORM:
        squares = gl.sum(left * left, 1)
        others = gl.sum(right * right, 1)
        if DIM == COLUMNS:
            squares += others
            others = squares
        left = left * gl.rsqrt(squares / DIM + eps)[:, None] * left_gain[None, :]
        right = right * gl.rsqrt(others / DIM + eps)[:, None] * right_gain[None, :]
    if TURNS > 0:
        left = _turned(left, left_place, left_frequency)
        right = _turned(right, right_place, right_frequency)
    return left, right


@gluon.jit
def _seats(seats_ptr, row, tokens, AMONG: gl.constexpr):
    """Where the rows of a tile of q go, in the layout in which they are stored."""
    RL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    r = row + gl.arange(0, ROWS, gl.SliceLayout(1, RL))
    if AMONG:
        return gl.load(seats_ptr + r, mask=r < tokens, other=0).to(gl.int64), r < tokens
    else:
        return r.to(gl.int64), r < tokens


@gluon.jit
def _scatter(part, q_ptr, seats, column, width, buffers, W: gl.constexpr, n, OUT: gl.constexpr):
    """As `put`, each row to its seat."""
    seat, inside = seats
    buf = buffers.index(W * OUT + n % OUT)
    tma.store_wait(0)  # copies are fewer than parts
    buf.store(part)
    RL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    c = column + gl.arange(0, HALF, gl.SliceLayout(0, RL))
    gl.store(q_ptr + (seat * width)[:, None] + c[None, :], buf.load(RL), mask=inside[:, None])
    return n + 1


@gluon.jit
def _part(
    W: gl.constexpr, part, role, outs, buffers, barriers, vectors, places, log_bases, tiles, columns, tokens, width,
    eps, STEPS: gl.constexpr, SLOTS: gl.constexpr, PHASES: gl.constexpr, OUT: gl.constexpr, DIM: gl.constexpr,
    BIAS: gl.constexpr, NORM: gl.constexpr, TURNS: gl.constexpr, AMONG: gl.constexpr,
):  # fmt: skip
    """A phase: this program's columns of one part, which is q, k or v by its role: 0, 1, 2."""
    packed_desc, q_desc, k_desc, q_ptr = outs
    x_buf, w_buf, out = buffers
    full, empty, weight, released = barriers
    bias_ptr, q_gain_ptr, k_gain_ptr = vectors
    first_ptr, second_ptr, seats_ptr = places
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    left, _right = halves(gl.zeros([ROWS, COLUMNS], gl.float32, AL))
    even, _odd = _pairs(left)
    HL: gl.constexpr = left.type.layout
    lane = gl.arange(0, HALF, gl.SliceLayout(0, HL))
    column, first, across = share(columns, tiles)
    before = part * own(first, tiles, across)
    turn = (before + W) % NC
    step = (before + turn) * STEPS
    n = 0
    here = column * COLUMNS
    there = part * width + here
    left_bias = vector(bias_ptr, there + lane, BIAS)
    right_bias = vector(bias_ptr, there + HALF + lane, BIAS)
    left_gain = vector(q_gain_ptr, lane, NORM)
    right_gain = vector(q_gain_ptr, (lane + HALF) % DIM, NORM)
    if NORM:
        left_gain = gl.where(role == 0, left_gain, vector(k_gain_ptr, lane, NORM))
        right_gain = gl.where(role == 0, right_gain, vector(k_gain_ptr, (lane + HALF) % DIM, NORM))
    left_frequency = _frequencies(even, column, 0, width // DIM // 2 * DIM, log_bases, DIM, TURNS)
    right_frequency = _frequencies(even, column, HALF, width // DIM // 2 * DIM, log_bases, DIM, TURNS)
    mbarrier.wait(weight, part & 1)
    for tile in range(first + turn * across, tiles, NC * across):
        row = tile * ROWS  # what is loaded by rows comes while the products are made
        at = (first_ptr, second_ptr)
        left_place = _position(even, row, tokens, column, 0, at, width // DIM // 2 * DIM, TURNS)
        right_place = _position(even, row, tokens, column, HALF, at, width // DIM // 2 * DIM, TURNS)
        seats = _seats(seats_ptr, row, tokens, AMONG)
        acc = product(x_buf, w_buf, full, empty, step, STEPS, SLOTS, PHASES, True, AL)
        step += NC * STEPS
        left, right = halves(acc)
        if BIAS:
            left += left_bias[None, :]
            right += right_bias[None, :]
        raw = left.to(packed_desc.dtype)
        n = put(raw, packed_desc, row, there, out, W, n, OUT)
        left = raw.to(gl.float32)
        raw = right.to(packed_desc.dtype)
        n = put(raw, packed_desc, row, there + HALF, out, W, n, OUT)
        right = raw.to(gl.float32)
        if role < 2:
            given = (left_gain, right_gain, left_frequency, right_frequency, left_place, right_place)
            a, b = _told(left, right, given, eps, DIM, NORM, TURNS)
            a = a.to(packed_desc.dtype)
            b = b.to(packed_desc.dtype)
            if role == 1:
                n = put(a, k_desc, row, here, out, W, n, OUT)
                n = put(b, k_desc, row, here + HALF, out, W, n, OUT)
            else:
                if AMONG:
                    n = _scatter(a, q_ptr, seats, here, width, out, W, n, OUT)
                    n = _scatter(b, q_ptr, seats, here + HALF, width, out, W, n, OUT)
                else:
                    n = put(a, q_desc, row, here, out, W, n, OUT)
                    n = put(b, q_desc, row, here + HALF, out, W, n, OUT)
    tma.store_wait(0)
    mbarrier.arrive(released, count=1)


@gluon.jit
def _consumer(
    W: gl.constexpr, outs, buffers, barriers, vectors, places, log_bases, tiles, columns, parts, tokens, width, eps,
    STEPS: gl.constexpr, SLOTS: gl.constexpr, PHASES: gl.constexpr, OUT: gl.constexpr, DIM: gl.constexpr,
    BIAS: gl.constexpr, NORM: gl.constexpr, TURNS: gl.constexpr, AMONG: gl.constexpr,
):  # fmt: skip
    for part in range(parts):
        _part(
            W, part, part + 3 - parts, outs, buffers, barriers, vectors, places, log_bases, tiles, columns, tokens,
            width, eps, STEPS, SLOTS, PHASES, OUT, DIM, BIAS, NORM, TURNS, AMONG,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["tiles", "columns", "parts", "tokens"])
def kernel(
    x_desc, w_desc, packed_desc, q_desc, k_desc, q_ptr, bias_ptr, q_gain_ptr, k_gain_ptr, first_ptr, second_ptr,
    seats_ptr, log_first, log_second, tiles, columns, parts, tokens, width, eps,
    STEPS: gl.constexpr, SLOTS: gl.constexpr, PHASES: gl.constexpr, OUT: gl.constexpr, DIM: gl.constexpr,
    BIAS: gl.constexpr, NORM: gl.constexpr, TURNS: gl.constexpr, AMONG: gl.constexpr, REGS: gl.constexpr,
):  # fmt: skip
    """`tiles` of 64 of the `tokens` rows, `columns` tiles of 128 columns of each of two or three `parts`, that are
    `width` wide with heads of DIM: 64 or 128. TURNS: how many positions there are; of two, the first half of the heads
    turns by the first. AMONG: row i of q goes to row seats[i]. K = 64 STEPS.
    """
    x_buf = gl.allocate_shared_memory(x_desc.dtype, [SLOTS, ROWS, HALF], x_desc.layout)
    w_buf = gl.allocate_shared_memory(x_desc.dtype, [STEPS, 2, HALF, HALF], w_desc.layout)
    out = gl.allocate_shared_memory(x_desc.dtype, [NC * OUT, ROWS, HALF], packed_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [PHASES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    weight = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(PHASES):
        mbarrier.init(full.index(s), count=1)
    for s in gl.static_range(SLOTS):
        mbarrier.init(empty.index(s), count=1)
    released = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(weight, count=1)
    mbarrier.init(released, count=NC)
    buffers = (x_buf, w_buf, out)
    barriers = (full, empty, weight, released)
    outs = (packed_desc, q_desc, k_desc, q_ptr)
    vectors = (bias_ptr, q_gain_ptr, k_gain_ptr)
    places = (first_ptr, second_ptr, seats_ptr)
    logs = (log_first, log_second)
    gl.warp_specialize(
        [
            (_consumer, (0, outs, buffers, barriers, vectors, places, logs, tiles, columns, parts, tokens, width, eps,
                         STEPS, SLOTS, PHASES, OUT, DIM, BIAS, NORM, TURNS, AMONG)),
            (_consumer, (1, outs, buffers, barriers, vectors, places, logs, tiles, columns, parts, tokens, width, eps,
                         STEPS, SLOTS, PHASES, OUT, DIM, BIAS, NORM, TURNS, AMONG)),
            (_loader, (x_desc, w_desc, buffers, barriers, tiles, columns, parts, STEPS, SLOTS, PHASES)),
        ],
        [4, 1],
        [REGS, 24],
    )  # fmt: skip
