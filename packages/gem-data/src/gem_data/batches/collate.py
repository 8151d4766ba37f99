"""From row indices to a jagged batch: one gather per column, no Python loop over samples or events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gem_data.batches.batch import JaggedBatch, JaggedIds, JaggedSequence
from gem_data.log.event_log import EventLog
from gem_data.log.gather import Plan
from gem_data.ragged import Ragged
from gem_data.schema import TIME, Column, Schema, unknown

MaxHistory = int | Mapping[str, int]


def history_limits(schema: Schema, max_history: MaxHistory) -> dict[str, int]:
    """The most events of each source's history. Raises ValueError for negative ones and unknown or missing names."""
    names = schema.source_names
    limits = dict(max_history) if isinstance(max_history, Mapping) else dict.fromkeys(names, int(max_history))
    for name, limit in limits.items():
        if name not in names:
            raise ValueError(unknown("source", name, names))
        if limit < 0:
            raise ValueError(f"max_history must be 0 or more, not {limit}")
    for name in names:
        if name not in limits:
            raise ValueError(f"max_history says nothing of source {name!r}; it has {', '.join(limits) or 'nothing'}")
    return limits


class Collator:
    """Collates rows of `log` with histories of at most `max_history` events (one number, or one for each source).

    With `share`, samples of the same user and time share one history (see `JaggedBatch.requests`). With `scattered` the
    rows of a batch come from all over the log (see `EventLog.advise`). Works on the log's memory-mapped columns;
    calling it copies exactly what the batch holds.
    """

    def __init__(self, log: EventLog, *, max_history: MaxHistory, share: bool = False, scattered: bool = False) -> None:
        self.limits = history_limits(log.schema, max_history)
        self.log, self.max_history, self.share, self.scattered = log, max_history, share, scattered

    def __call__(self, rows: Any, *, padding: NDArray[np.bool_] | None = None) -> JaggedBatch:
        """The batch of `rows` [B] (indices of the log, in this order, repeats allowed).

        `padding` [B] marks rows that only fill the batch: they keep their features and get sample id -1 and weight 0.
        Raises ValueError for a row outside the log, and for a log whose files were changed under the map.
        """
        log, schema = self.log, self.log.schema
        log.require_unchanged()
        log.advise(scattered=self.scattered)
        index = log.rows(rows)
        real = np.ones(len(index), bool) if padding is None else ~np.asarray(padding, bool)
        labels, mask = log.labels(index)
        plan = log.plan(index)
        time, user = log.take(TIME, plan), log.take(schema.user, plan)
        histories, requests = index, None
        if self.share:
            histories, requests = self._requests(index, user, time)
        one_each = torch.arange(len(index) + 1)
        return JaggedBatch(
            sequences={name: self._history(name, histories) for name in schema.source_names},
            sparse={name: _jagged(log.take(name, plan), one_each) for name in schema.sparse},
            dense=torch.from_numpy(self._dense(index, plan)),
            time=torch.from_numpy(time),
            labels=torch.from_numpy(labels),
            label_mask=torch.from_numpy(mask),
            weights=torch.from_numpy(real.astype(np.float32)),
            sample_ids=torch.from_numpy(np.where(real, index, -1)),
            groups=torch.from_numpy(user),
            requests=requests,
        )

    def costs(self, rows: Any) -> NDArray[np.int64]:
        """Events of all histories of each row, [B] int64: what its sequence towers see."""
        return self.lengths(rows).sum(0)  # type: ignore[no-any-return]

    def lengths(self, rows: Any) -> NDArray[np.int64]:
        """Events of each history of each row, [sources, B] int64."""
        index = self.log.rows(rows)
        found = [self.log.history_lengths(index, limit, name) for name, limit in self.limits.items()]
        return np.array(found, np.int64).reshape(len(self.limits), len(index))

    @staticmethod
    def _requests(index: NDArray[np.int64], user: Any, time: Any) -> tuple[NDArray[np.int64], Tensor]:
        """A row for each request, in the order in which they come, and the number of each row's request."""
        if len(index) == 0:
            return index, torch.empty(0, dtype=torch.int64)
        order = np.lexsort((np.arange(len(index)), time, user))
        new = np.ones(len(index), bool)
        new[1:] = (user[order][1:] != user[order][:-1]) | (time[order][1:] != time[order][:-1])
        first = order[new]  # the first sample of each request, in (user, time) order
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        requests = np.empty(len(index), np.int64)
        requests[order] = rank[np.cumsum(new) - 1]
        return index[np.sort(first)], torch.from_numpy(requests)

    def _history(self, source: str, index: NDArray[np.int64]) -> JaggedSequence:
        log, schema = self.log, self.log.schema
        plan, offsets = log.events_plan(index, self.limits[source], source)
        ids: dict[str, Tensor] = {}
        floats: dict[str, Tensor] = {}
        lists: dict[str, JaggedIds] = {}
        time = log.take(TIME, plan)
        for name in schema.source_columns(source):
            column = schema.column(name)
            values = log.take(name, plan)
            if column.delay:
                values = self._known(values, column.delay, time, index, offsets)
            if column.kind == "id":
                ids[name] = torch.from_numpy(values)
            elif column.kind == "ids":
                lists[name] = _jagged(values)
            else:
                floats[name] = torch.from_numpy(_floats(values, column))
        if schema.history_counters:
            values = log.take_counters(plan)
            for i, counter in enumerate(schema.counters):
                if counter.in_history:
                    floats[counter.name] = torch.from_numpy(np.ascontiguousarray(values[:, i : i + 1]))
        return JaggedSequence(
            ids=ids,
            floats=floats,
            time=torch.from_numpy(time),
            offsets=torch.from_numpy(offsets),
            max_len=int(np.diff(offsets).max(initial=0)),
            lists=lists,
        )

    def _known(self, values: Any, delay: int, time: Any, index: NDArray[np.int64], offsets: NDArray[np.int64]) -> Any:
        """Outcomes that were not known yet when the sample's request was made read as 0 (or no ids)."""
        now = np.repeat(self.log.take(TIME, self.log.plan(index)), np.diff(offsets))
        unknown_yet = time + delay >= now
        if isinstance(values, Ragged):
            lengths = np.where(unknown_yet, 0, values.lengths)
            keep = np.repeat(~unknown_yet, values.lengths)
            return Ragged(values.values[keep], np.concatenate([[0], np.cumsum(lengths)]))
        values[unknown_yet] = 0
        return values

    def _dense(self, index: NDArray[np.int64], plan: Plan) -> NDArray[np.float32]:
        """[B, F]: float, vector and bits columns in the schema's order, then the counters."""
        log, schema = self.log, self.log.schema
        dense = np.empty((len(index), schema.dense_width), np.float32)
        at = 0
        for name, width in schema.dense_columns.items():
            dense[:, at : at + width] = _floats(log.take(name, plan), schema.column(name))
            at += width
        if schema.counters:
            dense[:, at:] = log.take_counters(plan)
        return dense


def _floats(values: Any, column: Column) -> NDArray[np.float32]:
    """[n, width] float32 of a float, vector or bits column."""
    if column.kind == "bits":
        return ((values[:, None] >> np.arange(column.width)) & 1).astype(np.float32)
    return values.reshape(-1, column.width)


def _jagged(values: Any, one_each: Tensor | None = None) -> JaggedIds:
    if isinstance(values, Ragged):
        return JaggedIds(values=torch.from_numpy(values.values), offsets=torch.from_numpy(values.offsets))
    assert one_each is not None
    return JaggedIds(values=torch.from_numpy(values), offsets=one_each)
