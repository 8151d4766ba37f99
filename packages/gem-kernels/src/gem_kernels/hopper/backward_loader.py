"""The loading partition of the Hopper backward: takes tiles off the list, tells the consumers of each, brings what it
needs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from gem_kernels.hopper.backward_block import BLOCK, in_sight
from gem_kernels.hopper.exchange import pack, take, tile_row, unpack
from gem_kernels.hopper.records import FIELDS, RECORDS

PATIENCE = gl.constexpr(1 << 21)  # times that a loader asks whether dS is there: about a second


@gluon.jit
def _told(ptr):
    return gl.inline_asm_elementwise("ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [ptr], gl.int32, False, 1)


@gluon.jit
def _await(ptr, parts):
    """Until `parts` consumers have said of a (sequence, head) that their dS is in memory (`backward_keys.settle`): TMA
    may read it then. What does not come in a second never comes: an error then, and no GPU that hangs.
    """
    seen = _told(ptr)
    asked = 0
    while (seen < parts) & (asked < PATIENCE):
        seen = _told(ptr)
        asked += 1
    if seen < parts:
        gl.inline_asm_elementwise("trap; mov.b32 $0, $1;", "=r,r", [seen], gl.int32, False, 1)
    gl.inline_asm_elementwise("fence.proxy.async; mov.b32 $0, $1;", "=r,r", [seen], gl.int32, False, 1)


@gluon.jit
def _key_tile(
    tile, step, slot, phase, inputs, workspace, buffers, barriers,
    NC: gl.constexpr, QS: gl.constexpr, DS: gl.constexpr, GROUP: gl.constexpr, ACT: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """K and V of up to NC blocks of keys, then Q, dO and statistics of n blocks of queries of every head that reads
    them.
    """
    k_row, rows, q_row, begin, n, head, block = tile
    q_desc, k_desc, v_desc, do_desc, rows_desc = inputs
    query_blocks, _window_blocks, _key_blocks = workspace
    q_buf, do_buf, k_buf, v_buf, rows_buf = buffers
    q_full, do_full, step_empty, kv_full, kv_empty = barriers
    BLOCKS: gl.constexpr = q_desc.block_type.shape[2] // BLOCK
    mbarrier.wait(kv_empty.index(slot), phase ^ 1)
    for w in gl.static_range(NC):
        full = kv_full.index(slot * NC + w)
        if rows > w * BLOCK:
            mbarrier.expect(full, 2 * k_desc.block_type.nbytes)
            at = [k_row + w * BLOCK, head, 0]
            tma.async_copy_global_to_shared(k_desc, at, full, k_buf.index(slot * NC + w))
            tma.async_copy_global_to_shared(v_desc, at, full, v_buf.index(slot * NC + w))
            mbarrier.arrive(full, count=BLOCKS)
        else:
            mbarrier.arrive(full, count=1 + BLOCKS)
    for g in range(GROUP):
        q_head = head * GROUP + g
        statistics = q_head * query_blocks + block + begin
        for i in range(n):
            s = step % QS
            at_row = q_row + (begin + i) * BLOCK
            # Free since dO of the step before could be loaded: Q has one stage more.
            full = q_full.index(s)
            if ACT == "softmax":
                mbarrier.expect(full, q_desc.block_type.nbytes + 2 * rows_desc.block_type.nbytes)
                at = (statistics + i) * (2 * BLOCK)
                tma.async_copy_global_to_shared(rows_desc, [at], full, rows_buf.index(2 * s))
                tma.async_copy_global_to_shared(rows_desc, [at + BLOCK], full, rows_buf.index(2 * s + 1))
            else:
                mbarrier.expect(full, q_desc.block_type.nbytes)
            from_row = (begin + i) * BLOCK if SHARED else at_row
            tma.async_copy_global_to_shared(q_desc, [from_row, q_head, 0], full, q_buf.index(s))
            s = step % DS
            mbarrier.wait(step_empty.index(s), ((step // DS) & 1) ^ 1)
            mbarrier.expect(do_full.index(s), do_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(do_desc, [at_row, q_head, 0], do_full.index(s), do_buf.index(s))
            step += 1
    return step


@gluon.jit
def _ds_row(ds_block, w, i, key_blocks, WINDOW: gl.constexpr):
    """The row of the workspace where dS of a tile's query block w and key block i begins."""
    place = i
    if WINDOW:
        place = i % key_blocks
    return (ds_block + w * key_blocks + place) * BLOCK


