"""Counters of a log that does not fit in memory: the same numbers as `gem_data.features.counters` gives, key by key.

A counter needs the earlier rows of its key, so rows are dealt into buckets by a hash of the key and each bucket is
computed by itself. What concerns all rows, the running rate of everyone, is read off cumulative sums in order of time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gem_data.build.disk import new_array, scratch_array
from gem_data.features.counters import _Work, task_delay
from gem_data.hashing import mix64
from gem_data.log.derived import label_arrays
from gem_data.log.event_log import EventLog
from gem_data.schema import TIME, Counter, Schema

CHUNK = 1 << 20  # rows handled at a time where a pass goes over all of them
BYTES_PER_ROW = 400  # of a bucket while it is computed, about


def stream_counters(
    log: EventLog, schema: Schema, out: Path, scratch: Path, *, memory: int, report: Callable[[float], None]
) -> NDArray[np.float32]:
    """Write the counters of `schema` for the rows of `log` (opened without them) to `out`, .npy [n, C] float32.

    A key that most rows share makes a bucket of that size, and so does a counter without a key. A counter of neighbours
    has the few columns that it reads in memory, of all rows.
    """
    n, names = len(log), [c.name for c in schema.counters]
    final = new_array(out, np.float32, (n, len(names)))
    exact = {  # as computed, in float64: a residual is measured against it
        c.against: scratch_array(scratch / f"against.{c.against}", np.float64, (n,))
        for c in schema.counters
        if c.against
    }
    base = {t: _running_rate(log, schema, t, scratch) for t in {c.task for c in schema.counters} if t is not None}
    done: set[str] = set()
    for counter in schema.counters:
        if counter.kind == "neighbour":
            final[:, names.index(counter.name)] = _whole(log, schema, counter)
            done.add(counter.name)
    pending = [c for c in schema.counters if c.name not in done]
    while pending:
        group = _together(pending, done)
        pending = [c for c in pending if c not in group]
        for rows in _buckets(log, group[0].key, max(1, memory // BYTES_PER_ROW), scratch):
            plan = log.plan(rows)
            columns = {name: log.take(name, plan) for name in _needed(schema, group)}
            labels, mask = label_arrays(schema, columns)
            work = _Work(schema, columns, columns[TIME], labels, mask)
            work.preset(
                {t: np.asarray(b[rows]) for t, b in base.items()},
                {name: np.asarray(exact[name][rows]) for name in exact if name in done},
            )
            for counter in group:
                values = work.values(counter)
                final[rows, names.index(counter.name)] = values
                if counter.name in exact:
                    exact[counter.name][rows] = values
        done |= {c.name for c in group}
        report(len(done) / len(names))
    return final


def _whole(log: EventLog, schema: Schema, counter: Counter) -> NDArray[np.float64]:
    """A counter that all rows take part in, from the columns that it reads as a whole."""
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in (TIME, *counter.columns)}
    for start in range(0, len(log), CHUNK):
        plan = log.plan(np.arange(start, min(start + CHUNK, len(log))))
        for name, part in parts.items():
            part.append(log.take(name, plan))
    columns = {name: np.concatenate(part) for name, part in parts.items()}
    nothing = np.empty((len(log), 0))
    found: NDArray[np.float64] = _Work(schema, columns, columns[TIME], nothing, nothing).values(counter)
    return found


def _together(pending: list[Counter], done: set[str]) -> list[Counter]:
    """Counters of one key that can be computed in one pass, in the schema's order."""
    group: list[Counter] = []
    for counter in pending:
        ready = counter.against is None or counter.against in done | {c.name for c in group}
        if ready and (not group or counter.key == group[0].key):
            group.append(counter)
    return group


def _needed(schema: Schema, group: list[Counter]) -> list[str]:
    names = [TIME, *(name for c in group for name in c.columns), *(t.column for t in schema.tasks)]
    return list(dict.fromkeys(names))


def _buckets(log: EventLog, key: tuple[str, ...], most: int, scratch: Path) -> Any:
    """Rows, ascending, of each bucket: all rows of a key are in one. `most` rows a bucket, if keys are even."""
    n = len(log)
    count = 1 if not key else min(-(-n // most), np.iinfo(np.uint16).max)
    if count == 1:
        yield np.arange(n)
        return
    bucket = scratch_array(scratch / "bucket", np.uint16, (n,))
    for start in range(0, n, CHUNK):
        rows = np.arange(start, min(start + CHUNK, n))
        plan = log.plan(rows)
        mixed = np.zeros(len(rows), np.uint64)
        for name in key:
            mixed = mix64(mixed ^ log.take(name, plan).astype(np.uint64)) + np.uint64(1)
        bucket[rows] = mixed % np.uint64(count)
    for b in range(count):
        found = [np.flatnonzero(bucket[s : s + CHUNK] == b) + s for s in range(0, n, CHUNK)]
        rows = np.concatenate(found)
        if rows.size:
            yield rows


def _running_rate(log: EventLog, schema: Schema, task: str, scratch: Path) -> NDArray[np.float64]:
    """The rate of everyone for a task before each row, [n] float64 on disk: what `_Work.base` computes."""
    n, order = len(log), log.by_time
    rule = schema.task(task)
    needed = list(dict.fromkeys(t.column for t in schema.tasks))
    k = schema.task_names.index(rule.name)
    time = scratch_array(scratch / "rate.time", np.int64, (n,))
    total = scratch_array(scratch / "rate.total", np.int64, (n + 1, 2))
    for start in range(0, n, CHUNK):
        rows = np.asarray(order[start : start + CHUNK])
        plan = log.plan(rows)
        labels, mask = label_arrays(schema, {c: log.take(c, plan) for c in needed})
        seen = mask[:, k]
        both = np.stack([(labels[:, k] > 0) & seen, seen], axis=1)
        time[start : start + len(rows)] = log.take(TIME, plan)
        total[start + 1 : start + 1 + len(rows)] = total[start] + np.cumsum(both, axis=0)
    delay = task_delay(schema, task)
    out = scratch_array(scratch / f"rate.{task}", np.float64, (n,))
    for start in range(0, n, CHUNK):
        rows = np.asarray(order[start : start + CHUNK])
        before = np.searchsorted(time, time[start : start + len(rows)] - delay, side="left")
        positive, seen = total[before].T
        out[rows] = (positive + 0.5) / (seen + 1.0)
    return out
