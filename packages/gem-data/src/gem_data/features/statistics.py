"""Mean, spread and range of the dense features, gathered part by part and saved with the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gem_data.log.manifest import COUNTERS
from gem_data.schema import Schema


@dataclass(kw_only=True)
class Moments:
    """Count, mean, sum of squared deviations and range of columns [n, width], merged as Chan et al. (1979)."""

    count: int = 0
    mean: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    squares: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    low: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    high: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def add(self, values: NDArray[Any]) -> None:
        """Take in rows [n] or [n, width]."""
        n = len(values)
        if n == 0:
            return
        x = np.asarray(values, np.float64).reshape(n, -1)
        mean = x.mean(axis=0)
        part = Moments(count=n, mean=mean, squares=((x - mean) ** 2).sum(axis=0), low=x.min(axis=0), high=x.max(axis=0))
        vars(self).update(vars(self.merged(part)))

    def merged(self, other: Moments) -> Moments:
        """Those of both together."""
        if not (self.count and other.count):
            return self if self.count else other
        total, delta = self.count + other.count, other.mean - self.mean
        return Moments(
            count=total,
            mean=self.mean + delta * (other.count / total),
            squares=self.squares + other.squares + delta**2 * (self.count * other.count / total),
            low=np.minimum(self.low, other.low),
            high=np.maximum(self.high, other.high),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the manifest: count, and mean, std (of the population), min and max for each column."""
        std = np.sqrt(self.squares / max(1, self.count))
        values = {"mean": self.mean, "std": std, "min": self.low, "max": self.high}
        return {"count": self.count, **{k: v.tolist() for k, v in values.items()}}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Moments:
        """The inverse of `to_dict`, but for rounding."""
        mean, std, low, high = (np.array(data[k], np.float64) for k in ("mean", "std", "min", "max"))
        return cls(count=data["count"], mean=mean, squares=std**2 * data["count"], low=low, high=high)


def moments(columns: dict[str, Any], schema: Schema, *, counters: bool = True) -> dict[str, Moments]:
    """Statistics of the float and vector columns and of the counters, by name."""
    found = {c.name: Moments() for c in schema.columns if c.kind in ("float", "vector")}
    for name, part in found.items():
        part.add(columns[name])
    for i, counter in enumerate(schema.counters if counters else ()):
        found[counter.name] = Moments()
        found[counter.name].add(columns[COUNTERS][:, i])
    return found


def check_statistics(statistics: Mapping[str, Any], schema: Schema, path: Path) -> None:
    """Raise ValueError unless a manifest's statistics are those of the schema's dense features: names, widths, numbers.

    None at all are fine: older logs have none.
    """
    widths = {c.name: c.width for c in schema.columns if c.kind in ("float", "vector")}
    widths |= {c.name: 1 for c in schema.counters}
    if statistics and statistics.keys() != widths.keys():
        odd = ", ".join(sorted(statistics.keys() ^ widths.keys()))
        raise ValueError(f"{path} has statistics of other features than its schema: {odd}")
    for name, found in statistics.items():
        try:
            values = np.array([found[k] for k in ("mean", "std", "min", "max")], np.float64)
        except (KeyError, TypeError, ValueError):
            values = np.empty((4, 0))
        mean, std, low, high = values.reshape(4, -1)
        whole = values.shape == (4, widths[name]) and np.isfinite(values).all()
        slack = 1e-6 * (1 + np.abs(mean))  # a mean is rounded
        if not whole or (std < 0).any() or (mean < low - slack).any() or (mean > high + slack).any():
            raise ValueError(f"{path}: the statistics of {name!r} are none: {found!r}")
