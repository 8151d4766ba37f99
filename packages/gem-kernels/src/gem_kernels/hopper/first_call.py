"""Kernels of one call, built side by side the first time: one after the other is what a first call waits for."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime import driver

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

    def build(self) -> None:
        """Compiles it and loads it on the current device; nothing is launched. `run` of what was compiled is where
        Triton 3.6 has a C compiler make the function that launches it, which takes a third of a second.
        """
        compiled = self.kernel.warmup(*self.arguments, grid=self.grid, **self.constants)
        getattr(compiled, "run", None)


def run(launches: Sequence[Launch], key: Hashable, device: torch.device) -> None:
    """Runs `launches` in order, on the current device, which is `device`. The first time for each `key` they are built
    in threads before: compilers are C++ and processes, so these do run at once. The key should be what their code
    depends on: a launch of which it says too little compiles for itself, as ever.
    """
    if (key, device) not in _built:
        _build(launches, device)
        _built.add((key, device))
    for launch in launches:
        launch.run()


def _build(launches: Sequence[Launch], device: torch.device) -> None:
    """One thread for each kernel: two forms of one kernel would share what Triton sets up the first time."""
    driver.active.get_current_device()  # sets the driver up, which is not for several threads to do
    by_kernel: dict[int, list[Launch]] = {}
    for launch in launches:
        by_kernel.setdefault(id(launch.kernel), []).append(launch)

    def build(forms: list[Launch]) -> None:
        with torch.cuda.device(device):  # of this thread
            for launch in forms:
                launch.build()

    with ThreadPoolExecutor(len(by_kernel)) as pool:
        for done in [pool.submit(build, forms) for forms in by_kernel.values()]:
            done.result()
