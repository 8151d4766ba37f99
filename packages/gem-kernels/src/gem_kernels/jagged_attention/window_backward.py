"""Backward of self-attention over a narrow past on Hopper, in one pass: a persistent Gluon kernel that makes dQ, dK and
dV of a tile of 64 rows, and a small one before it for the statistics of rows.

The tile's queries need the keys before it, its keys the queries after it; both pass by in one buffer, keys and values
first, then queries and dO. What is between the tile's own queries and keys belongs to all three gradients. Q, K, V and
dO come from memory once (their neighbours find them in L2), each gradient is written once, and no scores but those of
the tiles around are made twice. No atomics, so every run gives the same bits.

    keys before:    S = Q_j K_i^T    dQ_j += dS K_i
    own:            S = Q_j K_j^T    dQ_j += dS K_j    dV_j  = P^T dO_j    dK_j  = dS^T Q_j
    queries after:  S = Q_i K_j^T                      dV_j += P^T dO_i    dK_j += dS^T Q_i

with P = exp(S - LSE), dS = P o (dP - delta), delta = rowsum(dO o O) - dLSE. P and dS go through shared memory: as
operands in registers they would not fit beside the accumulators. Two programs share an SM: one computes while the
other waits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gem_kernels.jagged_attention.window_tiles import ROWS, ask, barriers, buffer, put, record


@triton.jit(do_not_specialize=["total"])
def statistics_kernel(
    out_ptr, dout_ptr, lse_f32, dlse_f32, lse2_f32, delta_f32, out_row, dout_row, total,
    HEADS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, DLSE: tl.constexpr,
):  # fmt: skip
    """LSE in base 2 and delta of [total, HEADS, D] tensors with heads side by side, both [HEADS, total]."""
    row = tl.program_id(0).to(tl.int64) // HEADS * BM + tl.arange(0, BM)
    head = tl.program_id(0) % HEADS
    inside = row < total
    column = head * D + tl.arange(0, D)[None, :]
    out = tl.load(out_ptr + row[:, None] * out_row + column, mask=inside[:, None], other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + row[:, None] * dout_row + column, mask=inside[:, None], other=0.0).to(tl.float32)
    delta = tl.sum(out * dout, axis=1)
    if DLSE:
        delta -= tl.load(dlse_f32 + row * HEADS + head, mask=inside, other=0.0)
    lse = tl.load(lse_f32 + row * HEADS + head, mask=inside, other=0.0)
    at = head.to(tl.int64) * total + row
    tl.store(lse2_f32 + at, lse * 1.4426950408889634, mask=inside)
    tl.store(delta_f32 + at, delta, mask=inside)


@gluon.jit
def _around(place, rows, length, left):
    """How many tiles before this one its queries see, and how many after it see its keys."""
    before = (place - gl.maximum(place - left, 0) // ROWS * ROWS) // ROWS
    after = gl.maximum(gl.minimum(place + (ROWS - 1) + left, length - 1) - place, 0) // ROWS
    return gl.where(rows > 0, before, 0), gl.where(rows > 0, after, 0)


@gluon.jit
def _pass(descs, bufs, barrier, step, before, row, head, some, D: gl.constexpr):
    """Ask for what passes by at a step, if there is `some`: keys and values of a tile before, or queries and dO of one
    after the tile that begins at `row`.
    """
    q_desc, do_desc, k_desc, v_desc = descs
    earlier = step < before
    at = row + (step - before + gl.where(earlier, 0, 1)) * ROWS
    mbarrier.expect(barrier, 2 * q_desc.block_type.nbytes, pred=some)
    tma.async_copy_global_to_shared(k_desc, [at, head * D], barrier, bufs[0].index(0), pred=some & earlier)
    tma.async_copy_global_to_shared(v_desc, [at, head * D], barrier, bufs[1].index(0), pred=some & earlier)
    later = step >= before
    tma.async_copy_global_to_shared(q_desc, [at, head * D], barrier, bufs[0].index(0), pred=some & later)
    tma.async_copy_global_to_shared(do_desc, [at, head * D], barrier, bufs[1].index(0), pred=some & later)


@gluon.jit
def _pass_next(descs, bufs, barrier, step, n, before, row, head, n1, before1, row1, head1, D: gl.constexpr):
    """Ask for what passes by after `step` of n: of this tile or, when it has no more, the next tile's first."""
    more = step + 1 < n
    _pass(
        descs, bufs, barrier, gl.where(more, step + 1, 0), gl.where(more, before, before1), gl.where(more, row, row1),
        gl.where(more, head, head1), more | (n1 > 0), D,
    )  # fmt: skip


