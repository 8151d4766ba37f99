"""The forward pass through a window on Hopper, with scores and weights in turn, or with scores a step ahead: the next
step's are multiplied while this step's become weights.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.jagged_attention.window_tiles import (
    LN2,
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


@gluon.jit
def _softmax(S, m, total, hidden, step, limits, scale, SL: gl.constexpr):
    """What scores add to the running softmax: weights, their rows' new maximum and sum, and what shrinks the old."""
    if hidden:
        S = masked(S, step, limits, float("-inf"), SL)
    m_new = gl.maximum(m, gl.max(S, 1) * scale)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(S * scale - shift[:, None])
    alpha = gl.exp2(m - shift)
    return p, m_new, total * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _in_turn(
    q, descs, bufs, full, acc, m, total, step, tile, after, window, limits, scale,
    D: gl.constexpr, SLOTS: gl.constexpr, SL: gl.constexpr, AL: gl.constexpr,
):  # fmt: skip
    """All steps of one tile, one product after the other."""
    n, lo, other, head = tile
    n1, lo1, other1, head1 = after
    place, other_len, left, right = window
    for j in range(n):
        slot = (step + j) % SLOTS
        mbarrier.wait(full[0].index(slot), ((step + j) // SLOTS) & 1)
        none = gl.zeros([ROWS, ROWS], gl.float32, SL)
        S = warpgroup_mma(q, bufs[0].index(slot).permute((1, 0)), none, use_acc=False)
        hidden = edge(lo + j * ROWS, place, other_len, left, right)
        p, m, total, alpha = _softmax(S, m, total, hidden, lo + j * ROWS, limits, scale, SL)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, AL))[:, None]
        P = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, AL, 2))
        acc = warpgroup_mma(P, bufs[1].index(slot), acc)
        at, whose, some = following(j, n, other + lo, head, n1, other1 + lo1, head1, SLOTS)
        ask(descs, bufs, full[0].index(slot), slot, at, whose, some, D)
    return acc, m, total


