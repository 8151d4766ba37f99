"""The forward of jagged attention and GDPA on Hopper: one persistent, warp-specialised Gluon kernel.

A program owns one SM and walks a list of tiles (`gem_kernels.schedule`). One warp loads by TMA; NC consumer
warpgroups own 64 query rows each
and share the K and V tiles. K tiles are visited from the last to the first, so that only the first step of a tile
needs a mask.

Shapes: Q [Tq, H * D], K and V [Tk, Hkv * D] as 2-D descriptors; O like Q, LSE [Tq, H] float32.
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

from gem_kernels.hopper.activations import activate

BLOCK = gl.constexpr(64)  # query rows of one consumer: the M of one warpgroup MMA
FIELDS = gl.constexpr(8)  # int32 fields of a tile record, see gem_kernels.schedule


@gluon.jit
def tile_count(count_ptr):
    """How many tiles this program has: tiles are dealt in zigzag order, one row of programs after the other."""
    total = gl.load(count_ptr)
    programs = gl.num_programs(0)
    rows = total // programs
    column = gl.program_id(0)
    column = gl.where(rows % 2 == 0, column, programs - 1 - column)
    return rows + gl.where(column < total - rows * programs, 1, 0)


@gluon.jit
def tile_record(tiles_ptr, t, count):
    """The record of this program's t-th tile; zeros past its last."""
    programs = gl.num_programs(0)
    column = gl.program_id(0)
    column = gl.where(t % 2 == 0, column, programs - 1 - column)
    p = tiles_ptr + (t * programs + column) * FIELDS
    inside = t < count
    return (
        gl.load(p, mask=inside, other=0),
        gl.load(p + 1, mask=inside, other=0),
        gl.load(p + 2, mask=inside, other=0),
        gl.load(p + 3, mask=inside, other=0),
        gl.load(p + 4, mask=inside, other=0),
        gl.load(p + 5, mask=inside, other=0),
    )


