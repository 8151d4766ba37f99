"""Learning rates as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math


def rate(step: int, *, total: int, warmup: int, schedule: str, final_ratio: float) -> float:
    """The share of the peak learning rate that update `step` (1 to `total`) uses.

    step / warmup while step <= warmup; then 1 ("constant"), or from 1 to final_ratio at the last step:

        final_ratio + (1 - final_ratio) (1 + cos(pi (step - warmup) / (total - warmup))) / 2

    Steps beyond `total` keep the final value. Raises ValueError for a step below 1 or an unknown schedule.
    """
    if step < 1:
        raise ValueError(f"step is {step}; updates are counted from 1")
    if schedule not in ("cosine", "constant"):
        raise ValueError(f"schedule is {schedule!r}; expected 'cosine' or 'constant'")
    if step <= warmup:
        return step / warmup
    if schedule == "constant":
        return 1.0
    done = min((step - warmup) / max(total - warmup, 1), 1.0)
    return final_ratio + (1.0 - final_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))
