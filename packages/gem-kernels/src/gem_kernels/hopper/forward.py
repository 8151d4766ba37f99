"""The forward of jagged attention and GDPA on Hopper: one persistent, warp-specialised Gluon kernel.

A program owns one SM and walks a list of tiles (`gem_kernels.schedule`). One warp loads by TMA; NC consumer warpgroups
own 64 query rows each and share the K and V tiles. K tiles are visited from the last to the first, so that without a
mask only the first step of a tile needs one.

Shapes: Q [Tq, H, DIM], K and V [Tk, Hkv, DIM] as descriptors of one head's rows, DIM up to D: what is over reads as 0;
O [Tq, H, DIM] contiguous, LSE [Tq, H] float32.
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
RECORDS = gl.constexpr(4)  # tile records in shared memory: how far the loaders run ahead


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
def _fields(x, L: gl.constexpr):
    """(own_start, rows, other_start, other_len, head, out_start, position) of a record; every thread holds all of x."""
    i = gl.arange(0, FIELDS, L)
    return (
        gl.sum(gl.where(i == 0, x, 0), 0),
        gl.sum(gl.where(i == 1, x, 0), 0),
        gl.sum(gl.where(i == 2, x, 0), 0),
        gl.sum(gl.where(i == 3, x, 0), 0),
        gl.sum(gl.where(i == 4, x, 0), 0),
        gl.sum(gl.where(i == 5, x, 0), 0),
        gl.sum(gl.where(i == 7, x, 0), 0),
    )


@gluon.jit
def _next(cursor_ptr):
    """How many tiles were taken before this one; for a partition of one warp."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 lane, old;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        mov.u32 old, 0;
        @first atom.global.add.u32 old, [$1], 1;
        shfl.sync.idx.b32 $0, old, 0, 31, 0xffffffff;
        }""",
        "=r,l", [cursor_ptr.to(gl.int64)], gl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def _keys(position, rows, k_len, left, right, BN: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """The keys that a tile's rows see: the first one, and how many steps of BN keys there are from it."""
    lo = 0
    hi = k_len
    if RIGHT:
        hi = gl.minimum(k_len, gl.maximum(position + rows + right, 0))
    if LEFT:
        lo = gl.minimum(gl.maximum(position - left, 0), k_len)
    return lo, gl.cdiv(gl.maximum(hi - lo, 0), BN)


