"""The GEM model for `python -m gem_parallel.bench memory --workload gem_memory:large`, with this folder on the path.

The preset's own workload with half-filled random histories; its tables are cut to a million rows, which changes no
activation. Regions are the model's layers. Their projections are made apart from gates, norms and rotations, as memory
policies have them, so that all rows round alike and their gradients can be compared; `large_together` has them as they
train where nothing is planned, for the time of its row "none".
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch
from gem_model import GEM, ModelInputs, preset
from gem_model.presets import workload
from gem_model.replay import Replay
from gem_model.sequence import HistoryAttention, PersonalisedFFN
from gem_model.testing import random_batch
from gem_parallel.bench.stack import Workload
from torch import Tensor

ROWS = 1_000_000  # of a table, at most


def inputs(name: str, length: int | None = None) -> ModelInputs:
    """The inputs of the preset's workload with small tables, and histories of up to `length` events."""
    whole = workload(name).inputs
    return dataclasses.replace(
        whole,
        tables=tuple(dataclasses.replace(t, rows=min(t.rows, ROWS)) for t in whole.tables),
        sources=tuple(dataclasses.replace(s, max_len=min(s.max_len, length or s.max_len)) for s in whole.sources),
    )


def _workload(
    name: str, device: torch.device, batch: int, length: int | None = None, *, together: bool = False
) -> Workload:
    torch.manual_seed(0)
    shape = inputs(name, length)
    model = GEM(preset(name, dropout=0.1), shape, device=device)  # on the device: one core would draw for long
    for module in model.modules():
        if isinstance(module, PersonalisedFFN | HistoryAttention):
            module.fused = together
    data = random_batch(shape, batch, single_valued=True).to(device)

    def loss() -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(data)
        return model.loss(logits, data)

    @contextlib.contextmanager
    def graphs(ready: Callable[[], bool]) -> Iterator[None]:
        model.layers.replay = replay = Replay(model.layers)
        replay.ready = ready
        try:
            yield
        finally:
            model.layers.replay = None
            model.zero_grad(set_to_none=True)  # gradients are parts of what the graphs add to
            replay.forget()

    return Workload(model, model.units(), loss, graphs)


def large(device: torch.device, batch: int) -> Workload:
    """The preset "large": two histories of up to 2,048 and 1,024 events."""
    return _workload("large", device, batch)


def large_together(device: torch.device, batch: int) -> Workload:
    """The same with projections made together where nothing is planned."""
    return _workload("large", device, batch, together=True)


def tiny(device: torch.device, batch: int) -> Workload:
    """The preset "tiny", to try the script."""
    return _workload("tiny", device, batch)
