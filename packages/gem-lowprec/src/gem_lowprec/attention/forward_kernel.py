"""The forward of softmax attention with E4M3 operands on Hopper: one persistent, warp-specialised Gluon kernel.

    S = scale sq[row] sk[block] (Q K^T)        P = exp2(S - m + log2 sv[block] + 8) in E4M3        O = P V^T' / sum

The shape of it is that of `gem_kernels.hopper.forward`: two warps load by TMA, three consumer warpgroups own 64 query
rows each. What FP8 changes:

- Hopper reads FP8 operands along the contraction alone, so V comes transposed, in blocks [D, 128 keys] that begin at a
  sequence's start (`quantise`).
- Keys inside 16 of V's blocks are in the order in which a thread holds its scores, so that P goes from the accumulators
  of one product to the registers of the next without leaving its thread.
- The running maximum is rounded up to an integer and V's scales are powers of two: what P is divided by is a power of
  two, its E4M3 digits do not depend on the order in which keys are visited, and rescaling O is exact.
- A block's scale of V joins the exponent, and is taken out of the sum of the row again: two operations a row.
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
from gem_lowprec.attention.steps import KEYS, ROOM, SHIFT, step_in_halves, step_of, steps_of


@gluon.jit
def _load_queries(inputs, records, q_buf, q_full, q_empty, NC: gl.constexpr, QS: gl.constexpr):
    """gem-kernels' partition, for whole rows and no bias."""
    q_desc, tiles_ptr, count_ptr, cursor_ptr = inputs
    load_queries(
        (q_desc, tiles_ptr, count_ptr, cursor_ptr, count_ptr, 0), records, q_buf, q_full, q_empty, (-1, -1),
        BN=KEYS, NC=NC, QS=QS, LEFT=False, RIGHT=False, SHARED=False, ONCE=False, BIAS=0, TURNS=True,
    )  # fmt: skip


@gluon.jit
def _tell(told, q_told, pair, queries, s, first, full, NC: gl.constexpr):
    """A step's scales of K and V, and with a tile's first step those of its queries' rows, beside its keys."""
    told.index(s).store(pair)
    if first:
        for w in gl.static_range(NC):
            q_told.index(s * NC + w).store(queries[w].to(gl.bfloat16))  # a power of two
    mbarrier.arrive(full, count=1)


