"""The forward through a window over the past, for softmax and activations, that reads every key once.

A program owns an SM and a run of consecutive tiles of 64 queries; two consumers take them in turn. Keys and values of
64 rows stay in a ring as long as the window of some query to come reaches back to them: what `window_forward` reads
again for every tile (window / 64 + 1 times) comes in once, and memory is all that is left to wait for. A tile needs one
block more than the tile before, whether that is the next of its sequence or the first of another: only the run's first
tile needs those that lie before it.

Queries go to registers at the end of the tile before, so that the buffer that they came in is free for O, and then for
the queries after them. Only for self-attention over the past, where every query sees a key.

Shapes: Q, K, V, O as descriptors of [T, H * D] in tiles of 64 rows of a head; LSE [T, H] float32, for softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.block_attention import blocks
from gem_kernels.hopper.exchange import unpack
from gem_kernels.hopper.launch import LOG2E, programs
from gem_kernels.hopper.records import apart
from gem_kernels.hopper.softmax import partial, weights
from gem_kernels.jagged_attention.window import _addressable, _descriptor
from gem_kernels.jagged_attention.window_tiles import LN2, ROWS, edge, limits_of, masked, put, steps_of

FIELDS = gl.constexpr(8)
CONSUMERS = gl.constexpr(2)
RING = 6  # blocks of keys and of values
MOST = 256  # keys before a query: five blocks of them, and one more for the other consumer
REGISTERS = 168  # of a thread at the start


@gluon.jit
def _record(records_ptr, tile, blocks_per_head, end, L: gl.constexpr):
    """The record of a tile's block (`block_attention.blocks.records`), in every thread; zeros from `end` on, and for
    the blocks without rows that end a head's list, of which nothing else is written.
    """
    i = gl.arange(0, FIELDS, L)
    p = records_ptr + (tile % blocks_per_head) * FIELDS
    rows = gl.load(p + 1, mask=tile < end, other=0)
    return gl.load(p + i, mask=(i >= 0) & (rows > 0), other=0)


@gluon.jit
def _run(tiles):
    """The first of a program's tiles, and the first of the next program's."""
    p = gl.program_id(0)
    n = gl.num_programs(0)
    return (tiles.to(gl.int64) * p // n).to(gl.int32), (tiles.to(gl.int64) * (p + 1) // n).to(gl.int32)


@gluon.jit
def _needs(x, left, L: gl.constexpr):
    """How many blocks of keys a tile sees, its own included; 1 where there is no tile."""
    _row, own, place, _other, length, _f, _g, _h = unpack(x, L)
    _lo, n = steps_of(place, own, length, left, 0)
    return gl.maximum(n, 1)


@gluon.jit
def _load(
    descs, bufs, bars, records_ptr, blocks_per_head, tiles, left, D: gl.constexpr, RING: gl.constexpr
):  # fmt: skip
    """Queries of every tile of the run and, once each, the blocks of keys and values. Behind the run's end as many
    queries as there are consumers: each takes the next ones before it writes O.
    """
    q_desc, k_desc, v_desc = descs
    q_buf, k_buf, v_buf = bufs
    q_full, q_empty, kv_full, kv_empty = bars
    L: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [1], [0])
    begin, end = _run(tiles)
    block = 0
    x = _record(records_ptr, begin, blocks_per_head, end, L)
    new = _needs(x, left, L)
    for visit in range(end - begin + CONSUMERS):
        tile = begin + visit
        after = _record(records_ptr, tile + 1, blocks_per_head, end, L)
        row, _own, place, other, _len, _f, _g, _h = unpack(x, L)
        column = (tile // blocks_per_head) * D
        column = gl.where(tile < end, column, 0)
        slot = visit % CONSUMERS
        mbarrier.wait(q_empty.index(slot), ((visit // CONSUMERS) & 1) ^ 1)
        mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [row, column], q_full.index(slot), q_buf.index(slot))
        new = gl.where(tile < end, new, 0)
        first = other + place - (new - 1) * ROWS
        for j in range(new):
            s = (block + j) % RING
            mbarrier.wait(kv_empty.index(s), (((block + j) // RING) & 1) ^ 1)
            mbarrier.expect(kv_full.index(s), 2 * k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, [first + j * ROWS, column], kv_full.index(s), k_buf.index(s))
            tma.async_copy_global_to_shared(v_desc, [first + j * ROWS, column], kv_full.index(s), v_buf.index(s))
        block += new
        new = 1
        x = after


@gluon.jit
def _see(kv_full, seen, block, RING: gl.constexpr):
    """Wait for all blocks up to this one that were not waited for: every phase of a barrier is looked at.

    `apart`, here and for `freed`: a carried value that only bounds an inner loop is taken for its first (Triton 3.6,
    3.7; docs/notes/hopper-attention.md, Traps).
    """
    for b in range(apart(seen), block + 1):
        mbarrier.wait(kv_full.index(b % RING), (b // RING) & 1)
    return gl.maximum(seen, block + 1)


@gluon.jit
def _weights(
    S, acc, m, total, key, place, other_len, limits, left, scale,
    SL: gl.constexpr, AL: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """Weights of the keys key.., O so far, the rows' maxima and sums."""
    if edge(key, place, other_len, left, 0):
        S = masked(S, key, limits, float("-inf") if ACT == "softmax" else 0.0, SL)
    return weights(S, acc, m, total, scale, SL, AL, ACT, True, True)


