"""What balancing is worth, for lengths, a cost and a number of ranks: `python -m gem_data.balance.simulate`.

A step lasts as long as its heaviest rank, so max / average is the time that imbalance costs. The lengths are log-normal
or those of an event log.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gem_data.balance import SUB_BATCH, CostFunction, LengthCost, Method, assign, imbalance, moved

METHODS: tuple[Method, ...] = ("none", "bbs", "lpt", "karmarkar-karp", "exchange")
Sampler = Callable[[np.random.Generator, int], NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Lognormal:
    """Lengths [n] int64: exp(N(log median, sigma)), rounded, from 1 to `cap`."""

    median: float = 300.0
    sigma: float = 1.0
    cap: int = 4096

    def __call__(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """Draw `n` lengths."""
        return np.clip(np.rint(rng.lognormal(np.log(self.median), self.sigma, n)), 1, self.cap).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Lengths [n] drawn with repeats from those that were seen, the histories of a log's rows say."""

    lengths: NDArray[np.int64]

    def __call__(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """Draw `n` lengths."""
        return self.lengths[rng.integers(len(self.lengths), size=n)]


@dataclass(frozen=True, kw_only=True)
class Balance:
    """What a method does over some steps. Speed-ups are of the step, if it lasts as long as its heaviest rank."""

    method: Method
    ranks: int
    mean: float  # of max / average over the steps
    worst: float
    speed_up: float  # against `none`, the same samples
    sent: float  # the share of samples that would have to change rank


def simulate(
    lengths: Sampler,
    *,
    ranks: int,
    samples: int = 1024,
    cost: CostFunction | None = None,
    sub_batch: int = SUB_BATCH,
    steps: int = 10,
    methods: Sequence[Method] = METHODS,
    seed: int = 0,
) -> list[Balance]:
    """Balance `steps` global batches of `ranks` x `samples` samples by each method; the first is the baseline.

    Raises ValueError as `assign` does, and for no steps.
    """
    if steps < 1:
        raise ValueError(f"steps must be 1 or more, not {steps}")
    cost = cost or LengthCost()
    rng = np.random.default_rng(seed)
    ratio = {m: np.empty(steps) for m in methods}
    sent = dict.fromkeys(methods, 0.0)
    for step in range(steps):
        costs = cost(lengths(rng, ranks * samples))
        for method in methods:
            assignment = assign(costs, ranks, method=method, sub_batch=sub_batch)
            ratio[method][step] = imbalance(costs, assignment)
            # Readers of sub-batches give them to their rank; only the exchange moves what a rank already has.
            sent[method] += moved(assignment) / steps if method == "exchange" else 0.0
    base = ratio[methods[0]].mean()
    return [
        Balance(
            method=m,
            ranks=ranks,
            mean=float(ratio[m].mean()),
            worst=float(ratio[m].max()),
            speed_up=float(base / ratio[m].mean()),
            sent=sent[m],
        )
        for m in methods
    ]


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, simulate, print a table."""
    parser = argparse.ArgumentParser(prog="python -m gem_data.balance.simulate", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024, 4096])
    parser.add_argument("--samples", type=int, default=1024, help="samples a rank and step")
    parser.add_argument("--sub-batch", type=int, default=SUB_BATCH)
    parser.add_argument("--median", type=float, default=300.0)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--cap", type=int, default=4096)
    parser.add_argument("--log", help="take the histories' lengths of this event log instead")
    parser.add_argument("--quadratic", type=float, default=1.0, help="cost of L^2")
    parser.add_argument("--linear", type=float, default=4096.0, help="cost of L")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args(arguments)
    lengths: Sampler = Lognormal(median=options.median, sigma=options.sigma, cap=options.cap)
    if options.log:
        from gem_data.log.event_log import EventLog

        log = EventLog.open(options.log)
        rows = np.random.default_rng(0).integers(len(log), size=min(len(log), 1_000_000))
        lengths = Observed(lengths=log.history(rows, options.cap).lengths)
    cost = LengthCost(quadratic=options.quadratic, linear=options.linear)
    print(f"{'ranks':>6}  {'method':<15}{'max/avg':>9}{'worst':>9}{'speed-up':>10}{'sent':>7}")
    for ranks in options.ranks:
        for row in simulate(
            lengths, ranks=ranks, samples=options.samples, cost=cost, sub_batch=options.sub_batch, steps=options.steps
        ):
            print(f"{ranks:>6}  {row.method:<15}{row.mean:>9.4f}{row.worst:>9.4f}{row.speed_up:>9.3f}x{row.sent:>7.0%}")


if __name__ == "__main__":
    main()
