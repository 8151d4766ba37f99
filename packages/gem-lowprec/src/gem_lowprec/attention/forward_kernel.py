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
from gem_kernels.hopper.records import BLOCK, FIELDS, RECORDS
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_lowprec.attention.epilogue import store_scaled_rows

KEYS = gl.constexpr(128)  # keys that share the scales of K and V, a whole step
SHIFT = gl.constexpr(8.0)  # P is at most 2^8, E4M3 goes to 448


@gluon.jit
def _load_queries(inputs, records, q_buf, q_full, q_empty, NC: gl.constexpr, QS: gl.constexpr):
    """gem-kernels' partition, for whole rows and no bias."""
    q_desc, tiles_ptr, count_ptr, cursor_ptr = inputs
    load_queries(
        (q_desc, tiles_ptr, count_ptr, cursor_ptr, count_ptr, 0), records, q_buf, q_full, q_empty, (-1, -1),
        BN=KEYS, NC=NC, QS=QS, LEFT=False, RIGHT=False, SHARED=False, ONCE=False, BIAS=0, TURNS=True,
    )  # fmt: skip


@gluon.jit
def _load_keys(inputs, records, buffers, barriers, KS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr):
    """Keeps the rings of K and of V^T full, from a tile's last key to its first: short steps, then whole ones."""
    k_desc, v_desc, k_short, v_short, kv_heads = inputs
    record, record_full, record_empty = records
    k_buf, v_buf = buffers
    k_full, k_empty, v_full, v_empty = barriers
    L: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [1], [0])
    step = 0
    tile = 0
    rows = 1
    while rows > 0:
        r = tile % RECORDS
        mbarrier.wait(record_full.index(r), (tile // RECORDS) & 1)
        _q, rows, k_start, k_len, head, _out, b, _first = unpack(record.index(r).load(L), L)
        mbarrier.arrive(record_empty.index(r), count=1)
        tile += 1
        wholes = k_len // KEYS
        shorts = gl.cdiv(k_len - wholes * KEYS, BLOCK)
        if rows == 0:
            wholes = 0
            shorts = 0
        column = head // GROUP
        block = k_start // KEYS + b
        for i in range(shorts):
            s = step % KS
            phase = (step // KS) & 1
            at = (shorts - 1 - i) * BLOCK
            mbarrier.wait(k_empty.index(s), phase ^ 1)
            mbarrier.expect(k_full.index(s), k_short.block_type.nbytes)
            k = k_buf.index(s)._reinterpret(k_buf.dtype, k_short.block_shape, k_short.layout)
            tma.async_copy_global_to_shared(k_short, [k_start + wholes * KEYS + at, column, 0], k_full.index(s), k)
            mbarrier.wait(v_empty.index(s), phase ^ 1)
            mbarrier.expect(v_full.index(s), v_short.block_type.nbytes)
            v = v_buf.index(s)._reinterpret(v_buf.dtype, v_short.block_shape, v_short.layout)
            line = ((block + wholes) * kv_heads + column) * D
            tma.async_copy_global_to_shared(v_short, [line, at], v_full.index(s), v)
            step += 1
        for i in range(wholes):
            s = step % KS
            phase = (step // KS) & 1
            j = wholes - 1 - i
            mbarrier.wait(k_empty.index(s), phase ^ 1)
            mbarrier.expect(k_full.index(s), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, [k_start + j * KEYS, column, 0], k_full.index(s), k_buf.index(s))
            mbarrier.wait(v_empty.index(s), phase ^ 1)
            mbarrier.expect(v_full.index(s), v_desc.block_type.nbytes)
            line = ((block + j) * kv_heads + column) * D
            tma.async_copy_global_to_shared(v_desc, [line, 0], v_full.index(s), v_buf.index(s))
            step += 1


@gluon.jit
def _weights(
    s, acc, m, total, row_scale, sk, lv, N: gl.constexpr, SL: gl.constexpr, OL: gl.constexpr
):  # fmt: skip
    """One step of the online softmax: P as the next product's operand, O so far (rescaled), maximum and sum.

    `row_scale` [BLOCK] has the factor of the scores in log2 units; lv = log2 of V's scale.
    """
    c = row_scale * sk
    most = gl.convert_layout(gl.max(s, 1), m.type.layout) * c + lv
    m_new = gl.maximum(m, gl.ceil(most))
    shift = m_new - (lv + SHIFT)
    of: gl.constexpr = gl.SliceLayout(1, SL)
    p = gl.exp2(s * gl.convert_layout(c, of)[:, None] - gl.convert_layout(shift, of)[:, None])
    alpha = gl.exp2(m - m_new)
    total = total * alpha + gl.convert_layout(gl.sum(p, 1), m.type.layout) * gl.exp2(-lv)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OL))[:, None]
    return p, acc, m_new, total


@gluon.jit
def _operand(p, N: gl.constexpr, OL: gl.constexpr):
    """P with its keys in the order of V's blocks, as E4M3 in the registers of the second product.

    A thread has columns 2 t and 2 t + 1 of every 8 scores; of an operand it has 4 elements of every 16 side by side.
    """
    p = p.reshape([BLOCK, N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([BLOCK, N])
    return gl.convert_layout(p, gl.DotOperandLayout(0, OL, 4)).to(gl.float8e4nv)


@gluon.jit
def _step(
    q, k, v, acc, m, total, row_scale, sk, lv, step, key, k_len, barriers,
    N: gl.constexpr, KS: gl.constexpr, OL: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """N keys. EDGE: some of them may lie behind the sequence's end."""
    k_full, k_empty, v_full, v_empty = barriers
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 32])
    s = step % KS
    phase = (step // KS) & 1
    mbarrier.wait(k_full.index(s), phase)
    S = warpgroup_mma(q, k.permute((1, 0)), gl.zeros([BLOCK, N], gl.float32, SL), use_acc=False, is_async=True)
    S = warpgroup_mma_wait(0, deps=(S,))
    mbarrier.arrive(k_empty.index(s), count=1)
    if EDGE:
        col = (key + gl.arange(0, N, gl.SliceLayout(0, SL)))[None, :]
        S = gl.where(col < k_len, S, float("-inf"))
    p, acc, m, total = _weights(S, acc, m, total, row_scale, sk, lv, N, SL, OL)
    P = _operand(p, N, OL)
    mbarrier.wait(v_full.index(s), phase)
    acc = warpgroup_mma(P, v.permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(s), count=1)
    return acc, m, total


@gluon.jit
def _finish(acc, m, total, out, buf, out_row, rows, head, D: gl.constexpr, OL: gl.constexpr):
    """O and LSE of one block; a whole block goes out by TMA, a sequence's last by masked stores."""
    o_desc, o_ptr, lse_ptr, heads = out
    acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, OL))[:, None]
    tma.store_wait(0)
    store_block(acc, o_desc, o_ptr, buf, out_row, rows, head, heads, D, D, False)
    r = gl.arange(0, BLOCK, m.type.layout)
    lse = (m + gl.log2(total) - SHIFT) * 0.6931471805599453
    gl.store(lse_ptr + (out_row + r).to(gl.int64) * heads + head, lse, mask=r < rows)


@gluon.jit
def _no_keys(out, out_row, rows, head, D: gl.constexpr, OL: gl.constexpr):
    """Queries without keys: O = 0, LSE = -inf."""
    _o_desc, o_ptr, lse_ptr, heads = out
    r = gl.arange(0, BLOCK, gl.SliceLayout(1, OL))
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
    store_scaled_rows(y, data_ptr + head * D, heads * D, to, 1, out_row, rows, THRESHOLD, EMAX, bytes_)


@gluon.jit
def _consume(
    W: gl.constexpr, shared, SHORT_K: gl.constexpr, SHORT_V: gl.constexpr, D: gl.constexpr, NC: gl.constexpr,
    KS: gl.constexpr, QS: gl.constexpr, GROUP: gl.constexpr, ALSO: gl.constexpr,
    THRESHOLD: gl.constexpr, EMAX: gl.constexpr,
):  # fmt: skip
    """One block of every tile; the tiles' first blocks go round, so that none is idle for long where they have few."""
    scale, scales, out, eighths, records, buffers, q_barriers, barriers = shared
    record, record_full, record_empty = records
    q_buf, k_buf, v_buf, o_buf = buffers
    q_full, q_empty = q_barriers
    q_scale_ptr, kv_scale_ptr, kv_heads = scales
    heads = out[3]
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, OL)
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
            wholes = k_len // KEYS
            shorts = gl.cdiv(k_len - wholes * KEYS, BLOCK)
            mine = rows - w * BLOCK
            out_row = out_start + w * BLOCK
            slot = (tile % QS) * NC + W  # a consumer's own, whichever block it takes: see `load_queries`
            if (mine > 0) & (k_len > 0):
                i64 = gl.arange(0, BLOCK, ROW)
                at = (out_row + gl.minimum(i64, mine - 1)).to(gl.int64) * heads + head
                row_scale = gl.load(q_scale_ptr + at) * scale
                first = kv_scale_ptr + ((k_start // KEYS + b).to(gl.int64) * kv_heads + head // GROUP) * 2
                acc = gl.zeros([BLOCK, D], gl.float32, OL)
                m = gl.full([BLOCK], float("-inf"), gl.float32, ROW)
                total = gl.zeros([BLOCK], gl.float32, ROW)
                mbarrier.wait(q_full.index(slot), (tile // QS) & 1)
                q = q_buf.index(slot).reshape([BLOCK, D])
                at = first + wholes * (2 * kv_heads)
                sk = gl.load(at)  # of the last block of keys; not used where it is whole
                lv = gl.load(at + 1)
                for i in range(shorts):
                    s = (step + i) % KS
                    k = k_buf.index(s)._reinterpret(gl.float8e4nv, [BLOCK, 1, D], SHORT_K).reshape([BLOCK, D])
                    v = v_buf.index(s)._reinterpret(gl.float8e4nv, [D, BLOCK], SHORT_V)
                    acc, m, total = _step(
                        q, k, v, acc, m, total, row_scale, sk, lv, step + i,
                        wholes * KEYS + (shorts - 1 - i) * BLOCK, k_len, barriers, BLOCK, KS, OL, True,
                    )  # fmt: skip
                q = q_buf.index(slot).reshape([BLOCK, D])
                at = first + gl.maximum(wholes - 1, 0) * (2 * kv_heads)
                sk = gl.load(at)
                lv = gl.load(at + 1)
                for i in range(wholes):
                    s = (step + shorts + i) % KS
                    # A step's scales are asked for a step before: a load takes as long as a product.
                    at = first + gl.maximum(wholes - 2 - i, 0) * (2 * kv_heads)
                    sk_after = gl.load(at)
                    lv_after = gl.load(at + 1)
                    acc, m, total = _step(
                        q, k_buf.index(s).reshape([KEYS, D]), v_buf.index(s), acc, m, total, row_scale, sk, lv,
                        step + shorts + i, 0, k_len, barriers, KEYS, KS, OL, False,
                    )  # fmt: skip
                    sk = sk_after
                    lv = lv_after
                mbarrier.arrive(q_empty.index(slot), count=1)
                if ALSO:
                    whole = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, OL))[:, None]
                    _quantised(whole, out, eighths, o_buf.index(W), out_row, mine, head, D, THRESHOLD, EMAX)
                _finish(acc, m, total, out, o_buf.index(W), out_row, mine, head, D, OL)
            else:
                mbarrier.wait(q_full.index(slot), (tile // QS) & 1)
                mbarrier.arrive(q_empty.index(slot), count=1)
                if mine > 0:
                    _no_keys(out, out_row, mine, head, D, OL)
                    if ALSO:
                        nothing = gl.zeros([BLOCK, D], gl.float32, OL)
                        _quantised(nothing, out, eighths, o_buf.index(W), out_row, mine, head, D, THRESHOLD, EMAX)
                pass_steps(step, shorts + wholes, barriers, KS, False)
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
):  # fmt: skip
    """O and LSE. Q [T, H, D] and K [T, Hkv, D] in E4M3, V^T [blocks, Hkv, D, 128] (keys of 16 permuted), the scales of
    Q [T, H], of K and log2 of those of V [blocks, Hkv, 2]; `scale` holds log2(e) as a factor.
    ALSO (D 128): O in E4M3, too, [T, H 128], with a scale for each row and head, [H, pitch]: what a projection of O
    reads.
    """
    gl.static_assert(NC == 3 or NC == 2, "a partition for each consumer is written out below")
    q_buf = gl.allocate_shared_memory(gl.float8e4nv, [QS * NC, BLOCK, 1, D], q_desc.layout)
    k_buf = gl.allocate_shared_memory(gl.float8e4nv, [KS, KEYS, 1, D], k_desc.layout)
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
    for i in gl.static_range(KS):
        mbarrier.init(k_full.index(i), count=1)
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
    buffers = (q_buf, k_buf, v_buf, o_buf)
    q_barriers = (q_full, q_empty)
    barriers = (k_full, k_empty, v_full, v_empty)
    SK: gl.constexpr = k_short.layout
    SV: gl.constexpr = v_short.layout
    out = (o_desc, o_ptr, lse_ptr, heads)
    eighths = (o8_ptr, o8_scale_ptr, o8_pitch)
    scales = (q_scale_ptr, kv_scale_ptr, kv_heads)
    queries = (q_desc, tiles_ptr, count_ptr, cursor_ptr)
    keys = (k_desc, v_desc, k_short, v_short, kv_heads)
    shared = (scale, scales, out, eighths, records, buffers, q_barriers, barriers)
    if NC == 3:
        gl.warp_specialize(
            [
                (_consume, (0, shared, SK, SV, D, NC, KS, QS, GROUP, ALSO, THRESHOLD, EMAX)),
                (_consume, (1, shared, SK, SV, D, NC, KS, QS, GROUP, ALSO, THRESHOLD, EMAX)),
                (_consume, (2, shared, SK, SV, D, NC, KS, QS, GROUP, ALSO, THRESHOLD, EMAX)),
                (_load_queries, (queries, records, q_buf, q_full, q_empty, NC, QS)),
                (_load_keys, (keys, records, (k_buf, v_buf), barriers, KS, GROUP, D)),
            ],
            [4, 4, 1, 1],
            [REGS, REGS, LOADER_REGS, LOADER_REGS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (0, shared, SK, SV, D, NC, KS, QS, GROUP, ALSO, THRESHOLD, EMAX)),
                (_consume, (1, shared, SK, SV, D, NC, KS, QS, GROUP, ALSO, THRESHOLD, EMAX)),
                (_load_queries, (queries, records, q_buf, q_full, q_empty, NC, QS)),
                (_load_keys, (keys, records, (k_buf, v_buf), barriers, KS, GROUP, D)),
            ],
            [4, 1, 1],
            [REGS, LOADER_REGS, LOADER_REGS],
        )  # fmt: skip
