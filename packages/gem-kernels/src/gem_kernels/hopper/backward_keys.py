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
from gem_kernels.hopper.backward_block import BLOCK, in_sight, product, put_rows, score_gradient, weights

threads_meet = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # its name from triton 3.7 on


@gluon.jit
def settle(before, has_before, word, TOGETHER: gl.constexpr):
    """What the tile before left in its buffers of K and V has gone out, so that they may be loaded anew; and, where one
    is owed, a word to `backward_loader` that this consumer's part of dS of a (sequence, head) is in memory.

    That is all but the last two stores by TMA, which are those of dV and dK. It is said here, a tile later, because it
    takes a fence, which ends while a product is under way.
    """
    if TOGETHER:
        told_ptr, owed = word
        gl.inline_asm_elementwise("cp.async.bulk.wait_group 2; mov.b32 $0, $1;", "=r,r", [owed], gl.int32, False, 1)
        threads_meet()  # after the wait of the thread that issues stores
        gl.atomic_add(told_ptr + owed, 1, mask=owed >= 0, sem="release", scope="gpu")
    tma.store_wait(0)
    mbarrier.arrive(before, count=1, pred=has_before)


@gluon.jit
def _no_stores():
    """Two stores by TMA that have nothing to do, so that `settle` need not know who stored dV and dK."""
    nothing = gl.to_tensor(0)
    gl.inline_asm_elementwise(
        "cp.async.bulk.commit_group; cp.async.bulk.commit_group; mov.b32 $0, $1;", "=r,r", [nothing], gl.int32, False, 1
    )


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
    ACT: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, TOGETHER: gl.constexpr,
    HALF: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """What one head's queries add to dK and dV of 64 keys, and their dS. BIAS: `bias` is that of these keys for the
    queries that `n` counts, from `bias_at`, of pointers to HALF.
    """
    begin, end, n = steps
    q_left, mine, d0 = left_over
    ds_buf, ds_desc, ds_row, ds_step = out
    before, has_before, word = release
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
        settle(before, has_before, word, TOGETHER)
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
            _send(dS, ds_buf, ds_desc, ds_row, SL)
            ds_row += ds_step
            if BIAS:
                b = load_bias(bias, (i + 1) * BLOCK, q_left - (i + 1) * BLOCK, mine, SL, BIAS)
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
        settle(before, has_before, word, TOGETHER)
    if LEFT or RIGHT:
        step = pass_by(step, n - end, barriers, QS, DS)
    return dk, dv, step


@gluon.jit
def key_tile(
    W: gl.constexpr, tile, step, visit, word, outputs, problem, buffers, ds_buf, barriers, mask,
    D: gl.constexpr, DIM: gl.constexpr, NC: gl.constexpr, QS: gl.constexpr, DS: gl.constexpr, GROUP: gl.constexpr,
    ACT: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """dK and dV stay in registers while blocks of queries pass by, those of every head that reads these keys; dS goes
    out block after block, dK and dV at the end through the buffers of K and V. Returns the steps so far, and the place
    of the word that is owed for this tile, see `settle`.
    """
    told_ptr, owed = word
    ds_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, stride = outputs
    scale, v_scale, k_scale, workspace = problem
    _query_blocks, window_blocks, key_blocks = workspace
    k_row, rows, q_left, n, head, ds_block, diagonal, place = tile
    left, right = mask
    _q_buf, _do_buf, k_buf, v_buf, _rows_buf = buffers
    _q_full, _do_full, _step_empty, kv_full, kv_empty = barriers
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    dtype: gl.constexpr = dk_ptr.dtype.element_ty
    mine = rows - W * BLOCK
    slot = visit % 2
    before = kv_empty.index(1 - slot)
    mbarrier.wait(kv_full.index(slot * NC + W), (visit // 2) & 1)
    if mine > 0:
        k = k_buf.index(slot * NC + W)
        v = v_buf.index(slot * NC + W)
        begin, end = in_sight(diagonal + W * BLOCK, right, left, n, RIGHT, LEFT)
        first = ds_block % key_blocks  # where the tile's first block of keys has its place
        ds_row = (ds_block - first + (first + W) % key_blocks + begin * key_blocks) * BLOCK
        dk = gl.zeros([BLOCK, D], gl.float32, AL)
        dv = gl.zeros([BLOCK, D], gl.float32, AL)
        steps = (begin, end, n)
        left_over = (q_left, mine, diagonal + W * BLOCK)
        for g in range(GROUP):
            at = ds_row + g * window_blocks * key_blocks * BLOCK
            dk, dv, step = head_of_queries(
                dk, dv, k.reshape([BLOCK, D]), v.reshape([BLOCK, D]), step, steps, left_over,
                (ds_buf.index(W), ds_desc, at, key_blocks * BLOCK),
                (before, (visit > 0) & (g == 0), (told_ptr, gl.where(g == 0, owed, -1))),
                (scale, mask), 0, buffers, barriers, NC, D, QS, DS, ACT, LEFT, RIGHT, True, dtype, 0,
            )  # fmt: skip
        at_row = k_row + W * BLOCK
        k_out = k.reshape([BLOCK, D])
        v_out = v.reshape([BLOCK, D])
        v_out.store((dv * v_scale).to(dtype))
        k_out.store((dk * k_scale).to(dtype))
        if mine >= BLOCK:
            fence_async_shared()
            tma.async_copy_shared_to_global(dv_desc, [at_row, head, 0], v)
            tma.async_copy_shared_to_global(dk_desc, [at_row, head, 0], k)
        else:
            _no_stores()
            put_rows(dv_ptr, stride, v_out, at_row, head * DIM, mine, D, DIM)
            put_rows(dk_ptr, stride, k_out, at_row, head * DIM, mine, D, DIM)
    else:
        settle(before, visit > 0, (told_ptr, owed), True)
        step = pass_by(step, n * GROUP, barriers, QS, DS)
    return step, gl.where(mine > 0, place, -1)
