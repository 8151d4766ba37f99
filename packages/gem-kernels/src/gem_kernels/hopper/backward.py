"""The backward of jagged attention and GDPA on Hopper, first of two kernels: dK and dV, and dS for `query_gradient`.

Persistent and warp-specialised: one loader warp, NC consumer warpgroups that own 64 key rows each and keep dK and dV
in registers while steps of 64 query rows pass by, those of every query head that reads these keys. Scores are computed
transposed, so that P^T and dS^T are operands straight from registers:

    S^T = K Q^T    P^T = exp2(S^T scale - LSE)    dP^T = V dO^T    dS^T = P^T (dP^T - delta)
    dV += P^T dO   dK += dS^T Q

dS^T goes out as it is, in BF16 (the precision in which it enters dK), one block of 64 keys x 64 queries after the
other. So the backward computes five products and no more, nothing is added up in memory, and the result is the same
bit by bit. The blocks of dS are numbered (`Workspace` of `launch_backward`): a sequence's query blocks from
q_offsets[b] // 64 + b on, for each of them `key_blocks` places, key block j at j modulo `key_blocks`: as many as a
query block can see. A launch does the sequences whose first query block lies in a window of these numbers, so that the
workspace stays as small as the caller wishes.

With a mask a tile's loader brings only the query blocks that one of its keys is seen from, a consumer computes only
those that see one of its own, and masks where the mask's edge crosses a block.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from gem_kernels.hopper.backward_bias import bias_at
from gem_kernels.hopper.backward_block import BLOCK, clear_rows, in_sight, put_rows
from gem_kernels.hopper.backward_keys import head_of_queries, pass_by
from gem_kernels.hopper.exchange import pack, take, tile_row, unpack
from gem_kernels.hopper.records import FIELDS, RECORDS

# Two numbers in one of a record, with a bias: rows of a tile and its sequence, steps of a tile and its first.
ROWS, STEPS = gl.constexpr(256), gl.constexpr(1 << 16)


@gluon.jit
def _loader(
    inputs, records, buffers, barriers, mask,
    NC: gl.constexpr, QS: gl.constexpr, DS: gl.constexpr, GROUP: gl.constexpr, ACT: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, SHARED: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Takes tiles off the list, tells the consumers of each, and loads what it needs."""
    q_desc, k_desc, v_desc, do_desc, rows_desc, tiles_ptr, count_ptr, cursor_ptr, own_ptr, window, workspace = inputs
    first, last = window
    query_blocks, window_blocks, key_blocks = workspace
    left, right = mask
    record, record_full, record_empty = records
    q_buf, do_buf, k_buf, v_buf, rows_buf = buffers
    q_full, do_full, step_empty, kv_full, kv_empty = barriers
    L: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [1], [0])
    total = gl.load(count_ptr)
    t = gl.program_id(0)
    step = 0
    visit = 0
    tile = 0
    while t >= 0:
        k_row, rows, q_row, q_len, head, _out, b, first_block = unpack(tile_row(tiles_ptr, t, total, L), L)
        block = q_row // BLOCK + b
        # Not one tile ahead: Triton 3.6 forgets to carry some of these around the loop (docs/notes).
        if t < total:
            following = gl.num_programs(0) + take(cursor_ptr, total)
        else:
            following = -1
        if (t >= total) | ((block >= first) & (block < last)):
            n = gl.cdiv(q_len, BLOCK)
            begin = 0
            diagonal = 0
            if LEFT or RIGHT:
                k_len = (gl.load(own_ptr + b + 1) - gl.load(own_ptr + b)).to(gl.int32)
                # Where the tile's first key stands, counted from where the sequence's first query does.
                diagonal = first_block * BLOCK + q_len - k_len
                begin, _end = in_sight(diagonal, right, left, n, RIGHT, LEFT)
                final = diagonal + (gl.cdiv(rows, BLOCK) - 1) * BLOCK
                _begin, end = in_sight(final, right, left, n, RIGHT, LEFT)
                n = gl.maximum(end - begin, 0)
                diagonal -= begin * BLOCK
                q_len -= begin * BLOCK
            r = tile % RECORDS
            mbarrier.wait(record_empty.index(r), ((tile // RECORDS) & 1) ^ 1)
            ds_row = (head * GROUP * window_blocks + block + begin - first) * key_blocks * BLOCK
            rows_told, n_told = rows, n
            if BIAS:  # what finds the bias: the sequence, and the first query block
                rows_told, n_told = rows + b * ROWS, n + begin * STEPS
            record.index(r).store(pack(k_row, rows_told, q_len, n_told, head, ds_row, diagonal, first_block, L))
            mbarrier.arrive(record_full.index(r), count=1)
            tile += 1
            if t < total:
                slot = visit % 2
                mbarrier.wait(kv_empty.index(slot), ((visit // 2) & 1) ^ 1)
                for w in gl.static_range(NC):
                    full = kv_full.index(slot * NC + w)
                    if rows > w * BLOCK:
                        mbarrier.expect(full, 2 * k_desc.block_type.nbytes)
                        at = [k_row + w * BLOCK, head, 0]
                        tma.async_copy_global_to_shared(k_desc, at, full, k_buf.index(slot * NC + w))
                        tma.async_copy_global_to_shared(v_desc, at, full, v_buf.index(slot * NC + w))
                    else:
                        mbarrier.arrive(full, count=1)
                visit += 1
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
        t = following


@gluon.jit
def _consumer(
    W: gl.constexpr, outputs, problem, bias, records, buffers, ds_buf, barriers, mask,
    D: gl.constexpr, DIM: gl.constexpr, NC: gl.constexpr, QS: gl.constexpr, DS: gl.constexpr, GROUP: gl.constexpr,
    ACT: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    ds_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, stride = outputs
    scale, v_scale, k_scale, workspace = problem
    _query_blocks, window_blocks, key_blocks = workspace
    left, right = mask
    record, record_full, record_empty = records
    _q_buf, _do_buf, k_buf, v_buf, _rows_buf = buffers
    _q_full, _do_full, _step_empty, kv_full, kv_empty = barriers
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    RL: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    dtype: gl.constexpr = dk_ptr.dtype.element_ty
    step = 0
    visit = 0
    rows = 1
    while rows > 0:
        r = visit % RECORDS
        mbarrier.wait(record_full.index(r), (visit // RECORDS) & 1)
        k_row, rows, q_left, n, head, ds_row, diagonal, first_block = unpack(record.index(r).load(RL), RL)
        mbarrier.arrive(record_empty.index(r), count=1)
        b, first_query = 0, 0
        if BIAS:
            b, first_query = rows // ROWS, n // STEPS * BLOCK
            rows, n = rows % ROWS, n % STEPS
        if rows > 0:
            mine = rows - W * BLOCK
            slot = visit % 2
            before = kv_empty.index(1 - slot)
            mbarrier.wait(kv_full.index(slot * NC + W), (visit // 2) & 1)
            if mine > 0:
                k = k_buf.index(slot * NC + W)
                v = v_buf.index(slot * NC + W)
                if ACT != "softmax":
                    clear_rows(k.reshape([BLOCK, D]), mine, D)
                    clear_rows(v.reshape([BLOCK, D]), mine, D)
                begin, end = in_sight(diagonal + W * BLOCK, right, left, n, RIGHT, LEFT)
                ds_row += ((first_block + W) % key_blocks + begin * key_blocks) * BLOCK
                dk = gl.zeros([BLOCK, D], gl.float32, AL)
                dv = gl.zeros([BLOCK, D], gl.float32, AL)
                steps = (begin, end, n)
                left_over = (q_left, mine, diagonal + W * BLOCK)
                for g in range(GROUP):
                    place = 0
                    if BIAS:
                        place = bias_at(bias, (b, head * GROUP + g, first_query, first_block * BLOCK + W * BLOCK), BIAS)
                    at = ds_row + g * window_blocks * key_blocks * BLOCK
                    dk, dv, step = head_of_queries(
                        dk, dv, k.reshape([BLOCK, D]), v.reshape([BLOCK, D]), step, steps, left_over,
                        (ds_buf.index(W), ds_desc, at, key_blocks * BLOCK), (before, (visit > 0) & (g == 0)),
                        (scale, mask), place, buffers, barriers, NC, D, QS, DS, ACT, LEFT, RIGHT,
                        bias[0].dtype.element_ty, BIAS,
                    )  # fmt: skip
                at_row = k_row + W * BLOCK
                k_out = k.reshape([BLOCK, D])
                v_out = v.reshape([BLOCK, D])
                v_out.store((dv * v_scale).to(dtype))
                k_out.store((dk * k_scale).to(dtype))
                fence_async_shared()  # for the copies out, or for those that fill the buffers anew
                if mine >= BLOCK:
                    tma.async_copy_shared_to_global(dv_desc, [at_row, head, 0], v)
                    tma.async_copy_shared_to_global(dk_desc, [at_row, head, 0], k)
                else:
                    put_rows(dv_ptr, stride, v_out, at_row, head * DIM, mine, D, DIM)
                    put_rows(dk_ptr, stride, k_out, at_row, head * DIM, mine, D, DIM)
            else:
                tma.store_wait(0)
                mbarrier.arrive(before, count=1, pred=visit > 0)
                step = pass_by(step, n * GROUP, barriers, QS, DS)
        visit += 1
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "first", "last", "query_blocks", "window_blocks", "key_blocks", "left", "right", "bias_batch", "bias_head",
        "bias_row",
    ]
)  # fmt: skip
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, rows_desc, ds_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, stride,
    tiles_ptr, count_ptr, cursor_ptr, own_ptr, first, last, query_blocks, window_blocks, key_blocks, left, right,
    scale, v_scale, k_scale, bias_ptr, bias_batch, bias_head, bias_row,
    D: gl.constexpr, DIM: gl.constexpr, NC: gl.constexpr, QS: gl.constexpr, DS: gl.constexpr, GROUP: gl.constexpr,
    ACT: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, SHARED: gl.constexpr,
    REGS: gl.constexpr, LOADER_REGS: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """dV = v_scale P^T dO, dK = k_scale dS^T Q, and dS. For softmax `scale` holds log2(e) as a factor.

    rows: LSE in base 2 and delta of every query block of every head, [H, query_blocks, 2, 64] float32. `first`, `last`:
    the window of query block numbers; the workspace holds `window_blocks` of them for every head, `key_blocks` blocks
    of dS each. QS, DS: stages of Q and of dO. A query at position p = i + (Lk - Lq) sees keys p - left (with LEFT) to
    p + right (with RIGHT). SHARED: Q [L, H, DIM] serves every sequence. BIAS: added to the scores, with strides in
    units of BIAS numbers (`backward_bias`); softmax only.
    """
    dtype: gl.constexpr = dk_ptr.dtype.element_ty
    q_buf = gl.allocate_shared_memory(dtype, [QS, BLOCK, 1, D], q_desc.layout)
    do_buf = gl.allocate_shared_memory(dtype, [DS, BLOCK, 1, D], q_desc.layout)
    k_buf = gl.allocate_shared_memory(dtype, [2 * NC, BLOCK, 1, D], k_desc.layout)
    v_buf = gl.allocate_shared_memory(dtype, [2 * NC, BLOCK, 1, D], k_desc.layout)
    ds_buf = gl.allocate_shared_memory(dtype, [NC, BLOCK, 1, BLOCK], ds_desc.layout)
    rows_buf = gl.allocate_shared_memory(gl.float32, [2 * QS, BLOCK], rows_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [QS, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [DS, 1], BARRIER)
    step_empty = gl.allocate_shared_memory(gl.int64, [DS, 1], BARRIER)
    kv_full = gl.allocate_shared_memory(gl.int64, [2 * NC, 1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(QS):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(DS):
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(step_empty.index(i), count=NC)
    for i in gl.static_range(2):
        mbarrier.init(kv_empty.index(i), count=NC)
    for i in gl.static_range(2 * NC):
        mbarrier.init(kv_full.index(i), count=1)
    record = gl.allocate_shared_memory(gl.int32, [RECORDS, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    record_full = gl.allocate_shared_memory(gl.int64, [RECORDS, 1], BARRIER)
    record_empty = gl.allocate_shared_memory(gl.int64, [RECORDS, 1], BARRIER)
    for i in gl.static_range(RECORDS):
        mbarrier.init(record_full.index(i), count=1)
        mbarrier.init(record_empty.index(i), count=NC)
    mask = (left, right)
    workspace = (query_blocks, window_blocks, key_blocks)
    records = (record, record_full, record_empty)
    buffers = (q_buf, do_buf, k_buf, v_buf, rows_buf)
    barriers = (q_full, do_full, step_empty, kv_full, kv_empty)
    outputs = (ds_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, stride)
    problem = (scale, v_scale, k_scale, workspace)
    bias = (bias_ptr, bias_batch, bias_head, bias_row)
    inputs = (
        q_desc, k_desc, v_desc, do_desc, rows_desc, tiles_ptr, count_ptr, cursor_ptr, own_ptr, (first, last), workspace
    )  # fmt: skip
    gl.static_assert(NC == 2 or NC == 3)
    gl.static_assert(QS == DS + 1)
    if NC == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, outputs, problem, bias, records, buffers, ds_buf, barriers, mask,
                             D, DIM, NC, QS, DS, GROUP, ACT, LEFT, RIGHT, BIAS)),
                (_consumer, (1, outputs, problem, bias, records, buffers, ds_buf, barriers, mask,
                             D, DIM, NC, QS, DS, GROUP, ACT, LEFT, RIGHT, BIAS)),
                (_loader, (inputs, records, buffers, barriers, mask,
                           NC, QS, DS, GROUP, ACT, LEFT, RIGHT, SHARED, BIAS)),
            ],
            [4, 1],
            [REGS, LOADER_REGS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, outputs, problem, bias, records, buffers, ds_buf, barriers, mask,
                             D, DIM, NC, QS, DS, GROUP, ACT, LEFT, RIGHT, BIAS)),
                (_consumer, (1, outputs, problem, bias, records, buffers, ds_buf, barriers, mask,
                             D, DIM, NC, QS, DS, GROUP, ACT, LEFT, RIGHT, BIAS)),
                (_consumer, (2, outputs, problem, bias, records, buffers, ds_buf, barriers, mask,
                             D, DIM, NC, QS, DS, GROUP, ACT, LEFT, RIGHT, BIAS)),
                (_loader, (inputs, records, buffers, barriers, mask,
                           NC, QS, DS, GROUP, ACT, LEFT, RIGHT, SHARED, BIAS)),
            ],
            [4, 4, 1],
            [REGS, REGS, LOADER_REGS],
        )  # fmt: skip
