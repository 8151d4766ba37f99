"""Draw the figures of docs/data.md: `python tools/data_figures.py` (needs matplotlib; a minute on one core).

The data are made here: log-normal lengths, and the real lengths of the logs that are in gem-data's cache.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import matplotlib
import numpy as np
from gem_data import EventLog, SourceUnavailable, prepare
from gem_data.balance import LengthCost
from gem_data.balance.simulate import METHODS, Lognormal, Observed, Sampler, simulate
from gem_data.log.inspection import user_lengths
from gem_data.sources import movielens, open_bandit
from gem_data.sources.events import from_table

matplotlib.use("svg")
from matplotlib import pyplot as plt

COST = LengthCost(quadratic=1, linear=4096)
FIGURES = Path(__file__).parents[1] / "docs" / "figures"


def real_lengths(folder: Path) -> dict[str, np.ndarray]:
    """Events per user of MovieLens-100K and the Open Bandit sample, where they can be had."""
    found = {}
    for name, make in {
        "MovieLens-100K": lambda: from_table(*movielens.load()),
        "Open Bandit sample": open_bandit.events,
    }.items():
        try:
            source = make()
        except SourceUnavailable as reason:
            print(f"{name} is left out: {reason}")
            continue
        prepare(source, folder / name)
        found[name] = user_lengths(EventLog.open(folder / name))
    return found


def lengths_figure(real: dict[str, np.ndarray]) -> None:
    """Distributions of lengths, on a logarithmic axis."""
    samples = {"log-normal, median 300, sigma 1, cap 4096": Lognormal()(np.random.default_rng(0), 200_000), **real}
    figure, axes = plt.subplots(figsize=(7, 3.2))
    for name, values in samples.items():
        edges = np.logspace(0, 4, 41)
        share, _ = np.histogram(values, edges)
        axes.step(edges[:-1], share / share.sum(), where="post", label=f"{name}: mean {values.mean():.0f}")
    axes.set(xscale="log", xlabel="events per user", ylabel="share of users")
    axes.legend(frameon=False, fontsize=8)
    save(figure, "data-lengths.svg")


def balance_figure(ranks: list[int], steps: int) -> None:
    """Max / average over ranks, for every method."""
    figure, axes = plt.subplots(figsize=(7, 3.6))
    rows = [r for n in ranks for r in simulate(Lognormal(), ranks=n, cost=COST, steps=steps)]
    for method in METHODS:
        mine = [r for r in rows if r.method == method]
        axes.plot([r.ranks for r in mine], [r.mean for r in mine], marker="o", markersize=3, label=method)
        print(method, [(r.ranks, round(r.mean, 4), round(r.worst, 4), round(r.speed_up, 3)) for r in mine])
    axes.axhline(1.02, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xscale="log", xlabel="ranks, 1,024 samples each", ylabel="heaviest rank / average")
    axes.set_xticks(ranks, [str(n) for n in ranks])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)
    save(figure, "data-balance.svg")


def real_table(real: dict[str, np.ndarray], ranks: int) -> None:
    """The same for real lengths, printed."""
    for name, values in real.items():
        sampler: Sampler = Observed(lengths=values)
        print(name, [(r.method, round(r.mean, 4)) for r in simulate(sampler, ranks=ranks, cost=COST, steps=3)])


def save(figure: plt.Figure, name: str) -> None:
    """Without a date, so that the same data gives the same file."""
    figure.tight_layout()
    figure.savefig(FIGURES / name, metadata={"Date": None})


def main() -> None:
    """Draw everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128, 256, 1024, 4096])
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    matplotlib.rcParams["svg.hashsalt"] = "gem-data"
    FIGURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        real = real_lengths(Path(folder))
    lengths_figure(real)
    balance_figure(options.ranks, options.steps)
    real_table(real, 256)


if __name__ == "__main__":
    main()
