"""`plan`: which layout a model should have on a machine, before there is a machine. Pure arithmetic.

Every layout of the five axes whose sizes divide the tiers is a candidate, in as few parts a step as leave room. Those
whose memory does not fit in any number of parts are dropped; the step of the others is run on the clock of `timeline`,
and the fastest wins.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from gem_parallel.planning.cost import Links
from gem_parallel.planning.layout import STRATEGIES, Layout, TableLoad, memory, place_tables
from gem_parallel.planning.profile import Profile
from gem_parallel.planning.reasons import about_axes, about_parts
from gem_parallel.planning.spec import ModelSpec
from gem_parallel.planning.step import Step
from gem_parallel.planning.timeline import COMPUTE, Op, repeats, run
from gem_parallel.planning.topology import Topology

_GIB = 1 << 30


class NothingFitsError(ValueError):
    """No layout fits into the memory; `closest` is the one that misses by least."""

    def __init__(self, message: str, closest: Candidate) -> None:
        super().__init__(message)
        self.closest = closest


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout and what it costs.

    Attributes:
        layout: sizes and placement of the axes, and parts of a step.
        memory: bytes of one device by purpose, and their "peak".
        step_s: predicted seconds of a step with overlap; infinite when memory does not fit.
        compute_s: seconds of it in which the device computes.
        waits_s: seconds in which it waits, by cause; compute_s and these add up to step_s.
        sent: bytes that one device sends per step, by tier.
    """

    layout: Layout
    memory: dict[str, float]
    step_s: float
    compute_s: float
    waits_s: dict[str, float]
    sent: dict[str, float]

    @property
    def scaling(self) -> float:
        """Dense compute over the whole step: what is lost to communication, tables and the optimizer."""
        return self.compute_s / self.step_s


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The chosen layout with its reasons.

    Attributes:
        model, topology, profile, world, batch: what was planned for; batch is samples per device and step.
        best, runner_up: the fastest layout, and the fastest that differs in more than the sync interval.
        reasons: one sentence per axis, and why so many parts.
        considered, fitting: how many layouts were looked at, and had room in some number of parts.
        budget: bytes of a device that may be used.
    """

    model: ModelSpec
    topology: Topology
    profile: Profile
    world: int
    batch: int
    best: Candidate
    runner_up: Candidate | None
    reasons: tuple[str, ...]
    considered: int
    fitting: int
    budget: float

    @property
    def layout(self) -> Layout:
        """The best candidate's."""
        return self.best.layout

    @property
    def samples_per_s(self) -> float:
        """Of the whole world."""
        return self.world * self.batch / self.best.step_s

    def __str__(self) -> str:
        best = self.best
        lines = [
            f"{self.model.name} on {self.world} x {self.topology.device}, {self.batch} samples per device"
            + (f" in {self.layout.parts} parts of {self.layout.part(self.batch)}" if self.layout.parts > 1 else ""),
            f"  {_count(self.model.dense_params)} dense, {_count(self.model.expert_params)} expert and "
            f"{_count(self.model.table_params)} table parameters; {self.fitting} of {self.considered} layouts fit",
            "",
            f"layout     {best.layout}",
            f"step       {best.step_s * 1e3:.1f} ms, {self.samples_per_s:,.0f} samples/s; computing "
            f"{best.compute_s * 1e3:.1f} ms ({best.scaling:.1%})",
            *table("waits for", best.waits_s, 1e3, "ms"),
            f"memory     {best.memory['peak'] / _GIB:.1f} of {self.budget / _GIB:.1f} GiB at the peak",
            *table("memory", {k: v for k, v in best.memory.items() if k != "peak"}, 1 / _GIB, "GiB"),
            *table("sent per step and device", best.sent, 1e-9, "GB"),
            "why",
            *(f"  - {reason}" for reason in self.reasons),
            f"profile    {self.profile.source}",
        ]
        return "\n".join(lines)


def _count(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:.0f}"


def table(title: str, values: dict[str, float], factor: float, unit: str) -> list[str]:
    """Lines of a small table, the largest value first, without what is zero."""
    rows = sorted(((v, k) for k, v in values.items() if v * factor >= 0.005), reverse=True)
    return [f"  {title:26} {key:22} {value * factor:10.2f} {unit}" for value, key in rows]