@gluon.jit
def _prefetch(ptr, stride, row, count, column, D: gl.constexpr):
    """Ask for rows [row, row + count) of one head to be brought into L2; for a partition of one warp."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    base = ptr + row.to(gl.int64) * stride + column
    for first in range(0, count, 32):
        at = (base + gl.minimum(first + lane, count - 1) * stride).to(gl.int64)
        for line in gl.static_range(D // 64):  # lines of 128 bytes
            gl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at + 128 * line], gl.int32, False, 1
            )


@gluon.jit
def _producer(
    inputs, buffers, barriers,
    BN: gl.constexpr, D: gl.constexpr, NC: gl.constexpr, KS: gl.constexpr, QS: gl.constexpr, GROUP: gl.constexpr,
    PREFETCH: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc, tiles_ptr, count_ptr, q_ptr, k_ptr, v_ptr, q_stride, k_stride, v_stride = inputs
    q_buf, k_buf, v_buf = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    step = 0
    visit = 0
    count = tile_count(count_ptr)
    q_start, rows, k_start, k_len, head, _out = tile_record(tiles_ptr, 0, count)
    for t in range(count):
        q_start1, rows1, k_start1, k_len1, head1, _out1 = tile_record(tiles_ptr, t + 1, count)
        n = gl.cdiv(k_len, BN)
        column = (head // GROUP) * D
        if PREFETCH > 0:  # while this tile is computed, the next one's rows come from memory
            ahead = gl.minimum(k_len1, PREFETCH)
            _prefetch(k_ptr, k_stride, k_start1 + k_len1 - ahead, ahead, (head1 // GROUP) * D, D)
            _prefetch(v_ptr, v_stride, k_start1 + k_len1 - ahead, ahead, (head1 // GROUP) * D, D)
            _prefetch(q_ptr, q_stride, q_start1, gl.minimum(rows1, NC * BLOCK), head1 * D, D)
        for g in range(gl.cdiv(rows, NC * BLOCK)):
            slot = visit % QS
            phase = (visit // QS) & 1
            for w in gl.static_range(NC):
                full = q_full.index(slot * NC + w)
                mbarrier.wait(q_empty.index(slot * NC + w), phase ^ 1)
                first = (g * NC + w) * BLOCK
                if (rows > first) & (n > 0):
                    mbarrier.expect(full, q_desc.block_type.nbytes)
                    tma.async_copy_global_to_shared(
                        q_desc, [q_start + first, head * D], full, q_buf.index(slot * NC + w)
                    )
                else:
                    mbarrier.arrive(full, count=1)
            visit += 1
            if (g == 0) | (n > KS):
                row = k_start + (n - 1) * BN
                for _ in range(n):
                    s = step % KS
                    phase = (step // KS) & 1
                    mbarrier.wait(k_empty.index(s), phase ^ 1)
                    mbarrier.expect(k_full.index(s), k_desc.block_type.nbytes)
                    tma.async_copy_global_to_shared(k_desc, [row, column], k_full.index(s), k_buf.index(s))
                    mbarrier.wait(v_empty.index(s), phase ^ 1)
                    mbarrier.expect(v_full.index(s), v_desc.block_type.nbytes)
                    tma.async_copy_global_to_shared(v_desc, [row, column], v_full.index(s), v_buf.index(s))
                    row -= BN
                    step += 1
        q_start, rows, k_start, k_len, head = q_start1, rows1, k_start1, k_len1, head1


@gluon.jit
def _scores(q, k, BN: gl.constexpr, SL: gl.constexpr):
    """Q K^T [BLOCK, BN], issued and not waited for."""
    return warpgroup_mma(q, k.permute((1, 0)), gl.zeros([BLOCK, BN], gl.float32, SL), use_acc=False, is_async=True)


@gluon.jit
def _weights(s, m, total, scale, ACT: gl.constexpr):
    """One step of the online softmax, or the activation: weights, new maximum, new sum, and the factor of what was
    summed before.
    """
    if ACT == "softmax":
        m_new = gl.maximum(m, gl.max(s, 1) * scale)
        p = gl.exp2(s * scale - m_new[:, None])
        alpha = gl.exp2(m - m_new)
        total = total * alpha + gl.sum(p, 1)
    else:
        p = activate(s * scale, ACT)
        m_new = m
        alpha = m
    return p, m_new, total, alpha


@gluon.jit
def _store(
    acc, o_desc, o_ptr, o_stride, buf, out_row, rows, head, D: gl.constexpr, OL: gl.constexpr,
):  # fmt: skip
    """A whole block goes out by TMA, a sequence's last block by masked stores: its other rows are the next
    sequence's.
    """
    o = acc.to(o_ptr.dtype.element_ty)
    if rows >= BLOCK:
        buf.store(o)
        fence_async_shared()
        tma.async_copy_shared_to_global(o_desc, [out_row, head * D], buf)
    else:
        r = gl.arange(0, BLOCK, gl.SliceLayout(1, OL))
        c = gl.arange(0, D, gl.SliceLayout(0, OL))
        base = o_ptr + out_row.to(gl.int64) * o_stride + head * D
        gl.store(base + (r * o_stride)[:, None] + c[None, :], o, mask=(r < rows)[:, None])


@gluon.jit
def _first(S, tail, scale, BN: gl.constexpr, SL: gl.constexpr, ACT: gl.constexpr):
    """The step on the last K tile, of which `tail` rows are the sequence's own: the only step that needs a mask."""
    inside = (gl.arange(0, BN, gl.SliceLayout(0, SL)) < tail)[None, :]
    if ACT == "softmax":
        S = gl.where(inside, S, float("-inf"))
        m = gl.max(S, 1) * scale
        p = gl.exp2(S * scale - m[:, None])
        total = gl.sum(p, 1)
    else:
        m = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, SL))
        total = m
        p = activate(gl.where(inside, S, 0.0) * scale, ACT)
    return p, m, total


@gluon.jit
def _finish(
    acc, m, total, out_scale, o_desc, o_ptr, o_stride, lse_ptr, heads, buf, out_row, rows, head,
    D: gl.constexpr, SL: gl.constexpr, OL: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    if ACT == "softmax":
        acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, OL))[:, None]
        r = gl.arange(0, BLOCK, gl.SliceLayout(1, SL))
        lse = (m + gl.log2(total)) * 0.6931471805599453
        gl.store(lse_ptr + (out_row + r).to(gl.int64) * heads + head, lse, mask=r < rows)
    else:
        acc = acc * out_scale
    _store(acc, o_desc, o_ptr, o_stride, buf, out_row, rows, head, D, OL)


