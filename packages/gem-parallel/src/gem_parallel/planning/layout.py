"""The five axes and the parts of a step, and where a model's bytes lie under them."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from gem_parallel.planning.cost import Group
from gem_parallel.planning.profile import Profile
from gem_parallel.planning.spec import ModelSpec, require

STRATEGIES = ("v1", "v2", "v3")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes and placement of the five axes over `world` ranks, and the parts that a step is made in.

    Dense parameters: world = replicate x fsdp; inside an FSDP group `ep` neighbouring ranks hold different experts.
    Tables: world = table_shard x table_copies. With "v1" there is one copy. With "v2" every group of table_shard ranks
    holds a full copy, which is averaged every `sync_every` backward passes. With "v3" a rank keeps 1 / table_copies of
    its shard. Copies are neighbours (`copies_inside`: their collectives stay on the fast tier) or lie in different
    groups of neighbours.

    A rank's batch is computed in `parts`, one after another: what is kept for backward is there for one at a time, and
    weights, ids and embeddings travel for each. Dense gradients are reduced over the ranks in the last part, those of
    whole parameters added up until then; with `reduce_every_part` in every part, and only a shard's are added up.
    """

    world: int
    fsdp: int
    ep: int = 1
    strategy: str = "v1"
    table_shard: int
    table_copies: int = 1
    copies_inside: bool = True
    sync_every: int = 1
    parts: int = 1
    reduce_every_part: bool = False

    def __post_init__(self) -> None:
        require(self.parts >= 1, f"Layout.parts must be >= 1, got {self.parts!r}")

    @property
    def replicate(self) -> int:
        """Copies of the dense parameters."""
        return self.world // self.fsdp

    @property
    def replays(self) -> bool:
        """Whether units that keep a copy of their parameters do so here: not alone, nor with experts on other ranks."""
        return self.world > 1 and self.ep == 1

    @property
    def groups(self) -> dict[str, Group]:
        """The process group of every axis."""
        inside = self.copies_inside
        return {
            "ep": Group(self.ep, 1),
            "fsdp": Group(self.fsdp, 1),
            "efsdp": Group(self.fsdp // self.ep, self.ep),
            "replicate": Group(self.replicate, self.fsdp),
            "table_shard": Group(self.table_shard, self.table_copies if inside else 1),
            "table_copies": Group(self.table_copies, 1 if inside else self.table_shard),
        }

    def __str__(self) -> str:
        dense = f"replicate {self.replicate} x fsdp {self.fsdp}" + (f" (ep {self.ep})" if self.ep > 1 else "")
        tables = f"tables {self.strategy}: shard {self.table_shard} x copies {self.table_copies}"
        if self.table_copies > 1:
            tables += " inside" if self.copies_inside else " across"
        every = " (each reduced)" if self.reduce_every_part else ""
        return f"{dense}, {tables}" + (f", {self.parts} parts{every}" if self.parts > 1 else "")

    def part(self, batch: int) -> int:
        """Samples of the largest part of a rank's batch; parts are as equal as they can be."""
        return -(-batch // self.parts)

    @property
    def dense_axes(self) -> tuple[int, int]:
        """What says how dense parameters lie."""
        return self.fsdp, self.ep

    @property
    def table_axes(self) -> tuple[str, int, bool]:
        """What says how tables lie."""
        return self.strategy, self.table_shard, self.copies_inside

    @property
    def sums_whole(self) -> bool:
        """Whether gradients of whole parameters are added up."""
        return self.parts > 1 and not self.reduce_every_part


@dataclass(frozen=True)
class TableLoad:
    """How the tables spread over `table_shard` ranks.

    Attributes:
        bytes_max: weights and moments of the fullest rank, one copy whole.
        imbalance: lookups of the busiest rank over the mean.
        row_split: mean number of row blocks of a pooled table, weighted by its traffic: partial sums travel once each.
        splits: tables that were cut.
    """

    bytes_max: float
    imbalance: float
    row_split: float
    splits: int


def place_tables(model: ModelSpec, ranks: int) -> TableLoad:
    """Cut tables whose share of the bytes or of the lookups exceeds a rank's mean, columns first, then rows; then give
    the heaviest remaining block to the rank with the least lookups (Graham's longest processing time first)."""
    if not model.tables:
        return TableLoad(0.0, 1.0, 1.0, 0)
    row = {t.name: t.dim * model.table_bytes + model.moment_bytes for t in model.tables}
    all_bytes = sum(t.rows * row[t.name] * t.count for t in model.tables)
    all_reads = sum(t.pooling * t.dim * t.count for t in model.tables) or 1.0
    blocks: list[tuple[float, float]] = []
    traffic = weighted = 0.0
    splits = 0
    for table in model.tables:
        size, reads = table.rows * row[table.name], table.pooling * table.dim
        wanted = max(size / (all_bytes / ranks), reads / (all_reads / ranks))
        columns = rows = 1
        while columns * rows < wanted and columns * rows < ranks:
            if table.dim // (2 * columns) >= 64:
                columns *= 2
            else:
                rows *= 2
        rows = min(rows, table.rows)
        cut = min(columns * rows, ranks)
        splits += table.count * (cut > 1)
        share = table.vectors * table.dim * table.count
        traffic += share
        weighted += share * (rows if table.pooled else 1)
        blocks += [(reads / cut, size / cut)] * (cut * table.count)
    blocks.sort(reverse=True)
    # equal blocks in excess of the ranks spread evenly; the heap decides about the rest
    heap = [(0.0, 0.0, rank) for rank in range(ranks)]
    for looked_up, held_bytes in blocks:
        have, held, rank = heapq.heappop(heap)
        heapq.heappush(heap, (have + looked_up, held + held_bytes, rank))
    busiest, mean = max(h[0] for h in heap), all_reads / ranks
    return TableLoad(max(h[1] for h in heap), busiest / mean, weighted / traffic if traffic else 1.0, splits)


def memory(model: ModelSpec, layout: Layout, load: TableLoad, batch: int, profile: Profile) -> dict[str, float]:
    """Bytes of one rank by purpose; "peak" is the larger of the two moments that compete. Of a rank's `batch` one part
    is there at a time.

    At the end of the forward pass all activations are there and V3's working copy is gone; during lookup and table
    update it is the other way round.
    """
    batch = layout.part(batch)
    widest = max(u.params for u in model.layers)
    own_experts = model.expert_params / layout.ep
    widest_expert = max(u.expert_params * u.experts // layout.ep for u in model.layers)
    state = model.state_bytes * (model.dense_params / layout.fsdp + own_experts / (layout.fsdp // layout.ep))
    gathered = 0.0
    if layout.fsdp > 1:  # two units gathered, one unit's gradients
        gather = max(model.gather_bytes_of(u) for u in model.layers)
        gathered = (2 * gather + model.reduce_bytes) * (widest + widest_expert)
    sums = 0.0
    if layout.sums_whole:  # a shard's are in the state
        elsewhere = model.dense_params * (1 - 1 / layout.fsdp) + own_experts * (1 - layout.ep / layout.fsdp)
        sums = model.reduce_bytes * elsewhere
    copies = sum(u.kept_bytes for u in model.units) if layout.replays else 0.0
    kept = sum(u.activation_bytes for u in model.units) * batch
    exchanged = layout.ep * batch * max(u.expert_io_bytes for u in model.layers) if layout.ep > 1 else 0.0
    vectors = 2 * 4 * batch * sum(t.vectors * t.dim * t.count for t in model.tables)  # embeddings and their gradients
    tables = load.bytes_max
    working = 0.0
    if layout.strategy == "v3":
        tables, working = load.bytes_max / layout.table_copies, load.bytes_max
    always = state + sums + copies + tables + vectors + batch * model.input_bytes + profile.reserve_bytes
    items = {
        "dense state": state,
        **({"gradient sums": sums} if sums else {}),
        **({"kept parameters": copies} if copies else {}),
        "tables and moments": tables,
        "embeddings": vectors,
        "inputs": batch * model.input_bytes,
        "activations": kept,
        "gathered units": gathered,
        "expert exchange": exchanged,
        "table working copy": working,
        "reserve": float(profile.reserve_bytes),
    }
    return {**items, "peak": always + max(kept + gathered + exchanged, working)}
