"""The backward of jagged attention and GDPA on Hopper: one persistent, warp-specialised Gluon kernel for dK, dV and,
fused, dQ.

Two consumer warpgroups own 64 key rows each and keep dK and dV in registers; steps of 64 query rows pass by. Scores
are computed transposed:

    S^T = K Q^T    P^T = exp2(S^T scale - LSE)    dP^T = V dO^T    dS^T = P^T (dP^T - delta)    dV += P^T dO    dK +=
    dS^T Q

With DQ a program owns a whole (sequence, head): dQ of a step is dS K, whose two halves of columns the consumers share
out after exchanging dS
through shared memory. It is added into a float32 workspace by TMA: pass after pass over the same rows, by one
program, each pass
complete before the next begins, so that the order of the sum is fixed and two runs agree bit by bit.

Workspace rows of sequence b start at q_offsets[b] + 64 b: a last step may write past its sequence's end without
meeting the next one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gem_kernels.hopper.activations import activate_with_grad
from gem_kernels.hopper.forward import tile_count

BLOCK = gl.constexpr(64)  # key rows of a consumer, and query rows of a step


@builtin
def async_add_shared_to_global(desc, coord, src, _semantic=None):
    """TMA reduction: global[coord] += src. Gluon has the operation and no name for it."""
    from triton._C.libtriton import ir

    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@gluon.jit
def _all_stores_done():
    """Wait until every TMA store and reduction of this thread is complete in memory (`store_wait` waits for the
    reads only).
    """
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _record(tiles_ptr, t, count):
    """(key row, key rows, query row, query rows, head, sequence) of this program's t-th tile; zeros past its last."""
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
def _producer(
    inputs, buffers, barriers, D: gl.constexpr, QS: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc, do_desc, tiles_ptr, count_ptr = inputs
    q_buf, do_buf, k_buf, v_buf = buffers
    q_full, q_empty, do_full, do_empty, kv_full, kv_empty = barriers
    step = 0
    visit = 0
    count = tile_count(count_ptr)
    for t in range(count):
        # Read here and not one tile ahead: Triton 3.6 forgets to carry some of these around the loop
        # (docs/notes/hopper-attention.md).
        k_start, rows, q_start, q_len, head, _b = _record(tiles_ptr, t, count)
        n = gl.cdiv(q_len, BLOCK)
        column = head * D
        for c in range(gl.cdiv(rows, 2 * BLOCK)):
            mbarrier.wait(kv_empty, (visit & 1) ^ 1)
            mbarrier.expect(kv_full, 4 * k_desc.block_type.nbytes)
            row = k_start + c * (2 * BLOCK)
            tma.async_copy_global_to_shared(k_desc, [row, column], kv_full, k_buf.index(0))
            tma.async_copy_global_to_shared(k_desc, [row + BLOCK, column], kv_full, k_buf.index(1))
            tma.async_copy_global_to_shared(v_desc, [row, column], kv_full, v_buf.index(0))
            tma.async_copy_global_to_shared(v_desc, [row + BLOCK, column], kv_full, v_buf.index(1))
            visit += 1
            for i in range(n):
                s = step % QS
                phase = (step // QS) & 1
                mbarrier.wait(q_empty.index(s), phase ^ 1)
                mbarrier.expect(q_full.index(s), q_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(q_desc, [q_start + i * BLOCK, column], q_full.index(s), q_buf.index(s))
                mbarrier.wait(do_empty.index(s), phase ^ 1)
                mbarrier.expect(do_full.index(s), do_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    do_desc, [q_start + i * BLOCK, column], do_full.index(s), do_buf.index(s)
                )
                step += 1


@gluon.jit
def _product(a, b, SL: gl.constexpr):
    """a b^T [BLOCK, BLOCK], issued and not waited for."""
    return warpgroup_mma(a, b.permute((1, 0)), gl.zeros([BLOCK, BLOCK], gl.float32, SL), use_acc=False, is_async=True)


@gluon.jit
def _query_gradient(
    W: gl.constexpr, exchange, ds_buf, k_buf, ds_full, D: gl.constexpr, HL: gl.constexpr,
):  # fmt: skip
    """This consumer's half of the columns of dQ of one step, issued; the result is not waited for."""
    s = exchange % 2
    mbarrier.wait(ds_full.index(s), (exchange // 2) & 1)
    half: gl.constexpr = D // 2
    dq = gl.zeros([BLOCK, half], gl.float32, HL)
    dq = warpgroup_mma(
        ds_buf.index(2 * s).permute((1, 0)), k_buf.index(0).slice(W * half, half, 1), dq, use_acc=False, is_async=True
    )
    return warpgroup_mma(
        ds_buf.index(2 * s + 1).permute((1, 0)), k_buf.index(1).slice(W * half, half, 1), dq, is_async=True
    )


@gluon.jit
def _add(dq, first, stage, dq_desc, row, column):
    tma.store_wait(0)
    stage.store(dq)
    fence_async_shared()
    if first:
        tma.async_copy_shared_to_global(dq_desc, [row, column], stage)
    else:
        async_add_shared_to_global(dq_desc, [row, column], stage)


@gluon.jit
def _row_statistics(lse_ptr, delta_ptr, base, first, q_len, RL: gl.constexpr):
    """LSE and delta of a step's query rows; a row past the end gets LSE = inf, that is weight 0."""
    r = first + gl.arange(0, BLOCK, RL)
    lse = gl.load(lse_ptr + base + r, mask=r < q_len, other=float("inf"))
    delta = gl.load(delta_ptr + base + r, mask=r < q_len, other=0.0)
    return lse, delta


@gluon.jit
def _put(acc, ptr, stride, row, column, rows, D: gl.constexpr, AL: gl.constexpr):
    r = gl.arange(0, BLOCK, gl.SliceLayout(1, AL))
    c = gl.arange(0, D, gl.SliceLayout(0, AL))
    base = ptr + row.to(gl.int64) * stride + column
    gl.store(base + (r * stride)[:, None] + c[None, :], acc.to(ptr.dtype.element_ty), mask=(r < rows)[:, None])


@gluon.jit
def _consumer(
    W: gl.constexpr, grads, problem, buffers, private, barriers,
    D: gl.constexpr, QS: gl.constexpr, ACT: gl.constexpr, DQ: gl.constexpr,
):  # fmt: skip
    dq_desc, dk_ptr, dv_ptr, dk_stride, dv_stride = grads
    lse_ptr, delta_ptr, total_q, tiles_ptr, count_ptr, scale, v_scale, k_scale = problem
    q_buf, do_buf, k_buf, v_buf = buffers
    ds_buf, dq_buf, rows_buf, ds_full, ds_empty = private
    q_full, q_empty, do_full, do_empty, kv_full, kv_empty = barriers
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    HL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D // 2, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    RL: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    dtype: gl.constexpr = dk_ptr.dtype.element_ty
    step = 0
    visit = 0
    exchange = 0
    k = k_buf.index(W)
    v = v_buf.index(W)
    count = tile_count(count_ptr)
    k_start, rows, q_start, q_len, head, b = _record(tiles_ptr, 0, count)
    for t in range(count):
        k_start1, rows1, q_start1, q_len1, head1, b1 = _record(tiles_ptr, t + 1, count)
        n = gl.cdiv(q_len, BLOCK)
        column = head * D + W * (D // 2)
        if ACT == "softmax":
            base = head.to(gl.int64) * total_q + q_start
            lse, delta = _row_statistics(lse_ptr, delta_ptr, base, 0, q_len, RL)
        for c in range(gl.cdiv(rows, 2 * BLOCK)):
            mine = rows - (2 * c + W) * BLOCK
            mbarrier.wait(kv_full, visit & 1)
            visit += 1
            dk = gl.zeros([BLOCK, D], gl.float32, AL)
            dv = gl.zeros([BLOCK, D], gl.float32, AL)
            row = q_start + b * BLOCK  # of the workspace
            for i in range(n):
                s = step % QS
                phase = (step // QS) & 1
                if ACT == "softmax":
                    rows_buf.index(2 * W).store(lse)
                    rows_buf.index(2 * W + 1).store(delta)
                    after = gl.where(i + 1 < n, i + 1, 0)
                    lse, delta = _row_statistics(lse_ptr, delta_ptr, base, after * BLOCK, q_len, RL)
                mbarrier.wait(q_full.index(s), phase)
                S = _product(k, q_buf.index(s), SL)
                mbarrier.wait(do_full.index(s), phase)
                dP = _product(v, do_buf.index(s), SL)
                S = warpgroup_mma_wait(1, deps=(S,))
                if ACT == "softmax":
                    p = gl.exp2(S * scale - rows_buf.index(2 * W).load(gl.SliceLayout(0, SL))[None, :])
                    P = gl.convert_layout(p.to(dtype), PL)
                    dP = warpgroup_mma_wait(0, deps=(dP,))
                    ds = p * (dP - rows_buf.index(2 * W + 1).load(gl.SliceLayout(0, SL))[None, :])
                else:
                    qi = i * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, SL))
                    p, slope = activate_with_grad(S * scale, ACT)
                    p = gl.where((qi < q_len)[None, :], p, 0.0)
                    P = gl.convert_layout(p.to(dtype), PL)
                    dP = warpgroup_mma_wait(0, deps=(dP,))
                    ds = gl.where((qi < q_len)[None, :], slope * dP, 0.0)
                if DQ:
                    ki = gl.arange(0, BLOCK, gl.SliceLayout(1, SL))
                    ds = gl.where((ki < mine)[:, None], ds, 0.0)
                dsb = ds.to(dtype)
                dv_flying = warpgroup_mma(P, do_buf.index(s), dv, is_async=True)
                dS = gl.convert_layout(dsb, PL)
                dk_flying = warpgroup_mma(dS, q_buf.index(s), dk, is_async=True)
                if DQ:
                    e = exchange % 2
                    mbarrier.wait(ds_empty.index(e), ((exchange // 2) & 1) ^ 1)
                    ds_buf.index(2 * e + W).store(dsb)
                    fence_async_shared()
                    mbarrier.arrive(ds_full.index(e), count=1)
                    exchange += 1
                    if i > 0:
                        # dQ of the step before: the other consumer's dS has had a step's time to arrive.
                        dq = _query_gradient(W, exchange - 2, ds_buf, k_buf, ds_full, D, HL)
                        dv, dk, _p, _s = warpgroup_mma_wait(2, deps=(dv_flying, dk_flying, P, dS))
                        mbarrier.arrive(q_empty.index(s), count=1)
                        mbarrier.arrive(do_empty.index(s), count=1)
                        dq = warpgroup_mma_wait(0, deps=(dq,))
                        mbarrier.arrive(ds_empty.index((exchange - 2) % 2), count=1)
                        _add(dq, c == 0, dq_buf.index(W), dq_desc, row + (i - 1) * BLOCK, column)
                    else:
                        dv, dk, _p, _s = warpgroup_mma_wait(0, deps=(dv_flying, dk_flying, P, dS))
                        mbarrier.arrive(q_empty.index(s), count=1)
                        mbarrier.arrive(do_empty.index(s), count=1)
                else:
                    dv, dk, _p, _s = warpgroup_mma_wait(0, deps=(dv_flying, dk_flying, P, dS))
                    mbarrier.arrive(q_empty.index(s), count=1)
                    mbarrier.arrive(do_empty.index(s), count=1)
                step += 1
            if DQ:  # noqa: SIM102 (decided at compile time; n is not)
                if n > 0:
                    dq = _query_gradient(W, exchange - 1, ds_buf, k_buf, ds_full, D, HL)
                    dq = warpgroup_mma_wait(0, deps=(dq,))
                    mbarrier.arrive(ds_empty.index((exchange - 1) % 2), count=1)
                    _add(dq, c == 0, dq_buf.index(W), dq_desc, row + (n - 1) * BLOCK, column)
            mbarrier.arrive(kv_empty, count=1)
            k_row = k_start + (2 * c + W) * BLOCK
            if mine > 0:
                _put(dv * v_scale, dv_ptr, dv_stride, k_row, head * D, mine, D, AL)
                _put(dk * k_scale, dk_ptr, dk_stride, k_row, head * D, mine, D, AL)
            if DQ:
                _all_stores_done()
        k_start, rows, q_start, q_len, head, b = k_start1, rows1, q_start1, q_len1, head1, b1
    if DQ:
        _all_stores_done()


@gluon.jit(do_not_specialize=["total_q"])
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, dk_ptr, dv_ptr, dk_stride, dv_stride, lse_ptr, delta_ptr, total_q,
    tiles_ptr, count_ptr, scale, v_scale, k_scale,
    D: gl.constexpr, QS: gl.constexpr, ACT: gl.constexpr, DQ: gl.constexpr,
):  # fmt: skip
    """dV = v_scale P^T dO, dK = k_scale dS^T Q and, with DQ, the workspace += dS K. For softmax `scale` holds
    log2(e) as a factor.
    """
    dtype: gl.constexpr = dk_ptr.dtype.element_ty
    q_buf = gl.allocate_shared_memory(dtype, [QS, BLOCK, D], q_desc.layout)
    do_buf = gl.allocate_shared_memory(dtype, [QS, BLOCK, D], q_desc.layout)
    k_buf = gl.allocate_shared_memory(dtype, [2, BLOCK, D], k_desc.layout)
    v_buf = gl.allocate_shared_memory(dtype, [2, BLOCK, D], k_desc.layout)
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK], dtype)
    if DQ:
        ds_buf = gl.allocate_shared_memory(dtype, [4, BLOCK, BLOCK], SHARED)
        dq_buf = gl.allocate_shared_memory(gl.float32, [2, BLOCK, D // 2], dq_desc.layout)
    else:
        ds_buf = q_buf
        dq_buf = q_buf
    rows_buf = gl.allocate_shared_memory(gl.float32, [4, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [QS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [QS, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [QS, 1], BARRIER)
    do_empty = gl.allocate_shared_memory(gl.int64, [QS, 1], BARRIER)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(QS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(do_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(ds_empty.index(i), count=2)
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=2)
    buffers = (q_buf, do_buf, k_buf, v_buf)
    private = (ds_buf, dq_buf, rows_buf, ds_full, ds_empty)
    barriers = (q_full, q_empty, do_full, do_empty, kv_full, kv_empty)
    grads = (dq_desc, dk_ptr, dv_ptr, dk_stride, dv_stride)
    problem = (lse_ptr, delta_ptr, total_q, tiles_ptr, count_ptr, scale, v_scale, k_scale)
    inputs = (q_desc, k_desc, v_desc, do_desc, tiles_ptr, count_ptr)
    gl.warp_specialize(
        [
            (_consumer, (0, grads, problem, buffers, private, barriers, D, QS, ACT, DQ)),
            (_consumer, (1, grads, problem, buffers, private, barriers, D, QS, ACT, DQ)),
            (_producer, (inputs, buffers, barriers, D, QS)),
        ],
        [4, 1],
        [240, 24],
    )
