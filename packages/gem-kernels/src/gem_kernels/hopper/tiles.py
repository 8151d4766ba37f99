"""The tile list of `gem_kernels.schedule`, built on the GPU by one small kernel: the host never reads the offsets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels.hopper.first_call import Launch
from gem_kernels.schedule import FIELDS, TileShape


@dataclass(frozen=True)
class Tiles:
    """`table` [bound, 8] int32, of which the first `count` [1] int32 rows hold tiles (columns:
    `gem_kernels.schedule.FIELDS`).

    `cursor` [1] int32: how many tiles the programs of a running forward have taken; 0 before and after. So two
    launches that share a list must not run at the same time.
    """

    table: Tensor
    count: Tensor
    cursor: Tensor


@triton.jit
def _group(
    own, other, b, valid, BLOCK: tl.constexpr, CONSUMERS: tl.constexpr, STEP: tl.constexpr, SHARED: tl.constexpr
):
    """Of sequence b: own length, tiles, blocks of a small tile, number of large tiles, and the work of a tile of
    either kind.
    """
    if SHARED:
        own_len = tl.where(valid, tl.load(own + 1), 0).to(tl.int32)
    else:
        own_len = (tl.load(own + b + 1, mask=valid, other=0) - tl.load(own + b, mask=valid, other=0)).to(tl.int32)
    other_len = (tl.load(other + b + 1, mask=valid, other=0) - tl.load(other + b, mask=valid, other=0)).to(tl.int32)
    blocks = (own_len + BLOCK - 1) // BLOCK
    count = (blocks + CONSUMERS - 1) // CONSUMERS
    small = blocks // tl.maximum(count, 1)
    large = blocks - small * count
    steps = (other_len + STEP - 1) // STEP
    work_large = steps * tl.maximum(2 * small + 2, 3) + 2
    work_small = steps * tl.maximum(2 * small, 3) + 2
    return own_len, other_len, count, small, large, work_large, work_small


@triton.jit(do_not_specialize=["batch", "heads"])
def build_tiles(
    own, other, table, total, batch, heads,
    BLOCK: tl.constexpr, CONSUMERS: tl.constexpr, STEP: tl.constexpr, SHARED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program for each sequence: counts the tiles that come before its own, then writes its own."""
    b = tl.program_id(0)
    own_len, other_len, count, small, large, work_large, work_small = _group(
        own, other, b, b < batch, BLOCK, CONSUMERS, STEP, SHARED
    )
    before_large = tl.zeros([CHUNK], tl.int32)
    before_small = tl.zeros([CHUNK], tl.int32)
    everything = tl.zeros([CHUNK], tl.int32)
    for c in range(0, batch, CHUNK):
        i = c + tl.arange(0, CHUNK)
        _, _, n, _, n_large, w_large, w_small = _group(own, other, i, i < batch, BLOCK, CONSUMERS, STEP, SHARED)
        n_small = n - n_large
        everything += n
        # Group (i, kind) comes before (b, kind') if it has more work, or equal work and a smaller (sequence, kind).
        before_large += tl.where((w_large > work_large) | ((w_large == work_large) & (i < b)), n_large, 0)
        before_large += tl.where((w_small > work_large) | ((w_small == work_large) & (i < b)), n_small, 0)
        before_small += tl.where((w_large > work_small) | ((w_large == work_small) & (i <= b)), n_large, 0)
        before_small += tl.where((w_small > work_small) | ((w_small == work_small) & (i < b)), n_small, 0)
    if b == 0:
        tl.store(total, tl.sum(everything, 0) * heads)
        tl.store(total + 1, 0)
    start_large = tl.sum(before_large, 0) * heads
    start_small = tl.sum(before_small, 0) * heads
    if SHARED:
        own_start = 0
        out_start = (b * own_len).to(tl.int32)
    else:
        own_start = tl.load(own + b).to(tl.int32)
        out_start = own_start
    other_start = tl.load(other + b).to(tl.int32)
    for c in range(0, count * heads, CHUNK):
        i = c + tl.arange(0, CHUNK)
        mask = i < count * heads
        head = i // tl.maximum(count, 1)
        j = i - head * count
        is_large = j < large
        first = j * small + tl.minimum(j, large)
        position = tl.where(is_large, start_large + head * large + j, start_small + head * (count - large) + j - large)
        size = tl.where(is_large, small + 1, small)
        p = table + position * 8
        tl.store(p, own_start + first * BLOCK, mask=mask)
        tl.store(p + 1, tl.minimum(size * BLOCK, own_len - first * BLOCK), mask=mask)
        tl.store(p + 2, other_start, mask=mask)
        tl.store(p + 3, other_len, mask=mask)
        tl.store(p + 4, head, mask=mask)
        tl.store(p + 5, out_start + first * BLOCK, mask=mask)
        tl.store(p + 6, b, mask=mask)
        tl.store(p + 7, first, mask=mask)


def build(
    own_offsets: Tensor,
    other_offsets: Tensor,
    own_total: int,
    heads: int,
    shape: TileShape,
    *,
    shared_own: bool = False,
) -> Tiles:
    """The tiles of `gem_kernels.schedule.tiles`, in the same order, without a device sync.

    Args:
        own_offsets, other_offsets: [B + 1] int32 or int64 on the GPU; with `shared_own`, `own_offsets` is [2]: 0 and
        the shared length.
        own_total: rows of the own side over all sequences, a host int.
    """
    tiles, launches = plan(own_offsets, other_offsets, own_total, heads, shape, shared_own=shared_own)
    for launch in launches:
        launch.run()
    return tiles


def plan(
    own_offsets: Tensor,
    other_offsets: Tensor,
    own_total: int,
    heads: int,
    shape: TileShape,
    *,
    shared_own: bool = False,
) -> tuple[Tiles, list[Launch]]:
    """The list that `build` makes, not filled in yet, and the launch that does it (none for no sequences)."""
    batch = other_offsets.shape[0] - 1
    device = other_offsets.device
    table = torch.empty(max(shape.bound(own_total, batch, heads), 1), len(FIELDS), dtype=torch.int32, device=device)
    state = torch.empty(2, dtype=torch.int32, device=device)
    tiles = Tiles(table, state[:1], state[1:])
    if batch == 0:
        state.zero_()
        return tiles, []
    constants = {
        "BLOCK": shape.block, "CONSUMERS": shape.consumers, "STEP": shape.step, "SHARED": shared_own,
        "CHUNK": min(1024, max(32, triton.next_power_of_2(batch))), "num_warps": 4,
    }  # fmt: skip
    arguments = (own_offsets, other_offsets, table, state, batch, heads)
    return tiles, [Launch(kernel=build_tiles, grid=(batch,), arguments=arguments, constants=constants)]
