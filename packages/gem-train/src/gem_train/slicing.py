"""How good the predictions are by the value of a column, and for users and items that training has never seen.

COLUMN       an id column of the candidate or the user: its ten most frequent values, and the rest
             a dense feature: five parts of equal size, by value
new:COLUMN   whether the row's id of this column occurs among the training rows
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gem_train.config.tree import suggest
from gem_train.data import Data, without_history
from gem_train.evaluation import Predictions
from gem_train.metrics import METRICS, binary_entropy, resample, summarize

FREQUENT = 10
PARTS = 5
KEPT = ("samples", "base_rate", "log_loss", "ne", "auc", "calibration")


def by_columns(
    data: Data, predictions: Predictions, tasks: tuple[str, ...], names: Sequence[str], *, draws: int = 1000
) -> dict[str, list[dict[str, Any]]]:
    """Rows {"value", "samples", "users", "tasks": {task: figures}} for each of `names`.

    The figures have the 95 % interval of the NE ("ne_low", "ne_high"), by the bootstrap over the users of the slice; NE
    is against the slice's own base rate. Raises ValueError for a name that is no column.
    """
    columns = [name.removeprefix("new:") for name in names]
    check(data, names)
    values = _values(data, predictions.sample_ids, columns)
    found = {}
    for name, column in zip(names, columns, strict=True):
        if name.startswith("new:"):
            seen = np.unique(_values(data, data.split.train, [column])[column])
            known = np.isin(values[column], seen)
            parts = [("seen in training", known), ("new", ~known)]
        elif values[column].dtype == np.int64:
            parts = _frequent(values[column])
        else:
            parts = _quantiles(values[column])
        found[name] = [_row(label, chosen, predictions, tasks, draws) for label, chosen in parts if chosen.any()]
    return found


def check(data: Data, names: Sequence[str]) -> None:
    """Raise ValueError for a name that can't be sliced by, with the closest one that can."""
    schema = data.schema
    ids = [schema.user, *(n for n in schema.sparse if n != schema.user)]
    known = [*ids, *schema.dense_columns]
    for name in names:
        column = name.removeprefix("new:")
        if column not in known:
            raise ValueError(f"{column!r} is no column to slice by{suggest(column, known)}; there are {known}")
        if name.startswith("new:") and column not in ids:
            raise ValueError(f"{column!r} is a float column: new or seen is a question for ids, {ids}")


def _values(data: Data, rows: NDArray[np.int64], columns: Sequence[str]) -> dict[str, NDArray[Any]]:
    """The columns at `rows`: int64 ids, or float64."""
    wanted, dense = list(dict.fromkeys(columns)), list(data.schema.dense_columns)
    found: dict[str, list[NDArray[Any]]] = {name: [] for name in wanted}
    for batch in without_history(data, rows):
        for name in wanted:
            if name in dense:
                found[name].append(batch.dense[:, dense.index(name)].double().numpy())
            elif name == data.schema.user:
                found[name].append(batch.groups.numpy())
            else:
                ids = batch.sparse[name]
                if len(ids.values) != len(batch):
                    raise ValueError(f"{name!r} holds any number of ids a row, which gives no slices")
                found[name].append(ids.values.numpy())
    return {name: np.concatenate(parts) for name, parts in found.items()}


def _frequent(values: NDArray[np.int64]) -> list[tuple[str, NDArray[np.bool_]]]:
    unique, counts = np.unique(values, return_counts=True)
    chosen = unique[np.argsort(-counts, kind="stable")[:FREQUENT]]
    rest = ~np.isin(values, chosen)
    return [(str(v), values == v) for v in chosen.tolist()] + [(f"{len(unique) - len(chosen)} others", rest)]


def _quantiles(values: NDArray[np.float64]) -> list[tuple[str, NDArray[np.bool_]]]:
    edges = np.unique(np.quantile(values, np.linspace(0.0, 1.0, PARTS + 1)))
    if len(edges) == 1:
        return [(f"{edges[0]:.4g}", np.ones(len(values), bool))]
    part = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    return [(f"{a:.4g} to {b:.4g}", part == i) for i, (a, b) in enumerate(itertools.pairwise(edges))]


def _row(
    label: str, chosen: NDArray[np.bool_], predictions: Predictions, tasks: tuple[str, ...], draws: int
) -> dict[str, Any]:
    part = predictions.select(chosen)
    row: dict[str, Any] = {
        "value": label,
        "samples": len(part),
        "users": len(np.unique(part.groups)),
        "tasks": {},
    }
    for k, task in enumerate(tasks):
        known = part.select(part.mask[:, k])
        if not len(known):
            continue
        columns = (known.groups, known.labels[:, k])
        full = summarize(*columns, known.logits[:, k])
        low, high = resample(*columns, [known.logits[:, k]], draws=draws).interval(0.95)
        at = METRICS.index("ne")
        row["tasks"][task] = {key: full[key] for key in KEPT} | {
            "entropy": binary_entropy(full["base_rate"]),
            "ne_low": float(low[at, 0]),
            "ne_high": float(high[at, 0]),
        }
    return row
