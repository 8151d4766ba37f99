"""What batches are measured against: padding per sample in numpy or by torch, and list arrays of pyarrow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gem_data.log.event_log import EventLog

Array = NDArray[Any]


def padded_collate(log: EventLog, rows: Array, max_history: int, *, whole: bool = True) -> dict[str, Array]:
    """What many loaders do: one sample at a time, every history padded to the longest. ids [B, L], floats [B, L, k].

    With `whole`, also what else is in a batch: `candidate.NAME` [B], dense [B, F], labels and label_mask [B, K].
    """
    schema = log.schema
    spans = [_span(log, row, max_history) for row in rows.tolist()]
    longest = max((end - start for start, end in spans), default=0)
    out: dict[str, Array] = {"length": np.array([end - start for start, end in spans], np.int64)}
    for name in ("time", *schema.sequence_ids, *schema.sequence_floats):
        column = log.column(name)
        padded = np.zeros((len(rows), longest, *column.shape[1:]), column.dtype)
        for sample, (start, end) in enumerate(spans):
            padded[sample, : end - start] = column[start:end]
        out[name] = padded
    if whole:
        samples = [_sample(log, row) for row in rows.tolist()]
        out |= {name: np.stack([s[name] for s in samples]) for name in samples[0]}
    return out


def dataset_collate(log: EventLog, rows: Array, max_history: int, *, whole: bool = True) -> dict[str, Any]:
    """What a plain `torch.utils.data.Dataset` with a padding collate does: a dict of tensors for each sample, then
    `pad_sequence` of each history and `stack` of the rest. Contents and `whole` as in `padded_collate`."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    names = ("time", *log.schema.sequence_ids, *log.schema.sequence_floats)
    columns = {name: log.column(name) for name in names}

    def sample(row: int) -> dict[str, Any]:
        start, end = _span(log, row, max_history)
        history = {n: torch.tensor(c[start:end]) for n, c in columns.items()}
        return history | ({n: torch.tensor(v) for n, v in _sample(log, row).items()} if whole else {})

    samples = [sample(row) for row in rows.tolist()]
    out: dict[str, Any] = {n: pad_sequence([s[n] for s in samples], batch_first=True) for n in names}
    rest = {n: torch.stack([s[n] for s in samples]) for n in samples[0] if n not in names}
    return {"length": torch.tensor([len(s["time"]) for s in samples]), **out, **rest}


def _span(log: EventLog, row: int, max_history: int) -> tuple[int, int]:
    start = int(log.user_offsets[np.searchsorted(log.user_offsets, row, side="right") - 1])
    end = int(np.searchsorted(log.time[start : row + 1], log.time[row], side="left")) + start
    return max(start, end - max_history), end


def _sample(log: EventLog, row: int) -> dict[str, Array]:
    """One sample without its history."""
    schema = log.schema
    found: dict[str, Array] = {f"candidate.{n}": log.column(n)[row] for n in schema.sparse}
    dense = [np.atleast_1d(log.column(n)[row]) for n in schema.dense_columns]
    found["dense"] = np.concatenate([*dense, log.counters[row]]).astype(np.float32)
    positive = {t.name: bool(t.positive(log.column(t.column)[row])) for t in schema.tasks}
    mask = [positive[t.given] if t.given else True for t in schema.tasks]
    found["labels"] = np.array([positive[t.name] and m for t, m in zip(schema.tasks, mask, strict=True)], np.float32)
    found["label_mask"] = np.array(mask)
    return found


def arrow_lists(log: EventLog) -> dict[str, pa.Array]:
    """The log as many keep it: a list of values for each user and column, zero-copy."""
    offsets = pa.array(log.user_offsets)
    names = ("time", *log.schema.sequence_ids, *log.schema.sequence_floats)
    return {n: pa.LargeListArray.from_arrays(offsets, pa.array(log.column(n).reshape(-1))) for n in names}


def arrow_collate(lists: dict[str, pa.Array], log: EventLog, rows: Array, max_history: int) -> dict[str, pa.Array]:
    """The same histories cut out of list arrays with pyarrow alone, as one list array for each column."""
    user = np.searchsorted(log.user_offsets, rows, side="right") - 1
    time = lists["time"]
    spans = []
    for u, row in zip(user.tolist(), rows.tolist(), strict=True):
        seen = int(np.searchsorted(time[u].values.to_numpy(), log.time[row], side="left"))
        spans.append((u, max(0, seen - max_history), seen))
    offsets = pa.array(np.cumsum([0, *(b - a for _, a, b in spans)]), pa.int64())
    return {
        name: pa.LargeListArray.from_arrays(offsets, pa.concat_arrays([column[u].values[a:b] for u, a, b in spans]))
        for name, column in lists.items()
    }
