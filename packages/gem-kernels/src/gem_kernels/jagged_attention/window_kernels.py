"""Softmax attention through a window on Hopper: persistent Gluon kernels whose cost is linear in the sequence.

A program of one warpgroup walks tiles of 64 query rows (for dK and dV: of 64 keys). The tile stays in shared memory,
the other side passes by in steps of 64 rows, of which SLOTS are in flight or in use; the next tile and its first steps
are asked for before this one is finished. Two programs share an SM: one computes while the other waits. Whatever is a
whole tile comes and goes by TMA: registers that write rows of a product's layout straight to memory fill 16 bytes at a
time, which cost more than the products.

A step has a mask only where it is at an edge of the window or of the sequence. Rows past a sequence's end are the next
sequence's: they are read, and weighted by 0, which does not keep an infinity or a NaN out.

Backward: `query_gradient_kernel` makes dQ, and the statistics (LSE in base 2, delta = rowsum(dO o O) - dLSE; both
[H * T]) that `key_gradient_kernel` reads. No atomics, so every run gives the same bits.
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

ROWS = gl.constexpr(64)  # of a tile and of a step
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
def _barriers(N: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(N):
        mbarrier.init(barriers.index(n), count=1)
    return barriers


@gluon.jit
def _buffer(desc, N: gl.constexpr, D: gl.constexpr):
    return gl.allocate_shared_memory(desc.dtype, [N, ROWS, D], desc.layout)


@gluon.jit
def _steps(place, rows, other_len, before, after):
    """The other side's rows that own rows at `place`.. on the diagonal see: [lo, lo + 64 n)."""
    lo = gl.maximum(place - before, 0) // ROWS * ROWS
    hi = gl.minimum(place + rows + after, other_len)
    return lo, gl.where(rows > 0, gl.maximum(hi - lo + (ROWS - 1), 0) // ROWS, 0)


@gluon.jit
def _following(j, n, here, head, n1, there, head1, SLOTS: gl.constexpr):
    """What to load into the slot of step j of n: a step of this tile or, when it has no more, of the next; its first
    row, its head, and whether there is one.
    """
    later = j + SLOTS - n
    row = gl.where(later < 0, here + (j + SLOTS) * ROWS, there + later * ROWS)
    return row, gl.where(later < 0, head, head1), (later < 0) | (later < n1)


@gluon.jit
def _ask(descs, bufs, barrier, slot, row, head, some, D: gl.constexpr):
    """Ask for one slot of some tensors, if there is `some`."""
    mbarrier.expect(barrier, len(descs) * descs[0].block_type.nbytes, pred=some)
    for n in gl.static_range(len(descs)):
        tma.async_copy_global_to_shared(descs[n], [row, head * D], barrier, bufs[n].index(slot), pred=some)


@gluon.jit
def _limits(place, other_len, before, after):
    """The first row of the other side that each own row sees, and how many follow it, as unsigned numbers."""
    first = place - before
    last = gl.minimum(place + after, other_len - 1)
    none = last < first
    return gl.where(none, 1 << 30, first), gl.where(none, 0, last - first).to(gl.uint32)


@gluon.jit
def _edge(step, place, other_len, before, after):
    """Whether some own row does not see the whole of the step that begins at row `step` of the other side."""
    return (step < place + (ROWS - 1) - before) | (step + (ROWS - 1) > place + after) | (step + ROWS > other_len)


@gluon.jit
def _masked(x, step, limits, value: gl.constexpr, SL: gl.constexpr):
    first, width = limits
    other = step + gl.arange(0, ROWS, gl.SliceLayout(0, SL))
    seen = (other[None, :] - first[:, None]).to(gl.uint32) <= width[:, None]
    return gl.where(seen, x, value)


@gluon.jit
def _put(x, desc, ptr, stride, buf, row, rows, column, D: gl.constexpr, AL: gl.constexpr):
    """A whole tile leaves by TMA from `buf`, a sequence's last one by masked stores."""
    y = x.to(ptr.dtype.element_ty)
    if rows == ROWS:
        buf.store(y)
        fence_async_shared()
        tma.async_copy_shared_to_global(desc, [row, column], buf)
    else:
        r = gl.arange(0, ROWS, gl.SliceLayout(1, AL))
        c = gl.arange(0, D, gl.SliceLayout(0, AL))
        base = ptr + row.to(gl.int64) * stride + column
        gl.store(base + (r * stride)[:, None] + c[None, :], y, mask=(r < rows)[:, None])


@gluon.jit(do_not_specialize=["tiles", "left", "right"])
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, o_ptr, o_row, lse_ptr, records_ptr, tiles, left, right, scale,
    D: gl.constexpr, HEADS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """O and LSE; `scale` has log2(e) as a factor."""
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    q_buf, o_buf = _buffer(q_desc, 1, D), _buffer(o_desc, 1, D)
    descs = (k_desc, v_desc)
    bufs = (_buffer(k_desc, SLOTS, D), _buffer(v_desc, SLOTS, D))
    own, full = _barriers(1).index(0), _barriers(SLOTS)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, SL))
    programs = gl.num_programs(0)
    first_tile = gl.program_id(0)
    step = 0
    missing = SLOTS + 0  # so many first steps of the current tile have not been asked for
    visit = 0
    head, row, rows, place, other, other_len = _record(records_ptr, first_tile, tiles, HEADS)
    head1, row1, rows1, place1, other1, other_len1 = _record(records_ptr, first_tile + programs, tiles, HEADS)
    _ask((q_desc,), (q_buf,), own, 0, row, head, rows > 0, D)
    for tile in range(first_tile, tiles, programs):
        # Two tiles ahead, so that nothing waits for the load.
        head2, row2, rows2, place2, other2, other_len2 = _record(records_ptr, tile + 2 * programs, tiles, HEADS)
        lo, n = _steps(place, rows, other_len, left, right)
        lo1, n1 = _steps(place1, rows1, other_len1, left, right)
        if rows > 0:
            for j in gl.static_range(SLOTS):
                slot = (step + j) % SLOTS
                _ask(descs, bufs, full.index(slot), slot, other + lo + j * ROWS, head, (j < missing) & (j < n), D)
            limits = _limits(place + r, other_len, left, right)
            acc = gl.zeros([ROWS, D], gl.float32, AL)
            m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SL))
            total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SL))
            mbarrier.wait(own, visit & 1)
            for j in range(n):
                slot = (step + j) % SLOTS
                mbarrier.wait(full.index(slot), ((step + j) // SLOTS) & 1)
                none = gl.zeros([ROWS, ROWS], gl.float32, SL)
                S = warpgroup_mma(q_buf.index(0), bufs[0].index(slot).permute((1, 0)), none, use_acc=False)
                if _edge(lo + j * ROWS, place, other_len, left, right):
                    S = _masked(S, lo + j * ROWS, limits, float("-inf"), SL)
                m_new = gl.maximum(m, gl.max(S, 1) * scale)
                shift = gl.where(m_new == float("-inf"), 0.0, m_new)
                p = gl.exp2(S * scale - shift[:, None])
                alpha = gl.exp2(m - shift)
                total = total * alpha + gl.sum(p, 1)
                m = m_new
                acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, AL))[:, None]
                P = gl.convert_layout(p.to(o_ptr.dtype.element_ty), PL)
                acc = warpgroup_mma(P, bufs[1].index(slot), acc)
                at, whose, some = _following(j, n, other + lo, head, n1, other1 + lo1, head1, SLOTS)
                _ask(descs, bufs, full.index(slot), slot, at, whose, some, D)
            step += n
            missing = gl.maximum(SLOTS - n, 0)
            visit += 1
            _ask((q_desc,), (q_buf,), own, 0, row1, head1, rows1 > 0, D)
            some = total > 0.0
            safe = gl.where(some, total, 1.0)
            lse = gl.where(some, (m + gl.log2(safe)) * LN2, float("-inf"))
            gl.store(lse_ptr + (row + r).to(gl.int64) * HEADS + head, lse, mask=r < rows)
            acc = acc * gl.convert_layout(1.0 / safe, gl.SliceLayout(1, AL))[:, None]
            tma.store_wait(0)
            _put(acc, o_desc, o_ptr, o_row, o_buf.index(0), row, rows, head * D, D, AL)
        head, row, rows, place, other, other_len = head1, row1, rows1, place1, other1, other_len1
        head1, row1, rows1, place1, other1, other_len1 = head2, row2, rows2, place2, other2, other_len2
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "left", "right", "total_q"])
def query_gradient_kernel(
    q_desc, do_desc, k_desc, v_desc, o_desc, dq_desc, lse_ptr, dlse_ptr, lse2_ptr, delta_ptr, dq_ptr, dq_row,
    records_ptr, tiles, left, right, total_q, inner_scale, scale,
    D: gl.constexpr, HEADS: gl.constexpr, SLOTS: gl.constexpr, DLSE: gl.constexpr,
):  # fmt: skip
    """dQ and the statistics; `inner_scale` is `scale` log2(e). O comes into the buffer that dQ leaves from."""
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    own_descs = (q_desc, do_desc)
    own_bufs = (_buffer(q_desc, 1, D), _buffer(do_desc, 1, D))
    o_buf = _buffer(o_desc, 1, D)
    descs = (k_desc, v_desc)
    bufs = (_buffer(k_desc, SLOTS, D), _buffer(v_desc, SLOTS, D))
    own, o_full, full = _barriers(1).index(0), _barriers(1).index(0), _barriers(SLOTS)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, SL))
    programs = gl.num_programs(0)
    first_tile = gl.program_id(0)
    step = 0
    missing = SLOTS + 0
    visit = 0
    head, row, rows, place, other, other_len = _record(records_ptr, first_tile, tiles, HEADS)
    head1, row1, rows1, place1, other1, other_len1 = _record(records_ptr, first_tile + programs, tiles, HEADS)
    _ask(own_descs, own_bufs, own, 0, row, head, rows > 0, D)
    _ask((o_desc,), (o_buf,), o_full, 0, row, head, rows > 0, D)
    for tile in range(first_tile, tiles, programs):
        head2, row2, rows2, place2, other2, other_len2 = _record(records_ptr, tile + 2 * programs, tiles, HEADS)
        lo, n = _steps(place, rows, other_len, left, right)
        lo1, n1 = _steps(place1, rows1, other_len1, left, right)
        if rows > 0:
            for j in gl.static_range(SLOTS):
                slot = (step + j) % SLOTS
                _ask(descs, bufs, full.index(slot), slot, other + lo + j * ROWS, head, (j < missing) & (j < n), D)
            limits = _limits(place + r, other_len, left, right)
            at = (row + r).to(gl.int64) * HEADS + head
            lse = gl.load(lse_ptr + at, mask=r < rows, other=0.0)
            lse2 = gl.where(lse == float("-inf"), 0.0, lse * LOG2E)
            mbarrier.wait(own, visit & 1)
            mbarrier.wait(o_full, visit & 1)
            products = o_buf.index(0).load(AL).to(gl.float32) * own_bufs[1].index(0).load(AL).to(gl.float32)
            delta = gl.convert_layout(gl.sum(products, 1), gl.SliceLayout(1, SL))
            if DLSE:
                delta -= gl.load(dlse_ptr + at, mask=r < rows, other=0.0)
            place_of_row = head.to(gl.int64) * total_q + row + r
            gl.store(lse2_ptr + place_of_row, lse2, mask=r < rows)
            gl.store(delta_ptr + place_of_row, delta, mask=r < rows)
            dq = gl.zeros([ROWS, D], gl.float32, AL)
            for j in range(n):
                slot = (step + j) % SLOTS
                mbarrier.wait(full.index(slot), ((step + j) // SLOTS) & 1)
                none = gl.zeros([ROWS, ROWS], gl.float32, SL)
                k, v = bufs[0].index(slot), bufs[1].index(slot)
                S = warpgroup_mma(own_bufs[0].index(0), k.permute((1, 0)), none, use_acc=False, is_async=True)
                dP = warpgroup_mma(own_bufs[1].index(0), v.permute((1, 0)), none, use_acc=False, is_async=True)
                S = warpgroup_mma_wait(1, deps=(S,))
                p = gl.exp2(S * inner_scale - lse2[:, None])
                dP = warpgroup_mma_wait(0, deps=(dP,))
                ds = p * (dP - delta[:, None])
                if _edge(lo + j * ROWS, place, other_len, left, right):
                    ds = _masked(ds, lo + j * ROWS, limits, 0.0, SL)
                dq = warpgroup_mma(gl.convert_layout(ds.to(dq_ptr.dtype.element_ty), PL), k, dq)
                at_row, whose, some = _following(j, n, other + lo, head, n1, other1 + lo1, head1, SLOTS)
                _ask(descs, bufs, full.index(slot), slot, at_row, whose, some, D)
            step += n
            missing = gl.maximum(SLOTS - n, 0)
            visit += 1
            _ask(own_descs, own_bufs, own, 0, row1, head1, rows1 > 0, D)
            _put(dq * scale, dq_desc, dq_ptr, dq_row, o_buf.index(0), row, rows, head * D, D, AL)
            tma.store_wait(0)
            _ask((o_desc,), (o_buf,), o_full, 0, row1, head1, rows1 > 0, D)
        head, row, rows, place, other, other_len = head1, row1, rows1, place1, other1, other_len1
        head1, row1, rows1, place1, other1, other_len1 = head2, row2, rows2, place2, other2, other_len2
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "left", "right", "total_q"])
def key_gradient_kernel(
    k_desc, v_desc, q_desc, do_desc, lse2_ptr, delta_ptr, dk_desc, dv_desc, dk_ptr, dv_ptr, dk_row,
    records_ptr, tiles, left, right, total_q, inner_scale, scale,
    D: gl.constexpr, HEADS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """dK and dV of tiles of keys; scores are transposed, [keys, queries], so that P and dS are left operands."""
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    dtype: gl.constexpr = dk_ptr.dtype.element_ty
    own_descs = (k_desc, v_desc)
    own_bufs = (_buffer(k_desc, 1, D), _buffer(v_desc, 1, D))
    descs = (q_desc, do_desc)
    bufs = (_buffer(q_desc, SLOTS, D), _buffer(do_desc, SLOTS, D))
    own, full = _barriers(1).index(0), _barriers(SLOTS)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, SL))
    programs = gl.num_programs(0)
    first_tile = gl.program_id(0)
    step = 0
    missing = SLOTS + 0
    visit = 0
    head, row, rows, place, other, other_len = _record(records_ptr, first_tile, tiles, HEADS)
    head1, row1, rows1, place1, other1, other_len1 = _record(records_ptr, first_tile + programs, tiles, HEADS)
    _ask(own_descs, own_bufs, own, 0, row, head, rows > 0, D)
    for tile in range(first_tile, tiles, programs):
        lo, n = _steps(place, rows, other_len, right, left)
        lo1, n1 = _steps(place1, rows1, other_len1, right, left)
        if rows > 0:
            for j in gl.static_range(SLOTS):
                slot = (step + j) % SLOTS
                _ask(descs, bufs, full.index(slot), slot, other + lo + j * ROWS, head, (j < missing) & (j < n), D)
            limits = _limits(place + r, other_len, right, left)
            statistics = head.to(gl.int64) * total_q + other
            dk = gl.zeros([ROWS, D], gl.float32, AL)
            dv = gl.zeros([ROWS, D], gl.float32, AL)
            mbarrier.wait(own, visit & 1)
            for j in range(n):
                slot = (step + j) % SLOTS
                query = lo + j * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, SL))
                lse2 = gl.load(lse2_ptr + statistics + query, mask=query < other_len, other=0.0)
                delta = gl.load(delta_ptr + statistics + query, mask=query < other_len, other=0.0)
                mbarrier.wait(full.index(slot), ((step + j) // SLOTS) & 1)
                none = gl.zeros([ROWS, ROWS], gl.float32, SL)
                q, do = bufs[0].index(slot), bufs[1].index(slot)
                S = warpgroup_mma(own_bufs[0].index(0), q.permute((1, 0)), none, use_acc=False, is_async=True)
                dP = warpgroup_mma(own_bufs[1].index(0), do.permute((1, 0)), none, use_acc=False, is_async=True)
                S = warpgroup_mma_wait(1, deps=(S,))
                p = gl.exp2(S * inner_scale - lse2[None, :])
                dP = warpgroup_mma_wait(0, deps=(dP,))
                ds = p * (dP - delta[None, :])
                if _edge(lo + j * ROWS, place, other_len, right, left):
                    p = _masked(p, lo + j * ROWS, limits, 0.0, SL)
                    ds = _masked(ds, lo + j * ROWS, limits, 0.0, SL)
                P, dS = gl.convert_layout(p.to(dtype), PL), gl.convert_layout(ds.to(dtype), PL)
                dv = warpgroup_mma(P, do, dv, is_async=True)
                dk = warpgroup_mma(dS, q, dk, is_async=True)
                dv, dk, P, dS = warpgroup_mma_wait(0, deps=(dv, dk, P, dS))
                at, whose, some = _following(j, n, other + lo, head, n1, other1 + lo1, head1, SLOTS)
                _ask(descs, bufs, full.index(slot), slot, at, whose, some, D)
            step += n
            missing = gl.maximum(SLOTS - n, 0)
            visit += 1
            _put(dv, dv_desc, dv_ptr, dk_row, own_bufs[1].index(0), row, rows, head * D, D, AL)
            _put(dk * scale, dk_desc, dk_ptr, dk_row, own_bufs[0].index(0), row, rows, head * D, D, AL)
            tma.store_wait(0)
            _ask(own_descs, own_bufs, own, 0, row1, head1, rows1 > 0, D)
        head, row, rows, place, other, other_len = head1, row1, rows1, place1, other1, other_len1
        head1, row1, rows1, place1, other1, other_len1 = _record(records_ptr, tile + 2 * programs, tiles, HEADS)
    tma.store_wait(0)
