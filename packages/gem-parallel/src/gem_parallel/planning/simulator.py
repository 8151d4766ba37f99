"""A step replayed for every rank, with jagged imbalance and slow ranks; how much of the scaling is lost to what.

The scaling ratio is (seconds of balanced dense compute on one device) / (seconds of the step of the whole world).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gem_parallel.planning.cost import Group
from gem_parallel.planning.layout import place_tables
from gem_parallel.planning.planner import Plan, hidden_seconds, plan
from gem_parallel.planning.profile import Profile
from gem_parallel.planning.spec import ModelSpec
from gem_parallel.planning.step import Step
from gem_parallel.planning.timeline import COMPUTE, Op, repeats, run
from gem_parallel.planning.topology import Topology

SHOWN = 8  # parts of a step that are replayed; further ones count like the middle ones


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """What makes ranks unequal.

    Attributes:
        sigma: standard deviation of the logarithm of a sample's work (lengths of histories are about log-normal).
        balanced: share of the imbalance between ranks that shuffling takes away (published: 0.9 of the optimum).
        stragglers: share of the ranks that are slow in a step.
        slow: how much longer a slow rank computes (0.1: 10%).
        jitter: standard deviation of every rank's speed.
        seed: of the draw.
    """

    sigma: float = 1.2
    balanced: float = 0.0
    stragglers: float = 0.001
    slow: float = 0.1
    jitter: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("sigma", "slow", "jitter"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"Disturbance.{key} must be >= 0, got {getattr(self, key)!r}")
        for key in ("balanced", "stragglers"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"Disturbance.{key} must be in [0, 1], got {getattr(self, key)!r}")

    def samples(self, world: int, batch: int) -> np.ndarray:
        """Work of every rank over the mean, [world]: sums of `batch` log-normal samples."""
        rng = np.random.default_rng(self.seed)
        work = np.empty(world)
        step = max(1, (1 << 22) // batch)
        for begin in range(0, world, step):
            drawn = rng.lognormal(0.0, self.sigma, (min(step, world - begin), batch))
            work[begin : begin + step] = drawn.sum(1)
        work /= work.mean()
        return 1 + (work - 1) * (1 - self.balanced)

    def speeds(self, world: int) -> np.ndarray:
        """Seconds of every rank over those of a healthy one, [world]."""
        rng = np.random.default_rng(self.seed + 1)
        factor = 1 + np.abs(rng.normal(0.0, self.jitter, world)) if self.jitter else np.ones(world)
        slow = rng.random(world) < self.stragglers
        if self.stragglers and not slow.any() and self.stragglers * world >= 0.5:
            slow[rng.integers(world)] = True
        return factor * np.where(slow, 1 + self.slow, 1.0)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A step of the whole world.

    Attributes:
        step_s: seconds until the last rank is done.
        ideal_s: seconds of dense compute of a balanced rank.
        lost_s: seconds by cause, in the order in which the causes were added; ideal_s and these add up to step_s.
        exposed_s: seconds that the mean rank waited, by kind of operation.
        imbalance: work of each part's heaviest rank over the mean: ranks meet in every part.
    """

    world: int
    step_s: float
    ideal_s: float
    lost_s: dict[str, float]
    exposed_s: dict[str, float]
    imbalance: float

    @property
    def scaling(self) -> float:
        """ideal_s / step_s."""
        return self.ideal_s / self.step_s

    def __str__(self) -> str:
        lines = [
            f"simulated  {self.world} ranks: {self.step_s * 1e3:.1f} ms, scaling ratio {self.scaling:.3f}; "
            f"heaviest rank {self.imbalance:.3f} x the mean"
        ]
        lines += [f"  lost to {k:24} {v * 1e3:9.2f} ms  {v / self.step_s:6.1%}" for k, v in self.lost_s.items()]
        waits = sorted(self.exposed_s.items(), key=lambda kv: -kv[1])
        lines += [f"  mean rank waits for {k:12} {v * 1e3:9.2f} ms" for k, v in waits if v * 1e3 >= 0.005]
        return "\n".join(lines)


