"""The list of tiles of the Hopper backward, of keys and of queries, built on the GPU: the host never reads the offsets.

Sequences come in order of their work, most first, each with all its tiles of keys. Its tiles of queries, which need
what all those leave, follow when `lag` further tiles of keys have come for every program.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels.schedule import FIELDS, TileShape


@dataclass(frozen=True)
class BackwardTiles:
    """`table` [bound, 8] int32, of which the first `count` [1] int32 rows hold tiles: the columns of
    `gem_kernels.schedule.FIELDS`, but in place of "out_start" 1 for tiles of queries and 0 for those of keys.

    `cursor` [1] int32: how many tiles the programs of a running launch have taken; 0 before and after. `told`
    [batch * key heads] int32: how many blocks of keys of a (sequence, head) are done; 0 before the first launch.
    """

    table: Tensor
    count: Tensor
    cursor: Tensor
    told: Tensor


@triton.jit
def _counts(q_offsets, k_offsets, b, valid, CONSUMERS: tl.constexpr):
    """Of sequence b: blocks of 64 queries and of 64 keys, and tiles of either kind."""
    q_len = tl.load(q_offsets + b + 1, mask=valid, other=0) - tl.load(q_offsets + b, mask=valid, other=0)
    k_len = tl.load(k_offsets + b + 1, mask=valid, other=0) - tl.load(k_offsets + b, mask=valid, other=0)
    q_blocks = (q_len.to(tl.int32) + 63) // 64
    k_blocks = (k_len.to(tl.int32) + 63) // 64
    return q_blocks, k_blocks, (q_blocks + CONSUMERS - 1) // CONSUMERS, (k_blocks + CONSUMERS - 1) // CONSUMERS


@triton.jit(do_not_specialize=["batch", "heads", "kv_heads"])
def rank_sequences(
    q_offsets, k_offsets, starts, state, told, batch, heads, kv_heads, CONSUMERS: tl.constexpr, CHUNK: tl.constexpr
):
    """starts [2, batch]: how many tiles of keys, and of queries, the sequences before each in the order have."""
    b = tl.program_id(0)
    own_q, own_k, _own_q_tiles, _own_k_tiles = _counts(q_offsets, k_offsets, b, b < batch, CONSUMERS)
    work = own_q * own_k
    keys = tl.zeros([CHUNK], tl.int32)
    queries = tl.zeros([CHUNK], tl.int32)
    everything = tl.zeros([CHUNK], tl.int32)
    for c in range(0, batch, CHUNK):
        i = c + tl.arange(0, CHUNK)
        q_blocks, k_blocks, q_tiles, k_tiles = _counts(q_offsets, k_offsets, i, i < batch, CONSUMERS)
        other = q_blocks * k_blocks
        before = (other > work) | ((other == work) & (i < b))
        keys += tl.where(before, k_tiles, 0)
        queries += tl.where(before, q_tiles, 0)
        everything += q_tiles * heads + k_tiles * kv_heads
    tl.store(starts + b, tl.sum(keys, 0) * kv_heads)
    tl.store(starts + batch + b, tl.sum(queries, 0) * heads)
    if b == 0:
        tl.store(state, tl.sum(everything, 0))
        tl.store(state + 1, 0)
    for h in range(kv_heads):
        tl.store(told + b * kv_heads + h, 0)


@triton.jit
def _put(
    table, position, blocks, own, other, own_len, other_len, heads, b,
    KIND: tl.constexpr, CONSUMERS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The tiles of one side of sequence b, head after head, as equal as can be, the larger ones first."""
    count = (blocks + CONSUMERS - 1) // CONSUMERS
    small = blocks // tl.maximum(count, 1)
    large = blocks - small * count
    for c in range(0, count * heads, CHUNK):
        i = c + tl.arange(0, CHUNK)
        mask = i < count * heads
        head = i // tl.maximum(count, 1)
        j = i - head * count
        first = j * small + tl.minimum(j, large)
        size = tl.where(j < large, small + 1, small)
        p = table + (position + i) * 8
        tl.store(p, own + first * 64, mask=mask)
        tl.store(p + 1, tl.minimum(size * 64, own_len - first * 64), mask=mask)
        tl.store(p + 2, other, mask=mask)
        tl.store(p + 3, other_len, mask=mask)
        tl.store(p + 4, head, mask=mask)
        tl.store(p + 5, KIND, mask=mask)
        tl.store(p + 6, b, mask=mask)
        tl.store(p + 7, first, mask=mask)


