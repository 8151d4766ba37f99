"""The loading partitions of the Hopper forward: one warp for tiles and queries, one for keys and values."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from gem_kernels.hopper.exchange import take, tile_row, unpack
from gem_kernels.hopper.records import BLOCK, FIELDS, RECORDS, steps_of


@gluon.jit
def load_queries(
    inputs, records, q_buf, q_full, q_empty, window,
    BN: gl.constexpr, NC: gl.constexpr, QS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    SHARED: gl.constexpr, ONCE: gl.constexpr, BIAS: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Takes tiles off the list, the largest first, tells the other partitions of each, and loads up to NC blocks of
    its queries.

    Buffers and barriers belong to consumers, not to a tile's blocks: with TURNS a block goes where the consumer that
    takes it looks. A wait passes at once when its barrier is two phases behind, so who waits must see every phase.
    """
    q_desc, tiles_ptr, count_ptr, cursor_ptr, own_ptr, max_k = inputs
    record, record_full, record_empty = records
    left, right = window
    L: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [1], [0])
    i = gl.arange(0, FIELDS, L)
    total = gl.load(count_ptr)
    t = gl.program_id(0)
    tile = 0
    turn = 0  # which consumer takes the tile's first block
    while t >= 0:
        x = tile_row(tiles_ptr, t, total, L)
        first_block = gl.sum(gl.where(i == 7, x, 0), 0)
        if BIAS or ONCE:  # there is no more of a bias, or no other step
            x = gl.where(i == 3, gl.minimum(x, max_k), x)
        if LEFT or RIGHT:  # in place of the first block: where the first query stands on the diagonal
            b = 0 if SHARED else gl.sum(gl.where(i == 6, x, 0), 0)
            q_len = (gl.load(own_ptr + b + 1) - gl.load(own_ptr + b)).to(gl.int32)
            k_len = gl.sum(gl.where(i == 3, x, 0), 0)
            x = gl.where(i == 7, first_block * BLOCK + k_len - q_len, x)
        s = tile % RECORDS
        mbarrier.wait(record_empty.index(s), ((tile // RECORDS) & 1) ^ 1)
        y = x
        if BIAS:  # consumers have no use for where the queries begin, but for the first one's place in its sequence
            y = gl.where(i == 0, first_block * BLOCK, x)
        record.index(s).store(y)
        mbarrier.arrive(record_full.index(s), count=1)
        if t < total:
            taken = take(cursor_ptr, total)
            q_start, rows, _k_start, k_len, head, _out_start, _b, position = unpack(x, L)
            _lo, shorts, wholes = steps_of(position, rows, k_len, left, right, BN, LEFT, RIGHT)
            phase = (tile // QS) & 1
            for w in gl.static_range(NC):
                slot = (tile % QS) * NC + w
                if TURNS:
                    slot = (tile % QS) * NC + (turn + w) % NC
                full = q_full.index(slot)
                mbarrier.wait(q_empty.index(slot), phase ^ 1)
                if (rows > w * BLOCK) & (shorts + wholes > 0):
                    mbarrier.expect(full, q_desc.block_type.nbytes)
                    tma.async_copy_global_to_shared(q_desc, [q_start + w * BLOCK, head, 0], full, q_buf.index(slot))
                else:
                    mbarrier.arrive(full, count=1)
            if TURNS:
                turn = (turn + gl.cdiv(rows, BLOCK)) % NC
            t = gl.num_programs(0) + taken
        else:
            t = -1
        tile += 1


@gluon.jit
def load_keys(
    inputs, records, buffers, barriers, window,
    BN: gl.constexpr, KS: gl.constexpr, GROUP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    LEAN: gl.constexpr,
):  # fmt: skip
    """Keeps the rings of K and V full. A short step fills the beginning of its buffer."""
    k_desc, v_desc, k_short, v_short = inputs
    record, record_full, record_empty = records
    k_buf, v_buf = buffers
    k_full, k_empty, v_full, v_empty = barriers
    left, right = window
    L: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [1], [0])
    step = 0
    tile = 0
    rows = 1
    while rows > 0:
        r = tile % RECORDS
        mbarrier.wait(record_full.index(r), (tile // RECORDS) & 1)
        _q, rows, k_start, k_len, head, _out, _b, position = unpack(record.index(r).load(L), L)
        mbarrier.arrive(record_empty.index(r), count=1)
        tile += 1
        lo, shorts, wholes = steps_of(position, rows, k_len, left, right, BN, LEFT, RIGHT)
        if rows == 0:
            shorts = 0
            wholes = 0
        first = k_start + lo
        column = head // GROUP
        for i in range(shorts):
            s = step % KS
            phase = (step // KS) & 1
            at = [first + wholes * BN + (shorts - 1 - i) * BLOCK, column, 0]
            mbarrier.wait(k_empty.index(s), phase ^ 1)
            mbarrier.expect(k_full.index(s), k_short.block_type.nbytes * (2 if LEAN else 1))
            k = k_buf.index(s)._reinterpret(k_buf.dtype, k_short.block_shape, k_short.layout)
            tma.async_copy_global_to_shared(k_short, at, k_full.index(s), k)
            if not LEAN:
                mbarrier.wait(v_empty.index(s), phase ^ 1)
                mbarrier.expect(v_full.index(s), v_short.block_type.nbytes)
            v = v_buf.index(s)._reinterpret(v_buf.dtype, v_short.block_shape, v_short.layout)
            tma.async_copy_global_to_shared(v_short, at, (k_full if LEAN else v_full).index(s), v)
            step += 1
        for i in range(wholes):
            s = step % KS
            phase = (step // KS) & 1
            at = [first + (wholes - 1 - i) * BN, column, 0]
            mbarrier.wait(k_empty.index(s), phase ^ 1)
            mbarrier.expect(k_full.index(s), k_desc.block_type.nbytes * (2 if LEAN else 1))
            tma.async_copy_global_to_shared(k_desc, at, k_full.index(s), k_buf.index(s))
            if not LEAN:
                mbarrier.wait(v_empty.index(s), phase ^ 1)
                mbarrier.expect(v_full.index(s), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(v_desc, at, (k_full if LEAN else v_full).index(s), v_buf.index(s))
            step += 1
