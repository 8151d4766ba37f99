"""The backward of jagged attention and GDPA on Hopper, first of two kernels: dK and dV, and dS for `query_gradient`.

Persistent and warp-specialised: one loader warp, two consumer warpgroups that own 64 key rows each and keep dK and dV
in registers while steps of 64 query rows pass by. Scores are computed transposed, so that P^T and dS^T are operands
straight from registers:

    S^T = K Q^T    P^T = exp2(S^T scale - LSE)    dP^T = V dO^T    dS^T = P^T (dP^T - delta)
    dV += P^T dO   dK += dS^T Q

dS^T goes out as it is, in BF16 (the precision in which it enters dK), one block of 64 keys x 64 queries after the
other. So the backward computes five products and no more, nothing is added up in memory, and the result is the same
bit by bit. The blocks of dS are numbered (`Workspace` of `launch_backward`): a sequence's query blocks from
q_offsets[b] // 64 + b on, for each of them the key blocks side by side. A launch does the sequences whose first query
block lies in a window of these numbers, so that the workspace stays as small as the caller wishes.
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

from gem_kernels.hopper.activations import activate_with_grad
from gem_kernels.hopper.forward import tile_count

BLOCK = gl.constexpr(64)  # key rows of a consumer, query rows of a step, and both of a block of dS


@gluon.jit
def tile_record(tiles_ptr, t, count):
    """(own row, own rows, other row, other rows, head, sequence, first block) of this program's t-th tile; zeros past
    its last.
    """
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
        gl.load(p + 7, mask=inside, other=0),
    )


@gluon.jit
def _producer(inputs, buffers, barriers, D: gl.constexpr, QS: gl.constexpr, DS: gl.constexpr, ACT: gl.constexpr):
    q_desc, k_desc, v_desc, do_desc, rows_desc, tiles_ptr, count_ptr, window, query_blocks = inputs
    first, last = window
    q_buf, do_buf, k_buf, v_buf, rows_buf = buffers
    q_full, q_empty, do_full, do_empty, kv_full, kv_empty = barriers
    step = 0
    visit = 0
    count = tile_count(count_ptr)
    for t in range(count):
        # Read here and not one tile ahead: Triton 3.6 forgets to carry some of these around the loop
        # (docs/notes/hopper-attention.md).
        k_start, rows, q_start, q_len, head, b, _f = tile_record(tiles_ptr, t, count)
        block = q_start // BLOCK + b
        if (block >= first) & (block < last):
            column = head * D
            slot = visit % 2
            mbarrier.wait(kv_empty.index(slot), ((visit // 2) & 1) ^ 1)
            full = kv_full.index(slot)
            if rows > BLOCK:
                mbarrier.expect(full, 4 * k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(k_desc, [k_start + BLOCK, column], full, k_buf.index(2 * slot + 1))
                tma.async_copy_global_to_shared(v_desc, [k_start + BLOCK, column], full, v_buf.index(2 * slot + 1))
            else:
                mbarrier.expect(full, 2 * k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, [k_start, column], full, k_buf.index(2 * slot))
            tma.async_copy_global_to_shared(v_desc, [k_start, column], full, v_buf.index(2 * slot))
            visit += 1
            statistics = head * query_blocks + block
            for i in range(gl.cdiv(q_len, BLOCK)):
                s = step % QS
                row = q_start + i * BLOCK
                mbarrier.wait(q_empty.index(s), ((step // QS) & 1) ^ 1)
                if ACT == "softmax":
                    mbarrier.expect(q_full.index(s), q_desc.block_type.nbytes + 2 * rows_desc.block_type.nbytes)
                    at = (statistics + i) * (2 * BLOCK)
                    tma.async_copy_global_to_shared(rows_desc, [at], q_full.index(s), rows_buf.index(2 * s))
                    tma.async_copy_global_to_shared(rows_desc, [at + BLOCK], q_full.index(s), rows_buf.index(2 * s + 1))
                else:
                    mbarrier.expect(q_full.index(s), q_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(q_desc, [row, column], q_full.index(s), q_buf.index(s))
                s = step % DS
                mbarrier.wait(do_empty.index(s), ((step // DS) & 1) ^ 1)
                mbarrier.expect(do_full.index(s), do_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(do_desc, [row, column], do_full.index(s), do_buf.index(s))
                step += 1


@gluon.jit
def product(a, b, SL: gl.constexpr):
    """a b^T [BLOCK, BLOCK], issued and not waited for."""
    return warpgroup_mma(a, b.permute((1, 0)), gl.zeros([BLOCK, BLOCK], gl.float32, SL), use_acc=False, is_async=True)


@gluon.jit
def put(acc, desc, ptr, stride, stage, row, column, rows, D: gl.constexpr, AL: gl.constexpr):
    """A whole block goes out by TMA from `stage`, a sequence's last block by masked stores: its other rows are the next
    sequence's.
    """
    x = acc.to(ptr.dtype.element_ty)
    if rows >= BLOCK:
        stage.store(x)
        fence_async_shared()
        tma.async_copy_shared_to_global(desc, [row, column], stage)
    else:
        r = gl.arange(0, BLOCK, gl.SliceLayout(1, AL))
        c = gl.arange(0, D, gl.SliceLayout(0, AL))
        base = ptr + row.to(gl.int64) * stride + column
        gl.store(base + (r * stride)[:, None] + c[None, :], x, mask=(r < rows)[:, None])


@gluon.jit
def _weights(S, scale, lse, q_left, ACT: gl.constexpr, SL: gl.constexpr):
    """P^T of a step and what dP^T is multiplied by: P^T again, or the activation's slope."""
    if ACT == "softmax":
        p = gl.exp2(S * scale - lse.load(gl.SliceLayout(0, SL))[None, :])
        slope = p
    else:
        inside = (gl.arange(0, BLOCK, gl.SliceLayout(0, SL)) < q_left)[None, :]
        p, slope = activate_with_grad(S * scale, ACT)
        p = gl.where(inside, p, 0.0)
        slope = gl.where(inside, slope, 0.0)
    return p, slope