@gluon.jit
def _no_keys(
    o_ptr, o_stride, lse_ptr, heads, out_row, rows, head, D: gl.constexpr, OL: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """Queries that see no key: O = 0, LSE = -inf."""
    r = gl.arange(0, BLOCK, gl.SliceLayout(1, OL))
    c = gl.arange(0, D, gl.SliceLayout(0, OL))
    base = o_ptr + out_row.to(gl.int64) * o_stride + head * D
    zeros = gl.zeros([BLOCK, D], o_ptr.dtype.element_ty, OL)
    gl.store(base + (r * o_stride)[:, None] + c[None, :], zeros, mask=(r < rows)[:, None])
    if ACT == "softmax":
        none = gl.full([BLOCK], float("-inf"), gl.float32, gl.SliceLayout(1, OL))
        gl.store(lse_ptr + (out_row + r).to(gl.int64) * heads + head, none, mask=r < rows)


@gluon.jit
def _pass(step, n, k_full, k_empty, v_full, v_empty, release, KS: gl.constexpr):
    """A consumer without rows in this tile keeps the ring of K and V turning."""
    for i in range(n):
        s = (step + i) % KS
        phase = ((step + i) // KS) & 1
        mbarrier.wait(k_full.index(s), phase)
        mbarrier.arrive(k_empty.index(s), count=1, pred=release)
        mbarrier.wait(v_full.index(s), phase)
        mbarrier.arrive(v_empty.index(s), count=1, pred=release)


@gluon.jit
def _across_consumer(
    W: gl.constexpr, problem, buffers, barriers,
    BN: gl.constexpr, D: gl.constexpr, NC: gl.constexpr, KS: gl.constexpr, QS: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """Q K^T of step i + 1 and P V of step i are in flight together, across tiles too; the softmax of step i + 1
    hides under P V.
    """
    o_desc, o_ptr, o_stride, lse_ptr, heads, tiles_ptr, count_ptr, scale, out_scale = problem
    q_buf, k_buf, v_buf = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    dtype: gl.constexpr = o_ptr.dtype.element_ty
    step = 0
    visit = 0
    ready = False
    S = gl.zeros([BLOCK, BN], gl.float32, SL)
    count = tile_count(count_ptr)
    _q, rows, _k, k_len, head, out_start = tile_record(tiles_ptr, 0, count)
    for t in range(count):
        _q1, rows1, _k1, k_len1, head1, out_start1 = tile_record(tiles_ptr, t + 1, count)
        n = gl.cdiv(k_len, BN)
        n1 = gl.cdiv(k_len1, BN)
        groups = gl.cdiv(rows, NC * BLOCK)
        for g in range(groups):
            # K and V of few keys stay in shared memory for all row groups of the tile.
            last = g == groups - 1
            release = last | (n > KS)
            mine = rows - (g * NC + W) * BLOCK
            out_row = out_start + (g * NC + W) * BLOCK
            next_n = gl.where(last, n1, n)
            next_rows = gl.where(last, rows1 - W * BLOCK, mine - NC * BLOCK)
            next_active = (next_rows > 0) & (next_n > 0)
            next_step = gl.where(release, step + n, step)
            next_release = gl.where(last, (rows1 <= NC * BLOCK) | (n1 > KS), (g == groups - 2) | (n > KS))
            slot = (visit % QS) * NC + W
            before = ((visit + QS - 1) % QS) * NC + W
            visit += 1
            if (mine > 0) & (n > 0):
                if not ready:
                    s = step % KS
                    mbarrier.wait(q_full.index(slot), ((visit - 1) // QS) & 1)
                    mbarrier.wait(k_full.index(s), (step // KS) & 1)
                    S = _scores(q_buf.index(slot), k_buf.index(s), BN, SL)
                    S = warpgroup_mma_wait(0, deps=(S,))
                    mbarrier.arrive(k_empty.index(s), count=1, pred=release)
                p, m, total = _first(S, k_len - (n - 1) * BN, scale, BN, SL, ACT)
                P = gl.convert_layout(p.to(dtype), PL)
                tma.store_wait(0)  # O of the visit before has left the buffer that it shares with Q
                mbarrier.arrive(q_empty.index(before), count=1, pred=visit > 1)
                acc = gl.zeros([BLOCK, D], gl.float32, OL)
                for i in range(n - 1):
                    s1 = (step + i + 1) % KS
                    s = (step + i) % KS
                    mbarrier.wait(k_full.index(s1), ((step + i + 1) // KS) & 1)
                    S = _scores(q_buf.index(slot), k_buf.index(s1), BN, SL)
                    mbarrier.wait(v_full.index(s), ((step + i) // KS) & 1)
                    acc = warpgroup_mma(P, v_buf.index(s), acc, is_async=True)
                    S = warpgroup_mma_wait(1, deps=(S,))
                    mbarrier.arrive(k_empty.index(s1), count=1, pred=release)
                    p, m, total, alpha = _weights(S, m, total, scale, ACT)
                    acc, P = warpgroup_mma_wait(0, deps=(acc, P))
                    mbarrier.arrive(v_empty.index(s), count=1, pred=release)
                    if ACT == "softmax":
                        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OL))[:, None]
                    P = gl.convert_layout(p.to(dtype), PL)
                # The last P V of this tile, together with the first Q K^T of the next.
                s = (step + n - 1) % KS
                mbarrier.wait(v_full.index(s), ((step + n - 1) // KS) & 1)
                if next_active:
                    slot1 = (visit % QS) * NC + W
                    s1 = next_step % KS
                    mbarrier.wait(q_full.index(slot1), (visit // QS) & 1)
                    mbarrier.wait(k_full.index(s1), (next_step // KS) & 1)
                    S = _scores(q_buf.index(slot1), k_buf.index(s1), BN, SL)
                    acc = warpgroup_mma(P, v_buf.index(s), acc, is_async=True)
                    S = warpgroup_mma_wait(1, deps=(S,))
                    mbarrier.arrive(k_empty.index(s1), count=1, pred=next_release)
                    acc, P = warpgroup_mma_wait(0, deps=(acc, P))
                else:
                    acc = warpgroup_mma(P, v_buf.index(s), acc, is_async=True)
                    acc, P = warpgroup_mma_wait(0, deps=(acc, P))
                mbarrier.arrive(v_empty.index(s), count=1, pred=release)
                ready = next_active
                _finish(
                    acc,
                    m,
                    total,
                    out_scale,
                    o_desc,
                    o_ptr,
                    o_stride,
                    lse_ptr,
                    heads,
                    q_buf.index(slot),
                    out_row,
                    mine,
                    head,
                    D,
                    SL,
                    OL,
                    ACT,
                )
            else:
                mbarrier.wait(q_full.index(slot), ((visit - 1) // QS) & 1)
                tma.store_wait(0)
                mbarrier.arrive(q_empty.index(before), count=1, pred=visit > 1)
                if mine > 0:
                    _no_keys(o_ptr, o_stride, lse_ptr, heads, out_row, mine, head, D, OL, ACT)
                if release:
                    _pass(step, n, k_full, k_empty, v_full, v_empty, True, KS)
                ready = False
            step = next_step
        rows, k_len, head, out_start = rows1, k_len1, head1, out_start1
    tma.store_wait(0)


@gluon.jit
def _consumer(
    W: gl.constexpr, problem, buffers, barriers,
    BN: gl.constexpr, D: gl.constexpr, NC: gl.constexpr, KS: gl.constexpr, QS: gl.constexpr, ACT: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """One row group a tile. One product after the other: needs few registers, so that a third consumer fits, and
    hides under the other two.

    AHEAD: Q K^T of step i + 1 and P V of step i are in flight together, inside a tile.
    """
    o_desc, o_ptr, o_stride, lse_ptr, heads, tiles_ptr, count_ptr, scale, out_scale = problem
    q_buf, k_buf, v_buf = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    dtype: gl.constexpr = o_ptr.dtype.element_ty
    step = 0
    count = tile_count(count_ptr)
    _q, rows, _k, k_len, head, out_start = tile_record(tiles_ptr, 0, count)
    for t in range(count):
        _q1, rows1, _k1, k_len1, head1, out_start1 = tile_record(tiles_ptr, t + 1, count)
        n = gl.cdiv(k_len, BN)
        mine = rows - W * BLOCK
        out_row = out_start + W * BLOCK
        slot = (t % QS) * NC + W
        previous = ((t + QS - 1) % QS) * NC + W
        q = q_buf.index(slot)
        mbarrier.wait(q_full.index(slot), (t // QS) & 1)
        if (mine > 0) & (n > 0):
            s = step % KS
            phase = (step // KS) & 1
            mbarrier.wait(k_full.index(s), phase)
            S = _scores(q, k_buf.index(s), BN, SL)
            tma.store_wait(0)  # O of the tile before has left the buffer that it shares with Q
            mbarrier.arrive(q_empty.index(previous), count=1, pred=t > 0)
            S = warpgroup_mma_wait(0, deps=(S,))
            mbarrier.arrive(k_empty.index(s), count=1)
            p, m, total = _first(S, k_len - (n - 1) * BN, scale, BN, SL, ACT)
            P = gl.convert_layout(p.to(dtype), PL)
            if AHEAD:
                acc = gl.zeros([BLOCK, D], gl.float32, OL)
                for i in range(1, n):
                    s1 = (step + i) % KS
                    s = (step + i - 1) % KS
                    mbarrier.wait(k_full.index(s1), ((step + i) // KS) & 1)
                    S = _scores(q, k_buf.index(s1), BN, SL)
                    mbarrier.wait(v_full.index(s), ((step + i - 1) // KS) & 1)
                    acc = warpgroup_mma(P, v_buf.index(s), acc, is_async=True)
                    S = warpgroup_mma_wait(1, deps=(S,))
                    mbarrier.arrive(k_empty.index(s1), count=1)
                    p, m, total, alpha = _weights(S, m, total, scale, ACT)
                    acc, P = warpgroup_mma_wait(0, deps=(acc, P))
                    mbarrier.arrive(v_empty.index(s), count=1)
                    if ACT == "softmax":
                        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OL))[:, None]
                    P = gl.convert_layout(p.to(dtype), PL)
                s = (step + n - 1) % KS
                mbarrier.wait(v_full.index(s), ((step + n - 1) // KS) & 1)
                acc = warpgroup_mma(P, v_buf.index(s), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(v_empty.index(s), count=1)
            else:
                mbarrier.wait(v_full.index(s), phase)
                acc = warpgroup_mma(
                    P, v_buf.index(s), gl.zeros([BLOCK, D], gl.float32, OL), use_acc=False, is_async=True
                )
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(v_empty.index(s), count=1)
                for i in range(1, n):
                    s = (step + i) % KS
                    phase = ((step + i) // KS) & 1
                    mbarrier.wait(k_full.index(s), phase)
                    S = _scores(q, k_buf.index(s), BN, SL)
                    S = warpgroup_mma_wait(0, deps=(S,))
                    mbarrier.arrive(k_empty.index(s), count=1)
                    p, m, total, alpha = _weights(S, m, total, scale, ACT)
                    if ACT == "softmax":
                        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OL))[:, None]
                    P = gl.convert_layout(p.to(dtype), PL)
                    mbarrier.wait(v_full.index(s), phase)
                    acc = warpgroup_mma(P, v_buf.index(s), acc, is_async=True)
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                    mbarrier.arrive(v_empty.index(s), count=1)
            _finish(
                acc,
                m,
                total,
                out_scale,
                o_desc,
                o_ptr,
                o_stride,
                lse_ptr,
                heads,
                q,
                out_row,
                mine,
                head,
                D,
                SL,
                OL,
                ACT,
            )
        else:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(previous), count=1, pred=t > 0)
            if mine > 0:
                _no_keys(o_ptr, o_stride, lse_ptr, heads, out_row, mine, head, D, OL, ACT)
            _pass(step, n, k_full, k_empty, v_full, v_empty, True, KS)
        step += n
        rows, k_len, head, out_start = rows1, k_len1, head1, out_start1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads"])
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, q_ptr, k_ptr, v_ptr, o_ptr, q_stride, k_stride, v_stride, o_stride,
    lse_ptr, heads, tiles_ptr, count_ptr, scale, out_scale,
    BN: gl.constexpr, D: gl.constexpr, NC: gl.constexpr, KS: gl.constexpr, QS: gl.constexpr, GROUP: gl.constexpr,
    ACT: gl.constexpr, PIPELINE: gl.constexpr, PREFETCH: gl.constexpr, REGS: gl.constexpr, LOADER_REGS: gl.constexpr,
):  # fmt: skip
    """O = softmax(scale Q K^T) V, or out_scale * act(scale Q K^T) V; for softmax `scale` holds log2(e) as a factor."""
    dtype: gl.constexpr = o_ptr.dtype.element_ty
    q_buf = gl.allocate_shared_memory(dtype, [QS * NC, BLOCK, D], q_desc.layout)
    k_buf = gl.allocate_shared_memory(dtype, [KS, BN, D], k_desc.layout)
    v_buf = gl.allocate_shared_memory(dtype, [KS, BN, D], v_desc.layout)
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
    gl.static_assert(NC == 2 or NC == 3)
    buffers = (q_buf, k_buf, v_buf)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    problem = (o_desc, o_ptr, o_stride, lse_ptr, heads, tiles_ptr, count_ptr, scale, out_scale)
    inputs = (q_desc, k_desc, v_desc, tiles_ptr, count_ptr, q_ptr, k_ptr, v_ptr, q_stride, k_stride, v_stride)
    AHEAD: gl.constexpr = PIPELINE == "ahead"
    if PIPELINE == "across":
        if NC == 2:
            gl.warp_specialize(
                [
                    (_across_consumer, (0, problem, buffers, barriers, BN, D, NC, KS, QS, ACT)),
                    (_across_consumer, (1, problem, buffers, barriers, BN, D, NC, KS, QS, ACT)),
                    (_producer, (inputs, buffers, barriers, BN, D, NC, KS, QS, GROUP, PREFETCH)),
                ],
                [4, 1],
                [REGS, LOADER_REGS],
            )
        else:
            gl.warp_specialize(
                [
                    (_across_consumer, (0, problem, buffers, barriers, BN, D, NC, KS, QS, ACT)),
                    (_across_consumer, (1, problem, buffers, barriers, BN, D, NC, KS, QS, ACT)),
                    (_across_consumer, (2, problem, buffers, barriers, BN, D, NC, KS, QS, ACT)),
                    (_producer, (inputs, buffers, barriers, BN, D, NC, KS, QS, GROUP, PREFETCH)),
                ],
                [4, 4, 1],
                [REGS, REGS, LOADER_REGS],
            )
    else:
        if NC == 2:
            gl.warp_specialize(
                [
                    (_consumer, (0, problem, buffers, barriers, BN, D, NC, KS, QS, ACT, AHEAD)),
                    (_consumer, (1, problem, buffers, barriers, BN, D, NC, KS, QS, ACT, AHEAD)),
                    (_producer, (inputs, buffers, barriers, BN, D, NC, KS, QS, GROUP, PREFETCH)),
                ],
                [4, 1],
                [REGS, LOADER_REGS],
            )
        else:
            gl.warp_specialize(
                [
                    (_consumer, (0, problem, buffers, barriers, BN, D, NC, KS, QS, ACT, AHEAD)),
                    (_consumer, (1, problem, buffers, barriers, BN, D, NC, KS, QS, ACT, AHEAD)),
                    (_consumer, (2, problem, buffers, barriers, BN, D, NC, KS, QS, ACT, AHEAD)),
                    (_producer, (inputs, buffers, barriers, BN, D, NC, KS, QS, GROUP, PREFETCH)),
                ],
                [4, 4, 1],
                [REGS, REGS, LOADER_REGS],
            )