@gluon.jit
def _query_loader(
    inputs, records, q_buf, q_full, q_empty, window,
    BN: gl.constexpr, NC: gl.constexpr, QS: gl.constexpr, RESIDENT: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Takes tiles off the list, the largest first, tells the other partitions of each, and loads its queries."""
    q_desc, tiles_ptr, count_ptr, cursor_ptr, own_ptr = inputs
    record, record_full, record_empty = records
    left, right = window
    L: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [1], [0])
    i = gl.arange(0, FIELDS, L)
    total = gl.load(count_ptr)
    t = gl.program_id(0)
    tile = 0
    visit = 0
    while t >= 0:
        x = gl.load(tiles_ptr + t.to(gl.int64) * FIELDS + i, mask=(i >= 0) & (t < total), other=0)
        if LEFT or RIGHT:  # in place of the first block: where the first query stands on the diagonal
            b = 0 if SHARED else gl.sum(gl.where(i == 6, x, 0), 0)
            q_len = (gl.load(own_ptr + b + 1) - gl.load(own_ptr + b)).to(gl.int32)
            first_block = gl.sum(gl.where(i == 7, x, 0), 0)
            k_len = gl.sum(gl.where(i == 3, x, 0), 0)
            x = gl.where(i == 7, first_block * BLOCK + k_len - q_len, x)
        s = tile % RECORDS
        mbarrier.wait(record_empty.index(s), ((tile // RECORDS) & 1) ^ 1)
        record.index(s).store(x)
        mbarrier.arrive(record_full.index(s), count=1)
        if t < total:
            taken = _next(cursor_ptr)
            if taken == total - 1:  # nobody takes another: ready for the next launch
                gl.store(cursor_ptr, 0)
            q_start, rows, _k_start, k_len, head, _out_start, position = _fields(x, L)
            _lo, n = _keys(position, rows, k_len, left, right, BN, LEFT, RIGHT)
            groups = 1
            if RESIDENT:
                groups = gl.cdiv(rows, NC * BLOCK)
            for g in range(groups):
                slot = visit % QS
                phase = (visit // QS) & 1
                for w in gl.static_range(NC):
                    full = q_full.index(slot * NC + w)
                    mbarrier.wait(q_empty.index(slot * NC + w), phase ^ 1)
                    first = (g * NC + w) * BLOCK
                    if (rows > first) & (n > 0):
                        mbarrier.expect(full, q_desc.block_type.nbytes)
                        tma.async_copy_global_to_shared(
                            q_desc, [q_start + first, head, 0], full, q_buf.index(slot * NC + w)
                        )
                    else:
                        mbarrier.arrive(full, count=1)
                visit += 1
            t = gl.num_programs(0) + taken
        else:
            t = -1
        tile += 1


@gluon.jit
def _key_loader(
    inputs, records, buffers, barriers, window,
    BN: gl.constexpr, NC: gl.constexpr, KS: gl.constexpr, GROUP: gl.constexpr,
    RESIDENT: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """Keeps the rings of K and V full."""
    k_desc, v_desc = inputs
    record, record_full, record_empty = records
    k_buf, v_buf = buffers
    k_full, k_empty, v_full, v_empty = barriers
    left, right = window
    L: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [1], [0])
    step = 0
    tile = 0
    rows = 1
    while rows > 0:
        r = tile % RECORDS
        mbarrier.wait(record_full.index(r), (tile // RECORDS) & 1)
        _q, rows, k_start, k_len, head, _out, position = _fields(record.index(r).load(L), L)
        mbarrier.arrive(record_empty.index(r), count=1)
        tile += 1
        lo, n = _keys(position, rows, k_len, left, right, BN, LEFT, RIGHT)
        steps = n
        if RESIDENT:
            steps = gl.where(n > KS, n * gl.cdiv(rows, NC * BLOCK), n)
        steps = gl.where(rows > 0, steps, 0)
        first = k_start + lo
        i = n - 1
        for _ in range(steps):
            s = step % KS
            phase = (step // KS) & 1
            at = [first + i * BN, head // GROUP, 0]
            mbarrier.wait(k_empty.index(s), phase ^ 1)
            mbarrier.expect(k_full.index(s), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, at, k_full.index(s), k_buf.index(s))
            mbarrier.wait(v_empty.index(s), phase ^ 1)
            mbarrier.expect(v_full.index(s), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(v_desc, at, v_full.index(s), v_buf.index(s))
            i = gl.where(i == 0, n - 1, i - 1)
            step += 1


@gluon.jit
def _scores(q, k, N: gl.constexpr, SL: gl.constexpr):
    """Q K^T [BLOCK, N], issued and not waited for."""
    return warpgroup_mma(q, k.permute((1, 0)), gl.zeros([BLOCK, N], gl.float32, SL), use_acc=False, is_async=True)


@gluon.jit
def _weights(s, m, total, scale, MASKED: gl.constexpr, ACT: gl.constexpr):
    """One step of the online softmax, or the activation: weights, new maximum, new sum, and the factor of what was
    summed before. MASKED: a row may have seen no key yet.
    """
    if ACT == "softmax":
        m_new = gl.maximum(m, gl.max(s, 1) * scale)
        shift = m_new
        if MASKED:
            shift = gl.where(m_new == float("-inf"), 0.0, m_new)
        p = gl.exp2(s * scale - shift[:, None])
        alpha = gl.exp2(m - shift)
        total = total * alpha + gl.sum(p, 1)
    else:
        p = activate(s * scale, ACT)
        m_new = m
        alpha = m
    return p, m_new, total, alpha


@gluon.jit
def _first(S, tail, scale, N: gl.constexpr, SL: gl.constexpr, ACT: gl.constexpr):
    """The weights of the last K tile, of which `tail` rows are the sequence's own."""
    if tail < N:
        inside = (gl.arange(0, N, gl.SliceLayout(0, SL)) < tail)[None, :]
        hidden: gl.constexpr = float("-inf") if ACT == "softmax" else 0.0
        S = gl.where(inside, S, hidden)
    if ACT == "softmax":
        m = gl.max(S, 1) * scale
        p = gl.exp2(S * scale - m[:, None])
        total = gl.sum(p, 1)
    else:
        m = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, SL))
        total = m
        p = activate(S * scale, ACT)
    return p, m, total


