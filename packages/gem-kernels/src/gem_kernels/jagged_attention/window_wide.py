"""The forward pass of `window_kernels` over tiles of OWN query rows, a warpgroup for 64 of them, which share what
passes by: through wide windows every key comes from L2 so many times fewer.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from gem_kernels.jagged_attention.window_kernels import (
    LN2,
    ROWS,
    _ask,
    _barriers,
    _buffer,
    _following,
    _limits,
    _masked,
    _record,
    _steps,
)


@gluon.jit(do_not_specialize=["tiles", "left", "right"])
def wide_kernel(
    q_desc, k_desc, v_desc, o_desc, o_ptr, o_row, lse_ptr, records_ptr, tiles, left, right, scale,
    D: gl.constexpr, HEADS: gl.constexpr, SLOTS: gl.constexpr, OWN: gl.constexpr,
):  # fmt: skip
    """O and LSE of tiles of OWN query rows, a warpgroup for 64 of them; `scale` has log2(e) as a factor. O leaves from
    Q's buffer.
    """
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[OWN // 16, 1], instr_shape=[16, 64, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[OWN // 16, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    q_buf = gl.allocate_shared_memory(q_desc.dtype, [1, OWN, D], q_desc.layout)
    descs = (k_desc, v_desc)
    bufs = (_buffer(k_desc, SLOTS, D), _buffer(v_desc, SLOTS, D))
    own, full = _barriers(1).index(0), _barriers(SLOTS)
    r = gl.arange(0, OWN, gl.SliceLayout(1, SL))
    programs = gl.num_programs(0)
    first_tile = gl.program_id(0)
    step = 0
    missing = SLOTS + 0  # so many first steps of the current tile have not been asked for
    visit = 0
    head, row, rows, place, other, other_len = _record(records_ptr, first_tile, tiles, HEADS)
    head1, row1, rows1, place1, other1, other_len1 = _record(records_ptr, first_tile + programs, tiles, HEADS)
    _ask((q_desc,), (q_buf,), own, 0, row, head, rows > 0, D)
    for tile in range(first_tile, tiles, programs):
        # Two tiles ahead, so that nothing waits for the load.
        head2, row2, rows2, place2, other2, other_len2 = _record(records_ptr, tile + 2 * programs, tiles, HEADS)
        lo, n = _steps(place, rows, other_len, left, right)
        lo1, n1 = _steps(place1, rows1, other_len1, left, right)
        if rows > 0:
            for j in gl.static_range(SLOTS):
                slot = (step + j) % SLOTS
                _ask(descs, bufs, full.index(slot), slot, other + lo + j * ROWS, head, (j < missing) & (j < n), D)
            limits = _limits(place + r, other_len, left, right)
            acc = gl.zeros([OWN, D], gl.float32, AL)
            m = gl.full([OWN], float("-inf"), gl.float32, gl.SliceLayout(1, SL))
            total = gl.zeros([OWN], gl.float32, gl.SliceLayout(1, SL))
            mbarrier.wait(own, visit & 1)
            for j in range(n):
                slot = (step + j) % SLOTS
                mbarrier.wait(full.index(slot), ((step + j) // SLOTS) & 1)
                none = gl.zeros([OWN, ROWS], gl.float32, SL)
                S = warpgroup_mma(
                    q_buf.index((step + j) >> 30), bufs[0].index(slot).permute((1, 0)), none, use_acc=False
                )
                begin = lo + j * ROWS
                if (
                    (begin < place + (OWN - 1) - left)
                    | (begin + (ROWS - 1) > place + right)
                    | (begin + ROWS > other_len)
                ):
                    S = _masked(S, begin, limits, float("-inf"), SL)
                m_new = gl.maximum(m, gl.max(S, 1) * scale)
                shift = gl.where(m_new == float("-inf"), 0.0, m_new)
                p = gl.exp2(S * scale - shift[:, None])
                alpha = gl.exp2(m - shift)
                total = total * alpha + gl.sum(p, 1)
                m = m_new
                acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, AL))[:, None]
                P = gl.convert_layout(p.to(o_ptr.dtype.element_ty), PL)
                acc = warpgroup_mma(P, bufs[1].index(slot), acc)
                at, whose, some = _following(j, n, other + lo, head, n1, other1 + lo1, head1, SLOTS)
                _ask(descs, bufs, full.index(slot), slot, at, whose, some, D)
            step += n
            missing = gl.maximum(SLOTS - n, 0)
            visit += 1
            some = total > 0.0
            safe = gl.where(some, total, 1.0)
            lse = gl.where(some, (m + gl.log2(safe)) * LN2, float("-inf"))
            gl.store(lse_ptr + (row + r).to(gl.int64) * HEADS + head, lse, mask=r < rows)
            acc = acc * gl.convert_layout(1.0 / safe, gl.SliceLayout(1, AL))[:, None]
            y = acc.to(o_ptr.dtype.element_ty)
            if rows == OWN:
                q_buf.index(0).store(y)
                fence_async_shared()
                tma.async_copy_shared_to_global(o_desc, [row, head * D], q_buf.index(0))
                tma.store_wait(0)
            else:
                rr = gl.arange(0, OWN, gl.SliceLayout(1, AL))
                c = gl.arange(0, D, gl.SliceLayout(0, AL))
                base = o_ptr + row.to(gl.int64) * o_row + head * D
                gl.store(base + (rr * o_row)[:, None] + c[None, :], y, mask=(rr < rows)[:, None])
            _ask((q_desc,), (q_buf,), own, 0, row1, head1, rows1 > 0, D)
        head, row, rows, place, other, other_len = head1, row1, rows1, place1, other1, other_len1
        head1, row1, rows1, place1, other1, other_len1 = head2, row2, rows2, place2, other2, other_len2
    tma.store_wait(0)
