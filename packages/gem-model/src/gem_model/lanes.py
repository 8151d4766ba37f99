"""A CUDA stream for each history while the layers are captured: what does not depend on each other may run at once.

The towers of a layer meet only in its interaction. Captured from one stream they would stand in line all the same, and
every kernel would wait two to three microseconds for the end of the one before it. Captured from streams of their own
they are branches of the graph: while one tower has a short kernel, or none, the card works on another. Autograd runs
the gradient of an operator on the operator's own stream, so that the backward graph has the same branches.

Nothing here is used outside a capture: launched one by one, kernels wait for the host and not for one another.

Memory that one stream has allocated and another reads is not given to anybody else before the capture's end
(`record_stream`): it is the summaries and the 16-bit weights, a gigabyte for the preset "large".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Lane:
    """The stream of one history."""

    stream: torch.cuda.Stream

    def takes(self, *tensors: Tensor) -> torch.cuda.Event:
        """Tensors of the current stream, as of now, are for this one; the event after which they are there."""
        for tensor in tensors:
            tensor.record_stream(self.stream)
        return torch.cuda.current_stream().record_event()

    def gives(self, tensor: Tensor) -> Tensor:
        """A tensor of this stream for the current one, which waits for all that has been enqueued here."""
        here = torch.cuda.current_stream()
        here.wait_stream(self.stream)
        tensor.record_stream(here)
        return tensor


@contextlib.contextmanager
def along(lane: Lane | None) -> Iterator[None]:
    """Within the block operators are enqueued on the lane's stream; None is the stream of the moment."""
    if lane is None:
        yield
    else:
        with torch.cuda.stream(lane.stream):
            yield


class Lanes:
    """The lanes of all histories: the same for every capture, so that captures can share their memory."""

    def __init__(self) -> None:
        self._lanes: dict[str, Lane] = {}

    def open(self, sources: Iterable[str], x: Tensor) -> dict[str, Lane]:
        """A lane for each source, where what is enqueued for x is being captured, else none. Each of them begins with
        what the current stream has done so far.
        """
        if torch.compiler.is_compiling() or not x.is_cuda or not torch.cuda.is_current_stream_capturing():
            return {}
        here, found = torch.cuda.current_stream(x.device), {}
        for source in sources:
            if source not in self._lanes:
                self._lanes[source] = Lane(torch.cuda.Stream(x.device))
            found[source] = self._lanes[source]
            found[source].stream.wait_stream(here)
        return found

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Within a capture. When something fails in the block, the lanes are brought back to the current stream: a
        capture with a lane astray cannot end, and its error would stand in the place of the failure, mostly of memory.
        """
        try:
            yield
        except BaseException:
            here = torch.cuda.current_stream()
            for lane in self._lanes.values():
                with torch.cuda.stream(lane.stream):
                    astray = torch.cuda.is_current_stream_capturing()
                if astray:
                    here.wait_stream(lane.stream)
            raise