@gluon.jit
def _hidden(
    S, key, position, k_len, window, value: gl.constexpr,
    BN: gl.constexpr, SL: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """S of keys key.. and queries position.., with `value` where a query does not see a key."""
    left, right = window
    last = key + BN
    edge = last > k_len
    if RIGHT:
        edge = edge | (last > position + right + 1)
    if LEFT:
        edge = edge | (key < position + BLOCK - 1 - left)
    if edge:
        col = (key + gl.arange(0, BN, gl.SliceLayout(0, SL)))[None, :]
        row = (position + gl.arange(0, BLOCK, gl.SliceLayout(1, SL)))[:, None]
        seen = col < k_len
        if RIGHT:
            seen = seen & (col <= row + right)
        if LEFT:
            seen = seen & (col >= row - left)
        S = gl.where(seen, S, value)
    return S


@gluon.jit
def _finish(
    acc, m, total, out, buf, out_row, rows, head,
    D: gl.constexpr, DIM: gl.constexpr, SL: gl.constexpr, OL: gl.constexpr, ACT: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """O and LSE of one block. A whole block goes out by TMA, a sequence's last block by masked stores: its other rows
    are the next sequence's.
    """
    o_desc, o_ptr, lse_ptr, heads, out_scale = out
    if ACT == "softmax":
        if MASKED:  # a row that sees no key: O = 0, LSE = -inf
            inverse = 1.0 / gl.where(total == 0.0, 1.0, total)
        else:
            inverse = 1.0 / total
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, OL))[:, None]
    else:
        acc = acc * out_scale
    flat = buf.reshape([BLOCK, D])
    flat.store(acc.to(o_ptr.dtype.element_ty))
    fence_async_shared()
    if rows >= BLOCK:
        tma.async_copy_shared_to_global(o_desc, [out_row, head, 0], buf)
    else:
        RL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
        r = gl.arange(0, BLOCK, gl.SliceLayout(1, RL))
        c = gl.arange(0, D, gl.SliceLayout(0, RL))
        base = o_ptr + (out_row.to(gl.int64) * heads + head) * DIM
        inside = (r < rows)[:, None] & (c < DIM)[None, :]
        gl.store(base + (r * (heads * DIM))[:, None] + c[None, :], flat.load(RL), mask=inside)
    if ACT == "softmax":  # last: a fence waits for the global stores before it
        r = gl.arange(0, BLOCK, gl.SliceLayout(1, SL))
        lse = (m + gl.log2(total)) * 0.6931471805599453
        gl.store(lse_ptr + (out_row + r).to(gl.int64) * heads + head, lse, mask=r < rows)


@gluon.jit
def _no_keys(out, out_row, rows, head, D: gl.constexpr, DIM: gl.constexpr, OL: gl.constexpr, ACT: gl.constexpr):
    """Queries that see no key: O = 0, LSE = -inf."""
    _o_desc, o_ptr, lse_ptr, heads, _out_scale = out
    r = gl.arange(0, BLOCK, gl.SliceLayout(1, OL))
    c = gl.arange(0, D, gl.SliceLayout(0, OL))
    base = o_ptr + (out_row.to(gl.int64) * heads + head) * DIM
    inside = (r < rows)[:, None] & (c < DIM)[None, :]
    gl.store(
        base + (r * (heads * DIM))[:, None] + c[None, :],
        gl.zeros([BLOCK, D], o_ptr.dtype.element_ty, OL),
        mask=inside,
    )
    if ACT == "softmax":
        none = gl.full([BLOCK], float("-inf"), gl.float32, gl.SliceLayout(1, OL))
        gl.store(lse_ptr + (out_row + r).to(gl.int64) * heads + head, none, mask=r < rows)


