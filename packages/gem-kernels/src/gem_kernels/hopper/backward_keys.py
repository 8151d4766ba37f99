"""What a consumer of the Hopper backward does with a tile of keys: dK and dV of 64 of them, and their dS^T.

Scores are computed transposed, so that P^T and dS^T are operands straight from registers:

    S^T = K Q^T    P^T = exp2(S^T scale - LSE)    dP^T = V dO^T    dS^T = P^T (dP^T - delta)
    dV += P^T dO   dK += dS^T Q
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

from gem_kernels.hopper.backward_bias import biased, load_bias
from gem_kernels.hopper.backward_block import BLOCK, product, score_gradient, weights


@gluon.jit
def settle(before, has_before):
    """What the tile before left in its buffers of K and V has gone out: they may be loaded anew."""
    tma.store_wait(0)
    mbarrier.arrive(before, count=1, pred=has_before)


@gluon.jit
def _send(dS, out, desc, at_row, SL: gl.constexpr):
    """A block of dS goes out."""
    tma.store_wait(0)
    out.reshape([BLOCK, BLOCK]).store(gl.convert_layout(dS, SL))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [at_row, 0, 0], out)


@gluon.jit
def pass_by(step, n, barriers, QS: gl.constexpr, DS: gl.constexpr):
    """Steps that a consumer has no part in: it keeps the rings turning."""
    q_full, do_full, step_empty, _kv_full, _kv_empty = barriers
    for i in range(n):
        s = (step + i) % QS
        o = (step + i) % DS
        mbarrier.wait(q_full.index(s), ((step + i) // QS) & 1)
        mbarrier.wait(do_full.index(o), ((step + i) // DS) & 1)
        mbarrier.arrive(step_empty.index(o), count=1)
    return step + n


@gluon.jit
def _step(
    S, dv, k, v, step, q_left, k_left, d, problem, bias, buffers, barriers,
    NC: gl.constexpr, D: gl.constexpr, QS: gl.constexpr, DS: gl.constexpr,
    ACT: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, LAST: gl.constexpr,
    HALF: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """From a step's scores: dV, to which its part may still be in flight, P^T, which that product reads, and dS^T.

    The weights are made while dP^T is in flight, and dS^T while dV is (of three consumers, whose registers are short,
    another one's): ptxas moves arithmetic over waits for products, but not over products that need it.
    """
    scale, mask = problem
    _q_buf, do_buf, _k_buf, _v_buf, rows_buf = buffers
    _q_full, do_full, _step_empty, _kv_full, _kv_empty = barriers
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    RL: gl.constexpr = gl.SliceLayout(0, SL)
    dtype: gl.constexpr = k.dtype
    s = step % QS
    o = step % DS
    do = do_buf.index(o).reshape([BLOCK, D])
    mbarrier.wait(do_full.index(o), (step // DS) & 1)
    dP = product(v, do, SL)
    if BIAS:
        S = biased(S, scale, bias, HALF, SL, BIAS)
        scale = 1.0
    p, slope = weights(S, scale, rows_buf.index(2 * s).load(RL), q_left, d, mask, ACT, SL, LEFT, RIGHT, LAST)
    P = gl.convert_layout(p.to(dtype), PL)
    dv = warpgroup_mma(P, do, dv, is_async=True)
    dP, dv, P = warpgroup_mma_wait(1 if NC == 2 else 0, deps=(dP, dv, P))
    ds = score_gradient(
        slope, dP, rows_buf.index(2 * s + 1).load(RL), q_left, k_left, d, mask, ACT, SL, LEFT, RIGHT, LAST
    )  # fmt: skip
    return dv, P, gl.convert_layout(ds.to(dtype), PL)


@gluon.jit
def head_of_queries(
    dk, dv, k, v, step, steps, left_over, out, release, problem, bias, buffers, barriers,
    NC: gl.constexpr, D: gl.constexpr, QS: gl.constexpr, DS: gl.constexpr,
    ACT: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    HALF: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """What one head's queries add to dK and dV of 64 keys, and their dS. BIAS: `bias` is that of these keys for the
    queries that `n` counts, from `bias_at`, of pointers to HALF.
    """
    begin, end, n = steps
    q_left, mine, d0 = left_over
    ds_buf, ds_desc, ds_row, ds_step = out
    before, has_before = release
    q_buf, _do_buf, _k_buf, _v_buf, _rows_buf = buffers
    q_full, _do_full, step_empty, _kv_full, _kv_empty = barriers
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    if LEFT or RIGHT:
        step = pass_by(step, begin, barriers, QS, DS)
    if end > begin:
        mbarrier.wait(q_full.index(step % QS), (step // QS) & 1)
        S = product(k, q_buf.index(step % QS).reshape([BLOCK, D]), SL)
        b = 0
        if BIAS:  # under the product
            b = load_bias(bias, begin * BLOCK, q_left - begin * BLOCK, mine, SL, BIAS)
        settle(before, has_before)
        S = warpgroup_mma_wait(0, deps=(S,))
        for i in range(begin, end - 1):
            dv, P, dS = _step(
                S, dv, k, v, step, q_left - i * BLOCK, mine, d0 - i * BLOCK, problem, b, buffers, barriers,
                NC, D, QS, DS, ACT, LEFT, RIGHT, False, HALF, BIAS,
            )  # fmt: skip
            s = step % QS
            o = step % DS
            step += 1
            q = q_buf.index(step % QS).reshape([BLOCK, D])
            mbarrier.wait(q_full.index(step % QS), (step // QS) & 1)
            S = product(k, q, SL)
            dk = warpgroup_mma(dS, q_buf.index(s).reshape([BLOCK, D]), dk, is_async=True)
            if BIAS:  # before the fence of the store, which stands between a load and its use as well
                b = load_bias(bias, (i + 1) * BLOCK, q_left - (i + 1) * BLOCK, mine, SL, BIAS)
            _send(dS, ds_buf, ds_desc, ds_row, SL)
            ds_row += ds_step
            S, dv, dk, _p, _s = warpgroup_mma_wait(0, deps=(S, dv, dk, P, dS))
            mbarrier.arrive(step_empty.index(o), count=1)
        i = end - 1
        dv, P, dS = _step(
            S, dv, k, v, step, q_left - i * BLOCK, mine, d0 - i * BLOCK, problem, b, buffers, barriers,
            NC, D, QS, DS, ACT, LEFT, RIGHT, True, HALF, BIAS,
        )  # fmt: skip
        s = step % QS
        o = step % DS
        step += 1
        dk = warpgroup_mma(dS, q_buf.index(s).reshape([BLOCK, D]), dk, is_async=True)
        _send(dS, ds_buf, ds_desc, ds_row, SL)
        dv, dk, _p, _s = warpgroup_mma_wait(0, deps=(dv, dk, P, dS))
        mbarrier.arrive(step_empty.index(o), count=1)
    else:
        settle(before, has_before)
    if LEFT or RIGHT:
        step = pass_by(step, n - end, barriers, QS, DS)
    return dk, dv, step
