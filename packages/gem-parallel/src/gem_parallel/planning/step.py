"""The step that a layout makes, part by part, as operations for the clock of `timeline`."""

from __future__ import annotations

from gem_parallel.planning.cost import Cost, Links
from gem_parallel.planning.layout import Layout, TableLoad
from gem_parallel.planning.profile import Profile
from gem_parallel.planning.spec import LayerSpec, ModelSpec
from gem_parallel.planning.timeline import COMPUTE, Op
from gem_parallel.planning.topology import Topology


class Step:
    """One training step of every rank; loads are the mean rank's, but for tables, where the busiest sets the pace.

    Args:
        batch: samples of a rank and step; the layout may cut them into parts.
        links: what collectives cost, by default those of `topology` and `profile`.
    """

    def __init__(
        self,
        model: ModelSpec,
        layout: Layout,
        load: TableLoad,
        batch: int,
        topology: Topology,
        profile: Profile,
        links: Links | None = None,
    ) -> None:
        self.model, self.layout, self.load = model, layout, load
        self.batch = layout.part(batch)  # of a part
        self.links = links or Links(topology, profile)
        self.profile = profile
        self.rate = profile.tflops * 1e12
        self.fixed = profile.unit_us * 1e-6
        self.memory_rate = topology.memory_gbps * 1e9 * profile.memory_efficiency
        self.lookup_rate = topology.memory_gbps * 1e9 * profile.lookup_efficiency
        self.groups = layout.groups
        self.gathers = self._gathers(model.units)
        self._ops: list[Op] = []
        self.index = 0  # of the part
        self.before: tuple[int, ...] = ()  # what the next part's first operations of any stream wait for

    def ops(self, shown: int = 3) -> list[Op]:
        """All of its operations, the dense update last.

        Args:
            shown: parts that are listed at most; `timeline.run` lets those between the first and the last stand for
                others.
        """
        parts = min(self.layout.parts, shown)
        self._ops, self.before = [], ()
        for self.index in range(parts):
            self._part(last=self.index == parts - 1)
        return self._ops

    def _part(self, *, last: bool) -> None:
        """Forward, backward, updates."""
        ready, units, gathers = self._lookup(), self.model.units, self.gathers
        reduces = last or self.layout.reduce_every_part
        ends: list[int] = []
        for index, unit in enumerate(units):
            # at most one unit is gathered ahead: the gather of unit i waits for the compute of unit i - 2
            waits = self._gather(gathers[index], (ends[index - 2],) if index >= 2 else self.before)
            if ready is not None and unit.needs_tables:
                waits = (*waits, ready)
            ends.append(self._unit(unit, 1.0, waits))
        back: list[int] = []
        pending: list[tuple[LayerSpec, int]] = []
        for position, index in enumerate(reversed(range(len(units)))):
            unit = units[index]
            before = (back[position - 2],) if position >= 2 else (ends[-1],)
            replayed = unit.kept_bytes and self.layout.replays
            waits = () if replayed else self._gather(gathers[index], before)
            if pending:  # the next unit's gather is issued before the last unit's reduction
                self._reduce(*pending.pop())
            back.append(self._sum(unit, self._unit(unit, 2.0, waits)))
            if reduces:
                pending.append((unit, back[-1]))
        reduced = self._reduce(*pending.pop()) if reduces else ()
        updated, arrived, owned = self._update_tables(back[-1])
        if last:
            self._optimizer(reduced)
        if owned:  # V3's owner goes over its whole fraction: gradient and weights are read, weights written
            updated = self._add("table update", COMPUTE, 3.0 * owned / self.memory_rate, arrived)
        self.before = (updated, *arrived)

    def _add(self, kind: str, stream: str, cost: Cost | float, after: tuple[int, ...] = (), **more: object) -> int:
        seconds, sent = (cost, ()) if isinstance(cost, float) else (cost.seconds, cost.sent)
        self._ops.append(Op(kind, stream, seconds, after, part=self.index, sent=sent, **more))  # type: ignore[arg-type]
        return len(self._ops) - 1

    def _lookup(self) -> int | None:
        """V3's all-gather, the exchange of ids, the lookup, and the exchange of embeddings."""
        model, layout, load = self.model, self.layout, self.load
        if not model.tables:
            return None
        waits = self.before
        shard, copies = self.groups["table_shard"], self.groups["table_copies"]
        if layout.strategy == "v3" and layout.table_copies > 1:
            size = model.table_params * model.table_bytes / layout.table_shard
            waits = (self._add("table all-gather", "tables", self.links.all_gather(copies, size), waits, group=copies),)
        read = self.batch * sum(t.pooling * t.dim * t.count for t in model.tables) * model.table_bytes
        if layout.table_shard > 1:
            ids = 8.0 * self.batch * sum(t.pooling * t.count for t in model.tables)
            cost = self.links.all_to_all(shard, ids)
            waits = (*waits, self._add("id all-to-all", "sparse", cost, self.before, group=shard))
        look = self._add(
            "lookup", COMPUTE, read * load.imbalance / self.lookup_rate + self.fixed, waits, load="samples"
        )
        vectors = 4.0 * self.batch * sum(t.vectors * t.dim * t.count for t in model.tables)
        self.exchange = vectors * load.row_split * load.imbalance
        self.read = read * load.imbalance
        ready = look
        if layout.table_shard > 1:
            cost = self.links.all_to_all(shard, self.exchange)
            ready = self._add("embedding all-to-all", "sparse", cost, (look,), group=shard)
        return ready

    def _gathers(self, units: tuple[LayerSpec, ...]) -> list[tuple[Cost, ...]]:
        fsdp, efsdp = self.groups["fsdp"], self.groups["efsdp"]
        known: dict[int, tuple[Cost, ...]] = {}
        for unit in units:
            if id(unit) not in known:
                costs, nbytes = [], self.model.gather_bytes_of(unit)
                if fsdp.size > 1 and unit.params:
                    costs.append(self.links.all_gather(fsdp, unit.params * nbytes))
                if efsdp.size > 1 and unit.experts:
                    costs.append(self.links.all_gather(efsdp, self._local_experts(unit) * nbytes))
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

    def _sum(self, unit: LayerSpec, after: int) -> int:
        """Gradients of whole parameters are added to those of earlier parts: both are read, their sum is written."""
        if not (self.index and self.layout.sums_whole):
            return after
        size = (unit.params + self._local_experts(unit)) * self.model.reduce_bytes
        return self._add("gradient sums", COMPUTE, 3.0 * size / self.memory_rate, (after,))

    def _reduce(self, unit: LayerSpec, after: int) -> tuple[int, ...]:
        """Reduce-scatter inside the FSDP group, all-reduce of the shards between replicas; what earlier parts have
        reduced is added behind them, beside compute."""
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
            if self.index and self.layout.reduce_every_part:
                added = 3.0 * size / group.size / self.memory_rate
                last = (self._add("gradient sums", "replica" if replicas.size > 1 else "dense", added, last),)
        return last

    def _update_tables(self, after: int) -> tuple[int, tuple[int, ...], float]:
        """Exchange of gradients and the update: the last of it that computes, what else the next lookup has to wait
        for, and for V3 the bytes of the owned fraction, whose gradient arrives then."""
        model, layout = self.model, self.layout
        if not model.tables:
            return after, (), 0.0
        shard, copies = self.groups["table_shard"], self.groups["table_copies"]
        last = after
        if shard.size > 1:
            cost = self.links.all_to_all(shard, self.exchange)
            last = self._add("embedding all-to-all", "sparse", cost, (last,), group=shard)
        busy = 3.0 * self.read / self.lookup_rate + self.fixed  # read the gradient, read and write the rows
        last = self._add("table update", COMPUTE, busy, (last,), load="samples")
        size = model.table_params * model.table_bytes / layout.table_shard
        if layout.strategy == "v3" and copies.size > 1:
            cost = self.links.reduce_scatter(copies, size)
            arrived = self._add("table reduce-scatter", "tables", cost, (last,), group=copies)
            return last, (arrived,), size / copies.size
        if layout.strategy == "v2" and copies.size > 1:
            cost = self.links.all_reduce(copies, size)
            share = 1.0 / layout.sync_every
            cost = Cost(cost.seconds * share, tuple(sent * share for sent in cost.sent))
            return last, (self._add("table copies", "tables", cost, (last,), group=copies),), 0.0
        return last, (), 0.0

    def _optimizer(self, reduced: tuple[int, ...]) -> None:
        """AdamW goes over the local dense state about twice."""
        layout, model = self.layout, self.model
        local = model.dense_params / layout.fsdp + model.expert_params / layout.fsdp
        self._add("optimizer", COMPUTE, 2.0 * model.state_bytes * local / self.memory_rate, reduced)