@gluon.jit
def _ahead(
    q, descs, bufs, full, acc, m, total, step, tile, after, window, limits, scale,
    D: gl.constexpr, SLOTS: gl.constexpr, SL: gl.constexpr, AL: gl.constexpr,
):  # fmt: skip
    """All steps of one tile; the next step's scores are multiplied while this step's become weights."""
    n, lo, other, head = tile
    n1, lo1, other1, head1 = after
    place, other_len, left, right = window
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    k_buf, v_buf = bufs
    k_full, v_full = full
    if n > 0:
        mbarrier.wait(k_full.index(step % SLOTS), (step // SLOTS) & 1)
        none = gl.zeros([ROWS, ROWS], gl.float32, SL)
        S = warpgroup_mma(q, k_buf.index(step % SLOTS).permute((1, 0)), none, use_acc=False)
        for j in range(n - 1):
            slot = (step + j) % SLOTS
            next_slot = (step + j + 1) % SLOTS
            mbarrier.wait(k_full.index(next_slot), ((step + j + 1) // SLOTS) & 1)
            none = gl.zeros([ROWS, ROWS], gl.float32, SL)
            S1 = warpgroup_mma(q, k_buf.index(next_slot).permute((1, 0)), none, use_acc=False, is_async=True)
            at, whose, some = following(j, n, other + lo, head, n1, other1 + lo1, head1, SLOTS)
            ask((descs[0],), (k_buf,), k_full.index(slot), slot, at, whose, some, D)
            hidden = edge(lo + j * ROWS, place, other_len, left, right)
            p, m, total, alpha = _softmax(S, m, total, hidden, lo + j * ROWS, limits, scale, SL)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, AL))[:, None]
            mbarrier.wait(v_full.index(slot), ((step + j) // SLOTS) & 1)
            P = gl.convert_layout(p.to(q.dtype), PL)
            acc = warpgroup_mma(P, v_buf.index(slot), acc, is_async=True)
            S, acc, P = warpgroup_mma_wait(0, deps=(S1, acc, P))
            ask((descs[1],), (v_buf,), v_full.index(slot), slot, at, whose, some, D)
        last = n - 1
        slot = (step + last) % SLOTS
        at, whose, some = following(last, n, other + lo, head, n1, other1 + lo1, head1, SLOTS)
        ask((descs[0],), (k_buf,), k_full.index(slot), slot, at, whose, some, D)
        hidden = edge(lo + last * ROWS, place, other_len, left, right)
        p, m, total, alpha = _softmax(S, m, total, hidden, lo + last * ROWS, limits, scale, SL)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, AL))[:, None]
        mbarrier.wait(v_full.index(slot), ((step + last) // SLOTS) & 1)
        acc = warpgroup_mma(gl.convert_layout(p.to(q.dtype), PL), v_buf.index(slot), acc)
        ask((descs[1],), (v_buf,), v_full.index(slot), slot, at, whose, some, D)
    return acc, m, total


@gluon.jit(do_not_specialize=["tiles", "left", "right"])
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, o_ptr, o_row, lse_ptr, records_ptr, tiles, left, right, scale,
    D: gl.constexpr, HEADS: gl.constexpr, SLOTS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """O and LSE; `scale` has log2(e) as a factor. AHEAD: scores are made a step ahead."""
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    q_buf, o_buf = buffer(q_desc, 1, D), buffer(o_desc, 1, D)
    descs = (k_desc, v_desc)
    bufs = (buffer(k_desc, SLOTS, D), buffer(v_desc, SLOTS, D))
    own, k_full = barriers(1).index(0), barriers(SLOTS)
    v_full = k_full
    if AHEAD:
        v_full = barriers(SLOTS)
    full = (k_full, v_full)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, SL))
    programs = gl.num_programs(0)
    first_tile = gl.program_id(0)
    step = 0
    missing = SLOTS + 0  # so many first steps of the current tile have not been asked for
    visit = 0
    head, row, rows, place, other, other_len = record(records_ptr, first_tile, tiles, HEADS)
    head1, row1, rows1, place1, other1, other_len1 = record(records_ptr, first_tile + programs, tiles, HEADS)
    ask((q_desc,), (q_buf,), own, 0, row, head, rows > 0, D)
    for tile in range(first_tile, tiles, programs):
        # Two tiles ahead, so that nothing waits for the load.
        head2, row2, rows2, place2, other2, other_len2 = record(records_ptr, tile + 2 * programs, tiles, HEADS)
        lo, n = steps_of(place, rows, other_len, left, right)
        lo1, n1 = steps_of(place1, rows1, other_len1, left, right)
        if rows > 0:
            for j in gl.static_range(SLOTS):
                slot = (step + j) % SLOTS
                if AHEAD:  # a slot of K is free one step before that of V: they are waited for apart
                    some = (j < missing) & (j < n)
                    ask((k_desc,), (bufs[0],), k_full.index(slot), slot, other + lo + j * ROWS, head, some, D)
                    ask((v_desc,), (bufs[1],), v_full.index(slot), slot, other + lo + j * ROWS, head, some, D)
                else:
                    ask(
                        descs, bufs, k_full.index(slot), slot, other + lo + j * ROWS, head,
                        (j < missing) & (j < n), D,
                    )  # fmt: skip
            limits = limits_of(place + r, other_len, left, right)
            acc = gl.zeros([ROWS, D], gl.float32, AL)
            m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SL))
            total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SL))
            mbarrier.wait(own, visit & 1)
            this, after, window = (n, lo, other, head), (n1, lo1, other1, head1), (place, other_len, left, right)
            if AHEAD:
                acc, m, total = _ahead(
                    q_buf.index(0), descs, bufs, full, acc, m, total, step, this, after, window, limits, scale,
                    D, SLOTS, SL, AL,
                )  # fmt: skip
            else:
                acc, m, total = _in_turn(
                    q_buf.index(0), descs, bufs, full, acc, m, total, step, this, after, window, limits, scale,
                    D, SLOTS, SL, AL,
                )  # fmt: skip
            step += n
            missing = gl.maximum(SLOTS - n, 0)
            visit += 1
            ask((q_desc,), (q_buf,), own, 0, row1, head1, rows1 > 0, D)
            some = total > 0.0
            safe = gl.where(some, total, 1.0)
            lse = gl.where(some, (m + gl.log2(safe)) * LN2, float("-inf"))
            gl.store(lse_ptr + (row + r).to(gl.int64) * HEADS + head, lse, mask=r < rows)
            acc = acc * gl.convert_layout(1.0 / safe, gl.SliceLayout(1, AL))[:, None]
            tma.store_wait(0)
            put(acc, o_desc, o_ptr, o_row, o_buf.index(0), row, rows, head * D, D, AL)
        head, row, rows, place, other, other_len = head1, row1, rows1, place1, other1, other_len1
        head1, row1, rows1, place1, other1, other_len1 = head2, row2, rows2, place2, other2, other_len2
    tma.store_wait(0)
