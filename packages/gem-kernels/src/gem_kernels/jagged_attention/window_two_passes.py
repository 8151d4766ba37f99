"""Backward through a window on Hopper, in two passes: `query_gradient_kernel` makes dQ, and the statistics (LSE in base
2, delta = rowsum(dO o O) - dLSE; both [H * T]) that `key_gradient_kernel` reads, which makes dK and dV. No atomics, so
every run gives the same bits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.jagged_attention.window_tiles import (
    LOG2E,
    ROWS,
    ask,
    barriers,
    buffer,
    edge,
    following,
    limits_of,
    masked,
    put,
    record,
    steps_of,
)


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
    own_bufs = (buffer(q_desc, 1, D), buffer(do_desc, 1, D))
    o_buf = buffer(o_desc, 1, D)
    descs = (k_desc, v_desc)
    bufs = (buffer(k_desc, SLOTS, D), buffer(v_desc, SLOTS, D))
    own, o_full, full = barriers(1).index(0), barriers(1).index(0), barriers(SLOTS)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, SL))
    programs = gl.num_programs(0)
    first_tile = gl.program_id(0)
    step = 0
    missing = SLOTS + 0
    visit = 0
    head, row, rows, place, other, other_len = record(records_ptr, first_tile, tiles, HEADS)
    head1, row1, rows1, place1, other1, other_len1 = record(records_ptr, first_tile + programs, tiles, HEADS)
    ask(own_descs, own_bufs, own, 0, row, head, rows > 0, D)
    ask((o_desc,), (o_buf,), o_full, 0, row, head, rows > 0, D)
    for tile in range(first_tile, tiles, programs):
        head2, row2, rows2, place2, other2, other_len2 = record(records_ptr, tile + 2 * programs, tiles, HEADS)
        lo, n = steps_of(place, rows, other_len, left, right)
        lo1, n1 = steps_of(place1, rows1, other_len1, left, right)
        if rows > 0:
            for j in gl.static_range(SLOTS):
                slot = (step + j) % SLOTS
                ask(descs, bufs, full.index(slot), slot, other + lo + j * ROWS, head, (j < missing) & (j < n), D)
            limits = limits_of(place + r, other_len, left, right)
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
                if edge(lo + j * ROWS, place, other_len, left, right):
                    ds = masked(ds, lo + j * ROWS, limits, 0.0, SL)
                dq = warpgroup_mma(gl.convert_layout(ds.to(dq_ptr.dtype.element_ty), PL), k, dq)
                at_row, whose, some = following(j, n, other + lo, head, n1, other1 + lo1, head1, SLOTS)
                ask(descs, bufs, full.index(slot), slot, at_row, whose, some, D)
            step += n
            missing = gl.maximum(SLOTS - n, 0)
            visit += 1
            ask(own_descs, own_bufs, own, 0, row1, head1, rows1 > 0, D)
            put(dq * scale, dq_desc, dq_ptr, dq_row, o_buf.index(0), row, rows, head * D, D, AL)
            tma.store_wait(0)
            ask((o_desc,), (o_buf,), o_full, 0, row1, head1, rows1 > 0, D)
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
    own_bufs = (buffer(k_desc, 1, D), buffer(v_desc, 1, D))
    descs = (q_desc, do_desc)
    bufs = (buffer(q_desc, SLOTS, D), buffer(do_desc, SLOTS, D))
    own, full = barriers(1).index(0), barriers(SLOTS)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, SL))
    programs = gl.num_programs(0)
    first_tile = gl.program_id(0)
    step = 0
    missing = SLOTS + 0
    visit = 0
    head, row, rows, place, other, other_len = record(records_ptr, first_tile, tiles, HEADS)
    head1, row1, rows1, place1, other1, other_len1 = record(records_ptr, first_tile + programs, tiles, HEADS)
    ask(own_descs, own_bufs, own, 0, row, head, rows > 0, D)
    for tile in range(first_tile, tiles, programs):
        lo, n = steps_of(place, rows, other_len, right, left)
        lo1, n1 = steps_of(place1, rows1, other_len1, right, left)
        if rows > 0:
            for j in gl.static_range(SLOTS):
                slot = (step + j) % SLOTS
                ask(descs, bufs, full.index(slot), slot, other + lo + j * ROWS, head, (j < missing) & (j < n), D)
            limits = limits_of(place + r, other_len, right, left)
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
                if edge(lo + j * ROWS, place, other_len, right, left):
                    p = masked(p, lo + j * ROWS, limits, 0.0, SL)
                    ds = masked(ds, lo + j * ROWS, limits, 0.0, SL)
                P, dS = gl.convert_layout(p.to(dtype), PL), gl.convert_layout(ds.to(dtype), PL)
                dv = warpgroup_mma(P, do, dv, is_async=True)
                dk = warpgroup_mma(dS, q, dk, is_async=True)
                dv, dk, P, dS = warpgroup_mma_wait(0, deps=(dv, dk, P, dS))
                at, whose, some = following(j, n, other + lo, head, n1, other1 + lo1, head1, SLOTS)
                ask(descs, bufs, full.index(slot), slot, at, whose, some, D)
            step += n
            missing = gl.maximum(SLOTS - n, 0)
            visit += 1
            put(dv, dv_desc, dv_ptr, dk_row, own_bufs[1].index(0), row, rows, head * D, D, AL)
            put(dk * scale, dk_desc, dk_ptr, dk_row, own_bufs[0].index(0), row, rows, head * D, D, AL)
            tma.store_wait(0)
            ask(own_descs, own_bufs, own, 0, row1, head1, rows1 > 0, D)
        head, row, rows, place, other, other_len = head1, row1, rows1, place1, other1, other_len1
        head1, row1, rows1, place1, other1, other_len1 = record(records_ptr, tile + 2 * programs, tiles, HEADS)
    tma.store_wait(0)