def simulate(chosen: Plan, disturbance: Disturbance | None = None) -> Simulation:
    """Replay the plan's step with all its ranks.

    Causes are added one after another: dense compute alone; tables and optimizer, still without communication;
    exposed communication of equal ranks (and the slowdown of compute beside it); imbalance; slow ranks. What a cause
    adds to the step is charged to it.
    """
    disturbance = disturbance or Disturbance()
    layout, world = chosen.layout, chosen.world
    load = place_tables(chosen.model, layout.table_shard)
    shown = min(SHOWN, layout.parts)
    # [shown, ranks]: every part has samples of its own
    work = disturbance.samples(world * shown, layout.part(chosen.batch)).reshape(shown, world)
    speed = disturbance.speeds(world)
    ops = Step(chosen.model, layout, load, chosen.batch, chosen.topology, chosen.profile).ops(SHOWN)
    dense = [op.seconds * n for op, n in zip(ops, repeats(ops, layout.parts), strict=True) if op.kind == "dense"]
    equal = run(ops, layout.parts)
    slower = hidden_seconds(ops, equal.waits, layout.parts) * chosen.profile.slowdown
    ends = [sum(dense), equal.compute, equal.end + slower]
    for factors in ((work, np.ones(world)), (work, speed)):
        clock = _run_ranks(ops, layout.parts, *factors)
        ends.append(float(clock.end.max()) + slower)
    names = ("tables and optimizer", "exposed communication", "imbalance", "slow ranks")
    return Simulation(
        world=world,
        step_s=ends[-1],
        ideal_s=ends[0],
        lost_s={name: after - before for name, before, after in zip(names, ends, ends[1:], strict=False)},
        exposed_s={kind: float(np.mean(value)) for kind, value in clock.waits.items()},
        imbalance=float(work.max(1).mean() / work.mean()),
    )


def _run_ranks(ops: Sequence[Op], parts: int, work: np.ndarray, speed: np.ndarray) -> Any:
    """`work` is [listed parts, ranks], `speed` [ranks]."""
    world = len(speed)
    both = work * speed

    def scale(op: Op) -> Any:
        if op.stream != COMPUTE:
            return op.seconds
        return op.seconds * (both[op.part] if op.load == "samples" else speed)

    def meet(group: Group, start: Any) -> Any:
        """The last member's arrival: ranks are [outer, size, stride], the middle dim is the group."""
        start = np.broadcast_to(np.asarray(start, dtype=float), (world,))
        block = start.reshape(-1, group.size, group.stride)
        return np.broadcast_to(block.max(1, keepdims=True), block.shape).reshape(world)

    clock = run(ops, parts, maximum=np.maximum, scale=scale, meet=meet)
    clock.end = np.broadcast_to(clock.end, (world,))
    return clock


def scaling_curve(
    model: ModelSpec,
    topology: Topology,
    batch: int,
    worlds: Sequence[int],
    *,
    parts: int | None = None,
    profile: Profile | None = None,
    strategies: Sequence[str] = ("v1", "v3"),
    disturbance: Disturbance | None = None,
) -> list[tuple[int, Simulation | str]]:
    """Weak scaling: plan (with `parts`) and simulate every world; one in which nothing fits has the reason instead."""
    rows: list[tuple[int, Simulation | str]] = []
    for world in worlds:
        try:
            chosen = plan(model, topology, batch, parts=parts, world=world, profile=profile, strategies=strategies)
        except ValueError as error:
            rows.append((world, str(error)))
            continue
        rows.append((world, simulate(chosen, disturbance)))
    return rows


def curve_table(rows: Sequence[tuple[int, Simulation | str]]) -> str:
    """The curve as a table: scaling ratio and what it is lost to, in shares of the step."""
    lines = [f"{'devices':>8} {'step ms':>9} {'ratio':>6}  {'tables':>7} {'exposed':>8} {'imbalance':>10} {'slow':>7}"]
    for world, row in rows:
        if isinstance(row, str):
            lines.append(f"{world:>8} {row}")
            continue
        tables, exposed, imbalance, slow = (seconds / row.step_s for seconds in row.lost_s.values())
        lines.append(
            f"{world:>8} {row.step_s * 1e3:>9.1f} {row.scaling:>6.3f}  "
            f"{tables:>7.1%} {exposed:>8.1%} {imbalance:>10.1%} {slow:>7.1%}"
        )
    return "\n".join(lines)
