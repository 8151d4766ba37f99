"""Learning rates as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from collections.abc import Callable

DECAY = 0.1  # share of the steps over which "wsd" falls

# From 1 at the end of the warm-up (x = 0) to 0 at the last step (x = 1).
SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda x: 1.0,
    "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),
    "linear": lambda x: 1.0 - x,
    "wsd": lambda x: min(1.0, (1.0 - x) / DECAY),
}


def rate(step: int, *, total: int, warmup: int, schedule: str, final_ratio: float) -> float:
    """The share of the peak learning rate that update `step` (1 to `total`) uses.

    step / warmup while step <= warmup; then, with x = (step - warmup) / (total - warmup), f = final_ratio:

        constant    1
        cosine      f + (1 - f) (1 + cos(pi x)) / 2
        linear      f + (1 - f) (1 - x)
        wsd         1 up to x = 0.9, then linear down to f: f + (1 - f) min(1, (1 - x) / 0.1)

    Steps beyond `total` keep the final value. Raises ValueError for a step below 1 or an unknown schedule.

    Sources: cosine, Loshchilov & Hutter 2017; wsd (warm-up, stable, decay), Hu et al. 2024.
    """
    if step < 1:
        raise ValueError(f"step is {step}; updates are counted from 1")
    if schedule not in SHAPES:
        raise ValueError(f"schedule is {schedule!r}; expected one of {', '.join(map(repr, SHAPES))}")
    if step <= warmup:
        return step / warmup
    if schedule == "constant":
        return 1.0
    done = min((step - warmup) / max(total - warmup, 1), 1.0)
    return final_ratio + (1.0 - final_ratio) * SHAPES[schedule](done)