@gluon.jit
def _load_keys(
    inputs, scales, records, buffers, barriers, KS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
    NC: gl.constexpr, TOLD: gl.constexpr, REST: gl.constexpr, HALVES: gl.constexpr, LEAN: gl.constexpr,
):  # fmt: skip
    """Keeps the rings of K and of V^T full, from a tile's last key to its first: short steps, then whole ones. TOLD:
    and those of the scales, which consumers would wait for.
    """
    k_desc, v_desc, k_short, v_short = inputs
    q_scale_ptr, kv_scale_ptr, kv_heads, heads = scales
    record, record_full, record_empty = records
    k_buf, v_buf, told, q_told = buffers
    k_full, k_empty, v_full, v_empty = barriers
    L: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [1], [0])
    PL: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    QL: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    step = 0
    tile = 0
    rows = 1
    while rows > 0:
        r = tile % RECORDS
        mbarrier.wait(record_full.index(r), (tile // RECORDS) & 1)
        _q, rows, k_start, k_len, head, out, b, _first = unpack(record.index(r).load(L), L)
        mbarrier.arrive(record_empty.index(r), count=1)
        tile += 1
        shorts, wholes = steps_of(k_len, REST)
        if rows == 0:
            wholes = 0
            shorts = 0
        column = head // GROUP
        block = k_start // KEYS + b
        scale = kv_scale_ptr
        queries = (0, 0, 0)
        if TOLD:
            scale += (block.to(gl.int64) * kv_heads + column) * 2 + gl.arange(0, 2, PL)
            i64 = gl.arange(0, BLOCK, QL)
            last = gl.maximum(rows - 1, 0)
            theirs = q_scale_ptr + out.to(gl.int64) * heads + head
            own = rows > 0
            queries = (
                gl.load(theirs + gl.minimum(i64, last) * heads, mask=(i64 >= 0) & own, other=0.0),
                gl.load(theirs + gl.minimum(i64 + BLOCK, last) * heads, mask=(i64 >= 0) & own, other=0.0),
                gl.load(theirs + gl.minimum(i64 + 2 * BLOCK, last) * heads, mask=(i64 >= 0) & own, other=0.0),
            )
        for i in range(shorts):
            s = step % KS
            phase = (step // KS) & 1
            at = (shorts - 1 - i) * BLOCK
            if TOLD:
                pair = gl.load(scale + wholes * (2 * kv_heads))
            mbarrier.wait(k_empty.index(s), phase ^ 1)
            mbarrier.expect(k_full.index(s), k_short.block_type.nbytes + (v_short.block_type.nbytes if LEAN else 0))
            k = k_buf.index(s)._reinterpret(k_buf.dtype, k_short.block_shape, k_short.layout)
            tma.async_copy_global_to_shared(k_short, [k_start + wholes * KEYS + at, column, 0], k_full.index(s), k)
            if TOLD:
                _tell(told, q_told, pair, queries, s, i == 0, k_full.index(s), NC)
            if not LEAN:
                mbarrier.wait(v_empty.index(s), phase ^ 1)
                mbarrier.expect(v_full.index(s), v_short.block_type.nbytes)
            full = (k_full if LEAN else v_full).index(s)
            if HALVES:
                v = v_buf.index(2 * s)
            else:
                v = v_buf.index(s)._reinterpret(v_buf.dtype, v_short.block_shape, v_short.layout)
            line = ((block + wholes) * kv_heads + column) * D
            tma.async_copy_global_to_shared(v_short, [line, at], full, v)
            step += 1
        for i in range(wholes):
            s = step % KS
            phase = (step // KS) & 1
            j = wholes - 1 - i
            if TOLD:
                pair = gl.load(scale + j * (2 * kv_heads))
            mbarrier.wait(k_empty.index(s), phase ^ 1)
            mbarrier.expect(k_full.index(s), k_desc.block_type.nbytes + (v_desc.block_type.nbytes if LEAN else 0))
            tma.async_copy_global_to_shared(k_desc, [k_start + j * KEYS, column, 0], k_full.index(s), k_buf.index(s))
            if TOLD:
                _tell(told, q_told, pair, queries, s, (i == 0) & (shorts == 0), k_full.index(s), NC)
            if not LEAN:
                mbarrier.wait(v_empty.index(s), phase ^ 1)
                mbarrier.expect(v_full.index(s), v_desc.block_type.nbytes)
            full = (k_full if LEAN else v_full).index(s)
            line = ((block + j) * kv_heads + column) * D
            if HALVES:
                tma.async_copy_global_to_shared(v_short, [line, 0], full, v_buf.index(2 * s))
                tma.async_copy_global_to_shared(v_short, [line, BLOCK], full, v_buf.index(2 * s + 1))
            else:
                tma.async_copy_global_to_shared(v_desc, [line, 0], full, v_buf.index(s))
            step += 1


@gluon.jit
def _here(r, NEAR: gl.constexpr):
    """r; NEAR: of which the compiler does not know that what is made of it is the same for every tile, so that it makes
    it here and not before all loops, where it costs registers.
    """
    if NEAR:
        r = apart(r)
    return r


@gluon.jit
def _log2(x, NEAR: gl.constexpr):
    """log2(x) of a sum, NEAR: by one instruction (absolute error 2^-22 between 1/2 and 2, relative elsewhere)."""
    if NEAR:
        return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    else:
        return gl.log2(x)


@gluon.jit
def _inverse(total, m):
    """1 / sum of each row, and the sum."""
    if len(total.shape) == 2:  # of what each thread holds
        total = gl.convert_layout(gl.sum(total, 1), m.type.layout, True)
    return 1.0 / total, total


@gluon.jit
def _finish(
    acc, m, total, out, buf, out_row, rows, head,
    D: gl.constexpr, OL: gl.constexpr, NEAR: gl.constexpr, UP: gl.constexpr,
):  # fmt: skip
    """O and LSE of one block; a whole block goes out by TMA, a sequence's last by masked stores."""
    o_desc, o_ptr, lse_ptr, heads = out
    tma.store_wait(0)
    store_block(acc, o_desc, o_ptr, buf, out_row, rows, head, heads, D, D, NEAR)
    r = _here(gl.arange(0, BLOCK, m.type.layout), NEAR)
    lse = (m + _log2(total, NEAR) - UP) * 0.6931471805599453
    gl.store(lse_ptr + (out_row + r).to(gl.int64) * heads + head, lse, mask=r < rows)


@gluon.jit
def _no_keys(out, out_row, rows, head, D: gl.constexpr, OL: gl.constexpr, NEAR: gl.constexpr):
    """Queries without keys: O = 0, LSE = -inf."""
    _o_desc, o_ptr, lse_ptr, heads = out
    r = _here(gl.arange(0, BLOCK, gl.SliceLayout(1, OL)), NEAR)
    c = gl.arange(0, D, gl.SliceLayout(0, OL))
    base = o_ptr + (out_row.to(gl.int64) * heads + head) * D
    nothing = gl.zeros([BLOCK, D], o_ptr.dtype.element_ty, OL)
    gl.store(base + (r * (heads * D))[:, None] + c[None, :], nothing, mask=(r < rows)[:, None])
    none = gl.full([BLOCK], float("-inf"), gl.float32, gl.SliceLayout(1, OL))
    gl.store(lse_ptr + (out_row + r).to(gl.int64) * heads + head, none, mask=r < rows)


@gluon.jit
def _quantised(
    acc, out, eighths, buf, out_row, rows, head,
    D: gl.constexpr, THRESHOLD: gl.constexpr, EMAX: gl.constexpr, NEAR: gl.constexpr,
):  # fmt: skip
    """One block of O in E4M3, of the values that O has in its own dtype, with a scale for each row and head."""
    _o_desc, o_ptr, _lse_ptr, heads = out
    data_ptr, scale_ptr, pitch = eighths
    y = acc.to(o_ptr.dtype.element_ty).to(gl.float32)
    to = scale_ptr + head * pitch
    BYTES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    tma.store_wait(0)  # of the O before, from the same memory
    bytes_ = buf._reinterpret(gl.uint8, [BLOCK, D], BYTES)
    store_scaled_rows(y, data_ptr + head * D, heads * D, to, 1, out_row, rows, THRESHOLD, EMAX, bytes_, NEAR)


@gluon.jit
def _consume(
    W: gl.constexpr, shared, SHORT_K: gl.constexpr, SHORT_V: gl.constexpr, D: gl.constexpr, NC: gl.constexpr,
    KS: gl.constexpr, QS: gl.constexpr, GROUP: gl.constexpr, ALSO: gl.constexpr,
    THRESHOLD: gl.constexpr, EMAX: gl.constexpr,
    NEAR: gl.constexpr, TOLD: gl.constexpr, REST: gl.constexpr, HALVES: gl.constexpr, LEAN: gl.constexpr,
    LAZY: gl.constexpr,
):  # fmt: skip
    """One block of every tile; the tiles' first blocks go round, so that none is idle for long where they have few."""
    scale, scales, out, eighths, records, buffers, q_barriers, barriers = shared
    record, record_full, record_empty = records
    q_buf, k_buf, v_buf, o_buf, told, q_told = buffers
    q_full, q_empty = q_barriers
    q_scale_ptr, kv_scale_ptr, kv_heads = scales
    heads = out[3]
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, OL)
    UP: gl.constexpr = SHIFT - ROOM if LAZY else SHIFT  # P is at most 2^UP where a row's maximum is up to date
    RL: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    step = 0
    tile = 0
    rows = 1
    w = W
    while rows > 0:
        r = tile % RECORDS
        mbarrier.wait(record_full.index(r), (tile // RECORDS) & 1)
        _q, rows, k_start, k_len, head, out_start, b, _first = unpack(record.index(r).load(RL), RL)
        mbarrier.arrive(record_empty.index(r), count=1)
        if rows > 0:
            shorts, wholes = steps_of(k_len, REST)
            mine = rows - w * BLOCK
            out_row = out_start + w * BLOCK
            slot = (tile % QS) * NC + W  # a consumer's own, whichever block it takes: see `load_queries`
            if (mine > 0) & (k_len > 0):
                first = kv_scale_ptr + ((k_start // KEYS + b).to(gl.int64) * kv_heads + head // GROUP) * 2
                row_scale = gl.zeros([BLOCK], gl.float32, ROW)
                if not TOLD:
                    i64 = gl.arange(0, BLOCK, ROW)
                    at = (out_row + gl.minimum(i64, mine - 1)).to(gl.int64) * heads + head
                    row_scale = gl.load(q_scale_ptr + at) * scale
                acc = gl.zeros([BLOCK, D], gl.float32, OL)
                m = gl.full([BLOCK], float("-inf"), gl.float32, ROW)
                total = gl.zeros([BLOCK], gl.float32, ROW)
                if HALVES:
                    total = partial(acc)  # zeros
                mbarrier.wait(q_full.index(slot), (tile // QS) & 1)
                q = q_buf.index(_here(slot, NEAR)).reshape([BLOCK, D])
                sk = 0.0
                lv = 0.0
                if not TOLD:
                    at = first + wholes * (2 * kv_heads)
                    sk = gl.load(at)  # of the last block of keys; not used where it is whole
                    lv = gl.load(at + 1)
                for i in range(shorts):
                    s = (step + i) % KS
                    k = k_buf.index(s)._reinterpret(gl.float8e4nv, [BLOCK, 1, D], SHORT_K).reshape([BLOCK, D])
                    if HALVES:
                        v = v_buf.index(2 * s)
                    else:
                        v = v_buf.index(s)._reinterpret(gl.float8e4nv, [D, BLOCK], SHORT_V)
                    acc, m, total, row_scale = step_of(
                        q, k, v, acc, m, total, row_scale, sk, lv, (told, q_told, w), i == 0, scale, step + i,
                        wholes * KEYS + (shorts - 1 - i) * BLOCK, k_len, barriers, BLOCK, KS, OL, True, TOLD, REST,
                        LEAN, UP,
                    )  # fmt: skip
                q = q_buf.index(_here(slot, NEAR)).reshape([BLOCK, D])
                if HALVES:
                    for i in range(wholes):
                        k = k_buf.index((step + shorts + i) % KS).reshape([KEYS, D])
                        acc, m, total, row_scale = step_in_halves(
                            q, k, v_buf, acc, m, total, row_scale, (told, q_told, w),
                            (i == 0) & (shorts == 0), scale, step + shorts + i, (wholes - 1 - i) * KEYS, k_len,
                            barriers, KS, OL, LEAN, LAZY, UP,
                        )  # fmt: skip
                else:
                    if not TOLD:
                        at = first + gl.maximum(wholes - 1, 0) * (2 * kv_heads)
                        sk = gl.load(at)
                        lv = gl.load(at + 1)
                    for i in range(wholes):
                        s = (step + shorts + i) % KS
                        sk_after = 0.0
                        lv_after = 0.0
                        if not TOLD:
                            # A step's scales are asked for a step before: a load takes as long as a product.
                            at = first + gl.maximum(wholes - 2 - i, 0) * (2 * kv_heads)
                            sk_after = gl.load(at)
                            lv_after = gl.load(at + 1)
                        acc, m, total, row_scale = step_of(
                            q, k_buf.index(s).reshape([KEYS, D]), v_buf.index(s), acc, m, total, row_scale, sk, lv,
                            (told, q_told, w), (i == 0) & (shorts == 0), scale, step + shorts + i,
                            (wholes - 1 - i) * KEYS if REST else 0, k_len, barriers, KEYS, KS,
                            OL, False, TOLD, REST, LEAN, UP,
                        )  # fmt: skip
                        if not TOLD:
                            sk = sk_after
                            lv = lv_after
                mbarrier.arrive(q_empty.index(slot), count=1)
                inverse, total = _inverse(total, m)
                acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, OL))[:, None]
                if ALSO:
                    _quantised(acc, out, eighths, o_buf.index(W), out_row, mine, head, D, THRESHOLD, EMAX, NEAR)
                _finish(acc, m, total, out, o_buf.index(W), out_row, mine, head, D, OL, NEAR, UP)
            else:
                mbarrier.wait(q_full.index(slot), (tile // QS) & 1)
                mbarrier.arrive(q_empty.index(slot), count=1)
                if mine > 0:
                    _no_keys(out, out_row, mine, head, D, OL, NEAR)
                    if ALSO:
                        nothing = gl.zeros([BLOCK, D], gl.float32, OL)
                        _quantised(nothing, out, eighths, o_buf.index(W), out_row, mine, head, D, THRESHOLD, EMAX, NEAR)
                pass_steps(step, shorts + wholes, barriers, KS, LEAN)
            step += shorts + wholes
            w = (w + 2 * NC - gl.cdiv(rows, BLOCK)) % NC
        tile += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "kv_heads", "o8_pitch"])
def forward_kernel(
    q_desc, k_desc, v_desc, k_short, v_short, o_desc, o_ptr, lse_ptr, q_scale_ptr, kv_scale_ptr, heads, kv_heads,
    tiles_ptr, count_ptr, cursor_ptr, o8_ptr, o8_scale_ptr, o8_pitch, scale,
    D: gl.constexpr, NC: gl.constexpr, KS: gl.constexpr, QS: gl.constexpr, GROUP: gl.constexpr,
    REGS: gl.constexpr, LOADER_REGS: gl.constexpr, ALSO: gl.constexpr, THRESHOLD: gl.constexpr, EMAX: gl.constexpr,
    NEAR: gl.constexpr, TOLD: gl.constexpr, REST: gl.constexpr, HALVES: gl.constexpr, LEAN: gl.constexpr,
    LAZY: gl.constexpr,
):  # fmt: skip
    """O and LSE. Q [T, H, D] and K [T, Hkv, D] in E4M3, V^T [blocks, Hkv, D, 128] (keys of 16 permuted), the scales of
    Q [T, H], of K and log2 of those of V [blocks, Hkv, 2]; `scale` holds log2(e) as a factor.
    ALSO (D 128): O in E4M3, too, [T, H 128], with a scale for each row and head, [H, pitch]: what a projection of O
    reads.
    """
    gl.static_assert(NC == 3 or NC == 2, "a partition for each consumer is written out below")
    q_buf = gl.allocate_shared_memory(gl.float8e4nv, [QS * NC, BLOCK, 1, D], q_desc.layout)
    k_buf = gl.allocate_shared_memory(gl.float8e4nv, [KS, KEYS, 1, D], k_desc.layout)
    if HALVES:
        v_buf = gl.allocate_shared_memory(gl.float8e4nv, [2 * KS, D, BLOCK], v_short.layout)
    else:
        v_buf = gl.allocate_shared_memory(gl.float8e4nv, [KS, D, KEYS], v_desc.layout)
    o_buf = gl.allocate_shared_memory(o_ptr.dtype.element_ty, [NC, BLOCK, 1, D], o_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [QS * NC, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [QS * NC, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [KS, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [KS, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [KS, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [KS, 1], BARRIER)
    for i in gl.static_range(QS * NC):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    told = q_full  # not used
    q_told = q_full
    if TOLD:
        told = gl.allocate_shared_memory(gl.float32, [KS, 2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        q_told = gl.allocate_shared_memory(gl.bfloat16, [KS * NC, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(KS):
        mbarrier.init(k_full.index(i), count=2 if TOLD else 1)
        mbarrier.init(k_empty.index(i), count=NC)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=NC)
    record = gl.allocate_shared_memory(gl.int32, [RECORDS, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    record_full = gl.allocate_shared_memory(gl.int64, [RECORDS, 1], BARRIER)
    record_empty = gl.allocate_shared_memory(gl.int64, [RECORDS, 1], BARRIER)
    for i in gl.static_range(RECORDS):
        mbarrier.init(record_full.index(i), count=1)
        mbarrier.init(record_empty.index(i), count=NC + 1)
    records = (record, record_full, record_empty)
    buffers = (q_buf, k_buf, v_buf, o_buf, told, q_told)
    q_barriers = (q_full, q_empty)
    barriers = (k_full, k_empty, v_full, v_empty)
    SK: gl.constexpr = k_short.layout
    SV: gl.constexpr = v_short.layout
    out = (o_desc, o_ptr, lse_ptr, heads)
    eighths = (o8_ptr, o8_scale_ptr, o8_pitch)
    scales = (q_scale_ptr, kv_scale_ptr, kv_heads)
    queries = (q_desc, tiles_ptr, count_ptr, cursor_ptr)
    keys = (k_desc, v_desc, k_short, v_short)
    told_of = (q_scale_ptr, kv_scale_ptr, kv_heads, heads)
    shared = (scale, scales, out, eighths, records, buffers, q_barriers, barriers)
    if NC == 3:
        gl.warp_specialize(
            [
                (_consume, (0, shared, SK, SV, D, NC, KS, QS, GROUP, ALSO, THRESHOLD, EMAX,
                            NEAR, TOLD, REST, HALVES, LEAN, LAZY)),
                (_consume, (1, shared, SK, SV, D, NC, KS, QS, GROUP, ALSO, THRESHOLD, EMAX,
                            NEAR, TOLD, REST, HALVES, LEAN, LAZY)),
                (_consume, (2, shared, SK, SV, D, NC, KS, QS, GROUP, ALSO, THRESHOLD, EMAX,
                            NEAR, TOLD, REST, HALVES, LEAN, LAZY)),
                (_load_queries, (queries, records, q_buf, q_full, q_empty, NC, QS)),
                (_load_keys, (keys, told_of, records, (k_buf, v_buf, told, q_told), barriers, KS, GROUP, D, NC,
                              TOLD, REST, HALVES, LEAN)),
            ],
            [4, 4, 1, 1],
            [REGS, REGS, LOADER_REGS, LOADER_REGS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (0, shared, SK, SV, D, NC, KS, QS, GROUP, ALSO, THRESHOLD, EMAX,
                            NEAR, TOLD, REST, HALVES, LEAN, LAZY)),
                (_consume, (1, shared, SK, SV, D, NC, KS, QS, GROUP, ALSO, THRESHOLD, EMAX,
                            NEAR, TOLD, REST, HALVES, LEAN, LAZY)),
                (_load_queries, (queries, records, q_buf, q_full, q_empty, NC, QS)),
                (_load_keys, (keys, told_of, records, (k_buf, v_buf, told, q_told), barriers, KS, GROUP, D, NC,
                              TOLD, REST, HALVES, LEAN)),
            ],
            [4, 1, 1],
            [REGS, LOADER_REGS, LOADER_REGS],
        )  # fmt: skip
