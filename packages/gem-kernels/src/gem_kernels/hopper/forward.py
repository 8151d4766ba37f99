"""The forward of jagged attention and GDPA on Hopper: one persistent, warp-specialised Gluon kernel.

A program owns one SM and walks a list of tiles (`gem_kernels.schedule`). One warp loads by TMA; NC consumer warpgroups own 64 query rows each
and share the K and V tiles. K tiles are visited from the last to the first, so that only the first step of a tile needs a mask.

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
def tile_record(tiles_ptr, t):
    """The record of this program's t-th tile."""
    programs = gl.num_programs(0)
    column = gl.program_id(0)
    column = gl.where(t % 2 == 0, column, programs - 1 - column)
    p = tiles_ptr + (t * programs + column) * FIELDS
    return gl.load(p), gl.load(p + 1), gl.load(p + 2), gl.load(p + 3), gl.load(p + 4), gl.load(p + 5)


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, tiles_ptr, count_ptr, q_buf, k_buf, v_buf, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    BN: gl.constexpr, D: gl.constexpr, NC: gl.constexpr, KS: gl.constexpr, QS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    step = 0
    for t in range(tile_count(count_ptr)):
        q_start, rows, k_start, k_len, head, _out = tile_record(tiles_ptr, t)
        n = gl.cdiv(k_len, BN)
        slot = t % QS
        phase = (t // QS) & 1
        for w in gl.static_range(NC):
            full = q_full.index(slot * NC + w)
            mbarrier.wait(q_empty.index(slot * NC + w), phase ^ 1)
            if (rows > w * BLOCK) & (n > 0):
                mbarrier.expect(full, q_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    q_desc, [q_start + w * BLOCK, head * D], full, q_buf.index(slot * NC + w)
                )
            else:
                mbarrier.arrive(full, count=1)
        column = (head // GROUP) * D
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


@gluon.jit
def _weights(s, m, l, scale, ACT: gl.constexpr):
    """One step of the online softmax, or the activation: weights, new maximum, new sum, and the factor of what was summed before."""
    if ACT == "softmax":
        m_new = gl.maximum(m, gl.max(s, 1) * scale)
        p = gl.exp2(s * scale - m_new[:, None])
        alpha = gl.exp2(m - m_new)
        l = l * alpha + gl.sum(p, 1)
    else:
        p = activate(s * scale, ACT)
        m_new = m
        alpha = m
    return p, m_new, l, alpha


@gluon.jit
def _store(
    acc, o_desc, o_ptr, o_stride, buf, out_row, rows, head, D: gl.constexpr, OL: gl.constexpr,
):  # fmt: skip
    """A whole block goes out by TMA, a sequence's last block by masked stores: its other rows are the next sequence's."""
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
def _consumer(
    W: gl.constexpr, o_desc, o_ptr, o_stride, lse_ptr, heads, tiles_ptr, count_ptr, scale, out_scale,
    q_buf, k_buf, v_buf, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    BN: gl.constexpr, D: gl.constexpr, NC: gl.constexpr, KS: gl.constexpr, QS: gl.constexpr,
    ACT: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    dtype: gl.constexpr = o_ptr.dtype.element_ty
    step = 0
    for t in range(tile_count(count_ptr)):
        _q_start, rows, _k_start, k_len, head, out_start = tile_record(tiles_ptr, t)
        n = gl.cdiv(k_len, BN)
        rows -= W * BLOCK
        out_row = out_start + W * BLOCK
        slot = (t % QS) * NC + W
        q = q_buf.index(slot)
        mbarrier.wait(q_full.index(slot), (t // QS) & 1)
        if (rows > 0) & (n > 0):
            # The last K tile: the only one that may reach past the sequence's end.
            s = step % KS
            phase = (step // KS) & 1
            mbarrier.wait(k_full.index(s), phase)
            S = warpgroup_mma(
                q, k_buf.index(s).permute((1, 0)), gl.zeros([BLOCK, BN], gl.float32, SL), use_acc=False, is_async=True
            )
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(((t + QS - 1) % QS) * NC + W), count=1, pred=t > 0)
            S = warpgroup_mma_wait(0, deps=(S,))
            mbarrier.arrive(k_empty.index(s), count=1)
            inside = gl.arange(0, BN, gl.SliceLayout(0, SL)) < k_len - (n - 1) * BN
            if ACT == "softmax":
                S = gl.where(inside[None, :], S, float("-inf"))
                m = gl.max(S, 1) * scale
                p = gl.exp2(S * scale - m[:, None])
                l = gl.sum(p, 1)
            else:
                m = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, SL))
                l = m
                p = activate(gl.where(inside[None, :], S, 0.0) * scale, ACT)
            P = gl.convert_layout(p.to(dtype), PL)
            acc = gl.zeros([BLOCK, D], gl.float32, OL)
            if AHEAD:
                # Q K^T of this tile and P V of the one before are in flight together; the softmax of this one hides under P V.
                for _ in range(n - 1):
                    s1 = (step + 1) % KS
                    mbarrier.wait(k_full.index(s1), ((step + 1) // KS) & 1)
                    S = warpgroup_mma(
                        q,
                        k_buf.index(s1).permute((1, 0)),
                        gl.zeros([BLOCK, BN], gl.float32, SL),
                        use_acc=False,
                        is_async=True,
                    )
                    s = step % KS
                    mbarrier.wait(v_full.index(s), (step // KS) & 1)
                    acc = warpgroup_mma(P, v_buf.index(s), acc, is_async=True)
                    S = warpgroup_mma_wait(1, deps=(S,))
                    mbarrier.arrive(k_empty.index(s1), count=1)
                    p, m, l, alpha = _weights(S, m, l, scale, ACT)
                    acc, P = warpgroup_mma_wait(0, deps=(acc, P))
                    mbarrier.arrive(v_empty.index(s), count=1)
                    if ACT == "softmax":
                        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OL))[:, None]
                    P = gl.convert_layout(p.to(dtype), PL)
                    step += 1
                s = step % KS
                mbarrier.wait(v_full.index(s), (step // KS) & 1)
                acc = warpgroup_mma(P, v_buf.index(s), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(v_empty.index(s), count=1)
                step += 1
            else:
                mbarrier.wait(v_full.index(s), phase)
                acc = warpgroup_mma(P, v_buf.index(s), acc, use_acc=False, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(v_empty.index(s), count=1)
                step += 1
                for _ in range(n - 1):
                    s = step % KS
                    phase = (step // KS) & 1
                    mbarrier.wait(k_full.index(s), phase)
                    S = warpgroup_mma(
                        q,
                        k_buf.index(s).permute((1, 0)),
                        gl.zeros([BLOCK, BN], gl.float32, SL),
                        use_acc=False,
                        is_async=True,
                    )
                    S = warpgroup_mma_wait(0, deps=(S,))
                    mbarrier.arrive(k_empty.index(s), count=1)
                    p, m, l, alpha = _weights(S, m, l, scale, ACT)
                    if ACT == "softmax":
                        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OL))[:, None]
                    P = gl.convert_layout(p.to(dtype), PL)
                    mbarrier.wait(v_full.index(s), phase)
                    acc = warpgroup_mma(P, v_buf.index(s), acc, is_async=True)
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                    mbarrier.arrive(v_empty.index(s), count=1)
                    step += 1
            if ACT == "softmax":
                acc = acc * gl.convert_layout(1.0 / l, gl.SliceLayout(1, OL))[:, None]
                r = gl.arange(0, BLOCK, gl.SliceLayout(1, SL))
                lse = (m + gl.log2(l)) * 0.6931471805599453
                gl.store(lse_ptr + (out_row + r).to(gl.int64) * heads + head, lse, mask=r < rows)
            else:
                acc = acc * out_scale
            _store(acc, o_desc, o_ptr, o_stride, q, out_row, rows, head, D, OL)
        else:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(((t + QS - 1) % QS) * NC + W), count=1, pred=t > 0)
            if rows > 0:  # no keys: O = 0, LSE = -inf
                r = gl.arange(0, BLOCK, gl.SliceLayout(1, OL))
                c = gl.arange(0, D, gl.SliceLayout(0, OL))
                base = o_ptr + out_row.to(gl.int64) * o_stride + head * D
                gl.store(
                    base + (r * o_stride)[:, None] + c[None, :],
                    gl.zeros([BLOCK, D], dtype, OL),
                    mask=(r < rows)[:, None],
                )
                if ACT == "softmax":
                    none = gl.full([BLOCK], float("-inf"), gl.float32, gl.SliceLayout(1, OL))
                    gl.store(lse_ptr + (out_row + r).to(gl.int64) * heads + head, none, mask=r < rows)
            for _ in range(n):  # a block past the sequence's end keeps the ring turning
                s = step % KS
                phase = (step // KS) & 1
                mbarrier.wait(k_full.index(s), phase)
                mbarrier.arrive(k_empty.index(s), count=1)
                mbarrier.wait(v_full.index(s), phase)
                mbarrier.arrive(v_empty.index(s), count=1)
                step += 1
    tma.store_wait(0)


@gluon.jit
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, o_ptr, o_stride, lse_ptr, heads, tiles_ptr, count_ptr, scale, out_scale,
    BN: gl.constexpr, D: gl.constexpr, NC: gl.constexpr, KS: gl.constexpr, QS: gl.constexpr, GROUP: gl.constexpr,
    ACT: gl.constexpr, AHEAD: gl.constexpr, REGS: gl.constexpr, LOADER_REGS: gl.constexpr,
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
    fence_async_shared()
    gl.static_assert(NC == 2 or NC == 3)
    if NC == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, o_desc, o_ptr, o_stride, lse_ptr, heads, tiles_ptr, count_ptr, scale, out_scale, q_buf, k_buf, v_buf,
                             q_full, q_empty, k_full, k_empty, v_full, v_empty, BN, D, NC, KS, QS, ACT, AHEAD)),
                (_consumer, (1, o_desc, o_ptr, o_stride, lse_ptr, heads, tiles_ptr, count_ptr, scale, out_scale, q_buf, k_buf, v_buf,
                             q_full, q_empty, k_full, k_empty, v_full, v_empty, BN, D, NC, KS, QS, ACT, AHEAD)),
                (_producer, (q_desc, k_desc, v_desc, tiles_ptr, count_ptr, q_buf, k_buf, v_buf,
                             q_full, q_empty, k_full, k_empty, v_full, v_empty, BN, D, NC, KS, QS, GROUP)),
            ],
            [4, 1],
            [REGS, LOADER_REGS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, o_desc, o_ptr, o_stride, lse_ptr, heads, tiles_ptr, count_ptr, scale, out_scale, q_buf, k_buf, v_buf,
                             q_full, q_empty, k_full, k_empty, v_full, v_empty, BN, D, NC, KS, QS, ACT, AHEAD)),
                (_consumer, (1, o_desc, o_ptr, o_stride, lse_ptr, heads, tiles_ptr, count_ptr, scale, out_scale, q_buf, k_buf, v_buf,
                             q_full, q_empty, k_full, k_empty, v_full, v_empty, BN, D, NC, KS, QS, ACT, AHEAD)),
                (_consumer, (2, o_desc, o_ptr, o_stride, lse_ptr, heads, tiles_ptr, count_ptr, scale, out_scale, q_buf, k_buf, v_buf,
                             q_full, q_empty, k_full, k_empty, v_full, v_empty, BN, D, NC, KS, QS, ACT, AHEAD)),
                (_producer, (q_desc, k_desc, v_desc, tiles_ptr, count_ptr, q_buf, k_buf, v_buf,
                             q_full, q_empty, k_full, k_empty, v_full, v_empty, BN, D, NC, KS, QS, GROUP)),
            ],
            [4, 4, 1],
            [REGS, REGS, LOADER_REGS],
        )  # fmt: skip
