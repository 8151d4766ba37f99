"""Tile schedules of the persistent kernels: which program computes which tile, in which order. On the CPU.

A tile is up to `consumers` blocks of `block` consecutive own rows of one (sequence, head), together with all of that
sequence's other rows:
query rows and keys in a forward, key rows and queries where the gradients of keys and values are made. Only tiles
that hold rows exist.
Tiles are sorted by estimated work, largest first, and dealt to the programs in zigzag order: 0 .. P - 1, then P - 1
.. 0, and so on.
`gem_kernels.hopper.tiles` builds the same list on the GPU, from offsets that the host never reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FIELDS = ("own_start", "rows", "other_start", "other_len", "head", "out_start", "sequence", "first_block")


@dataclass(frozen=True, kw_only=True)
class TileShape:
    """What a kernel does with a tile: `consumers` warpgroups of `block` own rows each, steps of `step` other rows."""

    block: int = 64
    consumers: int = 2
    step: int = 128

    def __post_init__(self) -> None:
        if min(self.block, self.consumers, self.step) < 1:
            raise ValueError(f"block, consumers and step must be positive; got {self}")

    def bound(self, own_total: int, batch: int, heads: int) -> int:
        """At most so many tiles, whatever the lengths: what to allocate where lengths are known on the device only."""
        return heads * (own_total // (self.block * self.consumers) + batch)


def work(blocks: Tensor, steps: Tensor) -> Tensor:
    """Relative time of a tile. One active consumer cannot keep the tensor cores busy (3 : 4 : 6 for 1, 2, 3
    blocks); 2 is the fixed part.
    """
    return steps * (2 * blocks).clamp(min=3) + 2


def tiles(
    own_offsets: Tensor, other_offsets: Tensor, heads: int, shape: TileShape, *, shared_own: bool = False
) -> Tensor:
    """All tiles with rows, most work first, [N, 8] int32 with columns `FIELDS`; offsets are [B + 1] on the CPU.

    `shared_own`: every sequence has the same own rows (learned queries): `own_offsets` is [0, L], and only
    `out_start` differs.

    Raises ValueError for offsets that are not one-dimensional, do not ascend or differ in length.
    """
    own, other = own_offsets.long(), other_offsets.long()
    batch = len(other) - 1
    if shared_own:
        own = torch.arange(batch + 1) * own[-1]
    for name, offsets in (("own_offsets", own), ("other_offsets", other)):
        if offsets.ndim != 1 or len(offsets) != batch + 1 or (offsets.diff() < 0).any():
            raise ValueError(f"{name} must be {batch + 1} ascending offsets; got {offsets.tolist()}")
    own_len, other_len = own.diff(), other.diff()
    blocks = -(-own_len // shape.block)
    count = -(-blocks // shape.consumers)  # tiles of a (sequence, head), as equal as can be
    most = count.clamp(min=1)
    small, large = blocks // most, blocks % most  # `large` of them have one block more
    steps = -(-other_len // shape.step)

    # Two groups of equal tiles for each sequence, in order of work; ties keep the order of sequences.
    group_work = torch.stack([work(small + 1, steps), work(small, steps)], 1).flatten()
    group_tiles = torch.stack([large, count - large], 1).flatten()
    order = group_work.argsort(stable=True, descending=True)
    order = order[group_tiles[order] > 0]
    rows = []
    for g in order.tolist():
        b, kind = divmod(g, 2)
        n = int(group_tiles[g])
        size = int(small[b]) + 1 - kind
        first = torch.arange(n) * size + kind * int(large[b] * (small[b] + 1))
        start = first * shape.block
        record = torch.empty(heads, n, len(FIELDS), dtype=torch.int32)
        record[..., 0] = start + (0 if shared_own else own[b])
        record[..., 1] = (own_len[b] - start).clamp(max=size * shape.block)
        record[..., 2] = other[b]
        record[..., 3] = other_len[b]
        record[..., 4] = torch.arange(heads)[:, None]
        record[..., 5] = start + own[b]
        record[..., 6] = b
        record[..., 7] = first
        rows.append(record.view(-1, len(FIELDS)))
    return torch.cat(rows) if rows else torch.empty(0, len(FIELDS), dtype=torch.int32)


def tile_work(table: Tensor, shape: TileShape) -> Tensor:
    """The estimated work of every tile of a table from `tiles`, [N]."""
    blocks = -(-table[:, 1].long() // shape.block)
    return work(blocks, -(-table[:, 3].long() // shape.step))


def zigzag(count: int, programs: int) -> Tensor:
    """The program of each of `count` tiles, [count]: one row of programs forwards, the next backwards."""
    at = torch.arange(count)
    row, column = at // programs, at % programs
    return torch.where(row % 2 == 0, column, programs - 1 - column)


def blocked(count: int, programs: int) -> Tensor:
    """Equal runs of consecutive tiles, [count]: what a launch without a schedule amounts to, for comparison."""
    return torch.arange(count) * programs // max(count, 1)


def longest_first(weights: Tensor, programs: int) -> Tensor:
    """The program of each tile by longest-processing-time-first, [N]; `weights` must descend. For comparison with
    `zigzag`.
    """
    import heapq

    heap = [(0, p) for p in range(programs)]
    owner = []
    for w in weights.tolist():
        load, p = heap[0]
        owner.append(p)
        heapq.heapreplace(heap, (load + w, p))
    return torch.tensor(owner, dtype=torch.int64)


def skew(weights: Tensor, owner: Tensor, programs: int) -> float:
    """Largest load of a program over the mean load: 1.0 is perfect. 1.0 for no work at all."""
    load = torch.bincount(owner, weights=weights.double(), minlength=programs)
    mean = float(load.mean()) if programs else 0.0
    return float(load.max()) / mean if mean > 0 else 1.0
