"""Which option every region takes under a common budget of bytes: a multiple-choice knapsack, small enough to be exact.

    minimise    sum_i seconds[i][c_i]
    subject to  sum_(j < i) kept[j][c_j] + working[i][c_i] <= budget    for every i

While region i runs backward it needs its working bytes, whatever it kept, and beside them lies what the regions before
it keep. So the last regions may keep much at little cost. Where working = kept, it is the common knapsack.

States are (bytes, seconds) of the regions so far. A state that another one dominates is dropped, and so is one whose
relaxed completion (fractions of options allowed: Sinha and Zoltners 1979) is worse than the greedy solution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to treat a region.

    Attributes:
        kept: bytes that stay between its forward and its backward.
        seconds: what it adds to a step, against keeping everything.
        working: bytes while its backward runs, if these are more.
    """

    kept: int
    seconds: float
    working: int = 0

    @property
    def most(self) -> int:
        """Bytes at its backward."""
        return max(self.kept, self.working)


def hull(options: Sequence[Option]) -> list[int]:
    """Indices of the options on the lower convex hull, fewest bytes first: seconds saved per byte only fall."""
    order = sorted(range(len(options)), key=lambda i: (options[i].kept, options[i].seconds))
    found: list[int] = []
    for index in order:
        if found and options[index].seconds >= options[found[-1]].seconds:
            continue  # more bytes for nothing
        while len(found) > 1 and _saving(options, found[-1], index) >= _saving(options, found[-2], found[-1]):
            found.pop()
        found.append(index)
    return found


def _saving(options: Sequence[Option], fewer: int, more: int) -> float:
    """Seconds saved per byte by stepping from one option to a larger one."""
    a, b = options[fewer], options[more]
    return (a.seconds - b.seconds) / (b.kept - a.kept) if b.kept > a.kept else float("inf")


def peak(chosen: Sequence[Option]) -> int:
    """The most bytes that the options of all regions hold at a time."""
    before, most = 0, 0
    for option in chosen:
        most = max(most, before + option.most)
        before += option.kept
    return most


def allocate_greedy(regions: Sequence[Sequence[Option]], budget: int) -> list[int]:
    """Every region's choice by marginal seconds saved per byte: the steepest step that still fits, again and again.

    At worst it misses the optimum by one step, which matters little when there are many.

    Raises:
        ValueError: the smallest options exceed the budget.
    """
    hulls = [hull(options) for options in regions]
    at = [0] * len(regions)

    def options() -> list[Option]:
        return [r[h[i]] for r, h, i in zip(regions, hulls, at, strict=True)]

    least = peak(options()) if all(regions) else 0
    if not all(regions):
        raise ValueError("every region needs at least one option")
    if least > budget:
        raise ValueError(f"a budget of {budget} bytes is below the {least} that the regions hold at least")
    steps = sorted(
        ((-_saving(regions[r], h[i], h[i + 1]), r, i) for r, h in enumerate(hulls) for i in range(len(h) - 1)),
    )
    for _, region, index in steps:
        if at[region] == index:
            at[region] = index + 1
            if peak(options()) > budget:
                at[region] = index
    return [h[i] for h, i in zip(hulls, at, strict=True)]


def allocate(regions: Sequence[Sequence[Option]], budget: int) -> list[int]:
    """Every region's choice, of the least total seconds within the budget; exact.

    Args:
        regions: the options of every region, in the order of the forward pass.
        budget: bytes that all of them may hold at a time.

    Returns:
        an index into each region's options.

    Raises:
        ValueError: the smallest options exceed the budget.
    """
    greedy = allocate_greedy(regions, budget)
    if not regions:
        return greedy
    best = sum(options[i].seconds for options, i in zip(regions, greedy, strict=True))
    least = [min(option.kept for option in options) for options in regions]
    kept, seconds = np.zeros(1, dtype=np.int64), np.zeros(1)
    trail: list[tuple[np.ndarray, np.ndarray]] = []  # (choice, parent) of every state, region by region
    for index, options in enumerate(regions):
        sizes = np.array([option.kept for option in options], dtype=np.int64)
        most = np.array([option.most for option in options], dtype=np.int64)
        costs = np.array([option.seconds for option in options])
        new_kept, new_seconds = (kept[:, None] + sizes).ravel(), (seconds[:, None] + costs).ravel()
        fits = ((kept[:, None] + most) <= budget).ravel()
        parent = np.repeat(np.arange(len(kept)), len(options))
        choice = np.tile(np.arange(len(options)), len(kept))
        room = budget - sum(least[index + 1 :]) - new_kept
        bound = new_seconds + _relaxed(regions[index + 1 :], np.maximum(room, 0))
        alive = np.flatnonzero(fits & (room >= 0) & (bound <= best * (1 + 1e-12) + 1e-15))
        order = alive[np.lexsort((new_seconds[alive], new_kept[alive]))]
        fastest = np.minimum.accumulate(np.concatenate(([np.inf], new_seconds[order][:-1])))
        order = order[new_seconds[order] < fastest]
        if not len(order):  # rounding pruned the greedy solution itself: it is optimal
            return greedy
        kept, seconds = new_kept[order], new_seconds[order]
        trail.append((choice[order], parent[order]))
    state = int(np.argmin(seconds))
    if seconds[state] >= best:
        return greedy
    chosen = []
    for choices, parents in reversed(trail):
        chosen.append(int(choices[state]))
        state = int(parents[state])
    return chosen[::-1]


def _relaxed(regions: Sequence[Sequence[Option]], room: np.ndarray) -> np.ndarray:
    """The least seconds of the regions when hull steps may be taken in part, for every number of bytes beyond the
    smallest options."""
    floor = 0.0
    steps: list[tuple[float, int, float]] = []
    for options in regions:
        h = hull(options)
        floor += options[h[0]].seconds
        for fewer, more in pairwise(h):
            size = options[more].kept - options[fewer].kept
            steps.append((_saving(options, fewer, more), size, options[fewer].seconds - options[more].seconds))
    steps.sort(key=lambda step: -step[0])
    sizes = np.concatenate(([0], np.cumsum([size for _, size, _ in steps]))).astype(float)
    saved = np.concatenate(([0.0], np.cumsum([gain for _, _, gain in steps])))
    return np.asarray(floor - np.interp(room.astype(float), sizes, saved))
