"""How long compute stood still for each FSDP unit's parameters and gradients.

On CUDA the time is between two events on the compute stream, around the point where it waits for a unit (the copy out
of the gathered buffer is part of it); on a CPU, where collectives are synchronous, it is the wall time of the calls.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from gem_parallel.dense.units import param_groups

_WAITS = {"unshard": "gather", "wait_for_unshard": "gather", "post_backward": "reduce", "finalize_backward": "reduce"}


class Exposed:
    """Measures between `__enter__` and `__exit__`; costs two events a wait.

    `seconds()` is {unit: {"forward": s, "backward": s, "reduce": s}}, summed over what ran inside; the waits of the
    reductions' end are the last unit's. The root's name is "(root)".
    """

    def __init__(self, model: nn.Module) -> None:
        self._groups: list[tuple[str, Any]] = []
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                self._groups += [(name or "(root)", group) for group in param_groups(module)]
        self._spans: list[tuple[str, str, Any, Any]] = []
        self._depth = 0

    def __enter__(self) -> Exposed:
        self._spans.clear()
        for name, group in self._groups:
            for method, kind in _WAITS.items():
                if hasattr(group, method):
                    setattr(group, method, self._timed(getattr(group, method), name, kind, group))
        return self

    def __exit__(self, *error: object) -> None:
        for _, group in self._groups:
            for method in _WAITS:
                group.__dict__.pop(method, None)

    def _timed(self, function: Callable[..., Any], name: str, kind: str, group: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            state = str(getattr(group, "_training_state", "")).upper()
            what = kind if kind == "reduce" else ("backward" if "BACKWARD" in state else "forward")
            if self._depth:  # one wait inside another is that one's
                return function(*args, **kwargs)
            self._depth += 1
            begin = _mark()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                self._spans.append((name, what, begin, _mark()))

        return call

    def seconds(self) -> dict[str, dict[str, float]]:
        """What was measured; waits for the device."""
        total: dict[str, dict[str, float]] = {name: defaultdict(float) for name, _ in self._groups}
        for name, what, begin, end in self._spans:
            if isinstance(begin, float):
                total[name][what] += end - begin
            else:
                end.synchronize()
                total[name][what] += begin.elapsed_time(end) * 1e-3
        return {name: {k: found[k] for k in ("forward", "backward", "reduce")} for name, found in total.items()}

    def __str__(self) -> str:
        lines = [f"{'exposed, ms':28} {'forward':>9} {'backward':>9} {'reduce':>9}"]
        rows = self.seconds()
        rows["all"] = {k: sum(row[k] for row in rows.values()) for k in ("forward", "backward", "reduce")}
        lines += [
            f"{name:28} " + " ".join(f"{row[k] * 1e3:9.3f}" for k in ("forward", "backward", "reduce"))
            for name, row in rows.items()
        ]
        return "\n".join(lines)


def _mark() -> Any:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()