@gluon.jit
def _query_tile(
    tile, visit, inputs, workspace, buffers, barriers, mask,
    NC: gl.constexpr, GROUP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """Blocks of K and of dS for NC blocks of queries, as many at a time as there is room for in the buffers of K and V
    of one tile.
    """
    k_row, rows, begin, end, n, head, ds_block, diagonal = tile
    k_desc, ds_desc = inputs
    _query_blocks, _window_blocks, key_blocks = workspace
    left, right = mask
    _q_buf, _do_buf, k_buf, v_buf, _rows_buf = buffers
    _q_full, _do_full, _step_empty, kv_full, kv_empty = barriers
    BLOCKS: gl.constexpr = k_desc.block_type.shape[2] // BLOCK
    WINDOW: gl.constexpr = LEFT and RIGHT
    kv_head = head // GROUP
    # The blocks of keys of which every block of queries needs dS, where there are NC of them.
    _first, all_end = in_sight(diagonal, left, right, n, LEFT, RIGHT)
    all_begin, _last = in_sight(diagonal + (NC - 1) * BLOCK, left, right, n, LEFT, RIGHT)
    all_end = gl.where(rows > (NC - 1) * BLOCK, gl.minimum(all_end, end), 0)
    for i in range(begin, gl.maximum(end, begin + 1), BLOCKS):
        slot = visit % 2
        mbarrier.wait(kv_empty.index(slot), ((visit // 2) & 1) ^ 1)
        if (i >= all_begin) & (i + BLOCKS <= all_end):  # the same as below, in less time
            for w in gl.static_range(NC):
                full = kv_full.index(slot * NC + w)
                ds_buf = v_buf.index(slot * NC + w)._reinterpret(
                    k_buf.dtype, [BLOCKS, BLOCK, 1, BLOCK], ds_desc.layout
                )  # fmt: skip
                if w < BLOCKS:
                    mbarrier.expect(full, k_desc.block_type.nbytes + BLOCKS * ds_desc.block_type.nbytes)
                    at = [k_row + (i + w) * BLOCK, kv_head, 0]
                    tma.async_copy_global_to_shared(k_desc, at, full, k_buf.index(slot * NC + w))
                else:
                    mbarrier.expect(full, BLOCKS * ds_desc.block_type.nbytes)
                for j in gl.static_range(BLOCKS):
                    at = [_ds_row(ds_block, w, i + j, key_blocks, WINDOW), 0, 0]
                    tma.async_copy_global_to_shared(ds_desc, at, full, ds_buf.index(j))
                mbarrier.arrive(full, count=BLOCKS)
        else:
            for w in gl.static_range(NC):
                full = kv_full.index(slot * NC + w)
                ds_buf = v_buf.index(slot * NC + w)._reinterpret(
                    k_buf.dtype, [BLOCKS, BLOCK, 1, BLOCK], ds_desc.layout
                )  # fmt: skip
                wanted = False
                if w < BLOCKS:
                    wanted = i + w < end
                if wanted:
                    mbarrier.expect(full, k_desc.block_type.nbytes)
                    at = [k_row + (i + w) * BLOCK, kv_head, 0]
                    tma.async_copy_global_to_shared(k_desc, at, full, k_buf.index(slot * NC + w))
                else:
                    mbarrier.arrive(full, count=1)
                lo, hi = in_sight(diagonal + w * BLOCK, left, right, n, LEFT, RIGHT)
                for j in gl.static_range(BLOCKS):
                    if (rows > w * BLOCK) & (i + j >= lo) & (i + j < gl.minimum(hi, end)):
                        mbarrier.expect(full, ds_desc.block_type.nbytes)
                        at = [_ds_row(ds_block, w, i + j, key_blocks, WINDOW), 0, 0]
                        tma.async_copy_global_to_shared(ds_desc, at, full, ds_buf.index(j))
                    else:
                        mbarrier.arrive(full, count=1)
        visit += 1
    return visit


@gluon.jit
def load(
    inputs, lists, records, buffers, barriers, mask, window, workspace,
    NC: gl.constexpr, QS: gl.constexpr, DS: gl.constexpr, GROUP: gl.constexpr, ACT: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Tile after tile, of those whose sequence is in the window."""
    q_desc, k_desc, v_desc, do_desc, rows_desc, ds_desc = inputs
    tiles_ptr, count_ptr, cursor_ptr, told_ptr, q_offsets, k_offsets, kv_heads = lists
    first, last = window
    _query_blocks, window_blocks, key_blocks = workspace
    left, right = mask
    record, record_full, record_empty = records
    L: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [1], [0])
    total = gl.load(count_ptr)
    t = gl.program_id(0)
    step = 0
    visit = 0
    tile = 0
    while t >= 0:
        own_row, rows, other_row, other_len, head, kind, b, first_block = unpack(tile_row(tiles_ptr, t, total, L), L)
        of_queries = kind != 0
        # The number of the sequence's first query block.
        number = gl.where(of_queries, own_row // BLOCK - first_block, other_row // BLOCK) + b
        # Not one tile ahead: Triton 3.6 forgets to carry some of these around the loop (docs/notes).
        if t < total:
            following = gl.num_programs(0) + take(cursor_ptr, total)
        else:
            following = -1
        if (t >= total) | ((number >= first) & (number < last)):
            n = gl.cdiv(other_len, BLOCK)
            begin = 0
            end = n
            diagonal = 0
            r = tile % RECORDS
            mbarrier.wait(record_empty.index(r), ((tile // RECORDS) & 1) ^ 1)
            if of_queries:
                if LEFT or RIGHT:
                    q_len = (gl.load(q_offsets + b + 1) - gl.load(q_offsets + b)).to(gl.int32)
                    # Where the tile's first query stands, counted from the sequence's first key.
                    diagonal = first_block * BLOCK + other_len - q_len
                    begin, _end = in_sight(diagonal, left, right, n, LEFT, RIGHT)
                    final = diagonal + (gl.cdiv(rows, BLOCK) - 1) * BLOCK
                    _begin, end = in_sight(final, left, right, n, LEFT, RIGHT)
                record.index(r).store(pack(own_row, rows, begin, end, head, n, diagonal, -1, L))
                mbarrier.arrive(record_full.index(r), count=1)
                if end > begin:
                    _await((told_ptr + b * kv_heads + head // GROUP).to(gl.int64), n)
                ds_block = (head * window_blocks + number + first_block - first) * key_blocks
                visit = _query_tile(
                    (other_row, rows, begin, end, n, head, ds_block, diagonal), visit, (k_desc, ds_desc), workspace,
                    buffers, barriers, mask, NC, GROUP, LEFT, RIGHT,
                )  # fmt: skip
            else:
                q_left = other_len
                if LEFT or RIGHT:
                    k_len = (gl.load(k_offsets + b + 1) - gl.load(k_offsets + b)).to(gl.int32)
                    # Where the tile's first key stands, counted from where the sequence's first query does.
                    diagonal = first_block * BLOCK + other_len - k_len
                    begin, _end = in_sight(diagonal, right, left, n, RIGHT, LEFT)
                    final = diagonal + (gl.cdiv(rows, BLOCK) - 1) * BLOCK
                    _begin, end = in_sight(final, right, left, n, RIGHT, LEFT)
                    n = gl.maximum(end - begin, 0)
                    diagonal -= begin * BLOCK
                    q_left -= begin * BLOCK
                ds_block = (head * GROUP * window_blocks + number + begin - first) * key_blocks
                ds_block += first_block % key_blocks
                record.index(r).store(
                    pack(own_row, rows, q_left, n, head, ds_block, diagonal, b * kv_heads + head, L)
                )  # fmt: skip
                mbarrier.arrive(record_full.index(r), count=1)
                if t < total:
                    step = _key_tile(
                        (own_row, rows, other_row, begin, n, head, number), step, visit % 2, (visit // 2) & 1,
                        (q_desc, k_desc, v_desc, do_desc, rows_desc), workspace, buffers, barriers,
                        NC, QS, DS, GROUP, ACT, SHARED,
                    )  # fmt: skip
                    visit += 1
            tile += 1
        t = following
