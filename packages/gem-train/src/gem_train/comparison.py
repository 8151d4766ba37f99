"""Two runs on the same test samples: is one better, or is it chance? Reads their predictions alone; needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gem_train.errors import UserError
from gem_train.metrics.bootstrap import FEW_USERS, METRICS, resample
from gem_train.metrics.classification import logit
from gem_train.run_dir import RunDir, read_json

# Where float64 rounds a probability to 0 or 1, the logit is not finite: take the nearest one that is.
LOWEST, HIGHEST = np.nextafter(0.0, 1.0), np.nextafter(1.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Test:
    """What a run said of its test samples, in the order of the log."""

    sample_ids: NDArray[np.int64]
    groups: NDArray[np.int64]
    labels: dict[str, NDArray[np.float64]]  # by task, NaN where unknown
    probabilities: dict[str, NDArray[np.float64]]

    @classmethod
    def read(cls, run: RunDir) -> Test:
        """From predictions.parquet. Raises UserError where the run has not got that far, or the file is another."""
        if not run.predictions_file.exists():
            raise UserError(f"{run.predictions_file} is missing: the run has not been tested yet")
        try:
            table = pq.read_table(run.predictions_file)
            tasks = [n.removeprefix("p_") for n in table.column_names if n.startswith("p_")]

            def column(name: str) -> NDArray[Any]:
                return np.asarray(table.column(name).to_numpy(zero_copy_only=False))

            return cls(
                sample_ids=column("sample_id"),
                groups=column("group"),
                labels={t: column(f"label_{t}").astype(np.float64) for t in tasks},
                probabilities={t: column(f"p_{t}") for t in tasks},
            )
        except (OSError, KeyError, ValueError) as error:
            raise UserError(f"{run.predictions_file} can't be read: {error}") from error


def compare(a: RunDir, b: RunDir, *, draws: int = 1000, level: float = 0.95, seed: int = 0) -> dict[str, Any]:
    """Every task's metrics of `a` and `b` on the test samples that both have, with the difference b - a.

    Raises UserError where the runs were tested on different logs, or share no samples or no task.
    """
    _require_same_data(a, b)
    left, right = Test.read(a), Test.read(b)
    shared, i, j = np.intersect1d(left.sample_ids, right.sample_ids, assume_unique=True, return_indices=True)
    if not len(shared):
        raise UserError(f"{a.path} and {b.path} have no test sample in common: their splits differ")
    tasks = [t for t in left.labels if t in right.labels]
    if not tasks:
        raise UserError(f"the runs have no task in common: {', '.join(left.labels)} and {', '.join(right.labels)}")
    notes = []
    for run, test in ((a, left), (b, right)):
        if len(shared) < len(test.sample_ids):
            notes.append(f"{len(test.sample_ids) - len(shared)} test samples of {run.path} are not in the other run")
    results: dict[str, Any] = {}
    for task in tasks:
        labels = left.labels[task][i]
        if not np.array_equal(labels, right.labels[task][j], equal_nan=True):
            raise UserError(f"the labels of task {task!r} differ between the runs, so their figures can't be compared")
        known = np.isfinite(labels)
        if not known.any():
            notes.append(f"task {task!r} has no label among the shared samples")
            continue
        logits = [
            logit(np.clip(test.probabilities[task][at][known], LOWEST, HIGHEST)) for test, at in ((left, i), (right, j))
        ]
        found = resample(left.groups[i][known], labels[known], logits, draws=draws, seed=seed)
        difference, low, high, p = found.difference(level)
        results[task] = {
            "samples": int(known.sum()),
            "users": found.users,
            "metrics": {
                metric: {
                    "a": float(found.points[m, 0]),
                    "b": float(found.points[m, 1]),
                    "difference": float(difference[m]),
                    "low": float(low[m]),
                    "high": float(high[m]),
                    "p": float(p[m]),
                }
                for m, metric in enumerate(METRICS)
            },
        }
        if found.users < FEW_USERS:
            notes.append(f"task {task!r}: only {found.users} users to draw from; the intervals are too narrow")
    return {
        "a": str(a.path),
        "b": str(b.path),
        "samples": len(shared),
        "draws": draws,
        "level": level,
        "tasks": results,
        "notes": notes,
    }


def verdict(task: str, found: dict[str, Any], level: float) -> str:
    """A sentence on the NE: which run is better, or that the samples can't tell."""
    ne = found["metrics"]["ne"]
    if math.isnan(ne["difference"]) or math.isnan(ne["low"]):
        return f"{task}: no verdict, the NE does not exist on these samples"
    share = ne["difference"] / ne["a"]
    says = f"{task}: NE {ne['a']:.5f} -> {ne['b']:.5f} ({share:+.3%})"
    if ne["low"] <= 0.0 <= ne["high"]:
        return f"{says}: no difference that {found['users']:,} users can show"
    return f"{says}: B is {'better' if ne['difference'] < 0 else 'worse'}, at {level:.0%} confidence"


def _require_same_data(a: RunDir, b: RunDir) -> None:
    left, right = read_json(a.data_file), read_json(b.data_file)
    for key in ("source", "digest"):
        if left.get(key) != right.get(key):
            raise UserError(
                f"{a.path} and {b.path} were tested on different data: {key} {left.get(key)} and {right.get(key)}"
            )
