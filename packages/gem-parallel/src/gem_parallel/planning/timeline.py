"""A training step as operations on streams, and the clock that runs them; the planner and the simulator share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gem_parallel.planning.cost import Group

COMPUTE = "compute"


@dataclass(slots=True)
class Op:
    """One operation of every rank.

    Attributes:
        kind: what it counts as in a report ("dense", "lookup", "fsdp all-gather", ...).
        stream: operations of a stream run in order; "compute" is the device, others are links.
        seconds: of a rank with the mean load.
        after: indices of operations that must have ended.
        group: of a collective: nobody ends before the last member has begun.
        load: which per-rank factor scales it in a simulation ("samples" or "").
        part: of the step, from 0.
        sent: bytes on every tier.
    """

    kind: str
    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    group: Group | None = None
    load: str = ""
    part: int = 0
    sent: tuple[float, ...] = ()


@dataclass
class Clock:
    """The end of a run: `end`, and for each cause the seconds that compute stood still."""

    end: Any
    compute: Any
    waits: dict[str, Any] = field(default_factory=dict)


def repeats(ops: Sequence[Op], parts: int) -> list[float]:
    """How often each operation occurs in a step of so many parts: those of the middle parts stand for all between the
    first and the last."""
    listed = ops[-1].part + 1
    between = (parts - 2) / (listed - 2) if parts > listed else 1.0
    return [between if 0 < op.part < listed - 1 else 1.0 for op in ops]


def run(
    ops: Sequence[Op],
    parts: int = 1,
    *,
    maximum: Callable[[Any, Any], Any] = max,
    scale: Callable[[Op], Any] = lambda op: op.seconds,
    meet: Callable[[Group, Any], Any] = lambda group, start: start,
) -> Clock:
    """Run one step.

    Args:
        ops: in the order in which they are issued, part by part.
        parts: of the step. Where they are more than the operations have, there must be at least three of these: parts
            between the first and the last are alike, so that each of them takes as long as the listed ones.
        maximum: `max` for one representative rank, `numpy.maximum` for an array of ranks.
        scale: the seconds of an operation, a number or an array over ranks.
        meet: the start of a collective from its members' arrivals.
    """
    ends: list[Any] = []
    free: dict[str, Any] = {}
    waits: dict[str, Any] = {}
    busy: Any = 0.0  # seconds of compute
    begins: list[tuple[Any, Any, dict[str, Any]]] = []  # of every part: compute's end, busy and waits so far
    for op in ops:
        if op.part == len(begins):
            begins.append((free.get(COMPUTE, 0.0), busy, dict(waits)))
        start = free.get(op.stream, 0.0)
        for index in op.after:
            later = maximum(start, ends[index])
            if op.stream == COMPUTE and ops[index].stream != COMPUTE:
                waits[ops[index].kind] = waits.get(ops[index].kind, 0.0) + (later - start)
            start = later
        if op.group is not None and op.group.size > 1:
            start = meet(op.group, start)
        seconds = scale(op)
        if op.stream == COMPUTE:
            busy = busy + seconds
        end = start + seconds
        ends.append(end)
        free[op.stream] = end
    end = free.get(COMPUTE, 0.0)
    for op, finished in zip(ops, ends, strict=True):
        if op.stream != COMPUTE:
            later = maximum(end, finished)
            waits[op.kind] = waits.get(op.kind, 0.0) + (later - end)
            end = later
    if parts > len(begins):
        more = (parts - len(begins)) / (len(begins) - 2)
        (ended, computed, waited), (last_ended, last_computed, last_waited) = begins[1], begins[-1]
        end = end + more * (last_ended - ended)
        busy = busy + more * (last_computed - computed)
        for kind, seconds in last_waited.items():
            waits[kind] = waits[kind] + more * (seconds - waited.get(kind, 0.0))
    return Clock(end=end, compute=busy, waits=waits)
