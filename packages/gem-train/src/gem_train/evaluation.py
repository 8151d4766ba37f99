"""Predictions of all ranks, and the figures made of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from gem_data import JaggedBatch, Loader
from gem_parallel import Runtime
from numpy.typing import NDArray
from torch import Tensor

from gem_train.errors import NonFiniteError
from gem_train.metrics import METRICS, binary_entropy, calibration_curve, resample, sigmoid, summarize

HISTORY_EDGES = (0, 1, 5, 10, 20, 50, 100, 500, 2000)  # lower edges, in events
TIME_SLICES = 5


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """What a model said about n samples, in the order of the log; K tasks."""

    sample_ids: NDArray[np.int64]  # [n]
    groups: NDArray[np.int64]  # [n]
    time: NDArray[np.int64]  # [n] seconds
    history: NDArray[np.int64]  # [n] events in the history, after the cap
    labels: NDArray[np.float32]  # [n, K]
    mask: NDArray[np.bool_]  # [n, K]
    logits: NDArray[np.float64]  # [n, K]

    def __len__(self) -> int:
        return len(self.sample_ids)

    def select(self, index: Any) -> Predictions:
        """The samples of `index`."""
        return Predictions(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def write(self, path: Path, tasks: tuple[str, ...]) -> None:
        """As Parquet: sample_id, group, time, history, and per task label_X (null where masked) and p_X."""
        columns: dict[str, Any] = {
            "sample_id": self.sample_ids,
            "group": self.groups,
            "time": self.time,
            "history": self.history,
        }
        for k, task in enumerate(tasks):
            columns[f"label_{task}"] = pa.array(self.labels[:, k], mask=~self.mask[:, k])
            columns[f"p_{task}"] = sigmoid(self.logits[:, k])
        pq.write_table(pa.table(columns), path)


def predict(model: Callable[[JaggedBatch], Tensor], loader: Loader, runtime: Runtime) -> Predictions | None:
    """`model(batch)` -> logits [B, K] for all of the loader's rows, gathered on rank 0 (else None), without padding.

    Raises RuntimeError when a sample comes twice or is missing: figures over such a set would be wrong in silence;
    NonFiniteError, on every rank, when a prediction is no finite number.
    """
    parts: list[Predictions] = []
    with torch.no_grad():
        for batch in loader:
            logits = model(batch)
            parts.append(_columns(batch, logits.double().cpu()))
    mine = _concat(parts)
    bad = mine.sample_ids[~np.isfinite(mine.logits).all(axis=1)].tolist()
    everywhere = sorted(itertools.chain.from_iterable(runtime.gather(bad, "the check of the predictions")))
    if everywhere:
        raise NonFiniteError(f"{len(everywhere)} predictions are not finite; samples {everywhere[:8]} are the first")
    if runtime.world == 1:
        return _checked([mine], loader.rows)
    everyone: list[Any] | None = [None] * runtime.world if runtime.is_main else None
    with runtime.waiting("the predictions of the other ranks"):
        dist.gather_object(mine, everyone, dst=0, group=runtime.control)
    return _checked(everyone, loader.rows) if everyone is not None else None


def figures(predictions: Predictions, tasks: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """The summary of each task over the samples whose label is known."""
    result = {}
    for k, task in enumerate(tasks):
        known = predictions.select(predictions.mask[:, k])
        result[task] = summarize(known.groups, known.labels[:, k], known.logits[:, k])
    return result


def intervals(
    predictions: Predictions, tasks: tuple[str, ...], *, draws: int = 1000, level: float = 0.95
) -> dict[str, dict[str, list[float]]]:
    """[low, high] of each task's metrics by the bootstrap over users; NaN where there is none."""
    result = {}
    for k, task in enumerate(tasks):
        known = predictions.select(predictions.mask[:, k])
        low, high = resample(known.groups, known.labels[:, k], [known.logits[:, k]], draws=draws).interval(level)
        result[task] = {m: [float(low[i, 0]), float(high[i, 0])] for i, m in enumerate(METRICS)}
    return result


