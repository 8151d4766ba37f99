"""dQ of jagged attention and GDPA on Hopper by its own kernel: the half of the split backward that long sequences use.

Like the forward (`gem_kernels.hopper.forward`): a program walks a list of tiles, one warp loads, NC consumers own 64
query rows each.

    S = Q K^T    P = exp2(S scale - LSE)    dP = dO V^T    dS = P (dP - delta)    dQ = q_scale dS K
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.hopper.activations import activate_with_grad
from gem_kernels.hopper.forward import BLOCK, tile_count, tile_record


@gluon.jit
def _producer(
    inputs, buffers, barriers, BN: gl.constexpr, D: gl.constexpr, NC: gl.constexpr, KS: gl.constexpr, QS: gl.constexpr
):
    q_desc, k_desc, v_desc, do_desc, tiles_ptr, count_ptr = inputs
    q_buf, do_buf, k_buf, v_buf = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    step = 0
    count = tile_count(count_ptr)
    for t in range(count):
        # Read here and not one tile ahead: Triton 3.6 forgets to carry some of these around the loop
        # (docs/notes/hopper-attention.md).
        q_start, rows, k_start, k_len, head, _out = tile_record(tiles_ptr, t, count)
        column = head * D
        phase = (t // QS) & 1
        for w in gl.static_range(NC):
            slot = (t % QS) * NC + w
            mbarrier.wait(q_empty.index(slot), phase ^ 1)
            if rows > w * BLOCK:
                mbarrier.expect(q_full.index(slot), 2 * q_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    q_desc, [q_start + w * BLOCK, column], q_full.index(slot), q_buf.index(slot)
                )
                tma.async_copy_global_to_shared(
                    do_desc, [q_start + w * BLOCK, column], q_full.index(slot), do_buf.index(slot)
                )
            else:
                mbarrier.arrive(q_full.index(slot), count=1)
        for i in range(gl.cdiv(k_len, BN)):
            s = step % KS
            phase = (step // KS) & 1
            mbarrier.wait(k_empty.index(s), phase ^ 1)
            mbarrier.expect(k_full.index(s), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, [k_start + i * BN, column], k_full.index(s), k_buf.index(s))
            mbarrier.wait(v_empty.index(s), phase ^ 1)
            mbarrier.expect(v_full.index(s), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(v_desc, [k_start + i * BN, column], v_full.index(s), v_buf.index(s))
            step += 1


@gluon.jit
def _consumer(
    W: gl.constexpr, problem, buffers, barriers,
    BN: gl.constexpr, D: gl.constexpr, NC: gl.constexpr, KS: gl.constexpr, QS: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    dq_ptr, dq_stride, lse_ptr, delta_ptr, total_q, tiles_ptr, count_ptr, scale, q_scale = problem
    q_buf, do_buf, k_buf, v_buf = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    dtype: gl.constexpr = dq_ptr.dtype.element_ty
    step = 0
    count = tile_count(count_ptr)
    _q, rows, _k, k_len, head, q_row = tile_record(tiles_ptr, 0, count)
    for t in range(count):
        _q1, rows1, _k1, k_len1, head1, q_row1 = tile_record(tiles_ptr, t + 1, count)
        n = gl.cdiv(k_len, BN)
        mine = rows - W * BLOCK
        slot = (t % QS) * NC + W
        r = gl.arange(0, BLOCK, gl.SliceLayout(1, SL))
        at = head.to(gl.int64) * total_q + q_row + W * BLOCK + r
        if ACT == "softmax":
            lse = gl.load(lse_ptr + at, mask=r < mine, other=float("inf"))
            delta = gl.load(delta_ptr + at, mask=r < mine, other=0.0)
        mbarrier.wait(q_full.index(slot), (t // QS) & 1)
        if mine > 0:
            q = q_buf.index(slot)
            do = do_buf.index(slot)
            dq = gl.zeros([BLOCK, D], gl.float32, OL)
            for i in range(n):
                s = (step + i) % KS
                phase = ((step + i) // KS) & 1
                mbarrier.wait(k_full.index(s), phase)
                S = warpgroup_mma(
                    q,
                    k_buf.index(s).permute((1, 0)),
                    gl.zeros([BLOCK, BN], gl.float32, SL),
                    use_acc=False,
                    is_async=True,
                )
                mbarrier.wait(v_full.index(s), phase)
                dP = warpgroup_mma(
                    do,
                    v_buf.index(s).permute((1, 0)),
                    gl.zeros([BLOCK, BN], gl.float32, SL),
                    use_acc=False,
                    is_async=True,
                )
                S = warpgroup_mma_wait(1, deps=(S,))
                if ACT == "softmax":
                    p = gl.exp2(S * scale - lse[:, None])
                    dP = warpgroup_mma_wait(0, deps=(dP,))
                    ds = p * (dP - delta[:, None])
                else:
                    _p, slope = activate_with_grad(S * scale, ACT)
                    dP = warpgroup_mma_wait(0, deps=(dP,))
                    ds = slope * dP
                mbarrier.arrive(v_empty.index(s), count=1)
                if k_len < (i + 1) * BN:
                    inside = gl.arange(0, BN, gl.SliceLayout(0, SL)) < k_len - i * BN
                    ds = gl.where(inside[None, :], ds, 0.0)
                dS = gl.convert_layout(ds.to(dtype), PL)
                dq = warpgroup_mma(dS, k_buf.index(s), dq, is_async=True)
                dq = warpgroup_mma_wait(0, deps=(dq,))
                mbarrier.arrive(k_empty.index(s), count=1)
            mbarrier.arrive(q_empty.index(slot), count=1)
            ro = gl.arange(0, BLOCK, gl.SliceLayout(1, OL))
            c = gl.arange(0, D, gl.SliceLayout(0, OL))
            base = dq_ptr + (q_row + W * BLOCK).to(gl.int64) * dq_stride + head * D
            gl.store(base + (ro * dq_stride)[:, None] + c[None, :], (dq * q_scale).to(dtype), mask=(ro < mine)[:, None])
        else:
            mbarrier.arrive(q_empty.index(slot), count=1)
            for i in range(n):
                s = (step + i) % KS
                phase = ((step + i) // KS) & 1
                mbarrier.wait(k_full.index(s), phase)
                mbarrier.arrive(k_empty.index(s), count=1)
                mbarrier.wait(v_full.index(s), phase)
                mbarrier.arrive(v_empty.index(s), count=1)
        step += n
        rows, k_len, head, q_row = rows1, k_len1, head1, q_row1


@gluon.jit(do_not_specialize=["total_q"])
def query_gradient_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_ptr, dq_stride, lse_ptr, delta_ptr, total_q, tiles_ptr, count_ptr, scale,
    q_scale,
    BN: gl.constexpr, D: gl.constexpr, NC: gl.constexpr, KS: gl.constexpr, QS: gl.constexpr, ACT: gl.constexpr,
    REGS: gl.constexpr, LOADER_REGS: gl.constexpr,
):  # fmt: skip
    """dQ = q_scale dS K; for softmax `scale` holds log2(e) as a factor and LSE is in base 2."""
    dtype: gl.constexpr = dq_ptr.dtype.element_ty
    q_buf = gl.allocate_shared_memory(dtype, [QS * NC, BLOCK, D], q_desc.layout)
    do_buf = gl.allocate_shared_memory(dtype, [QS * NC, BLOCK, D], q_desc.layout)
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
    buffers = (q_buf, do_buf, k_buf, v_buf)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    problem = (dq_ptr, dq_stride, lse_ptr, delta_ptr, total_q, tiles_ptr, count_ptr, scale, q_scale)
    inputs = (q_desc, k_desc, v_desc, do_desc, tiles_ptr, count_ptr)
    if NC == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, problem, buffers, barriers, BN, D, NC, KS, QS, ACT)),
                (_consumer, (1, problem, buffers, barriers, BN, D, NC, KS, QS, ACT)),
                (_producer, (inputs, buffers, barriers, BN, D, NC, KS, QS)),
            ],
            [4, 1],
            [REGS, LOADER_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, problem, buffers, barriers, BN, D, NC, KS, QS, ACT)),
                (_consumer, (1, problem, buffers, barriers, BN, D, NC, KS, QS, ACT)),
                (_consumer, (2, problem, buffers, barriers, BN, D, NC, KS, QS, ACT)),
                (_producer, (inputs, buffers, barriers, BN, D, NC, KS, QS)),
            ],
            [4, 4, 1],
            [REGS, REGS, LOADER_REGS],
        )
