"""Streaming counters: dense features from events strictly before each event's time, computed once when a log is built.

Every kind comes down to one operation: for each row, the sum of some values over the rows with the same key and an
earlier time. Rows sorted by (key, time) make it a difference of two cumulative sums; rows that share key and time read
the sum at the head of their tie group, so that none sees another.

The sums are integers in units of 2^-24. With floats, the rounding of a difference would depend on the events of other
keys, later ones among them; exact sums leave the future no way in, not even through the last bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gem_data.features.neighbours import neighbour_scores
from gem_data.log.derived import first_recent
from gem_data.schema import Counter, Schema
from gem_data.sorting import order_of

Array = NDArray[Any]

_UNIT = 2.0**-24
_LIMIT = 2.0**62 * _UNIT  # where an int64 of such units would overflow


class Earlier:
    """The earlier rows of each row: `keys` are int64 columns [n] (none: all rows), `time` is int64 [n].

    A row of time s is earlier than one of time t where s + delay < t.
    """

    def __init__(self, keys: list[Array], time: Array, *, delay: int = 0) -> None:
        n = len(time)
        self.order = order_of([*keys, time])  # rows of one key and time see the same sums, whatever their order
        changed = np.zeros(n, bool)
        for key in keys:
            ordered = key[self.order]
            changed[1:] |= ordered[1:] != ordered[:-1]
        changed[:1] = True
        ordered = time[self.order]
        tied = changed.copy()
        tied[1:] |= ordered[1:] != ordered[:-1]
        at = np.arange(n)
        self.time = ordered
        self.head = np.maximum.accumulate(np.where(changed, at, 0))  # first row of the key, in sorted order
        self.tie = np.maximum.accumulate(np.where(tied, at, 0))  # first row of the (key, time) group
        if delay:  # the first row of the key that is too recent instead
            self.tie = first_recent(self.head, ordered, delay)

    def sum(self, values: Array) -> NDArray[np.float64]:
        """Sum of `values` [n], each rounded to 2^-24, over the earlier rows of each row: [n] float64."""
        if float(np.abs(values).sum()) >= _LIMIT:
            raise ValueError(f"the sum of a counter's values must stay under {_LIMIT:g}; scale the vector column down")
        total = np.concatenate([[0], np.cumsum(np.rint(values[self.order] / _UNIT).astype(np.int64))])
        return self._back((total[self.tie] - total[self.head]) * _UNIT)

    def count(self) -> NDArray[np.float64]:
        """The number of earlier rows of each row: [n] float64."""
        return self._back((self.tie - self.head).astype(np.float64))

    def gap(self) -> NDArray[np.float64]:
        """Time since the last earlier row, 0 where there is none (a real gap is at least 1): [n] float64."""
        since = self.time - self.time[np.maximum(self.tie - 1, 0)]
        return self._back(np.where(self.tie > self.head, since, 0).astype(np.float64))

    def _back(self, ordered: Array) -> Array:
        out = np.empty_like(ordered)
        out[self.order] = ordered
        return out


def compute_counters(
    schema: Schema, columns: dict[str, Array], time: Array, labels: NDArray[np.float32], mask: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """All counters of `schema` for rows in any order: [n, C] float32, finite. Equations: see `schema.Counter`.

    columns: name -> [n] or [n, size]; labels [n, K] float32 and mask [n, K] bool in the order of the schema's tasks.
    """
    work = _Work(schema, columns, time, labels, mask)
    out = np.empty((len(time), len(schema.counters)), np.float32)
    for i, counter in enumerate(schema.counters):
        out[:, i] = work.values(counter)
    return out


def task_delay(schema: Schema, task: str | None) -> int:
    """Seconds after an event until counters see it, or see its label for `task`."""
    if task is None:
        return schema.delay
    rule = schema.task(task)
    columns = [rule.column, *([schema.task(rule.given).column] if rule.given else [])]
    return max(schema.delay, *(schema.column(c).delay or 0 for c in columns))


class _Work:
    """Shares the sort of a key and the rates that others are smoothed towards."""

    def __init__(self, schema: Schema, columns: dict[str, Array], time: Array, labels: Array, mask: Array) -> None:
        self.schema, self.columns, self.time, self.labels, self.mask = schema, columns, time, labels, mask
        self._earlier: dict[tuple[tuple[str, ...], int], Earlier] = {}
        self._base: dict[str, Array] = {}
        self._computed: dict[str, Array] = {}

    def preset(self, base: dict[str, Array], computed: dict[str, Array]) -> None:
        """Running rates by task and counters by name that are known: these rows are not all of the log."""
        self._base.update(base)
        self._computed.update(computed)

    def values(self, counter: Counter) -> Array:
        out: Array = getattr(self, f"_{counter.kind}")(counter)
        self._computed[counter.name] = out
        return out

    def earlier(self, key: tuple[str, ...], task: str | None = None) -> Earlier:
        """The earlier rows with the same key; for sums over a task's labels, those whose labels are known."""
        return self.before(key, task_delay(self.schema, task))

    def before(self, key: tuple[str, ...], delay: int) -> Earlier:
        """The earlier rows with the same key, after `delay` seconds."""
        if (key, delay) not in self._earlier:
            self._earlier[key, delay] = Earlier([self.columns[k] for k in key], self.time, delay=delay)
        return self._earlier[key, delay]

    def task(self, counter: Counter) -> tuple[Array, Array]:
        """Label (0 where masked) and mask of the counter's task, [n] float64 each."""
        assert counter.task is not None
        k = self.schema.task_names.index(counter.task)
        seen = self.mask[:, k].astype(np.float64)
        return self.labels[:, k] * seen, seen

    def base(self, counter: Counter) -> Array:
        """The running rate of everyone for the counter's task."""
        assert counter.task is not None
        if counter.task not in self._base:
            positive, seen = self.task(counter)
            everyone = self.earlier((), counter.task)
            self._base[counter.task] = (everyone.sum(positive) + 0.5) / (everyone.sum(seen) + 1.0)
        return self._base[counter.task]

    def _count(self, counter: Counter) -> Array:
        return np.log1p(self.earlier(counter.key).count())

    def _since(self, counter: Counter) -> Array:
        return np.log1p(self.earlier(counter.key).gap())

    def _rate(self, counter: Counter) -> Array:
        positive, seen = self.task(counter)
        earlier = self.earlier(counter.key, counter.task)
        return (earlier.sum(positive) + counter.prior * self.base(counter)) / (earlier.sum(seen) + counter.prior)

    def _residual(self, counter: Counter) -> Array:
        assert counter.against is not None
        positive, seen = self.task(counter)
        earlier = self.earlier(counter.key, counter.task)
        return earlier.sum(positive - seen * self._computed[counter.against]) / (earlier.sum(seen) + counter.prior)

    def _affinity(self, counter: Counter) -> Array:
        assert counter.over is not None
        positive, seen = self.task(counter)
        earlier = self.earlier(counter.key, counter.task)
        rate = self._rate(counter)
        total, weight = np.zeros(len(rate)), np.zeros(len(rate))
        # One element at a time: the cumulative sums of all would be size times the log.
        for x in np.asarray(self.columns[counter.over], np.float64).T:
            element = (earlier.sum(positive * x) + counter.prior * rate) / (earlier.sum(seen * x) + counter.prior)
            total += x * element
            weight += x
        return np.where(weight > 0, total / np.where(weight > 0, weight, 1.0), rate)

    def _neighbour(self, counter: Counter) -> Array:
        assert counter.over is not None
        assert counter.value is not None
        value = np.asarray(self.columns[counter.value], np.float64)
        delay = value_delay(self.schema, counter.value)
        everyone, same = self.before((), delay), self.before((counter.over,), delay)
        usual = everyone.sum(value) / np.maximum(everyone.count(), 1.0)
        usual = (same.sum(value) + counter.prior * usual) / (same.count() + counter.prior)
        key = group_of([self.columns[k] for k in counter.key], len(value))
        item = np.asarray(self.columns[counter.over])
        return neighbour_scores(key, item, self.time, value - usual, prior=counter.prior, delay=delay)


def value_delay(schema: Schema, value: str) -> int:
    """Seconds after an event until counters see its outcome `value`."""
    return max(schema.delay, schema.column(value).delay or 0)


def group_of(keys: list[Array], n: int) -> NDArray[np.int64]:
    """A number for each combination of the keys: [n] int64."""
    if not keys:
        return np.zeros(n, np.int64)
    return np.unique(np.stack(keys, axis=1), axis=0, return_inverse=True)[1].reshape(-1)