@gluon.jit
def _consume(
    W, bufs, bars, o_desc, o_ptr, o_row, lse_ptr, records_ptr, blocks_per_head, tiles, left, scale, out_scale,
    D: gl.constexpr, HEADS: gl.constexpr, RING: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """Every CONSUMERS-th tile of the run, from the W-th on."""
    q_buf, k_buf, v_buf = bufs
    q_full, q_empty, kv_full, kv_empty = bars
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    QL: gl.constexpr = gl.DotOperandLayout(0, SL, 2)
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    L: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    ML: gl.constexpr = gl.SliceLayout(1, AL)
    dtype: gl.constexpr = o_ptr.dtype.element_ty
    begin, end = _run(tiles)
    seen = 0  # blocks that were waited for
    freed = 0  # blocks that this consumer is done with
    before = gl.cdiv(left, ROWS)  # blocks that a window reaches back
    own_block = _needs(_record(records_ptr, begin, blocks_per_head, end, L), left, L) - 1 + W
    x = _record(records_ptr, begin + W, blocks_per_head, end, L)
    buf = q_buf.index(W)
    mbarrier.wait(q_full.index(W), 0)
    q = buf.load(QL)
    mbarrier.arrive(q_empty.index(W), count=1)
    for tile in range(begin + W, end, CONSUMERS):
        after = _record(records_ptr, tile + CONSUMERS, blocks_per_head, end, L)
        row, own, place, _other, other_len, _f, _g, _h = unpack(x, L)
        head = tile // blocks_per_head
        n = _needs(x, left, L)
        first = own_block - n + 1
        lo = place - (n - 1) * ROWS
        limits = limits_of(place + gl.arange(0, ROWS, gl.SliceLayout(1, SL)), other_len, left, 0)
        acc = gl.zeros([ROWS, D], gl.float32, AL)
        m = gl.full([ROWS], float("-inf"), gl.float32, ML)
        total = partial(acc)  # zeros
        none = gl.zeros([ROWS, ROWS], gl.float32, SL)
        seen = _see(kv_full, seen, first, RING)
        S = warpgroup_mma(q, k_buf.index(first % RING).permute((1, 0)), none, use_acc=False, is_async=True)
        S = warpgroup_mma_wait(0, deps=(S,))
        visit = (tile - begin) // CONSUMERS
        if visit > 0:
            tma.store_wait(0)  # O of the tile before has left the buffer
            mbarrier.arrive(q_empty.index(W), count=1)
        for j in range(n - 1):
            seen = _see(kv_full, seen, first + j + 1, RING)
            k = k_buf.index((first + j + 1) % RING).permute((1, 0))
            S1 = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
            p, acc, m, total = _weights(
                S, acc, m, total, lo + j * ROWS, place, other_len, limits, left, scale, SL, AL, ACT
            )
            P = gl.convert_layout(p.to(dtype), PL)
            acc = warpgroup_mma(P, v_buf.index((first + j) % RING), acc, is_async=True)
            S, acc, P = warpgroup_mma_wait(0, deps=(S1, acc, P))
        p, acc, m, total = _weights(
            S, acc, m, total, place, place, other_len, limits, left, scale, SL, AL, ACT
        )  # fmt: skip
        P = gl.convert_layout(p.to(dtype), PL)
        acc = warpgroup_mma(P, v_buf.index(own_block % RING), acc, is_async=True)
        acc, P = warpgroup_mma_wait(0, deps=(acc, P))
        done = own_block + CONSUMERS - before  # the next tile of this consumer reaches back to this block
        for b in range(apart(freed), done):
            mbarrier.arrive(kv_empty.index(b % RING), count=1)
        freed = gl.maximum(freed, done)
        if ACT == "softmax":  # every row has seen a key; those past the sequence's end as its last one
            sums = gl.convert_layout(gl.sum(total, 1), ML, True)
            acc = acc * gl.convert_layout(1.0 / sums, gl.SliceLayout(1, AL))[:, None]
        else:
            acc = acc * out_scale
        mbarrier.wait(q_full.index(W), (visit + 1) & 1)
        q = buf.load(QL)
        put(acc, o_desc, o_ptr, o_row, buf, row, own, head * D, D, AL)
        if ACT == "softmax":  # after O: a fence waits for the global stores before it
            r = gl.arange(0, ROWS, ML)
            gl.store(lse_ptr + (row + r).to(gl.int64) * HEADS + head, (m + gl.log2(sums)) * LN2, mask=r < own)
        own_block += CONSUMERS
        x = after
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["blocks_per_head", "tiles", "left"])
def window_kernel(
    q_desc, k_desc, v_desc, o_desc, o_ptr, o_row, lse_ptr, records_ptr, blocks_per_head, tiles, left, scale, out_scale,
    D: gl.constexpr, HEADS: gl.constexpr, RING: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """O = softmax(scale Q K^T) V and LSE, `scale` with log2(e) as a factor, or out_scale * act(scale Q K^T) V, over the
    keys p - left .. p of the query at p. Tile t is block t % blocks_per_head of head t // blocks_per_head.
    """
    gl.static_assert(CONSUMERS == 2, "a partition for each consumer is written out below")
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_buf = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, ROWS, D], q_desc.layout)
    k_buf = gl.allocate_shared_memory(k_desc.dtype, [RING, ROWS, D], k_desc.layout)
    v_buf = gl.allocate_shared_memory(v_desc.dtype, [RING, ROWS, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    kv_full = gl.allocate_shared_memory(gl.int64, [RING, 1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [RING, 1], BARRIER)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(RING):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=CONSUMERS)
    bufs, bars = (q_buf, k_buf, v_buf), (q_full, q_empty, kv_full, kv_empty)
    gl.warp_specialize(
        [
            (_consume, (gl.to_tensor(0), bufs, bars, o_desc, o_ptr, o_row, lse_ptr, records_ptr, blocks_per_head, tiles,
                        left, scale, out_scale, D, HEADS, RING, ACT)),
            (_consume, (gl.to_tensor(1), bufs, bars, o_desc, o_ptr, o_row, lse_ptr, records_ptr, blocks_per_head, tiles,
                        left, scale, out_scale, D, HEADS, RING, ACT)),
            (_load, ((q_desc, k_desc, v_desc), bufs, bars, records_ptr, blocks_per_head, tiles, left, D, RING)),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip


def constants(dim: int, heads: int, act: str) -> dict[str, Any]:
    """The compile-time arguments of `window_kernel`."""
    return {"D": dim, "HEADS": heads, "RING": RING, "ACT": act}


def forward(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, scale: float, left: int, *, act: str, out_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """O [T, H, D] and LSE [T, H] (empty unless `act` is "softmax") of self-attention in which a query sees `left` keys
    before it, 1 to MOST, and its own, D 64 or 128; the scale must be positive for softmax.
    """
    assert q.shape == k.shape == v.shape
    assert q.shape[2] in (64, 128)
    assert 1 <= left <= MOST
    total, heads, dim = q.shape
    softmax = act == "softmax"
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(total if softmax else 0, heads, dtype=torch.float32, device=q.device)
    if total == 0:
        return out, lse
    q, k, v = (_addressable(x) for x in (q, k, v))
    with torch.cuda.device_of(q):
        records = blocks.records(offsets, offsets, total, ROWS.value)
        tiles = records.shape[0] * heads
        window_kernel[(min(tiles, programs(q.device)),)](
            *(_descriptor(x) for x in (q, k, v, out)), out, out.stride(0), lse, records, records.shape[0], tiles, left,
            scale * LOG2E if softmax else scale, out_scale, **constants(dim, heads, act),
            num_warps=4, maxnreg=REGISTERS,
        )  # fmt: skip
    return out, lse
