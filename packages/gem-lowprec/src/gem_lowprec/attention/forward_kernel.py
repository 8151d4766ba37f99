"""The forward of softmax attention with E4M3 operands on Hopper: one persistent, warp-specialised Gluon kernel.

    S = scale sq[row] sk[block] (Q K^T)        P = exp2(S - m + log2 sv[block] + 8) in E4M3        O = P V^T' / sum

The shape of it is that of `gem_kernels.hopper.forward`: two warps load by TMA, three consumer warpgroups own 64 query
rows each. What FP8 changes:

- Hopper reads FP8 operands along the contraction alone, so V comes transposed, in blocks [D, 128 keys] that begin at a
  sequence's start (`quantise`).
- Keys inside 16 of V's blocks are in the order in which a thread holds its scores, so that P goes from the accumulators
  of one product to the registers of the next without leaving its thread.
- What P is divided by is a power of two: an integer maximum in log2 units, and V's scales are such. Its E4M3 digits
  do not depend on the order in which keys are visited, and rescaling O is exact. The maximum that counts is not the
  latest one: it rises where P would be more than 2^8, which is seldom, so that O is seldom rescaled (`steps`).
- A block's scale of V joins the exponent, and is taken out of the sum of the row again: two operations a row.
- All scales come with the keys, from the warp that loads them: a consumer that loaded them would wait for memory where
  every tile begins.
"""

from __future__ import annotations

from gem_kernels.hopper.consumers import pass_steps, store_block
from gem_kernels.hopper.exchange import unpack
from gem_kernels.hopper.loaders import load_queries
from gem_kernels.hopper.records import BLOCK, FIELDS, RECORDS, apart
from gem_kernels.hopper.softmax import partial
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from gem_lowprec.attention.epilogue import store_scaled_rows
from gem_lowprec.attention.steps import KEYS, SHIFT, short_step, steps_of, whole_step


@gluon.jit
def _load_queries(inputs, records, q_buf, q_full, q_empty, QS: gl.constexpr):
    """gem-kernels' partition, for whole rows and no bias."""
    q_desc, tiles_ptr, count_ptr, cursor_ptr = inputs
    load_queries(
        (q_desc, tiles_ptr, count_ptr, cursor_ptr, count_ptr, 0), records, q_buf, q_full, q_empty, (-1, -1),
        BN=KEYS, NC=3, QS=QS, LEFT=False, RIGHT=False, SHARED=False, ONCE=False, BIAS=0, TURNS=True,
    )  # fmt: skip


