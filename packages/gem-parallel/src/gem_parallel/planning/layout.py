"""The five axes, where a model's bytes lie under them, and the step that they make."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from gem_parallel.planning.cost import Cost, Group, Links
from gem_parallel.planning.profile import Profile
from gem_parallel.planning.spec import LayerSpec, ModelSpec
from gem_parallel.planning.timeline import COMPUTE, Op
from gem_parallel.planning.topology import Topology

STRATEGIES = ("v1", "v2", "v3")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes and placement of the five axes over `world` ranks.

    Dense parameters: world = replicate x fsdp; inside an FSDP group `ep` neighbouring ranks hold different experts.
    Tables: world = table_shard x table_copies. With "v1" there is one copy. With "v2" every group of table_shard ranks
    holds a full copy, which is averaged every `sync_every` steps. With "v3" a rank keeps 1 / table_copies of its shard.
    Copies are neighbours (`copies_inside`: their collectives stay on the fast tier) or lie in different groups of
    neighbours.
    """

    world: int
    fsdp: int
    ep: int = 1
    strategy: str = "v1"
    table_shard: int
    table_copies: int = 1
    copies_inside: bool = True
    sync_every: int = 1

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
        return f"{dense}, {tables}"


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
    """Bytes of one rank by purpose; "peak" is the larger of the two moments that compete.

    At the end of the forward pass all activations are there and V3's working copy is gone; during lookup and table
    update it is the other way round.
    """
    widest = max(u.params for u in model.layers)
    own_experts = model.expert_params / layout.ep
    widest_expert = max(u.expert_params * u.experts // layout.ep for u in model.layers)
    state = model.state_bytes * (model.dense_params / layout.fsdp + own_experts / (layout.fsdp // layout.ep))
    gathered = 0.0
    if layout.fsdp > 1:  # two units gathered, one unit's gradients
        gathered = (2 * model.gather_bytes + model.reduce_bytes) * (widest + widest_expert)
    copies = sum(u.kept_bytes for u in model.units) if layout.replays else 0.0
    kept = sum(u.activation_bytes for u in model.units) * batch
    exchanged = layout.ep * batch * max(u.expert_io_bytes for u in model.layers) if layout.ep > 1 else 0.0
    vectors = 2 * 4 * batch * sum(t.vectors * t.dim * t.count for t in model.tables)  # embeddings and their gradients
    tables = load.bytes_max
    working = 0.0
    if layout.strategy == "v3":
        tables, working = load.bytes_max / layout.table_copies, load.bytes_max
    always = state + copies + tables + vectors + batch * model.input_bytes + profile.reserve_bytes
    items = {
        "dense state": state,
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


def step_ops(
    model: ModelSpec,
    layout: Layout,
    load: TableLoad,
    batch: int,
    topology: Topology,
    profile: Profile,
    links: Links | None = None,
) -> list[Op]:
    """One training step of every rank; loads are the mean rank's, but for tables, where the busiest sets the pace."""
    return _Step(model, layout, load, batch, topology, profile, links or Links(topology, profile)).build()


class _Step:
    def __init__(
        self,
        model: ModelSpec,
        layout: Layout,
        load: TableLoad,
        batch: int,
        topology: Topology,
        profile: Profile,
        links: Links,
    ) -> None:
        self.model, self.layout, self.load, self.batch, self.links = model, layout, load, batch, links
        self.profile = profile
        self.rate = profile.tflops * 1e12
        self.fixed = profile.unit_us * 1e-6
        self.memory_rate = topology.memory_gbps * 1e9 * profile.lookup_efficiency
        self.groups = layout.groups
        self.ops: list[Op] = []

    def build(self) -> list[Op]:
        """Forward, backward, updates."""
        ready, units = self._lookup(), self.model.units
        gathers = self._gathers(units)
        last: int | None = None
        ends: list[int] = []
        for index, unit in enumerate(units):
            # at most one unit is gathered ahead: the gather of unit i waits for the compute of unit i - 2
            waits = self._gather(gathers[index], (ends[index - 2],) if index >= 2 else ())
            if ready is not None and unit.needs_tables:
                waits = (*waits, ready)
            last = self._unit(unit, 1.0, waits)
            ends.append(last)
        assert last is not None
        back: list[int] = []
        pending: list[tuple[LayerSpec, int]] = []
        for position, index in enumerate(reversed(range(len(units)))):
            unit = units[index]
            before = (back[position - 2],) if position >= 2 else (ends[-1],)
            replayed = unit.kept_bytes and self.layout.replays
            waits = () if replayed else self._gather(gathers[index], before)
            if pending:  # the next unit's gather is issued before the last unit's reduction
                self._reduce(*pending.pop())
            back.append(self._unit(unit, 2.0, waits))
            pending.append((unit, back[-1]))
        reduced = self._reduce(*pending.pop())
        owned = self._update_tables(back[-1])
        self._optimizer(reduced)
        if owned is not None:  # V3's owner goes over its whole fraction: gradient and weights are read, weights written
            size, arrived = owned
            self._add("table update", COMPUTE, 3.0 * size / self.memory_rate, (arrived,))
        return self.ops

    def _add(self, kind: str, stream: str, cost: Cost | float, after: tuple[int, ...] = (), **more: object) -> int:
        seconds, sent = (cost, ()) if isinstance(cost, float) else (cost.seconds, cost.sent)
        self.ops.append(Op(kind, stream, seconds, after, sent=sent, **more))  # type: ignore[arg-type]
        return len(self.ops) - 1

    def _lookup(self) -> int | None:
        """V3's all-gather, the lookup and the exchange of embeddings; the ids of the next batch travel meanwhile."""
        model, layout, load = self.model, self.layout, self.load
        if not model.tables:
            return None
        waits: tuple[int, ...] = ()
        shard, copies = self.groups["table_shard"], self.groups["table_copies"]
        if layout.strategy == "v3" and layout.table_copies > 1:
            size = model.table_params * model.table_bytes / layout.table_shard
            waits = (self._add("table all-gather", "tables", self.links.all_gather(copies, size), group=copies),)
        read = self.batch * sum(t.pooling * t.dim * t.count for t in model.tables) * model.table_bytes
        ids = 8.0 * self.batch * sum(t.pooling * t.count for t in model.tables)
        look = self._add(
            "lookup", COMPUTE, read * load.imbalance / self.memory_rate + self.fixed, waits, load="samples"
        )
        vectors = 4.0 * self.batch * sum(t.vectors * t.dim * t.count for t in model.tables)
        self.exchange = vectors * load.row_split * load.imbalance
        self.read = read * load.imbalance
        ready = look
        if layout.table_shard > 1:
            cost = self.links.all_to_all(shard, self.exchange)
            ready = self._add("embedding all-to-all", "sparse", cost, (look,), group=shard)
            self._add("id all-to-all", "sparse", self.links.all_to_all(shard, ids), group=shard)
        return ready

    def _gathers(self, units: tuple[LayerSpec, ...]) -> list[tuple[Cost, ...]]:
        fsdp, efsdp = self.groups["fsdp"], self.groups["efsdp"]
        known: dict[int, tuple[Cost, ...]] = {}
        for unit in units:
            if id(unit) not in known:
                costs = []
                if fsdp.size > 1 and unit.params:
                    costs.append(self.links.all_gather(fsdp, unit.params * self.model.gather_bytes))
                if efsdp.size > 1 and unit.experts:
                    costs.append(self.links.all_gather(efsdp, self._local_experts(unit) * self.model.gather_bytes))
                known[id(unit)] = tuple(costs)
        return [known[id(unit)] for unit in units]

    def _local_experts(self, unit: LayerSpec) -> float:
        return unit.expert_params * unit.experts / self.layout.ep

    def _gather(self, costs: tuple[Cost, ...], after: tuple[int, ...]) -> tuple[int, ...]:
        group = self.groups["fsdp"]
        return tuple(self._add("fsdp all-gather", "dense", cost, after, group=group) for cost in costs)

    def _unit(self, unit: LayerSpec, times: float, waits: tuple[int, ...]) -> int:
        """Compute of a unit, with the exchange around its experts; a measured unit takes what was measured."""
        measured = self.profile.unit(unit.name)
        if measured is not None and (not unit.experts or self.groups["ep"].size == 1):
            seconds = measured.seconds(self.batch, backward=times > 1)
            return self._add("dense", COMPUTE, seconds, waits, load="samples")
        flops = times * self.batch * unit.flops
        experts = times * self.batch * unit.experts * unit.expert_flops
        ep = self.groups["ep"]
        if not unit.experts or ep.size == 1:
            return self._add(
                "dense", COMPUTE, (flops + experts) / self.rate + self.fixed * times, waits, load="samples"
            )
        own = self._add("dense", COMPUTE, flops / self.rate + self.fixed * times, waits, load="samples")
        # an ep-fold batch of the activations: half of the bytes enter, half leave
        cost = self.links.all_gather(ep, ep.size * self.batch * unit.expert_io_bytes / 2)
        enter = self._add("expert exchange", "expert", cost, (own,), group=ep)
        work = self._add("dense", COMPUTE, experts / self.rate + self.fixed * times, (enter,), load="samples")
        leave = self._add("expert exchange", "expert", cost, (work,), group=ep)
        return self._add("dense", COMPUTE, 0.0, (leave,))

    def _reduce(self, unit: LayerSpec, after: int) -> tuple[int, ...]:
        """Reduce-scatter inside the FSDP group, all-reduce of the shards between replicas."""
        last: tuple[int, ...] = (after,)
        for params, axis in ((float(unit.params), "fsdp"), (self._local_experts(unit), "efsdp")):
            group, replicas = self.groups[axis], self.groups["replicate"]
            if not params:
                continue
            size = params * self.model.reduce_bytes
            if group.size > 1:
                cost = self.links.reduce_scatter(group, size)
                last = (self._add("fsdp reduce-scatter", "dense", cost, last, group=group),)
            if replicas.size > 1:
                cost = self.links.all_reduce(replicas, size / group.size)
                last = (self._add("replica all-reduce", "replica", cost, last, group=replicas),)
        return last

    def _update_tables(self, after: int) -> tuple[float, int] | None:
        """Exchange of gradients and the update; for V3, the bytes and the arrival of the owned fraction's gradient."""
        model, layout = self.model, self.layout
        if not model.tables:
            return None
        shard, copies = self.groups["table_shard"], self.groups["table_copies"]
        last = after
        if shard.size > 1:
            cost = self.links.all_to_all(shard, self.exchange)
            last = self._add("embedding all-to-all", "sparse", cost, (last,), group=shard)
        busy = 3.0 * self.read / self.memory_rate + self.fixed  # read the gradient, read and write the rows
        last = self._add("table update", COMPUTE, busy, (last,), load="samples")
        size = model.table_params * model.table_bytes / layout.table_shard
        if layout.strategy == "v3" and copies.size > 1:
            cost = self.links.reduce_scatter(copies, size)
            return size / copies.size, self._add("table reduce-scatter", "tables", cost, (last,), group=copies)
        if layout.strategy == "v2" and copies.size > 1:
            cost = self.links.all_reduce(copies, size)
            share = 1.0 / layout.sync_every
            cost = Cost(cost.seconds * share, tuple(sent * share for sent in cost.sent))
            self._add("table copies", "tables", cost, (last,), group=copies)
        return None

    def _optimizer(self, reduced: tuple[int, ...]) -> None:
        """AdamW goes over the local dense state about twice."""
        layout, model = self.layout, self.model
        local = model.dense_params / layout.fsdp + model.expert_params / layout.fsdp
        self._add("optimizer", COMPUTE, 2.0 * model.state_bytes * local / self.memory_rate, reduced)
