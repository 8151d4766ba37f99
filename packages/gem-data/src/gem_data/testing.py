"""For tests, of this package and others: small random logs, and slow, obvious versions of what is done fast."""

from __future__ import annotations

import os
import signal
from bisect import bisect_right
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gem_data.batches.batch import JaggedBatch
from gem_data.batches.collate import Collator
from gem_data.log.event_log import EventLog
from gem_data.schema import Column, Counter, Schema, Source, Task

Array = NDArray[Any]


def small_schema(*, users: int = 6, items: int = 7) -> Schema:
    """A schema with every kind and role of column, a conditional task and every kind of counter."""
    return Schema(
        name="small",
        columns=(
            Column(name="user", kind="id", role="user", cardinality=users),
            Column(name="age", kind="float", role="user"),
            Column(name="item", kind="id", role="context", cardinality=items),
            Column(name="price", kind="float", role="context"),
            Column(name="genres", kind="vector", role="context", size=3),
            Column(name="action", kind="id", role="outcome", cardinality=4),
            Column(name="watched", kind="float", role="outcome"),
            Column(name="truth", kind="float", role="hidden"),
        ),
        tasks=(
            Task(name="click", column="action", minimum=2),
            Task(name="buy", column="action", equals=3, given="click"),
            Task(name="long", column="watched", minimum=0.5),
        ),
        counters=(
            Counter(name="everyone", kind="rate", key=(), task="click"),
            Counter(name="item_count", kind="count", key=("item",)),
            Counter(name="item_click", kind="rate", key=("item",), task="click", prior=2.0),
            Counter(name="item_buy", kind="rate", key=("item",), task="buy"),
            Counter(name="user_item", kind="rate", key=("user", "item"), task="long", prior=0.5),
            Counter(name="user_since", kind="since", key=("user",)),
            Counter(name="user_lift", kind="residual", key=("user",), task="click", against="item_click"),
            Counter(name="genre_click", kind="affinity", key=("user",), task="click", over="genres", prior=3.0),
            Counter(name="alike", kind="neighbour", key=("user",), over="item", value="action", prior=2.0),
        ),
    )


def small_events(n: int, *, seed: int = 0, users: int = 6, items: int = 7, times: int = 12) -> pa.Table:
    """`n` random events for `small_schema`, in random order; few distinct `times` give many ties. No duplicates."""
    rng = np.random.default_rng(seed)
    genres = pa.FixedSizeListArray.from_arrays(pa.array((rng.random(3 * n) < 0.4).astype(np.float32)), 3)
    return pa.table(
        {
            "user": rng.integers(users, size=n),
            "time": rng.integers(times, size=n) * 10 + 1000,
            "age": rng.normal(size=n).astype(np.float32),
            "item": rng.integers(items, size=n),
            "price": rng.normal(size=n).astype(np.float32),
            "genres": genres,
            "action": rng.integers(1, 4, size=n),
            "watched": rng.random(n).astype(np.float32),
            "truth": rng.random(n).astype(np.float32),
        }
    )


def rich_schema(*, users: int = 6, delay: int = 0, counters: bool = True, lag: int | None = 25) -> Schema:
    """Two sources, multi-valued ids, bit masks, text keys of both kinds of vocabulary, defaults and delays."""
    plain = small_schema(users=users)
    return Schema(
        name="rich",
        columns=(
            Column(name="user", kind="id", role="user", cardinality=users),
            Column(name="type", kind="id", role="context", cardinality=4),
            Column(name="item", kind="id", role="context", cardinality=6, vocabulary="frequency", min_count=2),
            Column(name="page", kind="id", role="context", cardinality=5, vocabulary="hash"),
            Column(name="tags", kind="ids", role="context", cardinality=9, default=0),
            Column(name="price", kind="float", role="context", default=-1),
            Column(name="embedding", kind="vector", role="context", size=2),
            Column(name="did", kind="bits", role="outcome", size=3, delay=lag),
            Column(name="replies", kind="ids", role="outcome", cardinality=5, delay=lag),
        ),
        tasks=(
            Task(name="click", column="did", bit=0),
            Task(name="buy", column="did", bit=2, given="click"),
        ),
        counters=(
            *(replace(c, over=None) for c in plain.counters if c.kind in ("count", "since")),
            Counter(name="item_click", kind="rate", key=("item",), task="click", prior=2.0),
            Counter(name="user_buy", kind="rate", key=("user",), task="buy"),
            Counter(name="lift", kind="residual", key=("user",), task="click", against="item_click"),
        )
        if counters
        else (),
        sources=(
            Source(name="views", column="type", values=(0, 1)),
            Source(name="orders", column="type", values=(1, 3), columns=("item", "price", "did", "tags")),
        ),
        delay=delay,
    )


def rich_events(n: int, *, seed: int = 0, users: int = 6, times: int = 12, first: int = 1000) -> pa.Table:
    """`n` random events for `rich_schema`, in random order, with missing values where there are defaults."""
    rng = np.random.default_rng(seed)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rng.normal(size=2 * n).astype(np.float32)), 2)

    def lists(top: int) -> list[list[int]]:
        return [rng.integers(top, size=k).tolist() for k in rng.integers(4, size=n)]

    return pa.table(
        {
            "user": rng.integers(users, size=n),
            "time": rng.integers(times, size=n) * 10 + first,
            "type": rng.integers(4, size=n),
            "item": [f"item-{k}" for k in rng.zipf(1.7, size=n)],
            "page": rng.integers(-(10**15), 10**15, size=n),
            "tags": pa.array([None if rng.random() < 0.2 else x for x in lists(9)], pa.list_(pa.int64())),
            "price": pa.array(rng.normal(size=n), mask=rng.random(n) < 0.2),
            "embedding": vectors,
            "did": rng.integers(8, size=n),
            "replies": lists(5),
        }
    )


