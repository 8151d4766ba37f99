"""How sure a figure is: bootstrap over users, of one model or of two on the same samples.

The samples of one user are not independent, so whole users are drawn, with replacement, as many as there are (Field and
Welsh, 2007, "Bootstrapping clustered data"). Two models are compared on the same draws: what both find hard cancels,
and differences far smaller than either interval show.

    figure(r) = the figure over the users of draw r, each counted as often as it was drawn
    interval  = the percentiles (1 - level) / 2 and (1 + level) / 2 over the draws

Everything but the AUC depends on sums over a user's samples alone. An AUC needs a pass over all samples for each draw,
so a large split gets fewer draws of it, or none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gem_train.metrics.classification import Array, _auc_by_group, binary_entropy, sigmoid

METRICS = ("ne", "log_loss", "auc", "gauc", "calibration")
AUC_WORK = 100_000_000  # samples x draws x models
FEWEST = 100  # draws that still give an interval
FEW_USERS = 50  # with fewer, percentiles of the bootstrap are known to be too narrow
BLOCK = 4_000_000  # users x draws at a time


@dataclass(frozen=True, kw_only=True)
class Draws:
    """What `resample` found.

    Attributes:
        users: how many there are to draw from.
        points: [M, K], metric m of model k over all samples.
        values: [R, M, K], the same of each draw; NaN where it does not exist or was not computed.
    """

    users: int
    points: Array
    values: Array

    def interval(self, level: float) -> tuple[Array, Array]:
        """Low and high ends, [M, K] each."""
        return _percentiles(self.values, level)

    def difference(self, level: float) -> tuple[Array, Array, Array, Array]:
        """Of the second model less the first: the difference, its low and high end, and the two-sided p, [M] each.

        p = 2 (1 + the smaller number of draws on one side of zero) / (1 + R), at most 1: how often chance alone would
        put the difference so far from zero. It can't be smaller than R allows.
        """
        d = self.values[:, :, 1] - self.values[:, :, 0]
        known = np.isfinite(d)
        below, above, count = (d <= 0).sum(0), (d >= 0).sum(0), known.sum(0)
        p = np.minimum(1.0, 2.0 * (1 + np.minimum(below, above)) / (1 + count))
        low, high = _percentiles(d, level)
        return self.points[:, 1] - self.points[:, 0], low, high, np.where(count >= FEWEST, p, math.nan)


def resample(
    groups: npt.ArrayLike,
    labels: npt.ArrayLike,
    logits: Sequence[npt.ArrayLike],
    *,
    draws: int = 1000,
    seed: int = 0,
) -> Draws:
    """Draw users `draws` times and compute METRICS of each of the K models in `logits` over every draw.

    groups, labels and each of `logits` are [n]: the user, 0 or 1, and the model's logit of each sample.

    Raises ValueError for fewer than FEWEST draws, or no samples.
    """
    if draws < FEWEST:
        raise ValueError(f"draws is {draws}; expected {FEWEST} or more")
    y = np.asarray(labels, np.float64)
    if not len(y):
        raise ValueError("there are no samples to draw from")
    z = [np.asarray(one, np.float64) for one in logits]
    _, user = np.unique(np.asarray(groups), return_inverse=True)
    user = user.reshape(-1)
    users = int(user.max()) + 1

    def per_user(values: Array) -> Array:
        return np.bincount(user, weights=values, minlength=users).astype(np.float64)

    n = per_user(np.ones(len(y)))
    common, sums = np.stack([n, per_user(y)], axis=1), []
    for one in z:
        by_user = _auc_by_group(user, y, one, np.ones(len(y)))
        both = np.isfinite(by_user)
        columns = [
            per_user(np.logaddexp(0.0, (1.0 - 2.0 * y) * one)),
            per_user(sigmoid(one)),
            np.where(both, n * np.nan_to_num(by_user), 0.0),
            np.where(both, n, 0.0),
        ]
        sums.append(np.stack(columns, axis=1))  # [U, 4]; a product for each, so that equal models get equal bits
    aucs = [_Auc(user, y, one) for one in z]
    affordable = AUC_WORK // (len(y) * len(z))
    of_auc = min(draws, affordable) if affordable >= FEWEST else 0

    everyone = np.ones((1, users))
    points = _from_sums(everyone @ common, [everyone @ s for s in sums])[0]
    points[METRICS.index("auc")] = [auc(everyone[0]) for auc in aucs]
    values, done = np.full((draws, len(METRICS), len(z)), math.nan), 0
    for counts in _counts(users, draws, seed):
        block = values[done : done + len(counts)]
        block[...] = _from_sums(counts @ common, [counts @ s for s in sums])
        for i in range(max(0, min(len(counts), of_auc - done))):
            block[i, METRICS.index("auc")] = [auc(counts[i]) for auc in aucs]
        done += len(counts)
    return Draws(users=users, points=points, values=values)


class _Auc:
    """The AUC of one model with a weight per user; the sorting is done once."""

    def __init__(self, user: npt.NDArray[np.int64], y: Array, z: Array) -> None:
        order = np.argsort(z, kind="stable")
        self.user, self.y, sorted_z = user[order], y[order], z[order]
        self.runs = np.flatnonzero(np.r_[True, sorted_z[1:] != sorted_z[:-1]])

    def __call__(self, weights: Array) -> float:
        w = weights[self.user]
        positive = np.add.reduceat(w * self.y, self.runs)
        negative = np.add.reduceat(w * (1.0 - self.y), self.runs)
        pairs = positive.sum() * negative.sum()
        won = (positive * (np.cumsum(negative) - 0.5 * negative)).sum()
        return float(won / pairs) if pairs > 0 else math.nan


def _from_sums(common: Array, models: list[Array]) -> Array:
    """Sums over the drawn users, [R, 2] and K times [R, 4], -> [R, M, K]; the AUC's place stays NaN."""
    n, positives = common.T
    entropy = np.array([binary_entropy(min(1.0, p)) for p in positives / n])
    out = np.full((len(common), len(METRICS), len(models)), math.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        for k, sums in enumerate(models):
            loss, promised, won, counted = sums.T
            out[:, METRICS.index("log_loss"), k] = loss / n
            out[:, METRICS.index("ne"), k] = np.where(entropy > 0, loss / n / entropy, math.nan)
            out[:, METRICS.index("gauc"), k] = np.where(counted > 0, won / counted, math.nan)
            out[:, METRICS.index("calibration"), k] = np.where(positives > 0, promised / positives, math.nan)
    return out


def _counts(users: int, draws: int, seed: int) -> Iterator[Array]:
    """How often each user is in each draw, in blocks [r, U]."""
    rng, block = np.random.default_rng(seed), max(1, BLOCK // users)
    for start in range(0, draws, block):
        r = min(block, draws - start)
        drawn = rng.integers(users, size=(r, users)) + users * np.arange(r)[:, None]
        yield np.bincount(drawn.reshape(-1), minlength=r * users).reshape(r, users).astype(np.float64)


def _percentiles(values: Array, level: float) -> tuple[Array, Array]:
    """Over the first dim, leaving NaN out; NaN where fewer than FEWEST draws have a value."""
    if not 0.0 < level < 1.0:
        raise ValueError(f"level is {level}; expected a share between 0 and 1")
    enough = np.isfinite(values).sum(0) >= FEWEST
    filled = np.where(enough, values, 0.0)
    low, high = np.nanpercentile(filled, [50 * (1 - level), 50 * (1 + level)], axis=0)
    return np.where(enough, low, math.nan), np.where(enough, high, math.nan)
