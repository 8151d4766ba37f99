"""Softmax attention through a window on Hopper: persistent Gluon kernels whose cost is linear in the sequence.

A program walks tiles of BM query rows (for dK and dV: of BM keys), BM / 16 warps at once. The tile stays in shared
memory, the other side passes by in steps of 64 rows, of which two are in flight or in use; the next tile's first steps
are asked for before this one is finished. Two programs share an SM: one computes while the other waits.

Every step is masked: with a window of a few steps nearly every one is at an edge. Rows past a sequence's end are the
next sequence's: they are read, and weighted by 0, which does not keep an infinity or a NaN out.

Backward: `query_gradient_kernel` makes dQ, and the statistics [2, H, T] (LSE in base 2, delta = rowsum(dO o O) - dLSE)
that `key_gradient_kernel` reads. No atomics, so every run gives the same bits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

STEP = gl.constexpr(64)
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _record(records_ptr, tile, tiles, HEADS: gl.constexpr):
    """A tile's head, and its record: first row, rows (0 past the last tile), place on the diagonal, first row of the
    other side's sequence, its length.
    """
    p = records_ptr + (tile // HEADS) * 8
    inside = tile < tiles
    return (
        tile % HEADS,
        gl.load(p, mask=inside, other=0),
        gl.load(p + 1, mask=inside, other=0),
        gl.load(p + 2, mask=inside, other=0),
        gl.load(p + 3, mask=inside, other=0),
        gl.load(p + 4, mask=inside, other=0),
    )


@gluon.jit
def _steps(place, rows, other_len, before, after):
    """The other side's rows that own rows at `place`.. on the diagonal see: [lo, lo + 64 n)."""
    lo = gl.maximum(place - before, 0) // STEP * STEP
    hi = gl.minimum(place + rows + after, other_len)
    return lo, gl.where(rows > 0, gl.maximum(hi - lo + (STEP - 1), 0) // STEP, 0)


@gluon.jit
def _ask(descs, bufs, full, step, row, column, some, SLOTS: gl.constexpr):
    """Ask for one step of both tensors of the other side."""
    slot = step % SLOTS
    barrier = full.index(slot)
    mbarrier.expect(barrier, 2 * descs[0].block_type.nbytes, pred=some)
    for n in gl.static_range(2):
        tma.async_copy_global_to_shared(descs[n], [row, column], barrier, bufs[n].index(slot), pred=some)


@gluon.jit
def _limits(place, other_len, before, after):
    """The first row of the other side that each own row sees, and how many follow it, as unsigned numbers."""
    first = place - before
    last = gl.minimum(place + after, other_len - 1)
    none = last < first
    return gl.where(none, 1 << 30, first), gl.where(none, 0, last - first).to(gl.uint32)


@gluon.jit(do_not_specialize=["tiles", "left", "right"])
def forward_kernel(
    q_desc, k_desc, v_desc, o_ptr, o_row, lse_ptr, records_ptr, tiles, left, right,
    scale,
    BM: gl.constexpr, D: gl.constexpr, HEADS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """O and LSE; `scale` has log2(e) as a factor."""
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[BM // 16, 1], instr_shape=[16, 64, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[BM // 16, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    dtype: gl.constexpr = o_ptr.dtype.element_ty
    q_buf = gl.allocate_shared_memory(dtype, [BM, D], q_desc.layout)
    k_buf = gl.allocate_shared_memory(dtype, [SLOTS, STEP, D], k_desc.layout)
    v_buf = gl.allocate_shared_memory(dtype, [SLOTS, STEP, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for s in gl.static_range(SLOTS):
        mbarrier.init(full.index(s), count=1)
    descs = (k_desc, v_desc)
    bufs = (k_buf, v_buf)
    r = gl.arange(0, BM, gl.SliceLayout(1, SL))
    c = gl.arange(0, STEP, gl.SliceLayout(0, SL))
    programs = gl.num_programs(0)
    first_tile = gl.program_id(0)
    step = 0
    missing = SLOTS + 0  # so many first steps of the current tile have not been asked for
    visit = 0
    head, row, rows, place, other, other_len = _record(records_ptr, first_tile, tiles, HEADS)
    head1, row1, rows1, place1, other1, other_len1 = _record(records_ptr, first_tile + programs, tiles, HEADS)
    mbarrier.expect(q_full, q_desc.block_type.nbytes, pred=rows > 0)
    tma.async_copy_global_to_shared(q_desc, [row, head * D], q_full, q_buf, pred=rows > 0)
    for tile in range(first_tile, tiles, programs):
        # Two tiles ahead, so that nothing waits for the load.
        head2, row2, rows2, place2, other2, other_len2 = _record(records_ptr, tile + 2 * programs, tiles, HEADS)
        lo, n = _steps(place, rows, other_len, left, right)
        lo1, n1 = _steps(place1, rows1, other_len1, left, right)
        if rows > 0:
            column = head * D
            for j in gl.static_range(SLOTS):
                _ask(descs, bufs, full, step + j, other + lo + j * STEP, column, (j < missing) & (j < n), SLOTS)
            first, width = _limits(place + r, other_len, left, right)
            acc = gl.zeros([BM, D], gl.float32, AL)
            m = gl.full([BM], float("-inf"), gl.float32, gl.SliceLayout(1, SL))
            total = gl.zeros([BM], gl.float32, gl.SliceLayout(1, SL))
            mbarrier.wait(q_full, visit & 1)
            for j in range(n):
                slot = (step + j) % SLOTS
                mbarrier.wait(full.index(slot), ((step + j) // SLOTS) & 1)
                none = gl.zeros([BM, STEP], gl.float32, SL)
                S = warpgroup_mma(q_buf, k_buf.index(slot).permute((1, 0)), none, use_acc=False)
                seen = ((lo + j * STEP + c)[None, :] - first[:, None]).to(gl.uint32) <= width[:, None]
                S = gl.where(seen, S * scale, float("-inf"))
                m_new = gl.maximum(m, gl.max(S, 1))
                shift = gl.where(m_new == float("-inf"), 0.0, m_new)
                p = gl.exp2(S - shift[:, None])
                alpha = gl.exp2(m - shift)
                total = total * alpha + gl.sum(p, 1)
                m = m_new
                acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, AL))[:, None]
                P = gl.convert_layout(p.to(dtype), PL)
                acc = warpgroup_mma(P, v_buf.index(slot), acc)
                ahead = j + SLOTS
                later = ahead - n  # a step of the next tile, if this one has no more
                wanted = gl.where(later < 0, other + lo + ahead * STEP, other1 + lo1 + later * STEP)
                at = gl.where(later < 0, column, head1 * D)
                _ask(descs, bufs, full, step + j, wanted, at, (later < 0) | (later < n1), SLOTS)
            step += n
            missing = gl.maximum(SLOTS - n, 0)
            visit += 1
            mbarrier.expect(q_full, q_desc.block_type.nbytes, pred=rows1 > 0)
            tma.async_copy_global_to_shared(q_desc, [row1, head1 * D], q_full, q_buf, pred=rows1 > 0)
            some = total > 0.0
            safe = gl.where(some, total, 1.0)
            lse = gl.where(some, (m + gl.log2(safe)) * LN2, float("-inf"))
            gl.store(lse_ptr + (row + r).to(gl.int64) * HEADS + head, lse, mask=r < rows)
            acc = acc * gl.convert_layout(1.0 / safe, gl.SliceLayout(1, AL))[:, None]
            _put(acc, o_ptr, o_row, row, rows, column, BM, D, AL)
        head, row, rows, place, other, other_len = head1, row1, rows1, place1, other1, other_len1
        head1, row1, rows1, place1, other1, other_len1 = head2, row2, rows2, place2, other2, other_len2


@gluon.jit
def _put(acc, ptr, stride, row, rows, column, BM: gl.constexpr, D: gl.constexpr, AL: gl.constexpr):
    r = gl.arange(0, BM, gl.SliceLayout(1, AL))
    c = gl.arange(0, D, gl.SliceLayout(0, AL))
    base = ptr + row.to(gl.int64) * stride + column
    gl.store(base + (r * stride)[:, None] + c[None, :], acc.to(ptr.dtype.element_ty), mask=(r < rows)[:, None])


@gluon.jit(do_not_specialize=["tiles", "left", "right", "total_q"])
def query_gradient_kernel(
    q_desc, do_desc, k_desc, v_desc, o_ptr, o_row, lse_ptr, dlse_ptr, stats_ptr, dq_ptr, dq_row,
    records_ptr, tiles, left, right, total_q, inner_scale, scale,
    BM: gl.constexpr, D: gl.constexpr, HEADS: gl.constexpr, SLOTS: gl.constexpr, DLSE: gl.constexpr,
):  # fmt: skip
    """dQ and the statistics; `inner_scale` is `scale` log2(e)."""
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[BM // 16, 1], instr_shape=[16, 64, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[BM // 16, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    dtype: gl.constexpr = dq_ptr.dtype.element_ty
    q_buf = gl.allocate_shared_memory(dtype, [BM, D], q_desc.layout)
    do_buf = gl.allocate_shared_memory(dtype, [BM, D], do_desc.layout)
    k_buf = gl.allocate_shared_memory(dtype, [SLOTS, STEP, D], k_desc.layout)
    v_buf = gl.allocate_shared_memory(dtype, [SLOTS, STEP, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for s in gl.static_range(SLOTS):
        mbarrier.init(full.index(s), count=1)
    descs = (k_desc, v_desc)
    bufs = (k_buf, v_buf)
    r = gl.arange(0, BM, gl.SliceLayout(1, SL))
    c = gl.arange(0, STEP, gl.SliceLayout(0, SL))
    programs = gl.num_programs(0)
    first_tile = gl.program_id(0)
    step = 0
    missing = SLOTS + 0
    visit = 0
    head, row, rows, place, other, other_len = _record(records_ptr, first_tile, tiles, HEADS)
    head1, row1, rows1, place1, other1, other_len1 = _record(records_ptr, first_tile + programs, tiles, HEADS)
    _ask_own((q_desc, do_desc), (q_buf, do_buf), q_full, row, head * D, rows > 0)
    for tile in range(first_tile, tiles, programs):
        # Two tiles ahead, so that nothing waits for the load.
        head2, row2, rows2, place2, other2, other_len2 = _record(records_ptr, tile + 2 * programs, tiles, HEADS)
        lo, n = _steps(place, rows, other_len, left, right)
        lo1, n1 = _steps(place1, rows1, other_len1, left, right)
        if rows > 0:
            column = head * D
            for j in gl.static_range(SLOTS):
                _ask(descs, bufs, full, step + j, other + lo + j * STEP, column, (j < missing) & (j < n), SLOTS)
            first, width = _limits(place + r, other_len, left, right)
            ra = gl.arange(0, BM, gl.SliceLayout(1, AL))
            ca = gl.arange(0, D, gl.SliceLayout(0, AL))
            base = o_ptr + row.to(gl.int64) * o_row + column
            o = gl.load(base + (ra * o_row)[:, None] + ca[None, :], mask=(ra < rows)[:, None], other=0.0)
            at = (row + r).to(gl.int64) * HEADS + head
            lse = gl.load(lse_ptr + at, mask=r < rows, other=0.0)
            lse2 = gl.where(lse == float("-inf"), 0.0, lse * LOG2E)
            mbarrier.wait(q_full, visit & 1)
            delta = gl.convert_layout(
                gl.sum(o.to(gl.float32) * do_buf.load(AL).to(gl.float32), 1), gl.SliceLayout(1, SL)
            )
            if DLSE:
                delta -= gl.load(dlse_ptr + at, mask=r < rows, other=0.0)
            stats = stats_ptr + head.to(gl.int64) * total_q + row
            gl.store(stats + r, lse2, mask=r < rows)
            gl.store(stats + total_q.to(gl.int64) * HEADS + r, delta, mask=r < rows)
            dq = gl.zeros([BM, D], gl.float32, AL)
            for j in range(n):
                slot = (step + j) % SLOTS
                mbarrier.wait(full.index(slot), ((step + j) // SLOTS) & 1)
                none = gl.zeros([BM, STEP], gl.float32, SL)
                S = warpgroup_mma(q_buf, k_buf.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
                dP = warpgroup_mma(do_buf, v_buf.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
                S = warpgroup_mma_wait(1, deps=(S,))
                seen = ((lo + j * STEP + c)[None, :] - first[:, None]).to(gl.uint32) <= width[:, None]
                p = gl.exp2(S * inner_scale - lse2[:, None])
                dP = warpgroup_mma_wait(0, deps=(dP,))
                ds = gl.where(seen, p * (dP - delta[:, None]), 0.0)
                dq = warpgroup_mma(gl.convert_layout(ds.to(dtype), PL), k_buf.index(slot), dq)
                ahead = j + SLOTS
                later = ahead - n
                wanted = gl.where(later < 0, other + lo + ahead * STEP, other1 + lo1 + later * STEP)
                at_column = gl.where(later < 0, column, head1 * D)
                _ask(descs, bufs, full, step + j, wanted, at_column, (later < 0) | (later < n1), SLOTS)
            step += n
            missing = gl.maximum(SLOTS - n, 0)
            visit += 1
            _ask_own((q_desc, do_desc), (q_buf, do_buf), q_full, row1, head1 * D, rows1 > 0)
            _put(dq * scale, dq_ptr, dq_row, row, rows, column, BM, D, AL)
        head, row, rows, place, other, other_len = head1, row1, rows1, place1, other1, other_len1
        head1, row1, rows1, place1, other1, other_len1 = head2, row2, rows2, place2, other2, other_len2


@gluon.jit
def _ask_own(descs, bufs, full, row, column, some):
    mbarrier.expect(full, 2 * descs[0].block_type.nbytes, pred=some)
    for n in gl.static_range(2):
        tma.async_copy_global_to_shared(descs[n], [row, column], full, bufs[n], pred=some)


@gluon.jit(do_not_specialize=["tiles", "left", "right", "total_q"])
def key_gradient_kernel(
    k_desc, v_desc, q_desc, do_desc, stats_ptr, dk_ptr, dv_ptr, dk_row,
    records_ptr, tiles, left, right, total_q, inner_scale, scale,
    BM: gl.constexpr, D: gl.constexpr, HEADS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """dK and dV of tiles of keys; scores are transposed, [keys, queries], so that P and dS are left operands."""
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[BM // 16, 1], instr_shape=[16, 64, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[BM // 16, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    dtype: gl.constexpr = dk_ptr.dtype.element_ty
    k_buf = gl.allocate_shared_memory(dtype, [BM, D], k_desc.layout)
    v_buf = gl.allocate_shared_memory(dtype, [BM, D], v_desc.layout)
    q_buf = gl.allocate_shared_memory(dtype, [SLOTS, STEP, D], q_desc.layout)
    do_buf = gl.allocate_shared_memory(dtype, [SLOTS, STEP, D], do_desc.layout)
    own_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(own_full, count=1)
    for s in gl.static_range(SLOTS):
        mbarrier.init(full.index(s), count=1)
    descs = (q_desc, do_desc)
    bufs = (q_buf, do_buf)
    r = gl.arange(0, BM, gl.SliceLayout(1, SL))
    c = gl.arange(0, STEP, gl.SliceLayout(0, SL))
    programs = gl.num_programs(0)
    first_tile = gl.program_id(0)
    step = 0
    missing = SLOTS + 0
    visit = 0
    head, row, rows, place, other, other_len = _record(records_ptr, first_tile, tiles, HEADS)
    head1, row1, rows1, place1, other1, other_len1 = _record(records_ptr, first_tile + programs, tiles, HEADS)
    _ask_own((k_desc, v_desc), (k_buf, v_buf), own_full, row, head * D, rows > 0)
    for tile in range(first_tile, tiles, programs):
        # Two tiles ahead, so that nothing waits for the load.
        head2, row2, rows2, place2, other2, other_len2 = _record(records_ptr, tile + 2 * programs, tiles, HEADS)
        lo, n = _steps(place, rows, other_len, right, left)
        lo1, n1 = _steps(place1, rows1, other_len1, right, left)
        if rows > 0:
            column = head * D
            for j in gl.static_range(SLOTS):
                _ask(descs, bufs, full, step + j, other + lo + j * STEP, column, (j < missing) & (j < n), SLOTS)
            first, width = _limits(place + r, other_len, right, left)
            lse_at = stats_ptr + head.to(gl.int64) * total_q + other
            delta_at = lse_at + total_q.to(gl.int64) * HEADS
            dk = gl.zeros([BM, D], gl.float32, AL)
            dv = gl.zeros([BM, D], gl.float32, AL)
            mbarrier.wait(own_full, visit & 1)
            for j in range(n):
                slot = (step + j) % SLOTS
                query = lo + j * STEP + c
                lse2 = gl.load(lse_at + query, mask=query < other_len, other=0.0)
                delta = gl.load(delta_at + query, mask=query < other_len, other=0.0)
                mbarrier.wait(full.index(slot), ((step + j) // SLOTS) & 1)
                none = gl.zeros([BM, STEP], gl.float32, SL)
                S = warpgroup_mma(k_buf, q_buf.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
                dP = warpgroup_mma(v_buf, do_buf.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
                S = warpgroup_mma_wait(1, deps=(S,))
                seen = (query[None, :] - first[:, None]).to(gl.uint32) <= width[:, None]
                p = gl.where(seen, gl.exp2(S * inner_scale - lse2[None, :]), 0.0)
                P = gl.convert_layout(p.to(dtype), PL)
                dP = warpgroup_mma_wait(0, deps=(dP,))
                ds = gl.where(seen, p * (dP - delta[None, :]), 0.0)
                dS = gl.convert_layout(ds.to(dtype), PL)
                dv = warpgroup_mma(P, do_buf.index(slot), dv, is_async=True)
                dk = warpgroup_mma(dS, q_buf.index(slot), dk, is_async=True)
                dv, dk, P, dS = warpgroup_mma_wait(0, deps=(dv, dk, P, dS))
                ahead = j + SLOTS
                later = ahead - n
                wanted = gl.where(later < 0, other + lo + ahead * STEP, other1 + lo1 + later * STEP)
                at_column = gl.where(later < 0, column, head1 * D)
                _ask(descs, bufs, full, step + j, wanted, at_column, (later < 0) | (later < n1), SLOTS)
            step += n
            missing = gl.maximum(SLOTS - n, 0)
            visit += 1
            _ask_own((k_desc, v_desc), (k_buf, v_buf), own_full, row1, head1 * D, rows1 > 0)
            _put(dk * scale, dk_ptr, dk_row, row, rows, column, BM, D, AL)
            _put(dv, dv_ptr, dk_row, row, rows, column, BM, D, AL)
        head, row, rows, place, other, other_len = head1, row1, rows1, place1, other1, other_len1
        head1, row1, rows1, place1, other1, other_len1 = head2, row2, rows2, place2, other2, other_len2
