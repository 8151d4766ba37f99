"""Tensors that wait for backward in host memory, moved on a side stream."""

from __future__ import annotations

import weakref
from typing import Any

import torch


class HostCopy:
    """One or more tensors in host memory; `fetch` starts the way back, `take` ends it."""

    def __init__(self, store: HostStore, tensors: tuple[torch.Tensor, ...]) -> None:
        self._store = store
        self.before: weakref.ref[HostCopy] | None = store.newest  # what was sent before comes back after
        self._device = tensors[0].device
        self._sent = store.send(tensors)
        self._back: tuple[torch.Tensor, ...] | None = None

    def fetch(self) -> None:
        """Start to copy back, unless that has begun."""
        if self._back is None:
            self._back = self._store.bring(self._sent, self._device)

    def take(self) -> tuple[torch.Tensor, ...]:
        """The tensors on their device, for use on the current stream; the next ones are started meanwhile."""
        self.fetch()
        assert self._back is not None
        back, self._back = self._back, None
        self._store.wait(back)
        other = self.before() if self.before is not None else None
        if other is not None:
            other.fetch()
        return back


class HostStore:
    """Copies of device tensors in pinned host memory.

    A copy starts when the device has written the tensor and runs beside later work, on a stream of its own; the device
    memory is free for reuse when the copy has ended. On the way back, taking one tensor starts the one before it.
    """

    def __init__(self) -> None:
        self.newest: weakref.ref[HostCopy] | None = None
        self.bytes_sent = 0
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def put(self, tensors: tuple[torch.Tensor, ...]) -> HostCopy:
        """Send tensors to the host."""
        copy = HostCopy(self, tensors)
        self.newest = weakref.ref(copy)
        return copy

    def send(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[torch.Tensor, ...], Any]:
        """(host tensors, an event after which they are whole)."""
        self.bytes_sent += sum(t.nbytes for t in tensors)
        if not tensors[0].is_cuda:
            return tuple(t.clone() for t in tensors), None
        side = self._side(tensors[0].device)
        side.wait_stream(torch.cuda.current_stream(tensors[0].device))
        with torch.cuda.stream(side):
            host = tuple(
                torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors
            )  # the order of strides, too
            for target, source in zip(host, tensors, strict=True):
                target.copy_(source, non_blocking=True)
                source.record_stream(side)
            done = side.record_event()
        return host, done

    def bring(self, sent: tuple[tuple[torch.Tensor, ...], Any], device: torch.device) -> tuple[torch.Tensor, ...]:
        """Start to copy host tensors to the device."""
        host, done = sent
        if done is None:
            return tuple(t.clone() for t in host)
        side = self._side(device)
        side.wait_event(done)
        with torch.cuda.stream(side):
            return tuple(t.to(device, non_blocking=True) for t in host)

    def wait(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Let the current stream wait for `bring`."""
        if tensors[0].is_cuda:
            current = torch.cuda.current_stream(tensors[0].device)
            current.wait_stream(self._side(tensors[0].device))
            for tensor in tensors:
                tensor.record_stream(current)

    def _side(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]