def plan(
    model: ModelSpec,
    topology: Topology,
    batch: int,
    *,
    parts: int | None = None,
    world: int | None = None,
    profile: Profile | None = None,
    strategies: Sequence[str] = STRATEGIES,
    sync_every: int = 10,
) -> Plan:
    """Choose sizes and placement of the five axes.

    Args:
        model: its plain description.
        topology: the machine; its device memory is the limit.
        batch: samples per device and step.
        parts: that a device makes of them, one after another, so that activations of one are there at a time. By
            default every layout has the fewest that leave room (a power of two); gradients are reduced in each of them
            only where sums of whole ones leave no room.
        world: devices to use, by default as many as the outermost tier holds.
        profile: measured rates, by default `Profile()`.
        strategies: of "v1", "v2", "v3", which table strategies may be chosen. V2 computes something else than one
            process when its copies are synchronised less than every step with SGD; leave it out to have exactness.
        sync_every: steps between V2's synchronisations.

    Raises:
        NothingFitsError: no layout fits into the memory (a ValueError that says by how much the closest one misses).
        ValueError: a world that the topology does not hold, more parts than samples, or an unknown strategy.
    """
    profile = profile or Profile()
    world = topology.tiers[-1].size if world is None else world
    if not 1 <= world <= topology.tiers[-1].size:
        raise ValueError(f"world must be in 1..{topology.tiers[-1].size} (the outermost tier), got {world}")
    if batch < 1:
        raise ValueError(f"batch must be >= 1, got {batch}")
    if parts is not None and not 1 <= parts <= batch:
        raise ValueError(f"parts must be in 1..{batch} (the samples of a device), got {parts}")
    unknown = set(strategies) - set(STRATEGIES)
    if unknown or not strategies:
        raise ValueError(f"strategies must be some of {', '.join(STRATEGIES)}, got {list(strategies)}")
    budget = (topology.device_memory or topology.host_memory) * profile.usable
    loads: dict[int, TableLoad] = {}
    links = Links(topology, profile)

    def need(layout: Layout) -> float:
        return memory(model, layout, loads[layout.table_shard], batch, profile)["peak"]

    counts = [parts] if parts else [min(1 << n, batch) for n in range((batch - 1).bit_length() + 1)]
    fitting: list[Layout] = []
    roomy = considered = 0
    closest: tuple[float, Layout] | None = None
    for layout in _layouts(model, topology, world, strategies, sync_every):
        considered += 1
        if layout.table_shard not in loads:
            loads[layout.table_shard] = place_tables(model, layout.table_shard)

        found = _with_room(layout, counts, need, budget)
        fitting += found
        roomy += bool(found)
        if not fitting:
            least = replace(layout, parts=counts[-1], reduce_every_part=counts[-1] > 1)
            bytes_needed = need(least)
            if closest is None or bytes_needed < closest[0]:
                closest = (bytes_needed, least)

    def evaluate(layout: Layout) -> Candidate:
        return _evaluate(model, layout, loads[layout.table_shard], batch, topology, profile, links)

    if not fitting:
        assert closest is not None
        candidate = replace(evaluate(closest[1]), step_s=math.inf)
        largest = max((k for k in candidate.memory if k != "peak"), key=candidate.memory.__getitem__)
        raise NothingFitsError(
            f"no layout of {model.name} fits on {world} x {topology.device}: the closest ({candidate.layout}) needs "
            f"{closest[0] / _GIB:.1f} GiB, {budget / _GIB:.1f} are usable; most goes to {largest} "
            f"({candidate.memory[largest] / _GIB:.1f} GiB)"
            + (f"; more parts than {parts} leave more room for activations" if parts and parts < batch else ""),
            candidate,
        )
    candidates = _search(fitting, evaluate)
    best = candidates[0]
    runner_up = candidates[1] if len(candidates) > 1 else None
    return Plan(
        model=model,
        topology=topology,
        profile=profile,
        world=world,
        batch=batch,
        best=best,
        runner_up=runner_up,
        reasons=(
            about_parts(best, batch, parts, need, budget),
            *about_axes(candidates, topology, loads[best.layout.table_shard]),
        ),
        considered=considered,
        fitting=roomy,
        budget=budget,
    )


def predict(
    model: ModelSpec, topology: Topology, layout: Layout, batch: int, *, profile: Profile | None = None
) -> Candidate:
    """What one layout costs, whether it fits or not: `plan` for a layout that was chosen already.

    Args:
        model: its plain description.
        topology: the machine.
        layout: sizes and placement of the axes, and parts of a step.
        batch: samples per device and step.
        profile: measured rates, by default `Profile()`.
    """
    profile = profile or Profile()
    load = place_tables(model, layout.table_shard)
    return _evaluate(model, layout, load, batch, topology, profile, Links(topology, profile))


def _with_room(layout: Layout, counts: list[int], need: Callable[[Layout], float], budget: float) -> list[Layout]:
    """The layout in as few parts as leave room, and reduced in every part where that takes fewer; [] where none do."""

    def made(parts: int, every: bool = False) -> Layout:
        return replace(layout, parts=parts, reduce_every_part=every and parts > 1)

    if need(made(counts[0])) <= budget:
        return [made(counts[0])]
    if need(made(counts[-1], True)) > budget:  # the more parts, the less
        return []
    each = counts[bisect_left(counts, True, key=lambda n: need(made(n, True)) <= budget)]
    last = bisect_left(counts, True, key=lambda n: need(made(n)) <= budget)
    if last == len(counts):
        return [made(each, True)]
    return [made(counts[last])] if each == counts[last] else [made(counts[last]), made(each, True)]