@gluon.jit
def _row_scales(q_scale_ptr, out, rows, head, heads):
    """The scales of a tile's rows, of three blocks; behind its last row stands that one's."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    r = gl.arange(0, BLOCK, L)
    at = q_scale_ptr + out.to(gl.int64) * heads + head
    last = gl.maximum(rows - 1, 0)
    own = (r >= 0) & (rows > 0)
    return (
        gl.load(at + gl.minimum(r, last) * heads, mask=own, other=0.0),
        gl.load(at + gl.minimum(r + BLOCK, last) * heads, mask=own, other=0.0),
        gl.load(at + gl.minimum(r + 2 * BLOCK, last) * heads, mask=own, other=0.0),
    )


@gluon.jit
def _tell(told, s, pair, of_rows, first, full):
    """A step's scales of K and V, and with a tile's first step those of its rows, beside its keys."""
    pairs, rows = told
    pairs.index(s).store(pair)
    if first:
        for w in gl.static_range(3):
            rows.index(3 * s + w).store(of_rows[w].to(gl.bfloat16))  # a power of two
    mbarrier.arrive(full, count=1)


@gluon.jit
def _load_keys(inputs, scales, records, buffers, barriers, KS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr):
    """Keeps the ring of K, V^T and scales full, from a tile's last key to its first: a short step, then whole ones."""
    k_desc, k_short, v_desc = inputs
    q_scale_ptr, kv_scale_ptr, kv_heads, heads = scales
    record, record_full, record_empty = records
    k_buf, v_buf, told = buffers
    full, empty = barriers
    L: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [1], [0])
    two = gl.arange(0, 2, gl.BlockedLayout([2], [32], [1], [0]))
    V_BYTES: gl.constexpr = v_desc.block_type.nbytes
    step = 0
    tile = 0
    rows = 1
    while rows > 0:
        r = tile % RECORDS
        mbarrier.wait(record_full.index(r), (tile // RECORDS) & 1)
        _q, rows, k_start, k_len, head, out, b, _first = unpack(record.index(r).load(L), L)
        mbarrier.arrive(record_empty.index(r), count=1)
        tile += 1
        shorts, wholes = steps_of(k_len)
        if rows == 0:
            wholes = 0
            shorts = 0
        column = head // GROUP
        block = k_start // KEYS + b
        scale = kv_scale_ptr + (block.to(gl.int64) * kv_heads + column) * 2 + two
        of_rows = _row_scales(q_scale_ptr, out, rows, head, heads)
        for _ in range(shorts):
            s = step % KS
            pair = gl.load(scale + wholes * (2 * kv_heads))
            mbarrier.wait(empty.index(s), ((step // KS) & 1) ^ 1)
            mbarrier.expect(full.index(s), k_short.block_type.nbytes + V_BYTES)
            k = k_buf.index(s)._reinterpret(k_buf.dtype, k_short.block_shape, k_short.layout)
            tma.async_copy_global_to_shared(k_short, [k_start + wholes * KEYS, column, 0], full.index(s), k)
            line = ((block + wholes) * kv_heads + column) * D
            tma.async_copy_global_to_shared(v_desc, [line, 0], full.index(s), v_buf.index(2 * s))
            _tell(told, s, pair, of_rows, True, full.index(s))
            step += 1
        for i in range(wholes):
            s = step % KS
            j = wholes - 1 - i
            pair = gl.load(scale + j * (2 * kv_heads))
            mbarrier.wait(empty.index(s), ((step // KS) & 1) ^ 1)
            mbarrier.expect(full.index(s), k_desc.block_type.nbytes + 2 * V_BYTES)
            tma.async_copy_global_to_shared(k_desc, [k_start + j * KEYS, column, 0], full.index(s), k_buf.index(s))
            line = ((block + j) * kv_heads + column) * D
            tma.async_copy_global_to_shared(v_desc, [line, 0], full.index(s), v_buf.index(2 * s))
            tma.async_copy_global_to_shared(v_desc, [line, BLOCK], full.index(s), v_buf.index(2 * s + 1))
            _tell(told, s, pair, of_rows, (i == 0) & (shorts == 0), full.index(s))
            step += 1


@gluon.jit
def _log2(x):
    """log2(x) by one instruction: absolute error 2^-22 between 1/2 and 2, relative elsewhere."""
    return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _finish(
    acc, m, total, out, buf, out_row, rows, head, D: gl.constexpr, OL: gl.constexpr
):  # fmt: skip
    """O and LSE of one block; a whole block goes out by TMA, a sequence's last by masked stores."""
    o_desc, o_ptr, lse_ptr, heads = out
    tma.store_wait(0)
    store_block(acc, o_desc, o_ptr, buf, out_row, rows, head, heads, D, D, True)
    r = apart(gl.arange(0, BLOCK, m.type.layout))  # addresses are made here, not before all loops, where they spill
    lse = (m + _log2(total) - SHIFT) * 0.6931471805599453
    gl.store(lse_ptr + (out_row + r).to(gl.int64) * heads + head, lse, mask=r < rows)


@gluon.jit
def _no_keys(out, out_row, rows, head, D: gl.constexpr, OL: gl.constexpr):
    """Queries without keys: O = 0, LSE = -inf."""
    _o_desc, o_ptr, lse_ptr, heads = out
    r = apart(gl.arange(0, BLOCK, gl.SliceLayout(1, OL)))
    c = gl.arange(0, D, gl.SliceLayout(0, OL))
    base = o_ptr + (out_row.to(gl.int64) * heads + head) * D
    nothing = gl.zeros([BLOCK, D], o_ptr.dtype.element_ty, OL)
    gl.store(base + (r * (heads * D))[:, None] + c[None, :], nothing, mask=(r < rows)[:, None])
    none = gl.full([BLOCK], float("-inf"), gl.float32, gl.SliceLayout(1, OL))
    gl.store(lse_ptr + (out_row + r).to(gl.int64) * heads + head, none, mask=r < rows)


@gluon.jit
def _quantised(
    acc, out, eighths, buf, out_row, rows, head, D: gl.constexpr, THRESHOLD: gl.constexpr, EMAX: gl.constexpr
):  # fmt: skip
    """One block of O in E4M3, of the values that O has in its own dtype, with a scale for each row and head."""
    _o_desc, o_ptr, _lse_ptr, heads = out
    data_ptr, scale_ptr, pitch = eighths
    y = acc.to(o_ptr.dtype.element_ty).to(gl.float32)
    to = scale_ptr + head * pitch
    BYTES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    tma.store_wait(0)  # of the O before, from the same memory
    bytes_ = buf._reinterpret(gl.uint8, [BLOCK, D], BYTES)
    store_scaled_rows(y, data_ptr + head * D, heads * D, to, 1, out_row, rows, THRESHOLD, EMAX, bytes_, True)


@gluon.jit
def _consume(
    W, shared, SHORT_K: gl.constexpr, D: gl.constexpr, KS: gl.constexpr, QS: gl.constexpr, ALSO: gl.constexpr,
    THRESHOLD: gl.constexpr, EMAX: gl.constexpr,
):  # fmt: skip
    """One block of every tile; the tiles' first blocks go round, so that none is idle for long where they have few."""
    scale, out, eighths, records, buffers, q_barriers, barriers = shared
    record, record_full, record_empty = records
    q_buf, k_buf, v_buf, o_buf, told = buffers
    q_full, q_empty = q_barriers
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, OL)
    RL: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    step = 0
    tile = 0
    rows = 1
    w = W  # which block of the tile
    while rows > 0:
        r = tile % RECORDS
        mbarrier.wait(record_full.index(r), (tile // RECORDS) & 1)
        _q, rows, _k, k_len, head, out_start, _b, _first = unpack(record.index(r).load(RL), RL)
        mbarrier.arrive(record_empty.index(r), count=1)
        if rows > 0:
            shorts, wholes = steps_of(k_len)
            mine = rows - w * BLOCK
            out_row = out_start + w * BLOCK
            slot = (tile % QS) * 3 + W  # a consumer's own, whichever block it takes: see `load_queries`
            mbarrier.wait(q_full.index(slot), (tile // QS) & 1)
            if (mine > 0) & (k_len > 0):
                acc = gl.zeros([BLOCK, D], gl.float32, OL)
                m = gl.full([BLOCK], float("-inf"), gl.float32, ROW)
                total = partial(acc)  # zeros
                row_scale = gl.zeros([BLOCK], gl.float32, ROW)
                rows_told = (told[0], told[1], w)
                q = q_buf.index(apart(slot)).reshape([BLOCK, D])
                for _ in range(shorts):
                    s = step % KS
                    k = k_buf.index(s)._reinterpret(gl.float8e4nv, [BLOCK, 1, D], SHORT_K).reshape([BLOCK, D])
                    acc, m, total, row_scale = short_step(
                        q, k, v_buf.index(2 * s), acc, m, total, row_scale, rows_told, scale, step, wholes * KEYS,
                        k_len, barriers, KS, OL,
                    )  # fmt: skip
                q = q_buf.index(apart(slot)).reshape([BLOCK, D])
                for i in range(wholes):
                    k = k_buf.index((step + shorts + i) % KS).reshape([KEYS, D])
                    acc, m, total, row_scale = whole_step(
                        q, k, v_buf, acc, m, total, row_scale, rows_told, scale, step + shorts + i,
                        (i == 0) & (shorts == 0), (wholes - 1 - i) * KEYS, k_len, barriers, KS, OL,
                    )  # fmt: skip
                mbarrier.arrive(q_empty.index(slot), count=1)
                total = gl.convert_layout(gl.sum(total, 1), ROW, True)
                acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, OL))[:, None]
                if ALSO:
                    _quantised(acc, out, eighths, o_buf.index(W), out_row, mine, head, D, THRESHOLD, EMAX)
                _finish(acc, m, total, out, o_buf.index(W), out_row, mine, head, D, OL)
            else:
                mbarrier.arrive(q_empty.index(slot), count=1)
                if mine > 0:
                    _no_keys(out, out_row, mine, head, D, OL)
                    if ALSO:
                        nothing = gl.zeros([BLOCK, D], gl.float32, OL)
                        _quantised(nothing, out, eighths, o_buf.index(W), out_row, mine, head, D, THRESHOLD, EMAX)
                pass_steps(step, shorts + wholes, (barriers[0], barriers[1], barriers[0], barriers[1]), KS, True)
            step += shorts + wholes
            w = (w + 6 - gl.cdiv(rows, BLOCK)) % 3
        tile += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "kv_heads", "o8_pitch"])
def forward_kernel(
    q_desc, k_desc, k_short, v_desc, o_desc, o_ptr, lse_ptr, q_scale_ptr, kv_scale_ptr, heads, kv_heads,
    tiles_ptr, count_ptr, cursor_ptr, o8_ptr, o8_scale_ptr, o8_pitch, scale,
    D: gl.constexpr, KS: gl.constexpr, QS: gl.constexpr, GROUP: gl.constexpr, REGS: gl.constexpr,
    LOADER_REGS: gl.constexpr, ALSO: gl.constexpr, THRESHOLD: gl.constexpr, EMAX: gl.constexpr,
):  # fmt: skip
    """O and LSE. Q [T, H, D] and K [T, Hkv, D] in E4M3, V^T [blocks, Hkv, D, 128] (keys of 16 permuted), the scales of
    Q [T, H], of K and log2 of those of V [blocks, Hkv, 2]; `scale` holds log2(e) as a factor.
    ALSO (D 128): O in E4M3, too, [T, H 128], with a scale for each row and head, [H, pitch]: what a projection of O
    reads.
    """
    q_buf = gl.allocate_shared_memory(gl.float8e4nv, [QS * 3, BLOCK, 1, D], q_desc.layout)
    k_buf = gl.allocate_shared_memory(gl.float8e4nv, [KS, KEYS, 1, D], k_desc.layout)
    v_buf = gl.allocate_shared_memory(gl.float8e4nv, [2 * KS, D, BLOCK], v_desc.layout)
    o_buf = gl.allocate_shared_memory(o_ptr.dtype.element_ty, [3, BLOCK, 1, D], o_desc.layout)
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    pairs = gl.allocate_shared_memory(gl.float32, [KS, 2], LINES)
    row_scales = gl.allocate_shared_memory(gl.bfloat16, [KS * 3, BLOCK], LINES)
    record = gl.allocate_shared_memory(gl.int32, [RECORDS, FIELDS], LINES)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [QS * 3, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [QS * 3, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [KS, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [KS, 1], BARRIER)
    record_full = gl.allocate_shared_memory(gl.int64, [RECORDS, 1], BARRIER)
    record_empty = gl.allocate_shared_memory(gl.int64, [RECORDS, 1], BARRIER)
    for i in gl.static_range(QS * 3):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(KS):
        mbarrier.init(full.index(i), count=2)  # bytes, and scales
        mbarrier.init(empty.index(i), count=3)
    for i in gl.static_range(RECORDS):
        mbarrier.init(record_full.index(i), count=1)
        mbarrier.init(record_empty.index(i), count=4)
    records = (record, record_full, record_empty)
    told = (pairs, row_scales)
    barriers = (full, empty)
    out = (o_desc, o_ptr, lse_ptr, heads)
    eighths = (o8_ptr, o8_scale_ptr, o8_pitch)
    SHORT: gl.constexpr = k_short.layout
    shared = (scale, out, eighths, records, (q_buf, k_buf, v_buf, o_buf, told), (q_full, q_empty), barriers)
    queries = (q_desc, tiles_ptr, count_ptr, cursor_ptr)
    keys = (k_desc, k_short, v_desc)
    scales = (q_scale_ptr, kv_scale_ptr, kv_heads, heads)
    gl.warp_specialize(
        [
            (_consume, (gl.to_tensor(0), shared, SHORT, D, KS, QS, ALSO, THRESHOLD, EMAX)),
            (_consume, (gl.to_tensor(1), shared, SHORT, D, KS, QS, ALSO, THRESHOLD, EMAX)),
            (_consume, (gl.to_tensor(2), shared, SHORT, D, KS, QS, ALSO, THRESHOLD, EMAX)),
            (_load_queries, (queries, records, q_buf, q_full, q_empty, QS)),
            (_load_keys, (keys, scales, records, (k_buf, v_buf, told), barriers, KS, GROUP, D)),
        ],
        [4, 4, 1, 1],
        [REGS, REGS, LOADER_REGS, LOADER_REGS],
    )  # fmt: skip
