"""Where the time of a step goes on each rank, and which rank the others wait for.

A step is a chain of phases: data, forward, loss (the reduction over the ranks, where they meet), backward, optimizer.
On CUDA the phases are those of the device, between events in its stream; data is the host's wait for the loader.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

NOTICED = 0.05  # a rank that is later than the median by this share of a step is a straggler, ...
CONFIRMED = 3  # ... if it was in so many looks in a row

Phases = Sequence[tuple[str, float]]  # (name, seconds) in the order they happened


class StepClock:
    """Marks the ends of phases; costs a clock reading (or an event record) each, and a wait when they are read."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self._on = False

    def begin(self, on: bool = True) -> None:
        """Forget what was marked and start, or rest until the next `begin`."""
        self._on = on
        self._marks = []
        self.mark("")

    def mark(self, phase: str) -> None:
        """`phase` has ended here."""
        if self._on:
            if self._cuda:
                now: Any = torch.cuda.Event(enable_timing=True)
                now.record()
            else:
                now = time.perf_counter()
            self._marks.append((phase, now))

    def read(self) -> list[tuple[str, float]]:
        """(phase, seconds) in the order they happened; parts of an accumulated step give a phase several times."""
        if self._cuda and self._marks:
            self._marks[-1][1].synchronize()
        pairs = itertools.pairwise(self._marks)
        return [(name, a.elapsed_time(b) / 1e3 if self._cuda else b - a) for (_, a), (name, b) in pairs]


class Stragglers:
    """Names ranks that the others wait for again and again.

    late_r = data_r - min data + max loss - loss_r: all ranks leave the loss together, so who waits there least came
    last; and a rank's own wait for data, which the others spend in the forward pass, waiting for its embeddings.
    """

    def __init__(self) -> None:
        self._late: dict[int, deque[float]] = {}

    def look(self, ranks: Sequence[Phases]) -> list[dict[str, Any]]:
        """The phases of each rank in one step -> the newly confirmed stragglers: {"rank", "late_s", "step_s"} each."""
        data, loss = ([sum(s for name, s in phases if name == which) for phases in ranks] for which in ("data", "loss"))
        late = [d - min(data) + max(loss) - w for d, w in zip(data, loss, strict=True)]
        whole = max(sum(s for _, s in phases) for phases in ranks)
        usual = statistics.median_low(late)
        found = []
        for rank, seconds in enumerate(late):
            if seconds - usual <= NOTICED * whole:
                self._late.pop(rank, None)
                continue
            history = self._late.setdefault(rank, deque(maxlen=CONFIRMED + 1))
            history.append(seconds - usual)
            if len(history) == CONFIRMED:  # said once, until it has been on time again
                found.append({"rank": rank, "late_s": statistics.mean(history), "step_s": whole})
        return found
