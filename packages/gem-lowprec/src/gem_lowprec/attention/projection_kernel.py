"""Projections whose results are attention's operands: a block-wise FP8 product that writes E4M3 and scales.

    [q || k || v] = X W^T + bias, heads of q and k normed and turned if asked for, and of each head what
    `operand_kernel` would make of it

X [T, K] has a scale for each 1 x 128, W [N, K] one for each 128 x 128, as in `gem_lowprec.hopper`. A tile is two blocks
of 128 tokens, counted from their sequence's start, by one head: each of two consumer warpgroups has all of a block, so
that the scale which a block of keys shares is known where the sums are. The product itself is never written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_lowprec.attention.epilogue import DIM, ROWS, largest, store_rows, store_scaled_rows, store_turned
from gem_lowprec.hopper import DEPTH, _promote
from gem_lowprec.tiles import _powers


@triton.jit(do_not_specialize=["batch"])
def list_blocks(offsets, table, count, batch, CHUNK: tl.constexpr):
    """Of each block of 128 tokens: first token, tokens, number (`operands`), the first token's place in its sequence;
    one program for each sequence.
    """
    b = tl.program_id(0)
    before = tl.zeros([CHUNK], tl.int32)
    for c in range(0, b, CHUNK):
        i = c + tl.arange(0, CHUNK)
        length = tl.load(offsets + i + 1, mask=i < b, other=0) - tl.load(offsets + i, mask=i < b, other=0)
        before += ((length + 127) // 128).to(tl.int32)
    first = tl.sum(before, 0)
    start = tl.load(offsets + b).to(tl.int32)
    length = tl.load(offsets + b + 1).to(tl.int32) - start
    blocks = (length + 127) // 128
    for c in range(0, blocks, CHUNK):
        j = c + tl.arange(0, CHUNK)
        to = table + (first + j) * 4
        tl.store(to, start + j * 128, mask=j < blocks)
        tl.store(to + 1, tl.minimum(length - j * 128, 128), mask=j < blocks)
        tl.store(to + 2, start // 128 + b + j, mask=j < blocks)
        tl.store(to + 3, j * 128, mask=j < blocks)
    if b == batch - 1:
        tl.store(count, first + blocks)


@gluon.jit
def _place(t, slots):
    """The pair of blocks and the head of tile t. Heads go round from pair to pair: those of v cost more than others,
    and a program whose number of neighbours is a multiple of `slots` must not get them alone.
    """
    pair = t // slots
    return pair, (t + pair) % slots


@gluon.jit
def _load(descs, buffers, full, empty, table_ptr, count, slots, k_blocks, STAGES: gl.constexpr):
    """Keeps the ring of operands and scales full."""
    x_desc, w_desc = descs
    x_buf, w_buf = buffers
    nbytes: gl.constexpr = 4 * x_desc.block_type.nbytes + w_desc.block_type.nbytes
    step = 0
    for t in range(gl.program_id(0), gl.cdiv(count, 2) * slots, gl.num_programs(0)):
        pair, slot = _place(t, slots)
        first = gl.load(table_ptr + pair * 8)
        second = gl.load(table_ptr + gl.minimum(pair * 2 + 1, count - 1) * 4)
        for i in range(k_blocks):
            s = step % STAGES
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            bar = full.index(s)
            mbarrier.expect(bar, nbytes)
            for r in gl.static_range(4):
                row = (first if r < 2 else second) + (r % 2) * ROWS
                tma.async_copy_global_to_shared(x_desc, [row, i * DEPTH], bar, x_buf.index(s * 4 + r))
            tma.async_copy_global_to_shared(w_desc, [slot * DIM, i * DEPTH], bar, w_buf.index(s))
            step += 1


@gluon.jit
def _sin_cos(angle):
    """Of angles up to some 10,000: less whole turns, by two constants that add up to 2 pi, then by the hardware."""
    turns = gl.floor(angle * 0.15915494309189535 + 0.5)
    rest = gl.fma(
        turns, gl.full_like(turns, -0.0019353071795864769), gl.fma(turns, gl.full_like(turns, -6.28125), angle)
    )
    sin = gl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [rest], dtype=gl.float32, is_pure=True, pack=1)
    cos = gl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [rest], dtype=gl.float32, is_pure=True, pack=1)
    return sin, cos


@gluon.jit
def _prepared(x, gain_ptr, heading, slot, row, rows, place, NORM: gl.constexpr, TURN: gl.constexpr):
    """64 tokens of one head, which goes to memory as it is (backward reads it), normed (`rms_norm`) and turned
    (`rope`: pairs of dims side by side, which a thread has both of).
    """
    raw_ptr, stride, freq_ptr, eps = heading
    L: gl.constexpr = x.type.layout
    r = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    c = gl.arange(0, DIM, gl.SliceLayout(0, L))
    to = raw_ptr + ((row + r).to(gl.int64) * stride)[:, None] + (slot * DIM + c)[None, :]
    gl.store(to, x.to(raw_ptr.dtype.element_ty), mask=(r < rows)[:, None])
    if NORM:
        scale = gl.rsqrt(gl.sum(x * x, 1) * (1.0 / DIM) + eps)
        x = x * scale[:, None] * gl.load(gain_ptr + c).to(gl.float32)[None, :]
    if TURN:
        even, odd = gl.split(x.reshape([ROWS, DIM // 2, 2]))
        P: gl.constexpr = even.type.layout
        at = (place + gl.arange(0, ROWS, gl.SliceLayout(1, P))).to(gl.float32)
        freq = gl.load(freq_ptr + gl.arange(0, DIM // 2, gl.SliceLayout(0, P)))
        sin, cos = _sin_cos(at[:, None] * freq[None, :])
        x = gl.convert_layout(gl.join(even * cos - odd * sin, even * sin + odd * cos).reshape([ROWS, DIM]), L)
    return x


@gluon.jit
def _finish(
    upper, lower, out, between, start, rows, block, place, slot, heads, kv_heads,
    NORM: gl.constexpr, TURN: gl.constexpr,
    THRESHOLD: gl.constexpr, EMAX: gl.constexpr, LEAST: gl.constexpr,
):  # fmt: skip
    """128 tokens (two products) of one head, of which `rows` are the sequence's."""
    q_ptr, qs_ptr, k_ptr, v_ptr, kvs_ptr = out
    L: gl.constexpr = upper.type.layout
    if NORM or TURN:  # noqa: SIM102 - the first is decided by the compiler
        if slot < heads + kv_heads:
            q_gain, k_gain, raw_ptr, freq_ptr, eps = between
            gain = q_gain
            if slot >= heads:
                gain = k_gain
            heading = (raw_ptr, (heads + 2 * kv_heads) * DIM, freq_ptr, eps)
            upper = _prepared(upper, gain, heading, slot, start, rows, place, NORM, TURN)
            lower = _prepared(lower, gain, heading, slot, start + ROWS, rows - ROWS, place + ROWS, NORM, TURN)
    if slot < heads:
        to = q_ptr + slot * DIM
        stride = heads * DIM
        store_scaled_rows(upper, to, stride, qs_ptr + slot, heads, start, rows, THRESHOLD, EMAX)
        store_scaled_rows(lower, to, stride, qs_ptr + slot, heads, start + ROWS, rows - ROWS, THRESHOLD, EMAX)
    else:
        r = gl.arange(0, ROWS, gl.SliceLayout(1, L))[:, None]
        upper = gl.where(r < rows, upper, 0.0)
        lower = gl.where(r < rows - ROWS, lower, 0.0)
        amax = largest(gl.maximum(gl.abs(upper), gl.abs(lower), propagate_nan=tl.PropagateNan.ALL))
        head = (slot - heads) % kv_heads
        number = block.to(gl.int64) * kv_heads + head
        if slot < heads + kv_heads:
            scale, inverse = _powers(amax, THRESHOLD, EMAX)
            to = k_ptr + head * DIM
            store_rows(upper * inverse, to, kv_heads * DIM, start, rows)
            store_rows(lower * inverse, to, kv_heads * DIM, start + ROWS, rows - ROWS)
            if rows > 0:
                gl.store(kvs_ptr + number * 2, scale)
        else:
            scale, inverse = _powers(gl.maximum(amax, LEAST), THRESHOLD, EMAX)
            if rows > 0:
                power = ((scale.to(gl.int32, bitcast=True) >> 23) - 127).to(gl.float32)
                gl.store(kvs_ptr + number * 2 + 1, gl.where(amax == amax, power, amax))
                store_turned(upper * inverse, v_ptr + number * (DIM * 128))
                store_turned(lower * inverse, v_ptr + number * (DIM * 128) + ROWS)


