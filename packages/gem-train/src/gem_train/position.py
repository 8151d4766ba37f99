"""What a run has reached and has to remember from one step to the next."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from gem_train.spikes import LossHistory


@dataclass(kw_only=True)
class Position:
    """How far the run is; goes into every checkpoint."""

    step: int = 0  # updates made
    best_step: int | None = None  # of the best validation NE
    best_ne: float = math.inf
    evaluated: int | None = None  # the step of the last validation
    usual_ne: float = math.inf  # what the next validation must beat by min_delta, ...
    stale: int = 0  # ... and how many in a row have not
    skipped: int = 0  # updates left out
    losses: LossHistory = field(default_factory=LossHistory)
    window: list[list[float]] = field(default_factory=list)  # of the progressive validation
    rooms: list[dict[str, Any]] = field(default_factory=list)  # of the CUDA graphs (gem_model.replay)
