"""The backward of jagged attention and GDPA on Hopper, in one kernel: dK, dV, dS and from it dQ.

Persistent and warp-specialised: a program takes tiles off a list, of keys or of queries; one warp loads
(`backward_loader`), NC consumer warpgroups own 64 rows each. A tile of keys (`backward_keys`) makes dK and dV in
registers, and writes dS^T in BF16 (the precision in which it enters dK), one block of 64 keys x 64 queries after the
other. A tile of queries (`backward_queries`) reads that and makes dQ = dS K. So the backward computes five products and
no more, nothing is added up in memory, and the result is the same bit by bit.

The tiles of a sequence's queries come in the list (`backward_tiles`) some time after those of its keys: while some
programs read dS, most make it, so that dQ's need of memory is spread over the whole, and much of dS is still in L2. A
loader that comes to a tile of queries waits until all consumers have told that their dS of that (sequence, head) is in
memory. The tiles that it waits for come before in the list, so they were taken before, and nobody waits for ever.

The blocks of dS are numbered (`Workspace` of `launch_backward`): a sequence's query blocks from q_offsets[b] // 64 + b
on, for each of them `key_blocks` places, key block j at j modulo `key_blocks`: as many as a query block can see. A
launch does the sequences whose first query block lies in a window of these numbers, so that the workspace stays as
small as the caller wishes.

With a mask a tile's loader brings only the blocks that one of its rows sees, or is seen from, a consumer computes only
those of its own rows, and masks where the mask's edge crosses a block.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gem_kernels.hopper.backward_block import BLOCK
from gem_kernels.hopper.backward_keys import key_tile, settle
from gem_kernels.hopper.backward_loader import load
from gem_kernels.hopper.backward_queries import query_tile
from gem_kernels.hopper.exchange import unpack
from gem_kernels.hopper.records import FIELDS, RECORDS


@gluon.jit
def _consumer(
    W: gl.constexpr, outputs, dq_output, problem, records, buffers, ds_buf, barriers, told_ptr, mask,
    D: gl.constexpr, DIM: gl.constexpr, NC: gl.constexpr, QS: gl.constexpr, DS: gl.constexpr, GROUP: gl.constexpr,
    ACT: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """One block of every tile: the first consumer the first, and so on."""
    record, record_full, record_empty = records
    RL: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    step = 0
    visit = 0
    tile = 0
    owed = -1
    rows = 1
    while rows > 0:
        r = tile % RECORDS
        mbarrier.wait(record_full.index(r), (tile // RECORDS) & 1)
        own_row, rows, c, d, e, f, g, place = unpack(record.index(r).load(RL), RL)
        mbarrier.arrive(record_empty.index(r), count=1)
        tile += 1
        if rows > 0:
            if place < 0:
                visit = query_tile(
                    W, (own_row, rows, c, d, e, f, g), visit, (told_ptr, owed), dq_output, buffers, ds_buf, barriers,
                    mask, D, DIM, NC, LEFT, RIGHT,
                )  # fmt: skip
                owed = -1
            else:
                step, owed = key_tile(
                    W, (own_row, rows, c, d, e, f, g, place), step, visit, (told_ptr, owed), outputs, problem, buffers,
                    ds_buf, barriers, mask, D, DIM, NC, QS, DS, GROUP, ACT, LEFT, RIGHT,
                )  # fmt: skip
                visit += 1
    settle(record_empty.index(0), False, (told_ptr, owed), True)  # there is no next tile


@gluon.jit(
    do_not_specialize=["first", "last", "query_blocks", "window_blocks", "key_blocks", "left", "right", "kv_heads"]
)  # fmt: skip
def together_kernel(
    q_desc, k_desc, v_desc, do_desc, rows_desc, ds_desc, dq_desc, dk_desc, dv_desc, dq_ptr, dk_ptr, dv_ptr,
    q_stride, k_stride, tiles_ptr, count_ptr, cursor_ptr, told_ptr, q_offsets, k_offsets, kv_heads,
    first, last, query_blocks, window_blocks, key_blocks, left, right, scale, q_scale, v_scale, k_scale,
    D: gl.constexpr, DIM: gl.constexpr, NC: gl.constexpr, QS: gl.constexpr, DS: gl.constexpr, GROUP: gl.constexpr,
    ACT: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, SHARED: gl.constexpr,
    REGS: gl.constexpr, LOADER_REGS: gl.constexpr,
):  # fmt: skip
    """dV = v_scale P^T dO, dK = k_scale dS^T Q, dS, and dQ = q_scale dS K (0 without keys in sight). Softmax: `scale`
    holds log2(e) as a factor.

    rows: LSE in base 2 and delta of every query block of every head, [H, query_blocks, 2, 64] float32. `first`, `last`:
    the window of query block numbers; the workspace holds `window_blocks` of them for every head, `key_blocks` blocks
    of dS each. QS, DS: stages of Q and of dO. A query at position p = i + (Lk - Lq) sees keys p - left (with LEFT) to
    p + right (with RIGHT). SHARED: Q [L, H, DIM] serves every sequence.
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
        mbarrier.init(kv_full.index(i), count=1 + D // BLOCK)
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
    outputs = (ds_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, k_stride)
    dq_output = (dq_desc, dq_ptr, q_stride, q_scale)
    problem = (scale, v_scale, k_scale, workspace)
    inputs = (q_desc, k_desc, v_desc, do_desc, rows_desc, ds_desc)
    lists = (tiles_ptr, count_ptr, cursor_ptr, told_ptr, q_offsets, k_offsets, kv_heads)
    gl.static_assert(NC == 2 or NC == 3)
    gl.static_assert(QS == DS + 1)
    if NC == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, outputs, dq_output, problem, records, buffers, ds_buf, barriers, told_ptr, mask,
                             D, DIM, NC, QS, DS, GROUP, ACT, LEFT, RIGHT)),
                (_consumer, (1, outputs, dq_output, problem, records, buffers, ds_buf, barriers, told_ptr, mask,
                             D, DIM, NC, QS, DS, GROUP, ACT, LEFT, RIGHT)),
                (load, (inputs, lists, records, buffers, barriers, mask, (first, last), workspace,
                        NC, QS, DS, GROUP, ACT, LEFT, RIGHT, SHARED)),
            ],
            [4, 1],
            [REGS, LOADER_REGS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, outputs, dq_output, problem, records, buffers, ds_buf, barriers, told_ptr, mask,
                             D, DIM, NC, QS, DS, GROUP, ACT, LEFT, RIGHT)),
                (_consumer, (1, outputs, dq_output, problem, records, buffers, ds_buf, barriers, told_ptr, mask,
                             D, DIM, NC, QS, DS, GROUP, ACT, LEFT, RIGHT)),
                (_consumer, (2, outputs, dq_output, problem, records, buffers, ds_buf, barriers, told_ptr, mask,
                             D, DIM, NC, QS, DS, GROUP, ACT, LEFT, RIGHT)),
                (load, (inputs, lists, records, buffers, barriers, mask, (first, last), workspace,
                        NC, QS, DS, GROUP, ACT, LEFT, RIGHT, SHARED)),
            ],
            [4, 4, 1],
            [REGS, REGS, LOADER_REGS],
        )  # fmt: skip