@gluon.jit
def _weigh(q, do, k, v, lse2, delta, inner_scale, first, place, length, left, masked, SL: gl.constexpr):
    """P and dS of the queries from `place` on and the keys from `first` on, [ROWS, ROWS]; 0 where one does not see the
    other, which is looked at where `masked`.
    """
    none = gl.zeros([ROWS, ROWS], gl.float32, SL)
    S = warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
    dP = warpgroup_mma(do, v.permute((1, 0)), none, use_acc=False, is_async=True)
    S = warpgroup_mma_wait(1, deps=(S,))
    p = gl.exp2(S * inner_scale - lse2[:, None])
    if masked:
        distance = (place + gl.arange(0, ROWS, gl.SliceLayout(1, SL)))[:, None] - (
            first + gl.arange(0, ROWS, gl.SliceLayout(0, SL))
        )[None, :]
        inside = (place + gl.arange(0, ROWS, gl.SliceLayout(1, SL)) < length)[:, None]
        p = gl.where((distance.to(gl.uint32) <= left.to(gl.uint32)) & inside, p, 0.0)
    dP = warpgroup_mma_wait(0, deps=(dP,))
    return p, p * (dP - delta[:, None])


@gluon.jit
def _views(query_bufs, key_bufs, bufs, weights, count):
    """Q, dO, K, V, what passes by, P and dS, at an index that is 0: the compiler does not see that of a count, and so
    does not keep the addresses of all operands of all products in registers throughout.
    """
    z = count >> 30
    return (
        query_bufs[0].index(z), query_bufs[1].index(z), key_bufs[0].index(z), key_bufs[1].index(z),
        bufs[0].index(z), bufs[1].index(z), weights.index(z), weights.index(z + 1),
    )  # fmt: skip


@gluon.jit
def _keep(x, buf):
    """x in shared memory, for products to read."""
    buf.store(x.to(buf.dtype))
    fence_async_shared()