@gluon.jit
def _consume(
    W: gl.constexpr, buffers, full, empty, table_ptr, count, slots, k_blocks, scales, bias_ptr, out, between, heads,
    kv_heads, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, NORM: gl.constexpr, TURN: gl.constexpr,
    THRESHOLD: gl.constexpr, EMAX: gl.constexpr, LEAST: gl.constexpr,
):  # fmt: skip
    """Every tile's first or second block."""
    x_buf, w_buf = buffers
    ws_ptr, ws_row, ws_col, sx_ptr, pitch, last = scales
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    step = 0
    part = gl.zeros([ROWS, DIM], gl.float32, L)  # one set of registers for all products
    for t in range(gl.program_id(0), gl.cdiv(count, 2) * slots, gl.num_programs(0)):
        pair, slot = _place(t, slots)
        place = pair * 2 + W
        entry = table_ptr + gl.minimum(place, count - 1) * 4
        start = gl.load(entry)
        rows = gl.where(place < count, gl.load(entry + 1), 0)
        block = gl.load(entry + 2)
        first = gl.load(entry + 3)
        upper = gl.zeros([ROWS, DIM], gl.float32, L)
        lower = gl.zeros([ROWS, DIM], gl.float32, L)
        # Of a step's scales it is asked a step before: they take longer than a product. TMA reads lines of numbers from
        # multiples of 16 bytes alone, and a sequence begins anywhere.
        r = start + gl.arange(0, ROWS, gl.SliceLayout(1, L))
        upper_at = sx_ptr + gl.minimum(r, last)
        lower_at = sx_ptr + gl.minimum(r + ROWS, last)
        w_at = ws_ptr + slot * ws_row
        w = gl.load(w_at)
        upper_scale = gl.load(upper_at)
        lower_scale = gl.load(lower_at)
        for i in range(k_blocks):
            s = step % STAGES
            after = gl.minimum(i + 1, k_blocks - 1)
            w_after = gl.load(w_at + after * ws_col)
            upper_after = gl.load(upper_at + after * pitch)
            lower_after = gl.load(lower_at + after * pitch)
            mbarrier.wait(full.index(s), (step // STAGES) & 1)
            b = w_buf.index(s).permute((1, 0))
            part = warpgroup_mma(x_buf.index(s * 4 + W * 2), b, part, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=(part,))
            upper = _promote(upper, part, upper_scale, w, False, True)
            part = warpgroup_mma(x_buf.index(s * 4 + W * 2 + 1), b, part, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=(part,))
            mbarrier.arrive(empty.index(s), count=1)
            lower = _promote(lower, part, lower_scale, w, False, True)
            w = w_after
            upper_scale = upper_after
            lower_scale = lower_after
            step += 1
        if HAS_BIAS:
            bias = gl.load(bias_ptr + slot * DIM + gl.arange(0, DIM, gl.SliceLayout(0, L))).to(gl.float32)[None, :]
            upper += bias
            lower += bias
        _finish(
            upper, lower, out, between, start, rows, block, first, slot, heads, kv_heads,
            NORM, TURN, THRESHOLD, EMAX, LEAST,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["k_blocks", "pitch", "last", "ws_row", "ws_col", "heads", "kv_heads"])
def projection_kernel(
    x_desc, w_desc, sx_ptr, ws_ptr, bias_ptr, table_ptr, count_ptr, q_ptr, qs_ptr, k_ptr, v_ptr, kvs_ptr,
    q_gain_ptr, k_gain_ptr, raw_ptr, freq_ptr, eps, k_blocks, pitch, last, ws_row, ws_col, heads, kv_heads,
    STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, NORM: gl.constexpr, TURN: gl.constexpr,
    THRESHOLD: gl.constexpr, EMAX: gl.constexpr, LEAST: gl.constexpr,
):  # fmt: skip
    """Rows of W are `heads` heads of q, then `kv_heads` of k and of v, 128 each. NORM, TURN: heads of q and k are
    normed, and turned by their place in the sequence; `raw_ptr` [T, N] is what they were before.
    """
    x_buf = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 4, ROWS, DEPTH], x_desc.layout)
    w_buf = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, DIM, DEPTH], w_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    count = gl.load(count_ptr)
    slots = heads + 2 * kv_heads
    buffers = (x_buf, w_buf)
    scales = (ws_ptr, ws_row, ws_col, sx_ptr, pitch, last)
    out = (q_ptr, qs_ptr, k_ptr, v_ptr, kvs_ptr)
    between = (q_gain_ptr, k_gain_ptr, raw_ptr, freq_ptr, eps)
    gl.warp_specialize(
        [
            (_consume, (0, buffers, full, empty, table_ptr, count, slots, k_blocks, scales, bias_ptr, out, between,
                        heads, kv_heads, STAGES, HAS_BIAS, NORM, TURN, THRESHOLD, EMAX, LEAST)),
            (_consume, (1, buffers, full, empty, table_ptr, count, slots, k_blocks, scales, bias_ptr, out, between,
                        heads, kv_heads, STAGES, HAS_BIAS, NORM, TURN, THRESHOLD, EMAX, LEAST)),
            (_load, ((x_desc, w_desc), buffers, full, empty, table_ptr, count, slots, k_blocks, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