def mean_ne(by_task: dict[str, dict[str, float]]) -> float:
    """The tasks' mean NE, over those that have both classes: what the best checkpoint is chosen by. NaN without any."""
    values = [f["ne"] for f in by_task.values() if not math.isnan(f["ne"])]
    return sum(values) / len(values) if values else math.nan


def slices(predictions: Predictions, tasks: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    """NE and samples by time (equal parts of the split) and by length of the history.

    NE inside a slice is against the slice's own base rate; the log loss and the entropy are given beside it.
    """
    order = np.argsort(predictions.time, kind="stable")
    by_time = [({"from": int(predictions.time[p[0]])}, p) for p in np.array_split(order, TIME_SLICES) if len(p)]
    edges = [*HISTORY_EDGES, math.inf]
    by_history = []
    for low, high in itertools.pairwise(edges):
        index = np.flatnonzero((predictions.history >= low) & (predictions.history < high))
        if len(index):
            by_history.append(({"from": int(low), "to": None if high == math.inf else int(high) - 1}, index))
    return {"time": _rows(by_time, predictions, tasks), "history": _rows(by_history, predictions, tasks)}


def calibration_curves(predictions: Predictions, tasks: tuple[str, ...]) -> dict[str, list[dict[str, float]]]:
    """Ten points of predicted against observed rate for each task."""
    known = {task: predictions.select(predictions.mask[:, k]) for k, task in enumerate(tasks)}
    return {task: calibration_curve(p.labels[:, k], p.logits[:, k]) for k, (task, p) in enumerate(known.items())}


def _rows(
    parts: list[tuple[dict[str, Any], Any]], predictions: Predictions, tasks: tuple[str, ...]
) -> list[dict[str, Any]]:
    rows = []
    for name, index in parts:
        part = predictions.select(index)
        row: dict[str, Any] = {**name, "samples": len(part), "tasks": {}}
        for k, task in enumerate(tasks):
            known = part.select(part.mask[:, k])
            if len(known):
                full = summarize(known.groups, known.labels[:, k], known.logits[:, k])
                kept = {key: full[key] for key in ("samples", "base_rate", "log_loss", "ne", "auc")}
                row["tasks"][task] = {**kept, "entropy": binary_entropy(full["base_rate"])}
        rows.append(row)
    return rows


def _columns(batch: JaggedBatch, logits: Tensor) -> Predictions:
    """The rows of one batch that are no padding."""
    real = batch.sample_ids.cpu().numpy() >= 0
    history = np.zeros(len(real), np.int64)
    for sequence in batch.sequences.values():
        history += sequence.offsets.diff().cpu().numpy()
    tensors = {"sample_ids": batch.sample_ids, "groups": batch.groups, "time": batch.time}
    tensors |= {"labels": batch.labels, "mask": batch.label_mask, "logits": logits}
    return Predictions(history=history[real], **{name: t.cpu().numpy()[real] for name, t in tensors.items()})


def _concat(parts: list[Predictions]) -> Predictions:
    return Predictions(**{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Predictions)})


def _checked(parts: list[Predictions], rows: NDArray[np.int64]) -> Predictions:
    """All ranks' predictions, each sample of the split exactly once, in the order of the log."""
    whole = _concat(parts)
    whole = whole.select(np.argsort(whole.sample_ids, kind="stable"))
    if not np.array_equal(whole.sample_ids, np.sort(rows)):
        found, counts = np.unique(whole.sample_ids, return_counts=True)
        twice, missing = found[counts > 1], np.setdiff1d(rows, found)
        raise RuntimeError(
            f"the evaluation saw {len(whole)} samples of a split of {len(rows)}: {len(twice)} came more than once "
            f"(first {twice[:3].tolist()}), {len(missing)} never came (first {missing[:3].tolist()})"
        )
    return whole