@gluon.jit(do_not_specialize=["tiles", "left", "total"])
def backward_kernel(
    q_desc, do_desc, k_desc, v_desc, dq_desc, dk_desc, dv_desc, lse2_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, g_row,
    records_ptr, tiles, left, total, inner_scale, scale,
    D: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """dQ, dK and dV; a query sees the `left` keys before it and its own; `inner_scale` is `scale` log2(e)."""
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    dtype: gl.constexpr = dk_ptr.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], dtype)
    query_bufs = (buffer(q_desc, 1, D), buffer(do_desc, 1, D))
    key_bufs = (buffer(k_desc, 1, D), buffer(v_desc, 1, D))
    bufs = (buffer(k_desc, 1, D), buffer(v_desc, 1, D))  # what passes by
    weights = gl.allocate_shared_memory(dtype, [2, ROWS, ROWS], SHARED)  # P and dS
    query_descs = (q_desc, do_desc)
    key_descs = (k_desc, v_desc)
    descs = (q_desc, do_desc, k_desc, v_desc)
    queries, keys, passing = barriers(1).index(0), barriers(1).index(0), barriers(1).index(0)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, SL))
    programs = gl.num_programs(0)
    first_tile = gl.program_id(0)
    step = 0  # of all tiles: the phase of `passing`
    asked = first_tile * 0  # whether this tile's first step has been asked for
    visit = 0
    head, row, rows, place, _other, length = record(records_ptr, first_tile, tiles, HEADS)
    head1, row1, rows1, place1, _other1, length1 = record(records_ptr, first_tile + programs, tiles, HEADS)
    ask(query_descs, query_bufs, queries, 0, row, head, rows > 0, D)
    ask(key_descs, key_bufs, keys, 0, row, head, rows > 0, D)
    for tile in range(first_tile, tiles, programs):
        # Two tiles ahead, so that nothing waits for the load.
        head2, row2, rows2, place2, _other2, length2 = record(records_ptr, tile + 2 * programs, tiles, HEADS)
        before, after = _around(place, rows, length, left)
        before1, after1 = _around(place1, rows1, length1, left)
        n, n1 = before + after, before1 + after1
        if rows > 0:
            _pass(descs, bufs, passing, 0, before, row, head, (asked == 0) & (n > 0), D)
            statistics = head.to(gl.int64) * total + row
            lse2 = gl.load(lse2_ptr + statistics + r, mask=r < rows, other=0.0)
            delta = gl.load(delta_ptr + statistics + r, mask=r < rows, other=0.0)
            dq = gl.zeros([ROWS, D], gl.float32, AL)
            mbarrier.wait(queries, visit & 1)
            for i in range(before):
                begin = place + (i - before) * ROWS
                q, do, k, v, first, second, p_buf, ds_buf = _views(query_bufs, key_bufs, bufs, weights, step + i)
                mbarrier.wait(passing, (step + i) & 1)
                masked = begin < place + (ROWS - 1) - left
                p, ds = _weigh(q, do, first, second, lse2, delta, inner_scale, begin, place, length, left, masked, SL)
                _keep(ds, ds_buf)
                dq = warpgroup_mma(ds_buf, first, dq)
                _pass_next(descs, bufs, passing, i, n, before, row, head, n1, before1, row1, head1, D)

            q, do, k, v, first, second, p_buf, ds_buf = _views(query_bufs, key_bufs, bufs, weights, visit)
            mbarrier.wait(keys, visit & 1)
            p, ds = _weigh(q, do, k, v, lse2, delta, inner_scale, place, place, length, left, True, SL)
            p_buf.store(p.to(dtype))
            _keep(ds, ds_buf)
            none = gl.zeros([ROWS, D], gl.float32, AL)
            dq = warpgroup_mma(ds_buf, k, dq, is_async=True)
            dv = warpgroup_mma(p_buf.permute((1, 0)), do, none, use_acc=False, is_async=True)
            dk = warpgroup_mma(ds_buf.permute((1, 0)), q, none, use_acc=False, is_async=True)
            dq, dv, dk = warpgroup_mma_wait(0, deps=(dq, dv, dk))
            put(dq * scale, dq_desc, dq_ptr, g_row, q, row, rows, head * D, D, AL)

            for i in range(before, n):
                begin = place + (i - before + 1) * ROWS
                at = statistics + (i - before + 1) * ROWS + r
                lse2 = gl.load(lse2_ptr + at, mask=begin + r < length, other=0.0)
                delta = gl.load(delta_ptr + at, mask=begin + r < length, other=0.0)
                q, do, k, v, first, second, p_buf, ds_buf = _views(query_bufs, key_bufs, bufs, weights, step + i)
                mbarrier.wait(passing, (step + i) & 1)
                masked = (begin + (ROWS - 1) > place + left) | (begin + ROWS > length)
                p, ds = _weigh(first, second, k, v, lse2, delta, inner_scale, place, begin, length, left, masked, SL)
                p_buf.store(p.to(dtype))
                _keep(ds, ds_buf)
                dv = warpgroup_mma(p_buf.permute((1, 0)), second, dv, is_async=True)
                dk = warpgroup_mma(ds_buf.permute((1, 0)), first, dk, is_async=True)
                dv, dk = warpgroup_mma_wait(0, deps=(dv, dk))
                _pass_next(descs, bufs, passing, i, n, before, row, head, n1, before1, row1, head1, D)
            q, do, k, v, first, second, p_buf, ds_buf = _views(query_bufs, key_bufs, bufs, weights, visit)
            tma.store_wait(0)  # dQ has left
            ask(query_descs, query_bufs, queries, 0, row1, head1, rows1 > 0, D)
            put(dv, dv_desc, dv_ptr, g_row, v, row, rows, head * D, D, AL)
            put(dk * scale, dk_desc, dk_ptr, g_row, k, row, rows, head * D, D, AL)
            tma.store_wait(0)
            ask(key_descs, key_bufs, keys, 0, row1, head1, rows1 > 0, D)
            asked = gl.where((n > 0) & (n1 > 0), 1, 0)
            step += n
            visit += 1
        head, row, rows, place, length = head1, row1, rows1, place1, length1
        head1, row1, rows1, place1, length1 = head2, row2, rows2, place2, length2
    tma.store_wait(0)
