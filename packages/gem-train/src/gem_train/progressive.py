"""Progressive validation: in a stream, each sample is predicted before it is trained on, so its loss is a test's.

The logits are those of the training step itself, taken before the update; they cost nothing. With dropout they are
those of a thinned model, a little worse than the whole one's. (Blum, Kalai & Langford, 1999.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gem_train.metrics.classification import binary_entropy


class Window:
    """Sums over the samples since the last `close`, of each task: loss, weight and weight of the positives."""

    def __init__(self, sums: list[list[float]] | None = None) -> None:
        self.sums: list[list[float]] = sums or []

    def add(self, tasks: Sequence[tuple[float, float, float]]) -> None:
        """One global batch, as `GlobalLoss.tasks` has it."""
        if not self.sums:
            self.sums = [[0.0, 0.0, 0.0] for _ in tasks]
        for mine, theirs in zip(self.sums, tasks, strict=True):
            for i, value in enumerate(theirs):
                mine[i] += value

    def close(self, names: Sequence[str]) -> dict[str, Any]:
        """The figures of each task over the window, and begin the next one."""
        found = {name: _figures(*sums) for name, sums in zip(names, self.sums, strict=True)} if self.sums else {}
        self.sums = []
        return found


def _figures(loss: float, weight: float, positives: float) -> dict[str, float]:
    if weight <= 0.0:
        return {"samples": 0.0, "base_rate": math.nan, "log_loss": math.nan, "ne": math.nan}
    rate = min(1.0, positives / weight)
    entropy = binary_entropy(rate)
    mean = loss / weight
    ne = mean / entropy if entropy > 0 else math.nan
    return {"samples": weight, "base_rate": rate, "log_loss": mean, "ne": ne}
