"""Plain activation checkpointing of whole units: what is kept is their input, and the forward pass runs twice."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from gem_train.measuring.waterfall import RECOMPUTATION


def recompute(model: nn.Module, units: Sequence[str]) -> None:
    """Let the named submodules keep only their inputs between the passes. Cannot be undone."""
    for name in units:
        unit = model.get_submodule(name)
        unit.forward = functools.partial(checkpoint, _marked(unit.forward), use_reentrant=False)  # type: ignore[method-assign]


def _marked(forward: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:  # not inside a backward pass: the first time
            return forward(*args, **kwargs)
        with record_function(RECOMPUTATION):
            return forward(*args, **kwargs)

    return run