def _search(fitting: list[Layout], evaluate: Callable[[Layout], Candidate]) -> list[Candidate]:
    """Evaluated layouts, fastest first: all of them when they are few, else one side of the layout at a time.

    Dense axes and table axes compete for the same clock but hardly change one another's order, unless one leaves the
    other too little room for a part. The dense axes are ranked beside one choice of table axes, the table axes beside
    the best dense ones, and so on until nothing changes; for each table strategy once from the table axes that leave
    most dense axes a choice, once from those that leave most room.
    """
    done: dict[Layout, Candidate] = {}

    def timed(layout: Layout) -> float:
        if layout not in done:
            done[layout] = evaluate(layout)
        return done[layout].step_s

    if len(fitting) <= 64:
        return sorted((done[x] for x in sorted(fitting, key=timed)), key=lambda c: c.step_s)
    by_dense: dict[tuple[int, int], list[Layout]] = {}
    by_tables: dict[tuple[str, int, bool], list[Layout]] = {}
    for layout in fitting:
        by_dense.setdefault(layout.dense_axes, []).append(layout)
        by_tables.setdefault(layout.table_axes, []).append(layout)
    groups = [[v for axes, v in by_tables.items() if axes[0] == strategy] for strategy in STRATEGIES]
    starts = [max(same, key=len) for same in groups if same]
    starts += [min(same, key=lambda v: min((x.parts, x.reduce_every_part) for x in v)) for same in groups if same]
    for group in starts:
        least = math.inf
        while timed(best := min(by_dense[min(group, key=timed).dense_axes], key=timed)) < least:
            least, group = timed(best), by_tables[best.table_axes]
    return sorted(done.values(), key=lambda c: c.step_s)


def _layouts(
    model: ModelSpec, topology: Topology, world: int, strategies: Sequence[str], sync_every: int
) -> Iterator[Layout]:
    sizes = [d for d in _divisors(world) if _nests(d, topology)]
    experts = [u.experts for u in model.layers if u.experts]
    inner = topology.tiers[0].size
    tables: list[tuple[str, int, bool]] = []
    for shard in sizes if model.tables else [world]:
        copies = world // shard
        if copies == 1:
            tables.append(("v1", shard, True))
            continue
        for strategy in ("v2", "v3"):
            tables += [(strategy, shard, True)] + ([(strategy, shard, False)] if shard > 1 else [])
    allowed = [t for t in tables if t[0] in strategies or not model.tables]
    if not allowed:  # a single device has one copy whatever the strategy
        allowed = [("v1", world, True)]
    for fsdp in sizes:
        for ep in _divisors(math.gcd(fsdp, *experts)) if experts else [1]:
            if ep > inner:
                continue
            for strategy, shard, inside in allowed:
                yield Layout(
                    world=world,
                    fsdp=fsdp,
                    ep=ep,
                    strategy=strategy,
                    table_shard=shard,
                    table_copies=world // shard,
                    copies_inside=inside,
                    sync_every=sync_every if strategy == "v2" else 1,
                )


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _nests(size: int, topology: Topology) -> bool:
    return all(size % tier.size == 0 or tier.size % size == 0 for tier in topology.tiers[:-1])


def _evaluate(
    model: ModelSpec,
    layout: Layout,
    load: TableLoad,
    batch: int,
    topology: Topology,
    profile: Profile,
    links: Links,
) -> Candidate:
    ops = Step(model, layout, load, batch, topology, profile, links).ops()
    clock = run(ops, layout.parts)
    waits = {kind: seconds for kind, seconds in clock.waits.items() if seconds > 0}
    waits["slower beside comms"] = hidden_seconds(ops, clock.waits, layout.parts) * profile.slowdown
    sent = [0.0] * len(topology.tiers)
    for op, times in zip(ops, repeats(ops, layout.parts), strict=True):
        for tier, moved in enumerate(op.sent):
            sent[tier] += moved * times
    return Candidate(
        layout=layout,
        memory=memory(model, layout, load, batch, profile),
        step_s=clock.end + waits["slower beside comms"],
        compute_s=clock.compute,
        waits_s=waits,
        sent={tier.name: moved for tier, moved in zip(topology.tiers, sent, strict=True)},
    )


def hidden_seconds(ops: Sequence[Op], waits: dict[str, float], parts: int) -> float:
    """Seconds of communication that ran beside compute in a step of so many parts."""
    links = sum(op.seconds * n for op, n in zip(ops, repeats(ops, parts), strict=True) if op.stream != COMPUTE)
    return max(0.0, links - sum(waits.values()))