@gluon.jit
def _score_gradient(slope, dP, delta, k_left, ACT: gl.constexpr, SL: gl.constexpr):
    """dS^T of a step, 0 for keys past the sequence's end."""
    if ACT == "softmax":
        ds = slope * (dP - delta.load(gl.SliceLayout(0, SL))[None, :])
    else:
        ds = slope * dP
    if k_left < BLOCK:
        ds = gl.where((gl.arange(0, BLOCK, gl.SliceLayout(1, SL)) < k_left)[:, None], ds, 0.0)
    return ds


@gluon.jit
def _send(dS, out, desc, row, SL: gl.constexpr):
    """A block of dS goes out."""
    tma.store_wait(0)
    out.store(gl.convert_layout(dS, SL))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [row, 0], out)


@gluon.jit
def _consumer(
    W: gl.constexpr, outputs, problem, buffers, ds_buf, barriers,
    D: gl.constexpr, QS: gl.constexpr, DS: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    ds_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, stride = outputs
    tiles_ptr, count_ptr, scale, v_scale, k_scale, window, window_blocks, key_blocks = problem
    first, last = window
    q_buf, do_buf, k_buf, v_buf, rows_buf = buffers
    q_full, q_empty, do_full, do_empty, kv_full, kv_empty = barriers
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    dtype: gl.constexpr = dk_ptr.dtype.element_ty
    step = 0
    visit = 0
    count = tile_count(count_ptr)
    for t in range(count):
        k_start, rows, q_start, q_len, head, b, first_block = tile_record(tiles_ptr, t, count)
        block = q_start // BLOCK + b
        if (block >= first) & (block < last):
            n = gl.cdiv(q_len, BLOCK)
            mine = rows - W * BLOCK
            slot = visit % 2
            mbarrier.wait(kv_full.index(slot), (visit // 2) & 1)
            if mine > 0:
                k = k_buf.index(2 * slot + W)
                v = v_buf.index(2 * slot + W)
                dk = gl.zeros([BLOCK, D], gl.float32, AL)
                dv = gl.zeros([BLOCK, D], gl.float32, AL)
                if n > 0:
                    ds_row = ((head * window_blocks + block - first) * key_blocks + first_block + W) * BLOCK
                    s = step % QS
                    d = step % DS
                    mbarrier.wait(q_full.index(s), (step // QS) & 1)
                    S = product(k, q_buf.index(s), SL)
                    mbarrier.wait(do_full.index(d), (step // DS) & 1)
                    dP = product(v, do_buf.index(d), SL)
                    # What the tile before left in its K and V has gone out: they may be loaded anew.
                    tma.store_wait(0)
                    mbarrier.arrive(kv_empty.index(1 - slot), count=1, pred=visit > 0)
                    S = warpgroup_mma_wait(1, deps=(S,))
                    p, slope = _weights(S, scale, rows_buf.index(2 * s), q_len, ACT, SL)
                    P = gl.convert_layout(p.to(dtype), PL)
                    dP = warpgroup_mma_wait(0, deps=(dP,))
                    ds = _score_gradient(slope, dP, rows_buf.index(2 * s + 1), mine, ACT, SL)
                    dS = gl.convert_layout(ds.to(dtype), PL)
                    for i in range(1, n):
                        # dV and dK of the step before run under the weights of this one.
                        s0 = step % QS
                        d0 = step % DS
                        step += 1
                        s = step % QS
                        d = step % DS
                        mbarrier.wait(q_full.index(s), (step // QS) & 1)
                        S = product(k, q_buf.index(s), SL)
                        dv_flying = warpgroup_mma(P, do_buf.index(d0), dv, is_async=True)
                        dk_flying = warpgroup_mma(dS, q_buf.index(s0), dk, is_async=True)
                        _send(dS, ds_buf.index(W), ds_desc, ds_row, SL)
                        ds_row += key_blocks * BLOCK
                        S = warpgroup_mma_wait(2, deps=(S,))
                        p, slope = _weights(S, scale, rows_buf.index(2 * s), q_len - i * BLOCK, ACT, SL)
                        dv, dk, _p, _s = warpgroup_mma_wait(0, deps=(dv_flying, dk_flying, P, dS))
                        mbarrier.arrive(q_empty.index(s0), count=1)
                        mbarrier.arrive(do_empty.index(d0), count=1)
                        mbarrier.wait(do_full.index(d), (step // DS) & 1)
                        dP = product(v, do_buf.index(d), SL)
                        P = gl.convert_layout(p.to(dtype), PL)
                        dP = warpgroup_mma_wait(0, deps=(dP,))
                        ds = _score_gradient(slope, dP, rows_buf.index(2 * s + 1), mine, ACT, SL)
                        dS = gl.convert_layout(ds.to(dtype), PL)
                    s0 = step % QS
                    d0 = step % DS
                    step += 1
                    dv_flying = warpgroup_mma(P, do_buf.index(d0), dv, is_async=True)
                    dk_flying = warpgroup_mma(dS, q_buf.index(s0), dk, is_async=True)
                    _send(dS, ds_buf.index(W), ds_desc, ds_row, SL)
                    dv, dk, _p, _s = warpgroup_mma_wait(0, deps=(dv_flying, dk_flying, P, dS))
                    mbarrier.arrive(q_empty.index(s0), count=1)
                    mbarrier.arrive(do_empty.index(d0), count=1)
                else:
                    tma.store_wait(0)
                    mbarrier.arrive(kv_empty.index(1 - slot), count=1, pred=visit > 0)
                k_row = k_start + W * BLOCK
                put(dv * v_scale, dv_desc, dv_ptr, stride, v, k_row, head * D, mine, D, AL)
                put(dk * k_scale, dk_desc, dk_ptr, stride, k, k_row, head * D, mine, D, AL)
            else:
                tma.store_wait(0)
                mbarrier.arrive(kv_empty.index(1 - slot), count=1, pred=visit > 0)
                for _ in range(n):
                    s = step % QS
                    d = step % DS
                    mbarrier.wait(q_full.index(s), (step // QS) & 1)
                    mbarrier.arrive(q_empty.index(s), count=1)
                    mbarrier.wait(do_full.index(d), (step // DS) & 1)
                    mbarrier.arrive(do_empty.index(d), count=1)
                    step += 1
            visit += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["first", "last", "query_blocks", "window_blocks", "key_blocks"])
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, rows_desc, ds_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, stride,
    tiles_ptr, count_ptr, first, last, query_blocks, window_blocks, key_blocks, scale, v_scale, k_scale,
    D: gl.constexpr, QS: gl.constexpr, DS: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """dV = v_scale P^T dO, dK = k_scale dS^T Q, and dS. For softmax `scale` holds log2(e) as a factor.

    rows: LSE in base 2 and delta of every query block of every head, [H, query_blocks, 2, 64] float32. `first`, `last`:
    the window of query block numbers; the workspace holds `window_blocks` of them for every head, `key_blocks` blocks
    of dS each. QS, DS: stages of Q and of dO.
    """
    dtype: gl.constexpr = dk_ptr.dtype.element_ty
    q_buf = gl.allocate_shared_memory(dtype, [QS, BLOCK, D], q_desc.layout)
    do_buf = gl.allocate_shared_memory(dtype, [DS, BLOCK, D], q_desc.layout)
    k_buf = gl.allocate_shared_memory(dtype, [4, BLOCK, D], k_desc.layout)
    v_buf = gl.allocate_shared_memory(dtype, [4, BLOCK, D], k_desc.layout)
    ds_buf = gl.allocate_shared_memory(dtype, [2, BLOCK, BLOCK], ds_desc.layout)
    rows_buf = gl.allocate_shared_memory(gl.float32, [2 * QS, BLOCK], rows_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [QS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [QS, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [DS, 1], BARRIER)
    do_empty = gl.allocate_shared_memory(gl.int64, [DS, 1], BARRIER)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(QS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(DS):
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(do_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
    window = (first, last)
    buffers = (q_buf, do_buf, k_buf, v_buf, rows_buf)
    barriers = (q_full, q_empty, do_full, do_empty, kv_full, kv_empty)
    outputs = (ds_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, stride)
    problem = (tiles_ptr, count_ptr, scale, v_scale, k_scale, window, window_blocks, key_blocks)
    inputs = (q_desc, k_desc, v_desc, do_desc, rows_desc, tiles_ptr, count_ptr, window, query_blocks)
    gl.warp_specialize(
        [
            (_consumer, (0, outputs, problem, buffers, ds_buf, barriers, D, QS, DS, ACT)),
            (_consumer, (1, outputs, problem, buffers, ds_buf, barriers, D, QS, DS, ACT)),
            (_producer, (inputs, buffers, barriers, D, QS, DS, ACT)),
        ],
        [4, 1],
        [240, 24],
    )
