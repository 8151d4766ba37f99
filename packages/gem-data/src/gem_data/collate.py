"""From row indices to a jagged batch: one gather per column, no Python loop over samples or events."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gem_data.batch import JaggedBatch, JaggedIds, JaggedSequence
from gem_data.log import EventLog


class Collator:
    """Collates rows of `log` with histories of at most `max_history` events.

    Works on the log's memory-mapped columns; calling it copies exactly what the batch holds.
    """

    def __init__(self, log: EventLog, *, max_history: int) -> None:
        if max_history < 0:
            raise ValueError(f"max_history must be 0 or more, not {max_history}")
        self.log, self.max_history = log, max_history

    def __call__(self, rows: Any, *, padding: NDArray[np.bool_] | None = None) -> JaggedBatch:
        """The batch of `rows` [B] (indices of the log, in this order, repeats allowed).

        `padding` [B] marks rows that only fill the batch: they keep their features and get sample id -1 and weight 0.
        Raises ValueError for a row outside the log.
        """
        log, schema = self.log, self.log.schema
        index = log.rows(rows)
        real = np.ones(len(index), bool) if padding is None else ~np.asarray(padding, bool)
        labels, mask = log.labels(index)
        one_each = torch.arange(len(index) + 1)
        return JaggedBatch(
            sequences={schema.source: self._history(index)},
            sparse={
                name: JaggedIds(values=torch.from_numpy(log.column(name)[index]), offsets=one_each)
                for name in schema.sparse
            },
            dense=torch.from_numpy(self._dense(index)),
            time=torch.from_numpy(log.time[index]),
            labels=torch.from_numpy(labels),
            label_mask=torch.from_numpy(mask),
            weights=torch.from_numpy(real.astype(np.float32)),
            sample_ids=torch.from_numpy(np.where(real, index, -1)),
            groups=torch.from_numpy(log.user[index]),
        )

    def _history(self, index: NDArray[np.int64]) -> JaggedSequence:
        log, schema = self.log, self.log.schema
        history = log.history(index, self.max_history)
        lengths = history.lengths
        offsets = np.zeros(len(index) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        # The ragged arange: event j of sample b is row start[b] + j.
        events = np.repeat(history.start - offsets[:-1], lengths) + np.arange(offsets[-1])
        return JaggedSequence(
            ids={name: torch.from_numpy(log.column(name).take(events)) for name in schema.sequence_ids},
            floats={
                name: torch.from_numpy(log.column(name).take(events, axis=0).reshape(-1, width))
                for name, width in schema.sequence_floats.items()
            },
            time=torch.from_numpy(log.time.take(events)),
            offsets=torch.from_numpy(offsets),
            max_len=int(lengths.max(initial=0)),
        )

    def _dense(self, index: NDArray[np.int64]) -> NDArray[np.float32]:
        """[B, F]: float and vector columns in the schema's order, then the counters."""
        log, schema = self.log, self.log.schema
        dense = np.empty((len(index), schema.dense_width), np.float32)
        at = 0
        for name, width in schema.dense_columns.items():
            dense[:, at : at + width] = log.column(name)[index].reshape(-1, width)
            at += width
        dense[:, at:] = log.counters[index]
        return dense
