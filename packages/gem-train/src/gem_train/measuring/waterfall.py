"""Where the time of a step goes, from a trace of torch.profiler: parts that add up to the step exactly.

Each instant belongs to the first of these that is at work on the device (on a CPU: in the process):

    optimizer       the dense optimizer and the gradient's norm
    recomputation   forward passes that are repeated inside the backward pass
    tables          lookups and the tables' fused updates
    layers          everything else that computes
    communication   collectives, where nothing computes beside them (exposed)
    gaps            nothing at all: the host has not launched the next kernel yet, or waits

The trace is of one part of an accumulated step, or of all of it where graphs launch the kernels; `of_a_step` makes it
the parts of a step whose time is known. Data wait is the host's and lies before the step. Of the communication, what a
rank spends waiting for a rank that computes longer is imbalance.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile, record_function

from gem_train.trainer import Trainer

STEP, OPTIMIZER, RECOMPUTATION = "gem.step", "gem.optimizer", "gem.recomputation"
PARTS = ("optimizer", "recomputation", "tables", "layers", "communication", "gaps")
COLLECTIVES = ("nccl", "gloo:", "c10d::")
TABLES = ("embedding", "tbe_", "fbgemm")

Spans = NDArray[np.float64]  # [n, 2] begin and end, microseconds


def trace_step(trainer: Trainer, step: Callable[[], Any], *, shapes: bool = False) -> dict[str, Any]:
    """Run `step` (one update) under the profiler, with the shapes of the operators' tensors if asked; the trace."""
    cuda = trainer.runtime.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with _annotated(trainer), profile(activities=activities, record_shapes=shapes) as found, record_function(STEP):
        step()
        if cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text())
    return trace


def split(trace: dict[str, Any], *, cuda: bool) -> dict[str, float]:
    """Seconds of PARTS, and of the whole "step", in a trace that holds one annotated step."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    begin, end = _step(events)
    marked = {
        name: _spans([e for e in events if e["name"] == name and (e.get("cat") == "gpu_user_annotation") == cuda])
        for name in (OPTIMIZER, RECOMPUTATION)
    }
    kinds: dict[str, list[Any]] = {part: [] for part in PARTS[:-1]}
    if cuda:
        for event in events:
            if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
                kinds[_kind(event, marked)].append(event)
        spans = {part: _spans(found) for part, found in kinds.items()}
    else:  # no kernels: what is neither annotated nor a collective or a lookup is the layers'
        operators = [e for e in events if e.get("cat") in ("cpu_op", "user_annotation")]
        spans = {
            "optimizer": marked[OPTIMIZER],
            "recomputation": marked[RECOMPUTATION],
            "communication": _spans([e for e in operators if e["name"].lower().startswith(COLLECTIVES)]),
            "tables": _spans([e for e in operators if any(t in e["name"].lower() for t in TABLES)]),
            "layers": np.array([[begin, end]]),
        }
    order = PARTS[:-1] if cuda else ("communication", *PARTS[:4])
    seconds = dict.fromkeys(PARTS, 0.0)
    covered = np.empty((0, 2))
    for part in order:
        together = _union(np.concatenate([covered, np.clip(spans[part], begin, end)]))
        seconds[part] = (_length(together) - _length(covered)) / 1e6
        covered = together
    seconds["gaps"] = (end - begin - _length(covered)) / 1e6
    return {**seconds, "step": (end - begin) / 1e6}


def of_a_step(seconds: dict[str, float], count: int, measured: float) -> dict[str, float]:
    """PARTS of a step of `count` parts that took `measured` seconds, from those of one part, whose optimizer ran once.

    The device's times are those of the trace; the gaps are what is left of the step: a traced host is slower.
    """
    found = {part: value * (1 if part == "optimizer" else count) for part, value in seconds.items() if part != "step"}
    found["gaps"] = max(0.0, measured - sum(value for part, value in found.items() if part != "gaps"))
    return {**found, "step": sum(found.values())}


def _step(events: list[Any]) -> tuple[float, float]:
    """Begin and end on the host, which waits for the device before the end."""
    found = [e for e in events if e["name"] == STEP and e.get("cat") == "user_annotation"]
    if len(found) != 1:
        raise ValueError(f"expected one {STEP!r} in the trace, found {len(found)}")
    return float(found[0]["ts"]), float(found[0]["ts"] + found[0]["dur"])


def _kind(event: Any, marked: dict[str, Spans]) -> str:
    name, middle = event["name"].lower(), event["ts"] + event["dur"] / 2
    if name.startswith("nccl"):
        return "communication"
    for part, spans in (("optimizer", marked[OPTIMIZER]), ("recomputation", marked[RECOMPUTATION])):
        if ((spans[:, 0] <= middle) & (middle <= spans[:, 1])).any():
            return part
    return "tables" if any(t in name for t in TABLES) else "layers"


def _spans(events: list[Any]) -> Spans:
    return np.array([[e["ts"], e["ts"] + e["dur"]] for e in events], np.float64).reshape(-1, 2)


def _union(spans: Spans) -> Spans:
    """The same instants as disjoint spans in order."""
    if not len(spans):
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    starts = np.flatnonzero(np.r_[True, spans[1:, 0] > reach[:-1]])
    return np.stack([spans[starts, 0], reach[np.r_[starts[1:] - 1, len(spans) - 1]]], axis=1)


def _length(spans: Spans) -> float:
    """Of disjoint spans."""
    return float((spans[:, 1] - spans[:, 0]).sum())


@contextlib.contextmanager
def _annotated(trainer: Trainer) -> Iterator[None]:
    """Within the block the optimizer and the gradient's norm are marked in traces."""
    optimizer: Any = trainer.parts.optimizer
    model: Any = trainer.model
    plain_step, plain_clip = optimizer.step, model.clip_grad_norm_

    def step(*args: Any, **kwargs: Any) -> Any:
        with record_function(OPTIMIZER):
            return plain_step(*args, **kwargs)

    def clip(*args: Any, **kwargs: Any) -> Any:
        with record_function(OPTIMIZER):
            return plain_clip(*args, **kwargs)

    optimizer.step, model.clip_grad_norm_ = step, clip
    try:
        yield
    finally:
        del optimizer.step, model.clip_grad_norm_