@triton.jit(do_not_specialize=["batch", "heads", "kv_heads", "lag"])
def place_tiles(
    q_offsets, k_offsets, starts, table, batch, heads, kv_heads, lag, CONSUMERS: tl.constexpr, CHUNK: tl.constexpr
):
    """One program for each sequence: writes its tiles of keys, and of queries after all tiles of keys that begin less
    than `lag` behind the end of its own.
    """
    b = tl.program_id(0)
    q_blocks, k_blocks, _q_tiles, k_tiles = _counts(q_offsets, k_offsets, b, b < batch, CONSUMERS)
    keys_at = tl.load(starts + b)
    queries_at = tl.load(starts + batch + b)
    ready = keys_at + k_tiles * kv_heads + lag
    queries_before = tl.zeros([CHUNK], tl.int32)
    keys_before = tl.zeros([CHUNK], tl.int32)
    for c in range(0, batch, CHUNK):
        i = c + tl.arange(0, CHUNK)
        _other_q_blocks, _other_k_blocks, other_q, other_k = _counts(q_offsets, k_offsets, i, i < batch, CONSUMERS)
        other_at = tl.load(starts + i, mask=i < batch, other=0)
        queries_before += tl.where(other_at + other_k * kv_heads + lag <= keys_at, other_q, 0)
        keys_before += tl.where(other_at < ready, other_k, 0)
    q_row = tl.load(q_offsets + b)
    k_row = tl.load(k_offsets + b)
    q_len = (tl.load(q_offsets + b + 1) - q_row).to(tl.int32)
    k_len = (tl.load(k_offsets + b + 1) - k_row).to(tl.int32)
    keys_at += tl.sum(queries_before, 0) * heads
    queries_at += tl.sum(keys_before, 0) * kv_heads
    _put(table, keys_at, k_blocks, k_row, q_row, k_len, q_len, kv_heads, b, 0, CONSUMERS, CHUNK)
    _put(table, queries_at, q_blocks, q_row, k_row, q_len, k_len, heads, b, 1, CONSUMERS, CHUNK)


def build(
    q_offsets: Tensor, k_offsets: Tensor, total_q: int, total_k: int, heads: int, kv_heads: int, consumers: int,
    programs: int, lag: int,
) -> BackwardTiles:  # fmt: skip
    """The tiles of `consumers` blocks of 64 rows, without a device sync.

    Args:
        q_offsets, k_offsets: [B + 1] int32 or int64 on the GPU.
        total_q, total_k: rows of queries and of keys over all sequences, host ints.
        programs: how many programs walk the list.
        lag: tiles of keys for every program between a sequence's own and its tiles of queries.
    """
    batch, device = k_offsets.shape[0] - 1, k_offsets.device
    shape = TileShape(block=64, consumers=consumers)
    bound = shape.bound(total_q, batch, heads) + shape.bound(total_k, batch, kv_heads)
    table = torch.empty(max(bound, 1), len(FIELDS), dtype=torch.int32, device=device)
    # In one allocation, every part where 16 divides its address: kernels are built for that.
    parts = [4, batch * kv_heads, 2 * batch]
    counters = torch.empty(sum(-(-n // 4) * 4 for n in parts), dtype=torch.int32, device=device)
    state, told, starts = counters.split([-(-n // 4) * 4 for n in parts])
    chunk = min(1024, max(32, triton.next_power_of_2(batch)))
    rank_sequences[(batch,)](
        q_offsets, k_offsets, starts, state, told, batch, heads, kv_heads, CONSUMERS=consumers, CHUNK=chunk, num_warps=4
    )
    place_tiles[(batch,)](
        q_offsets, k_offsets, starts, table, batch, heads, kv_heads, lag * programs,
        CONSUMERS=consumers, CHUNK=chunk, num_warps=4,
    )  # fmt: skip
    return BackwardTiles(table, state[:1], state[1:2], told[: batch * kv_heads])
