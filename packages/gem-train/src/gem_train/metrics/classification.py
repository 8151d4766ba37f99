"""Quality of probabilistic predictions of a binary label, in float64 on the host.

Everything takes logits z, not probabilities: log(1 + exp(z)) - y z loses nothing for confident predictions, whereas a
float32 probability of 1 - 1e-9 is already 1. `logit` brings a probability into that form.

`labels` are 0 or 1, `weights` are non-negative (default 1); all arrays are one-dimensional, of equal length n.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def sigmoid(logits: npt.ArrayLike) -> Array:
    """p = 1 / (1 + exp(-z)), without overflow at either end."""
    z = np.asarray(logits, np.float64)
    small = np.exp(-np.abs(z))
    return np.where(z >= 0, 1.0, small) / (1.0 + small)


def logit(probability: npt.ArrayLike) -> Array:
    """z = log(p / (1 - p)); probabilities of exactly 0 and 1 give -inf and inf."""
    p = np.asarray(probability, np.float64)
    if np.any((p < 0) | (p > 1)):
        raise ValueError(f"a probability of {p[(p < 0) | (p > 1)].flat[0]} was given; expected values in [0, 1]")
    with np.errstate(divide="ignore"):
        return np.log(p) - np.log1p(-p)


def binary_entropy(rate: float) -> float:
    """H(p) = -p log p - (1 - p) log(1 - p), in nats; 0 at both ends."""
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"rate is {rate}; expected a value in [0, 1]")
    return -sum(p * math.log(p) for p in (rate, 1.0 - rate) if p > 0.0)


def log_loss(labels: npt.ArrayLike, logits: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> float:
    """Weighted mean of -log P(y) = softplus((1 - 2y) z), in nats."""
    y, z, w = _columns(labels, logits, weights)
    return float(np.average(np.logaddexp(0.0, (1.0 - 2.0 * y) * z), weights=w))


def normalized_entropy(labels: npt.ArrayLike, logits: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> float:
    """NE = average log loss / entropy of the empirical base rate; 1 is what the base rate alone achieves.

    NaN where only one class is present: the entropy is zero and the ratio says nothing. (He et al., 2014, "Practical
    Lessons from Predicting Clicks on Ads at Facebook".)
    """
    y, z, w = _columns(labels, logits, weights)
    entropy = binary_entropy(float(np.average(y, weights=w)))
    return log_loss(y, z, w) / entropy if entropy > 0.0 else math.nan


def calibration(labels: npt.ArrayLike, logits: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> float:
    """Mean predicted probability / mean label; above 1 the model promises too much. NaN without a positive."""
    y, z, w = _columns(labels, logits, weights)
    rate = float(np.average(y, weights=w))
    return float(np.average(sigmoid(z), weights=w)) / rate if rate > 0.0 else math.nan


def auc(labels: npt.ArrayLike, logits: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> float:
    """P(score of a positive > score of a negative) + P(equal) / 2, exactly; NaN if only one class is present."""
    y, z, w = _columns(labels, logits, weights)
    return float(_auc_by_group(np.zeros(len(y), np.int64), y, z, w)[0])


class GroupedAuc(NamedTuple):
    """The impression-weighted mean of the users' AUCs, over how many users, and how many had only one class."""

    value: float
    groups: int
    skipped: int


def grouped_auc(groups: npt.ArrayLike, labels: npt.ArrayLike, logits: npt.ArrayLike) -> GroupedAuc:
    """GAUC = sum_u n_u AUC_u / sum_u n_u over the users u with both classes (n_u: their impressions).

    (Zhu et al., 2017, "Optimized Cost per Click in Taobao Display Advertising".) NaN if no user has both classes.
    """
    y, z, w = _columns(labels, logits, None)
    _, index, impressions = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    values = _auc_by_group(index.reshape(-1), y, z, w)
    both = np.isfinite(values)
    value = float(np.average(values[both], weights=impressions[both])) if both.any() else math.nan
    return GroupedAuc(value, int(both.sum()), int((~both).sum()))


def _auc_by_group(group: npt.NDArray[np.int64], y: Array, z: Array, w: Array) -> Array:
    """AUC of each group 0..G-1 (every one present), NaN where a class is missing.

    Sorted by (group, score), runs of equal score become one point with a positive and a negative weight; the AUC is the
    sum of positive x (negative weight below + half the negative weight beside), divided by the two totals.
    """
    order = np.lexsort((z, group))
    group, y, z, w = group[order], y[order], z[order], w[order]
    new_run = np.ones(len(y), bool)
    new_run[1:] = (group[1:] != group[:-1]) | (z[1:] != z[:-1])
    runs = np.flatnonzero(new_run)
    positive, negative = np.add.reduceat(w * y, runs), np.add.reduceat(w * (1.0 - y), runs)
    run_group = group[runs]
    firsts = np.flatnonzero(np.r_[True, run_group[1:] != run_group[:-1]])
    # The negative weight below a run, inside its group: a running total, less the total at the group's start.
    below = np.cumsum(negative) - negative
    below -= below[firsts][run_group]
    won = np.add.reduceat(positive * (below + 0.5 * negative), firsts)
    pairs = np.add.reduceat(positive, firsts) * np.add.reduceat(negative, firsts)
    return np.divide(won, pairs, out=np.full(len(firsts), math.nan), where=pairs > 0.0)


def calibration_curve(labels: npt.ArrayLike, logits: npt.ArrayLike, bins: int = 10) -> list[dict[str, float]]:
    """Mean prediction and mean label in `bins` groups of (nearly) equal size, by ascending prediction."""
    y, z, _ = _columns(labels, logits, None)
    parts = np.array_split(np.argsort(z, kind="stable"), min(bins, len(y)))
    p = sigmoid(z)
    return [{"predicted": float(p[i].mean()), "observed": float(y[i].mean()), "count": float(len(i))} for i in parts]


def summarize(groups: npt.ArrayLike, labels: npt.ArrayLike, logits: npt.ArrayLike) -> dict[str, float]:
    """The figures reported for one task on one split: samples, base rate, log loss, NE, AUC, GAUC, calibration."""
    grouped = grouped_auc(groups, labels, logits)
    return {
        "samples": int(np.size(labels)),
        "base_rate": float(np.mean(np.asarray(labels, np.float64))),
        "log_loss": log_loss(labels, logits),
        "ne": normalized_entropy(labels, logits),
        "auc": auc(labels, logits),
        "gauc": grouped.value,
        "gauc_users": grouped.groups,
        "gauc_skipped_users": grouped.skipped,
        "calibration": calibration(labels, logits),
    }


def _columns(labels: npt.ArrayLike, logits: npt.ArrayLike, weights: npt.ArrayLike | None) -> tuple[Array, Array, Array]:
    y, z = np.asarray(labels, np.float64), np.asarray(logits, np.float64)
    w = np.ones_like(y) if weights is None else np.asarray(weights, np.float64)
    if y.ndim != 1 or y.shape != z.shape or y.shape != w.shape:
        raise ValueError(
            f"labels, logits, weights have shapes {y.shape}, {z.shape}, {w.shape}; expected one length, 1-D"
        )
    if len(y) == 0:
        raise ValueError("no samples to evaluate: the split is empty")
    if not np.isin(y, (0.0, 1.0)).all():
        raise ValueError(f"label {y[~np.isin(y, (0.0, 1.0))][0]} found; expected 0 or 1")
    if np.isnan(z).any():
        raise ValueError(f"{int(np.isnan(z).sum())} of {len(z)} predictions are NaN")
    if (w < 0).any() or w.sum() == 0:
        raise ValueError("weights must be non-negative and not all zero")
    return y, z, w
