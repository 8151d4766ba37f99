"""The whole backward of jagged attention and GDPA on Hopper in one kernel, where queries or keys fit in 64 rows.

Such problems are bound by memory: a program keeps the pair that is short (`OWN`: K and V, or Q and dO) in shared
memory, the other pair passes by once, and all three products of a step are complete or stay in registers:

    S^T = K Q^T    P^T = exp2(S^T scale - LSE)    dP^T = V dO^T    dS^T = P^T (dP^T - delta)
    dV (+)= P^T dO    dK (+)= dS^T Q    dQ (+)= dS K

With OWN = "keys" a step sees all keys of its queries, so it makes delta = rowsum(P dP) itself and O is never read. One
consumer warpgroup and one loader warp; two programs share an SM, so that one's latencies are filled by the other.
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

from gem_kernels.hopper.activations import activate_with_slope, times_slope
from gem_kernels.hopper.backward_block import BLOCK, product, put_rows
from gem_kernels.hopper.records import tile_count


@gluon.jit
def _tile(tiles_ptr, t, count):
    """(own row, own rows, other row, other rows, head, sequence) of this program's t-th tile; zeros past its last."""
    programs = gl.num_programs(0)
    column = gl.program_id(0)
    column = gl.where(t % 2 == 0, column, programs - 1 - column)
    p = tiles_ptr + (t * programs + column) * 8
    inside = t < count
    return (
        gl.load(p, mask=inside, other=0),
        gl.load(p + 1, mask=inside, other=0),
        gl.load(p + 2, mask=inside, other=0),
        gl.load(p + 3, mask=inside, other=0),
        gl.load(p + 4, mask=inside, other=0),
        gl.load(p + 6, mask=inside, other=0),
    )


@gluon.jit
def _load_rows(rows_desc, block, barrier, rows_buf, at):
    """LSE and delta of one query block."""
    tma.async_copy_global_to_shared(rows_desc, [block * (2 * BLOCK)], barrier, rows_buf.index(at))
    tma.async_copy_global_to_shared(rows_desc, [block * (2 * BLOCK) + BLOCK], barrier, rows_buf.index(at + 1))


