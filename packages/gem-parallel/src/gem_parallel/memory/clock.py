"""How long regions take on a device and on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map

from gem_parallel.memory.profile import plain_tensors

REPEATS = 3  # of a measurement


class Clock:
    """Seconds of the device and of the host for what runs inside; the device's are known when it is through."""

    def __init__(self, cuda: bool) -> None:
        self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) if cuda else None
        self.host_s = 0.0

    def __enter__(self) -> Clock:
        if self._events:
            self._events[0].record()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        self.host_s = time.perf_counter() - self._began
        if self._events:
            self._events[1].record()

    @property
    def seconds(self) -> float:
        """Of the device; of the host where there is none."""
        if not self._events:
            return self.host_s
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) * 1e-3


def longer(
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    module: nn.Module,
    switched: Callable[[bool], AbstractContextManager[Any]],
    before: Callable[[], None] = lambda: None,
) -> float:
    """Seconds that both passes of a region take longer where it is `switched` on, of the device (of the host, where
    there is none); the middle one of several turns. Generators are left as they were, and nothing of the runs is left.
    """
    found = []
    for _ in range(REPEATS):
        took = []
        for on in (False, True):
            with switched(on):
                took.append(_both_passes(function, args, kwargs, module, before))
        found.append(took[1] - took[0])
    return max(statistics.median(found), 0.0)


def _both_passes(
    function: Callable[..., Any], args: Any, kwargs: Any, module: nn.Module, before: Callable[[], None]
) -> float:
    devices = sorted({t.device.index for t in plain_tensors((args, kwargs)) if t.is_cuda})
    clock = Clock(bool(devices))
    with torch.random.fork_rng(devices):
        args, kwargs = tree_map(cut_off, (args, dict(kwargs)))
        before()
        with clock:
            out = [t for t in plain_tensors(function(*args, **kwargs)) if t.requires_grad]
            leaves = [t for t in (*plain_tensors((args, kwargs)), *module.parameters()) if t.requires_grad]
            if out and leaves and not waits_for_units(module):
                torch.autograd.grad(out, leaves, [torch.zeros_like(t) for t in out], allow_unused=True)
    return clock.seconds


def waits_for_units(module: nn.Module) -> bool:
    """Whether there are FSDP units inside, whose backward pass waits for their own."""
    return any(isinstance(m, FSDPModule) for m in module.modules() if m is not module)


def cut_off(value: Any) -> Any:
    """An input that is nothing's result: one may be another's, and backward would go on into what made both."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    return value.detach().requires_grad_()
