"""Kernels of one call, compiled side by side the first time: one after the other is what a first call waits for."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

_built: set[Hashable] = set()


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A kernel of Triton or Gluon, its grid, what it is called with, and constants and options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def run(self) -> None:
        """On the current device and stream."""
        self.kernel[self.grid](*self.arguments, **self.constants)

    def warm_up(self, device: torch.device) -> None:
        """Compiles it; nothing is launched."""
        with torch.cuda.device(device):
            self.kernel.warmup(*self.arguments, grid=self.grid, **self.constants)


def build(key: Hashable, launches: Sequence[Launch], device: torch.device) -> None:
    """Compile `launches` in threads, once for each `key` and device. The key should be what their code depends on: a
    launch of which it says too little compiles for itself, as ever. Compilers are C++ and processes: threads do run at
    once.
    """
    if (key, device) in _built:
        return
    with ThreadPoolExecutor(len(launches)) as pool:
        for done in [pool.submit(launch.warm_up, device) for launch in launches]:
            done.result()
    _built.add((key, device))