@gluon.jit
def _loader(
    inputs, buffers, barriers,
    MS: gl.constexpr, OWN: gl.constexpr, GROUP: gl.constexpr, ACT: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc, do_desc, rows_desc, tiles_ptr, count_ptr, query_blocks = inputs
    own_buf, first_buf, second_buf, rows_buf = buffers
    own_full, own_empty, first_full, first_empty, second_full, second_empty = barriers
    statistics: gl.constexpr = 2 * rows_desc.block_type.nbytes if ACT == "softmax" else 0
    pair: gl.constexpr = 2 * q_desc.block_type.nbytes
    step = 0
    count = tile_count(count_ptr)
    for t in range(count):
        # Read here and not one tile ahead: see backward.py.
        k_row, k_len, q_row, q_len, head, b = _tile(tiles_ptr, t, count)
        block = q_row // BLOCK + b
        from_row = 0 if SHARED else q_row
        mbarrier.wait(own_empty, (t & 1) ^ 1)
        if OWN == "keys":
            mbarrier.expect(own_full, pair)
            tma.async_copy_global_to_shared(k_desc, [k_row, head, 0], own_full, own_buf.index(0))
            tma.async_copy_global_to_shared(v_desc, [k_row, head, 0], own_full, own_buf.index(1))
        else:
            mbarrier.expect(own_full, pair + statistics)
            tma.async_copy_global_to_shared(q_desc, [from_row, head, 0], own_full, own_buf.index(0))
            tma.async_copy_global_to_shared(do_desc, [q_row, head, 0], own_full, own_buf.index(1))
            if ACT == "softmax":
                _load_rows(rows_desc, head * query_blocks + block, own_full, rows_buf, 0)
        for g in range(GROUP):
            q_head = head * GROUP + g
            for i in range(gl.cdiv(q_len if OWN == "keys" else k_len, BLOCK)):
                s = step % MS
                phase = (step // MS) & 1
                mbarrier.wait(first_empty.index(s), phase ^ 1)
                at = first_full.index(s)
                if OWN == "keys":
                    mbarrier.expect(at, pair // 2 + statistics)
                    tma.async_copy_global_to_shared(q_desc, [from_row + i * BLOCK, q_head, 0], at, first_buf.index(s))
                    if ACT == "softmax":
                        _load_rows(rows_desc, q_head * query_blocks + block + i, at, rows_buf, 2 * s)
                else:
                    mbarrier.expect(at, pair // 2)
                    tma.async_copy_global_to_shared(k_desc, [k_row + i * BLOCK, head, 0], at, first_buf.index(s))
                mbarrier.wait(second_empty.index(s), phase ^ 1)
                at = second_full.index(s)
                mbarrier.expect(at, pair // 2)
                if OWN == "keys":
                    tma.async_copy_global_to_shared(do_desc, [q_row + i * BLOCK, q_head, 0], at, second_buf.index(s))
                else:
                    tma.async_copy_global_to_shared(v_desc, [k_row + i * BLOCK, head, 0], at, second_buf.index(s))
                step += 1


@gluon.jit
def _put(acc, desc, ptr, stride, stage, at_row, head, rows, D: gl.constexpr, DIM: gl.constexpr):
    """A whole block goes from `stage` by TMA, a sequence's last block by masked stores: its other rows are the next
    sequence's.
    """
    flat = stage.reshape([BLOCK, D])
    flat.store(acc.to(ptr.dtype.element_ty))
    fence_async_shared()  # for the copy out, or for the one that fills the buffer anew
    if rows >= BLOCK:
        tma.async_copy_shared_to_global(desc, [at_row, head, 0], stage)
    else:
        put_rows(ptr, stride, flat, at_row, head * DIM, rows, D, DIM)


@gluon.jit
def _fresh(a, b, D: gl.constexpr, AL: gl.constexpr):
    """a b [BLOCK, D], issued and not waited for."""
    return warpgroup_mma(a, b, gl.zeros([BLOCK, D], gl.float32, AL), use_acc=False, is_async=True)


@gluon.jit
def _consumer(
    outputs, problem, buffers, ds_buf, barriers, mask,
    D: gl.constexpr, DIM: gl.constexpr, MS: gl.constexpr, OWN: gl.constexpr, GROUP: gl.constexpr, ACT: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    dq_desc, dk_desc, dv_desc, dq_ptr, dk_ptr, dv_ptr, q_stride, k_stride = outputs
    tiles_ptr, count_ptr, scale, q_scale, v_scale, k_scale = problem
    left, right = mask
    own_buf, first_buf, second_buf, rows_buf = buffers
    own_full, own_empty, first_full, first_empty, second_full, second_empty = barriers
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    KEYS: gl.constexpr = OWN == "keys"
    FLAT: gl.constexpr = -1.0 if ACT == "silu" else 0.0  # a slope of 0, for `times_slope`
    dtype: gl.constexpr = dq_ptr.dtype.element_ty
    ki = gl.arange(0, BLOCK, gl.SliceLayout(1, SL))
    qi = gl.arange(0, BLOCK, gl.SliceLayout(0, SL))
    step = 0
    count = tile_count(count_ptr)
    for t in range(count):
        k_row, k_len, q_row, q_len, head, _b = _tile(tiles_ptr, t, count)
        mbarrier.wait(own_full, t & 1)
        if KEYS:
            dk = gl.zeros([BLOCK, D], gl.float32, AL)
            dv = gl.zeros([BLOCK, D], gl.float32, AL)
        else:
            dq = gl.zeros([BLOCK, D], gl.float32, AL)
        for g in range(GROUP):
            q_head = head * GROUP + g
            for i in range(gl.cdiv(q_len if KEYS else k_len, BLOCK)):
                s = step % MS
                phase = (step // MS) & 1
                own_first, own_second = own_buf.index(0), own_buf.index(1)
                first, second = first_buf.index(s), second_buf.index(s)
                if KEYS:
                    k_at, v_at, q_at, do_at = own_first, own_second, first, second
                    k_left, q_left, rows = k_len, q_len - i * BLOCK, 2 * s
                    d = q_len - k_len - i * BLOCK  # where the first key stands, from where the first query does
                else:
                    k_at, v_at, q_at, do_at = first, second, own_first, own_second
                    k_left, q_left, rows = k_len - i * BLOCK, q_len, 0
                    d = q_len - k_len + i * BLOCK
                k, v = k_at.reshape([BLOCK, D]), v_at.reshape([BLOCK, D])
                q, do = q_at.reshape([BLOCK, D]), do_at.reshape([BLOCK, D])
                mbarrier.wait(first_full.index(s), phase)
                S = product(k, q, SL)
                if not KEYS:  # dQ alone is kept in registers: room for both
                    mbarrier.wait(second_full.index(s), phase)
                    dP = product(v, do, SL)
                # What the step before left in its buffer of Q or K has gone out: it may be loaded anew.
                tma.store_wait(0)
                mbarrier.arrive(first_empty.index((step + MS - 1) % MS), count=1, pred=step > 0)
                # With statistics, queries past the end have weight 0 already, unless there are none at all.
                inside = (ki < k_left)[:, None] & (q_left > 0)
                if ACT != "softmax":
                    inside = inside & (qi < q_left)[None, :]
                if RIGHT:
                    inside = inside & ((ki + (d - right))[:, None] <= qi[None, :])
                if LEFT:
                    inside = inside & ((ki + (d + left))[:, None] >= qi[None, :])
                S = warpgroup_mma_wait(0 if KEYS else 1, deps=(S,))
                if ACT == "softmax":
                    p = gl.exp2(S * scale - rows_buf.index(rows).load(gl.SliceLayout(0, SL))[None, :])
                    p = gl.where(inside, p, 0.0)
                    slope = p
                else:
                    p, slope = activate_with_slope(S * scale, ACT)
                    p = gl.where(inside, p, 0.0)
                    slope = gl.where(inside, slope, FLAT)
                P = gl.convert_layout(p.to(dtype), PL)
                # Products are waited for one by one where registers are short: the other program fills the gaps.
                if KEYS:
                    mbarrier.wait(second_full.index(s), phase)
                    dv_flying = warpgroup_mma(P, do, dv, is_async=True)
                    dv, _p, slope = warpgroup_mma_wait(0, deps=(dv_flying, P, slope))
                    dP = product(v, do, SL)
                dP = warpgroup_mma_wait(0, deps=(dP,))
                if ACT == "softmax":
                    delta = rows_buf.index(rows + 1).load(gl.SliceLayout(0, SL))
                    if KEYS:
                        delta += gl.sum(slope * dP, 0)
                    ds = slope * (dP - delta[None, :])
                    if not KEYS:
                        ds = gl.where(inside, ds, 0.0)  # statistics of no query are not numbers
                else:
                    ds = times_slope(slope, dP, ACT)
                dsb = ds.to(dtype)
                ds_buf.store(dsb)
                fence_async_shared()
                dS = gl.convert_layout(dsb, PL)
                if KEYS:
                    dk_flying = warpgroup_mma(dS, q, dk, is_async=True)
                    dk, _s = warpgroup_mma_wait(0, deps=(dk_flying, dS))
                    dq_flying = _fresh(ds_buf.permute((1, 0)), k, D, AL)
                    dq_step = warpgroup_mma_wait(0, deps=(dq_flying,))
                    mbarrier.arrive(second_empty.index(s), count=1)
                    _put(dq_step * q_scale, dq_desc, dq_ptr, q_stride, q_at, q_row + i * BLOCK, q_head, q_left, D, DIM)
                else:
                    dv_flying = _fresh(P, do, D, AL)
                    dq = warpgroup_mma(ds_buf.permute((1, 0)), k, dq, is_async=True)
                    dv_step, _p = warpgroup_mma_wait(1, deps=(dv_flying, P))
                    _put(dv_step * v_scale, dv_desc, dv_ptr, k_stride, v_at, k_row + i * BLOCK, head, k_left, D, DIM)
                    dk_flying = _fresh(dS, q, D, AL)
                    dk_step, dq, _s = warpgroup_mma_wait(0, deps=(dk_flying, dq, dS))
                    _put(dk_step * k_scale, dk_desc, dk_ptr, k_stride, k_at, k_row + i * BLOCK, head, k_left, D, DIM)
                    tma.store_wait(1)  # dV has gone out
                    mbarrier.arrive(second_empty.index(s), count=1)
                step += 1
        if KEYS:
            _put(dv * v_scale, dv_desc, dv_ptr, k_stride, own_buf.index(1), k_row, head, k_len, D, DIM)
            _put(dk * k_scale, dk_desc, dk_ptr, k_stride, own_buf.index(0), k_row, head, k_len, D, DIM)
        elif q_len > 0:
            _put(dq * q_scale, dq_desc, dq_ptr, q_stride, own_buf.index(0), q_row, head, q_len, D, DIM)
        tma.store_wait(0)
        mbarrier.arrive(own_empty, count=1)


@gluon.jit(do_not_specialize=["query_blocks", "left", "right"])
def short_backward_kernel(
    q_desc, k_desc, v_desc, do_desc, rows_desc, dq_desc, dk_desc, dv_desc, dq_ptr, dk_ptr, dv_ptr, q_stride, k_stride,
    tiles_ptr, count_ptr, query_blocks, left, right, scale, q_scale, v_scale, k_scale,
    D: gl.constexpr, DIM: gl.constexpr, MS: gl.constexpr, OWN: gl.constexpr, GROUP: gl.constexpr, ACT: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """dV = v_scale P^T dO, dK = k_scale dS^T Q, dQ = q_scale dS K of every (sequence, key head) with keys.

    rows: as in `backward_kernel`; with OWN = "keys" its second half holds what is to be added to delta. Masks and
    SHARED: as there.
    """
    gl.static_assert(OWN == "keys" or GROUP == 1, "dK and dV of several heads would have to be kept")
    dtype: gl.constexpr = dq_ptr.dtype.element_ty
    own_buf = gl.allocate_shared_memory(dtype, [2, BLOCK, 1, D], q_desc.layout)
    first_buf = gl.allocate_shared_memory(dtype, [MS, BLOCK, 1, D], q_desc.layout)
    second_buf = gl.allocate_shared_memory(dtype, [MS, BLOCK, 1, D], q_desc.layout)
    SHARED_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK], dtype)
    ds_buf = gl.allocate_shared_memory(dtype, [BLOCK, BLOCK], SHARED_LAYOUT)
    rows_buf = gl.allocate_shared_memory(gl.float32, [2 * MS, BLOCK], rows_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    own_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    own_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    first_full = gl.allocate_shared_memory(gl.int64, [MS, 1], BARRIER)
    first_empty = gl.allocate_shared_memory(gl.int64, [MS, 1], BARRIER)
    second_full = gl.allocate_shared_memory(gl.int64, [MS, 1], BARRIER)
    second_empty = gl.allocate_shared_memory(gl.int64, [MS, 1], BARRIER)
    mbarrier.init(own_full, count=1)
    mbarrier.init(own_empty, count=1)
    for i in gl.static_range(MS):
        mbarrier.init(first_full.index(i), count=1)
        mbarrier.init(first_empty.index(i), count=1)
        mbarrier.init(second_full.index(i), count=1)
        mbarrier.init(second_empty.index(i), count=1)
    buffers = (own_buf, first_buf, second_buf, rows_buf)
    barriers = (own_full, own_empty, first_full, first_empty, second_full, second_empty)
    mask = (left, right)
    outputs = (dq_desc, dk_desc, dv_desc, dq_ptr, dk_ptr, dv_ptr, q_stride, k_stride)
    problem = (tiles_ptr, count_ptr, scale, q_scale, v_scale, k_scale)
    inputs = (q_desc, k_desc, v_desc, do_desc, rows_desc, tiles_ptr, count_ptr, query_blocks)
    gl.warp_specialize(
        [
            (_consumer, (outputs, problem, buffers, ds_buf, barriers, mask, D, DIM, MS, OWN, GROUP, ACT, LEFT, RIGHT)),
            (_loader, (inputs, buffers, barriers, MS, OWN, GROUP, ACT, SHARED)),
        ],
        [1],
        [24],
    )
