"""Why a plan is what it is, in sentences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from gem_parallel.planning.layout import Layout, TableLoad
from gem_parallel.planning.topology import Topology

if TYPE_CHECKING:
    from gem_parallel.planning.planner import Candidate


def about_parts(best: Candidate, batch: int, asked: int | None, peak: Callable[[Layout], float], budget: float) -> str:
    """Why a step has so many parts, and what becomes of their gradients. `peak` is the bytes that a layout needs."""
    layout, gib = best.layout, 1 / (1 << 30)
    if layout.parts == 1:
        return f"parts 1{', as asked' if asked else ''}: all {batch} samples at once leave room"
    why = "as asked"
    if not asked:
        fewer = replace(
            layout, parts=layout.parts // 2, reduce_every_part=layout.reduce_every_part and layout.parts > 2
        )
        why = f"{fewer.parts} would need {peak(fewer) * gib:.1f} GiB of {budget * gib:.1f}"
    sums = "gradients are reduced once a step"
    if best.memory.get("gradient sums"):
        sums += f", until then sums of whole ones take {best.memory['gradient sums'] * gib:.1f} GiB"
    if layout.reduce_every_part:
        last = peak(replace(layout, reduce_every_part=False))
        sums = f"gradients are reduced in each, since sums of whole ones would need {last * gib:.1f} GiB in all"
    return f"parts {layout.parts} of {layout.part(batch)} samples: {why}; {sums}"


def about_axes(candidates: list[Candidate], topology: Topology, load: TableLoad) -> tuple[str, ...]:
    """Why each axis of the first candidate has its size: what is next best; and what the runner-up waits for."""
    best = candidates[0]
    layout, groups = best.layout, best.layout.groups
    reasons = []

    def against(what: str, others: list[Candidate]) -> str:
        if not others:
            return f"{what}: no other size was compared (the others do not fit, or there is none)"
        other = others[0]
        slower = other.step_s / best.step_s - 1
        return f"{what}: next best is {other.layout}, {other.step_s * 1e3:.1f} ms ({slower:+.1%})"

    def same(c: Candidate, *, dense: bool) -> bool:
        mine, theirs = c.layout, layout
        return mine.dense_axes == theirs.dense_axes if dense else mine.table_axes == theirs.table_axes

    where = groups["fsdp"].reach(topology)
    reasons.append(
        against(
            f"fsdp {layout.fsdp} ({where}), replicate {layout.replicate} ({groups['replicate'].reach(topology)})",
            [c for c in candidates if c.layout.fsdp != layout.fsdp and same(c, dense=False)],
        )
    )
    reasons.append(
        against(
            f"ep {layout.ep} ({groups['ep'].reach(topology)})",
            [c for c in candidates if c.layout.ep != layout.ep and c.layout.fsdp == layout.fsdp],
        )
    )
    reasons.append(
        against(
            f"tables {layout.strategy}, shard {layout.table_shard} ({groups['table_shard'].reach(topology)}), copies "
            f"{layout.table_copies} ({groups['table_copies'].reach(topology)})",
            [c for c in candidates if same(c, dense=True) and not same(c, dense=False)],
        )
    )
    if layout.table_shard > 1:
        reasons.append(
            f"the busiest of {layout.table_shard} ranks looks up {load.imbalance:.2f} x the mean; "
            f"{load.splits} tables are cut, a pooled vector travels from {load.row_split:.2f} row blocks on average"
        )
    if len(candidates) > 1:
        other = candidates[1]
        waits = max(other.waits_s, key=other.waits_s.__getitem__) if other.waits_s else "nothing"
        reasons.append(
            f"runner-up: {other.layout}, {other.step_s * 1e3:.1f} ms; it waits longest for {waits} "
            f"({other.waits_s.get(waits, 0.0) * 1e3:.1f} ms)"
        )
    return tuple(reasons)
