"""Balance: which rank takes which samples of a global batch, so that the heaviest rank is hardly over the average.

Every method is a pure function of the costs, so all ranks compute the same assignment without talking. None changes
which samples a global batch holds, only who computes them: sampling stays as it was, each sample exactly once an epoch.

    bbs             base batch shuffling: sub-batches of 128 samples, the heaviest interleaved with the lightest
    lpt             longest processing time first (Graham, 1969): the heaviest sub-batch to the lightest rank with room
    karmarkar-karp  balanced largest differencing (Karmarkar and Karp, 1982; balanced: Michiels et al., 2003)
    exchange        single samples interleaved over all ranks: near perfect, but samples must travel (an all-to-all)
    none            the order of the batch

Costs are any nonnegative numbers; `LengthCost` makes them from lengths, and any callable on lengths will do.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gem_data.schema import unknown

Method = Literal["none", "bbs", "lpt", "karmarkar-karp", "exchange"]
Costs = NDArray[np.float64]
Index = NDArray[np.int64]
CostFunction = Callable[[NDArray[Any]], NDArray[Any]]

SUB_BATCH = 128


@dataclass(frozen=True, kw_only=True)
class LengthCost:
    """cost(L) = quadratic L^2 + linear L + constant, for each length: [n] -> [n] float64.

    For a tower of width d with full attention the two terms of a layer are about 4 d L^2 and 24 d^2 L FLOPs, so
    `LengthCost(quadratic=1, linear=6 * d)` ranks samples as their FLOPs do; with a window w, `quadratic=0,
    linear=6 * d + w`.
    """

    quadratic: float = 0.0
    linear: float = 1.0
    constant: float = 0.0

    def __post_init__(self) -> None:
        values = (self.quadratic, self.linear, self.constant)
        if not all(np.isfinite(values)) or min(values) < 0 or max(values) == 0:
            raise ValueError(f"the factors of a cost must be nonnegative and not all 0: {self}")

    def __call__(self, lengths: NDArray[Any]) -> Costs:
        """The cost of each length."""
        length = np.asarray(lengths, np.float64)
        return (self.quadratic * length + self.linear) * length + self.constant


def check_costs(costs: Any) -> Costs:
    """Costs as float64 [n]. Raises ValueError naming the first that is negative or not finite."""
    values = np.asarray(costs, np.float64)
    if values.ndim != 1:
        raise ValueError(f"costs must have one dim, not shape {values.shape}")
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if bad.size:
        raise ValueError(f"cost {values[bad[0]]} of sample {bad[0]} is not a nonnegative finite number")
    return values


def assign(costs: Any, ranks: int, *, method: Method = "bbs", sub_batch: int = SUB_BATCH) -> Index:
    """Who takes what: sample indices [ranks, n / ranks] int64, each of 0..n-1 exactly once.

    costs [n] of the samples of a global batch, n a multiple of `ranks`. Sub-batches are runs of `sub_batch` samples in
    the batch's order; where a rank's share is not a multiple of it, they are as large as their greatest common divisor.

    Raises ValueError for an unknown method, for shares that are not equal and for costs that are no costs.
    """
    if method not in get_args(Method):
        raise ValueError(unknown("balance method", method, get_args(Method)))
    values = check_costs(costs)
    if ranks < 1 or sub_batch < 1 or len(values) % ranks:
        raise ValueError(f"{len(values)} samples in sub-batches of {sub_batch} can't be shared by {ranks} ranks")
    share = len(values) // ranks
    if method == "none" or ranks == 1 or share == 0:
        return np.arange(len(values)).reshape(ranks, share)
    run = 1 if method == "exchange" else int(np.gcd(share, sub_batch))
    heavy = values.reshape(-1, run).sum(axis=1)
    chosen = {"lpt": _lpt, "karmarkar-karp": _differencing}.get(method, _interleave)(heavy, ranks)
    return (chosen[:, :, None] * run + np.arange(run)).reshape(ranks, share)


def _interleave(costs: Costs, bins: int) -> Index:
    """Heaviest stratum, lightest, second heaviest, ...; in each the lightest bin so far takes the heaviest item.

    items [n] -> [bins, n / bins]. Equal counts by construction; O(n log n), all in numpy.
    """
    strata = np.argsort(-costs, kind="stable").reshape(-1, bins)
    k = len(strata)
    order = np.empty(k, np.int64)
    order[::2], order[1::2] = np.arange((k + 1) // 2), k - 1 - np.arange(k // 2)
    total = np.zeros(bins)
    out = np.empty((bins, k), np.int64)
    for position, stratum in enumerate(order):
        lightest = np.argsort(total, kind="stable")
        out[lightest, position] = strata[stratum]
        total[lightest] += costs[strata[stratum]]
    return out


def _lpt(costs: Costs, bins: int) -> Index:
    """The heaviest item left to the lightest bin that has room: [bins, n / bins]."""
    room = len(costs) // bins
    heap = [(0.0, b) for b in range(bins)]
    taken: list[list[int]] = [[] for _ in range(bins)]
    for item in np.argsort(-costs, kind="stable").tolist():
        total, b = heapq.heappop(heap)
        taken[b].append(item)
        if len(taken[b]) < room:
            heapq.heappush(heap, (total + float(costs[item]), b))
    return np.array(taken, np.int64)


def _differencing(costs: Costs, bins: int) -> Index:
    """Balanced largest differencing: [bins, n / bins].

    The items, sorted, form groups of one per bin. The two groups that differ most inside are merged, the heaviest of
    one with the lightest of the other, until one is left.
    """
    groups: list[tuple[float, int, Costs, Index]] = []
    sorted_items = np.argsort(-costs, kind="stable").reshape(-1, bins)

    def push(number: int, sums: Costs, items: Index) -> None:
        order = np.argsort(-sums, kind="stable")
        sums = sums[order]
        heapq.heappush(groups, (-float(sums[0] - sums[-1]), number, sums, items[order]))

    for number, items in enumerate(sorted_items):
        push(number, costs[items], items[:, None])
    number = len(sorted_items)
    while len(groups) > 1:
        (_, _, a, in_a), (_, _, b, in_b) = heapq.heappop(groups), heapq.heappop(groups)
        push(number, a + b[::-1], np.concatenate([in_a, in_b[::-1]], axis=1))
        number += 1
    return groups[0][3]


def deal(costs: Any, ranks: int) -> list[Index]:
    """Who takes what where shares need not be equal in number: of each rank, ascending sample indices int64.

    Longest processing time first, sample by sample; every rank has one if there are as many samples as ranks.
    """
    values = check_costs(costs)
    if ranks < 1:
        raise ValueError(f"ranks must be 1 or more, not {ranks}")
    heap = [(0.0, 0, r) for r in range(ranks)]
    taken: list[list[int]] = [[] for _ in range(ranks)]
    for item in np.argsort(-values, kind="stable").tolist():
        total, count, r = heap[0]  # of equally light ranks the one with the fewest samples
        taken[r].append(item)
        heapq.heapreplace(heap, (total + float(values[item]), count + 1, r))
    return [np.sort(np.array(t, np.int64)) for t in taken]


def budget_batches(costs: Any, budget: float, *, most: int | None = None) -> Index:
    """Cut a stream into batches of at most `budget` (tokens, say): offsets [batches + 1] int64, order kept.

    A batch ends where the next sample would go over, or has `most` samples; a sample that is over by itself is a batch
    of its own. Raises ValueError for a budget that is not positive and for costs that are no costs.
    """
    values = check_costs(costs)
    if not budget > 0:
        raise ValueError(f"a batch's budget must be positive, not {budget!r}")
    most = len(values) if most is None else most
    # Whole numbers (tokens) stay exact; a budget met to the last bit is met.
    total = np.concatenate([[0.0], np.cumsum(values)])
    offsets = [0]
    while offsets[-1] < len(values):
        at = offsets[-1]
        end = int(np.searchsorted(total, total[at] + budget, side="right")) - 1
        offsets.append(max(min(end, at + most), at + 1))
    return np.array(offsets, np.int64)


def imbalance(costs: Any, assignment: Index) -> float:
    """max over ranks / average over ranks of the summed cost; 1 is perfect, also where everything costs 0."""
    totals = np.asarray(costs, np.float64)[assignment].sum(axis=1)
    mean = totals.mean() if totals.size else 0.0
    return float(totals.max() / mean) if mean > 0 else 1.0


def moved(assignment: Index) -> float:
    """The share of samples that a rank takes from another's share of the batch: what an exchange would send."""
    ranks, share = assignment.shape
    if assignment.size == 0:
        return 0.0
    return float((assignment // share != np.arange(ranks)[:, None]).mean())