@gluon.jit
def _pass(step, n, k_full, k_empty, v_full, v_empty, KS: gl.constexpr):
    """A consumer without rows in this tile keeps the ring of K and V turning."""
    for i in range(n):
        s = (step + i) % KS
        phase = ((step + i) // KS) & 1
        mbarrier.wait(k_full.index(s), phase)
        mbarrier.arrive(k_empty.index(s), count=1)
        mbarrier.wait(v_full.index(s), phase)
        mbarrier.arrive(v_empty.index(s), count=1)


@gluon.jit
def _begin(
    q, k, v, tail, scale, step, release, before, k_full, k_empty, v_full, v_empty,
    BN: gl.constexpr, D: gl.constexpr, KS: gl.constexpr, SL: gl.constexpr, OL: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """The first step of a tile: O so far, maximum and sum."""
    s = step % KS
    phase = (step // KS) & 1
    q_empty, has_before = before
    mbarrier.wait(k_full.index(s), phase)
    S = _scores(q, k, BN, SL)
    tma.store_wait(0)  # O of the visit before has left the buffer that it shares with Q
    mbarrier.arrive(q_empty, count=1, pred=has_before)
    S = warpgroup_mma_wait(0, deps=(S,))
    mbarrier.arrive(k_empty.index(s), count=1, pred=release)
    p, m, total = _first(S, tail, scale, BN, SL, ACT)
    P = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, OL, 2))
    mbarrier.wait(v_full.index(s), phase)
    acc = warpgroup_mma(P, v, gl.zeros([BLOCK, D], gl.float32, OL), use_acc=False, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(s), count=1, pred=release)
    return acc, m, total


@gluon.jit
def _consumer(
    W: gl.constexpr, scale, out, records, buffers, barriers, window,
    BN: gl.constexpr, D: gl.constexpr, DIM: gl.constexpr, NC: gl.constexpr, KS: gl.constexpr, QS: gl.constexpr,
    ACT: gl.constexpr, RESIDENT: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """One product after the other: needs few registers, so that a third consumer fits, and hides under the others.

    RESIDENT: a tile has several row groups, and K and V of few keys stay in shared memory for all of them.
    """
    record, record_full, record_empty = records
    q_buf, k_buf, v_buf = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    left, right = window
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    MASKED: gl.constexpr = LEFT or RIGHT
    dtype: gl.constexpr = q_buf.dtype
    step = 0
    visit = 0
    tile = 0
    rows = 1
    RL: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    while rows > 0:
        r = tile % RECORDS
        mbarrier.wait(record_full.index(r), (tile // RECORDS) & 1)
        _q, rows, _k, k_len, head, out_start, position = _fields(record.index(r).load(RL), RL)
        mbarrier.arrive(record_empty.index(r), count=1)
        tile += 1
        lo, n = _keys(position, rows, k_len, left, right, BN, LEFT, RIGHT)
        groups = gl.where(rows > 0, 1, 0)
        if RESIDENT:
            groups = gl.cdiv(rows, NC * BLOCK)
        for g in range(groups):
            release = True
            if RESIDENT:
                release = (g == groups - 1) | (n > KS)
            mine = rows - (g * NC + W) * BLOCK
            out_row = out_start + (g * NC + W) * BLOCK
            slot = (visit % QS) * NC + W
            before = q_empty.index(((visit + QS - 1) % QS) * NC + W)
            q_here = q_buf.index(slot)
            q = q_here.reshape([BLOCK, D])
            mbarrier.wait(q_full.index(slot), (visit // QS) & 1)
            if (mine > 0) & (n > 0):
                if MASKED:
                    tma.store_wait(0)
                    mbarrier.arrive(before, count=1, pred=visit > 0)
                    acc = gl.zeros([BLOCK, D], gl.float32, OL)
                    m = gl.full([BLOCK], float("-inf"), gl.float32, gl.SliceLayout(1, SL))
                    total = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, SL))
                    begin = 0
                else:
                    s = step % KS
                    tail = k_len - (n - 1) * BN
                    acc, m, total = _begin(
                        q, k_buf.index(s).reshape([BN, D]), v_buf.index(s).reshape([BN, D]), tail, scale, step,
                        release, (before, visit > 0), k_full, k_empty, v_full, v_empty, BN, D, KS, SL, OL, ACT,
                    )  # fmt: skip
                    begin = 1
                for i in range(begin, n):
                    s = (step + i) % KS
                    phase = ((step + i) // KS) & 1
                    k = k_buf.index(s).reshape([BN, D])
                    v = v_buf.index(s).reshape([BN, D])
                    mbarrier.wait(k_full.index(s), phase)
                    S = _scores(q, k, BN, SL)
                    S = warpgroup_mma_wait(0, deps=(S,))
                    mbarrier.arrive(k_empty.index(s), count=1, pred=release)
                    if MASKED:
                        value: gl.constexpr = float("-inf") if ACT == "softmax" else 0.0
                        key = lo + (n - 1 - i) * BN
                        S = _hidden(S, key, position + W * BLOCK, k_len, window, value, BN, SL, LEFT, RIGHT)
                    p, m, total, alpha = _weights(S, m, total, scale, MASKED, ACT)
                    if ACT == "softmax":
                        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OL))[:, None]
                    P = gl.convert_layout(p.to(dtype), PL)
                    mbarrier.wait(v_full.index(s), phase)
                    acc = warpgroup_mma(P, v, acc, is_async=True)
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                    mbarrier.arrive(v_empty.index(s), count=1, pred=release)
                _finish(acc, m, total, out, q_here, out_row, mine, head, D, DIM, SL, OL, ACT, MASKED)
            else:
                tma.store_wait(0)
                mbarrier.arrive(before, count=1, pred=visit > 0)
                if mine > 0:
                    _no_keys(out, out_row, mine, head, D, DIM, OL, ACT)
                if release:
                    _pass(step, n, k_full, k_empty, v_full, v_empty, KS)
            visit += 1
            step += gl.where(release, n, 0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "left", "right"])
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, o_ptr, lse_ptr, heads, tiles_ptr, count_ptr, cursor_ptr, own_ptr,
    scale, out_scale, left, right,
    BN: gl.constexpr, D: gl.constexpr, DIM: gl.constexpr, NC: gl.constexpr, KS: gl.constexpr, QS: gl.constexpr,
    GROUP: gl.constexpr, ACT: gl.constexpr, RESIDENT: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    SHARED: gl.constexpr, REGS: gl.constexpr, LOADER_REGS: gl.constexpr,
):  # fmt: skip
    """O = softmax(scale Q K^T) V, or out_scale * act(scale Q K^T) V; for softmax `scale` holds log2(e) as a factor.

    A query at position p = i + (Lk - Lq) sees keys p - left (with LEFT) to p + right (with RIGHT).
    """
    dtype: gl.constexpr = o_ptr.dtype.element_ty
    q_buf = gl.allocate_shared_memory(dtype, [QS * NC, BLOCK, 1, D], q_desc.layout)
    k_buf = gl.allocate_shared_memory(dtype, [KS, BN, 1, D], k_desc.layout)
    v_buf = gl.allocate_shared_memory(dtype, [KS, BN, 1, D], v_desc.layout)
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
    gl.static_assert(not (RESIDENT and (LEFT or RIGHT)), "what a tile sees depends on its rows")
    record = gl.allocate_shared_memory(gl.int32, [RECORDS, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    record_full = gl.allocate_shared_memory(gl.int64, [RECORDS, 1], BARRIER)
    record_empty = gl.allocate_shared_memory(gl.int64, [RECORDS, 1], BARRIER)
    for i in gl.static_range(RECORDS):
        mbarrier.init(record_full.index(i), count=1)
        mbarrier.init(record_empty.index(i), count=NC + 1)
    records = (record, record_full, record_empty)
    buffers = (q_buf, k_buf, v_buf)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    window = (left, right)
    out = (o_desc, o_ptr, lse_ptr, heads, out_scale)
    queries = (q_desc, tiles_ptr, count_ptr, cursor_ptr, own_ptr)
    keys = (k_desc, v_desc)
    key_barriers = (k_full, k_empty, v_full, v_empty)
    if NC == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, scale, out, records, buffers, barriers, window,
                             BN, D, DIM, NC, KS, QS, ACT, RESIDENT, LEFT, RIGHT)),
                (_consumer, (1, scale, out, records, buffers, barriers, window,
                             BN, D, DIM, NC, KS, QS, ACT, RESIDENT, LEFT, RIGHT)),
                (_query_loader, (queries, records, q_buf, q_full, q_empty, window,
                                 BN, NC, QS, RESIDENT, LEFT, RIGHT, SHARED)),
                (_key_loader, (keys, records, (k_buf, v_buf), key_barriers, window,
                               BN, NC, KS, GROUP, RESIDENT, LEFT, RIGHT)),
            ],
            [4, 1, 1],
            [REGS, LOADER_REGS, LOADER_REGS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, scale, out, records, buffers, barriers, window,
                             BN, D, DIM, NC, KS, QS, ACT, RESIDENT, LEFT, RIGHT)),
                (_consumer, (1, scale, out, records, buffers, barriers, window,
                             BN, D, DIM, NC, KS, QS, ACT, RESIDENT, LEFT, RIGHT)),
                (_consumer, (2, scale, out, records, buffers, barriers, window,
                             BN, D, DIM, NC, KS, QS, ACT, RESIDENT, LEFT, RIGHT)),
                (_query_loader, (queries, records, q_buf, q_full, q_empty, window,
                                 BN, NC, QS, RESIDENT, LEFT, RIGHT, SHARED)),
                (_key_loader, (keys, records, (k_buf, v_buf), key_barriers, window,
                               BN, NC, KS, GROUP, RESIDENT, LEFT, RIGHT)),
            ],
            [4, 4, 1, 1],
            [REGS, REGS, LOADER_REGS, LOADER_REGS],
        )  # fmt: skip
