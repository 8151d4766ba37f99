"""The all-gather of a table's fractions ("v3"): through NCCL or gloo, or read from the owners by copy engine."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from gem_parallel.comm.windows import CudaWindow, Make, Window, pull


class TableGather(Protocol):
    """Gathers one kernel's fractions."""

    def place(self, fraction: torch.Tensor) -> torch.Tensor:
        """The fraction [chunk, dim] where others can reach it; called once, by all ranks of the group."""

    def start(self, output: torch.Tensor, fraction: torch.Tensor) -> Any:
        """Begin to gather into output [size chunk dim]; the result's `wait()` ends it."""


class DefaultTableGather:
    """The backend's own."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def place(self, fraction: torch.Tensor) -> torch.Tensor:
        """As it is."""
        return fraction

    def start(self, output: torch.Tensor, fraction: torch.Tensor) -> Any:
        """See TableGather."""
        return dist.all_gather_into_tensor(output, fraction.view(-1), self.group, async_op=True)


class CopyEngineTableGather:
    """Fractions lie in windows for good, so that the others read them without a staging copy, on a side stream."""

    def __init__(self, group: Any, make: Make = CudaWindow) -> None:
        self.group, self._make = group, make
        self._window: Window | None = None
        self._side: Any = None

    def place(self, fraction: torch.Tensor) -> torch.Tensor:
        """A copy of it in a window."""
        self._window = self._make(fraction.nbytes, self.group, fraction.device)
        if fraction.is_cuda:
            self._side = torch.cuda.Stream(fraction.device)
        inside = self._window.local.view(fraction.dtype).view(fraction.shape)
        inside.copy_(fraction)
        return inside

    def start(self, output: torch.Tensor, fraction: torch.Tensor) -> Any:
        """See TableGather."""
        assert self._window is not None
        if self._side is None:
            pull(self._window, output, fraction.nbytes, self.group, whole=False)
            return _Done(None)
        self._side.wait_stream(torch.cuda.current_stream(output.device))
        with torch.cuda.stream(self._side):
            pull(self._window, output, fraction.nbytes, self.group, whole=False)
            return _Done(self._side.record_event())


class _Done:
    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        """Let the current stream wait."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