def brute_history(log: EventLog, row: int, max_history: int, source: str | None = None) -> list[int]:
    """The rows of one history, by looking at every row."""
    delay = log.schema.delay
    before = [r for r in range(len(log)) if log.user[r] == log.user[row] and log.time[r] + delay < log.time[row]]
    if source is not None:
        of = next(s for s in log.schema.sources if s.name == source)
        before = [r for r in before if log.column(of.column)[r] in of.values]
    # What was appended after the row was not there when its request was made.
    bases = [g.first for g in log.generations]
    before = [r for r in before if bisect_right(bases, r) <= bisect_right(bases, row)]
    before.sort(key=lambda r: (log.time[r], r))
    return before[-max_history:] if max_history else []


def brute_counter(log: EventLog, name: str, row: int) -> float:
    """One counter of one row, straight from the equation in `schema.Counter`, in float64."""
    schema = log.schema
    counter = {c.name: c for c in schema.counters}[name]
    if counter.kind == "neighbour":
        columns = (*counter.key, str(counter.over), str(counter.value))
        key, item, value = (np.asarray(log.column(c)) for c in columns)
        found = brute_neighbours(key, item, value, np.asarray(log.time), prior=counter.prior, delay=schema.delay)
        return float(found[row])

    delay = schema.delay
    if counter.task is not None:
        rules = [schema.task(counter.task)]
        rules += [schema.task(r.given) for r in rules if r.given]
        delay = max(delay, *(schema.column(r.column).delay or 0 for r in rules))

    def earlier(of: int, key: tuple[str, ...]) -> list[int]:
        same = [r for r in range(len(log)) if all(log.column(k)[r] == log.column(k)[of] for k in key)]
        return [r for r in same if log.time[r] + delay < log.time[of]]

    past = earlier(row, counter.key)
    if counter.kind == "count":
        return float(np.log1p(len(past)))
    if counter.kind == "since":
        return float(np.log1p(log.time[row] - max(log.time[r] for r in past))) if past else 0.0

    task = schema.task(str(counter.task))

    def holds(name: str, r: int) -> bool:
        rule = schema.task(name)
        return bool(rule.positive(log.column(rule.column)[r : r + 1])[0])

    def seen(rows: list[int]) -> list[int]:
        return [r for r in rows if task.given is None or holds(task.given, r)]

    everyone, past = seen(earlier(row, ())), seen(past)
    base = (sum(holds(task.name, r) for r in everyone) + 0.5) / (len(everyone) + 1)
    if counter.kind == "residual":
        lift = sum(holds(task.name, r) - brute_counter(log, str(counter.against), r) for r in past)
        return float(lift / (len(past) + counter.prior))
    rate = (sum(holds(task.name, r) for r in past) + counter.prior * base) / (len(past) + counter.prior)
    if counter.kind == "rate":
        return float(rate)
    x = log.column(str(counter.over)).astype(np.float64)
    if x[row].sum() == 0:
        return float(rate)
    elements = [
        (sum(holds(task.name, r) * x[r, g] for r in past) + counter.prior * rate)
        / (sum(x[r, g] for r in past) + counter.prior)
        for g in range(x.shape[1])
    ]
    return float(np.dot(x[row], elements) / x[row].sum())


def brute_neighbours(key: Array, item: Array, value: Array, time: Array, *, prior: float, delay: int = 0) -> Array:
    """`neighbour` of all rows, [n] float64, by looking at every pair of rows for each."""
    v, n = value.astype(np.float64), len(key)
    before = time[None] + delay < time[:, None]  # [of, whom]
    usual = before @ v / np.maximum(before.sum(1), 1)
    same = before & (item[:, None] == item)
    x = v - (same @ v + prior * usual) / (same.sum(1) + prior)
    own = before & (key[:, None] == key)
    m = own @ x / (own.sum(1) + prior)
    z = x - m
    out = np.zeros(n)
    for row in range(n):
        past = np.flatnonzero(before[row])

        def of(i: int, past: Array = past) -> Array:
            return past[item[past] == i]

        weight, total = 0.0, 0.0
        for f in np.flatnonzero(own[row]):
            pairs = [(a, b) for a in of(item[row]) for b in of(item[f]) if a != b and key[a] == key[b]]
            size = np.sqrt((z[of(item[row])] ** 2).sum() * (z[of(item[f])] ** 2).sum())
            s = sum(z[a] * z[b] for a, b in pairs) / (size + 1e-6) * len(pairs) / (len(pairs) + prior)
            weight, total = weight + abs(s), total + s * (x[f] - m[row])
        out[row] = total / (weight + 0.3)
    return out


class KillingCollator(Collator):
    """Kills its own worker process once, at the batch that holds `row`; the file `flag` says that it has."""

    def __init__(self, log: EventLog, flag: Path, row: int) -> None:
        super().__init__(log, max_history=4)
        self.flag, self.row, self.parent = flag, row, os.getpid()

    def __call__(self, rows: Array, *, padding: Array | None = None) -> JaggedBatch:
        """As a collator's, if the process lives."""
        if os.getpid() != self.parent and self.row in rows and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(rows, padding=padding)
