"""Memory that the ranks of a group read from one another, in windows that are used in turn.

A window is made by all ranks of the group together and stays. Which one a collective uses follows from how many there
were before it, which is the same on every rank; that it is free is checked.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from gem_parallel.comm.watch import Watch


class Window(Protocol):
    """One rank's view of memory that every rank of the group has."""

    local: torch.Tensor  # uint8 [n], this rank's

    def peer(self, rank: int) -> torch.Tensor:
        """The same memory of another rank of the group, uint8 [n]."""

    def barrier(self) -> None:
        """Wait, on the current stream, until every rank has come here."""


Make = Callable[[int, Any, torch.device], Window]


class CudaWindow:
    """A window in torch's symmetric memory.

    Ranks meet through numbers in one another's signal pads. With `kernels` that is torch's barrier, a kernel that holds
    an SM while it waits; without, the stream itself writes to the others' pads and waits for its own, which needs none.
    A barrier that lasts longer than `watch` allows ends the process with the names of those who have not come.
    """

    def __init__(
        self, nbytes: int, group: Any, device: torch.device, *, kernels: bool = False, watch: Watch | None = None
    ) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.local = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        # torch (2.13 and before) has the default stream zero new memory, signal pad included, and waits for nothing. A
        # rank that is ahead would signal into a pad that is zeroed later: its signal is lost, and torch's barrier,
        # which sends one each time, never ends. So the memory is zero before anybody can reach it.
        torch.cuda.default_stream(device).synchronize()
        self._handle = symmetric.rendezvous(self.local, group)
        self._kernels, self._watch = kernels, watch
        self._met = 0  # barriers so far; every rank counts alike
        self._peers: dict[int, torch.Tensor] = {}

    def peer(self, rank: int) -> torch.Tensor:
        """See Window."""
        if rank not in self._peers:
            self._peers[rank] = self._handle.get_buffer(rank, (self.local.numel(),), torch.uint8)
        return self._peers[rank]

    def barrier(self) -> None:
        """See Window."""
        self._met = (self._met + 1) % 2**32
        if self._kernels:
            self._handle.barrier()
        else:
            self._meet()
        if self._watch is not None and not torch.cuda.is_current_stream_capturing():
            event, number = torch.cuda.Event(), self._met
            event.record()
            self._watch.expect(id(self), lambda: self._is_over(event), lambda: self._missing(number))

    def _meet(self) -> None:
        """By the stream."""
        handle, first = self._handle, self._first()
        rank, size, pads = handle.rank, handle.world_size, handle.signal_pad_ptrs
        stream = torch.cuda.current_stream(self.local.device).cuda_stream
        for other in range(size):
            if other != rank:
                _stream_value("cuStreamWriteValue32_v2", stream, pads[other] + first + 4 * rank, self._met)
        for other in range(size):
            if other != rank:  # waits until the number, counted cyclically, is reached
                _stream_value("cuStreamWaitValue32_v2", stream, pads[rank] + first + 4 * other, self._met)

    def _is_over(self, event: Any) -> bool:
        """For a thread that has no device: asking without one would take memory of the first card."""
        with torch.cuda.device(self.local.device):
            return bool(event.query())

    def _first(self) -> int:
        """Where the ranks' numbers begin: at the end of the pad, since torch's own barriers use its beginning."""
        return int(self._handle.signal_pad_size) - 4 * int(self._handle.world_size)

    def _missing(self, number: int) -> str:
        """Who has not come to barrier `number`, for a person."""
        handle = self._handle
        rank, size = handle.rank, handle.world_size
        text = f"rank {rank} of {size} waits at barrier {number} of a window of {self.local.nbytes:,} bytes"
        if self._kernels:
            return f"{text} for another rank, which died, hangs or has left the common sequence of collectives"
        print(f"{text}; asking the card who has come", file=sys.stderr, flush=True)  # in case it does not answer
        with torch.cuda.device(self.local.device), torch.cuda.stream(torch.cuda.Stream(self.local.device)):
            pad = handle.get_signal_pad(rank, (size,), torch.int32, self._first() // 4)
            come = [value % 2**32 for value in pad.tolist()]
        others = [other for other in range(size) if other != rank and come[other] != number]
        said = ", ".join(f"rank {other} (it came to {come[other]})" for other in others)
        return f"{text} for {said or 'nobody: all have come since'}: it died, hangs or left the common sequence"


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _stream_value(function: str, stream: int, address: int, value: int) -> None:
    """Let the stream write or await a number; a write comes after everything that the stream did before."""
    call = getattr(_driver(), function)
    status = call(ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint(0))
    if status:
        raise RuntimeError(f"{function} failed with the driver's error {status}")


class Ring:
    """Windows of every size, `depth` of each, in turn; all of a size are made when it is first asked for."""

    def __init__(self, group: Any, depth: int, make: Make = CudaWindow) -> None:
        self.group, self.depth, self._make = group, depth, make
        self._windows: dict[int, list[Window]] = {}
        self._turn: dict[int, int] = {}
        self._used: dict[int, StorageWeakRef] = {}
        self._home: dict[int, Window] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all windows on this rank."""
        return sum(w.local.nbytes for windows in self._windows.values() for w in windows)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor in the next window of its size.

        Raises:
            RuntimeError: whoever took that window before still holds its tensor.
        """
        elements = 1
        for size in shape:
            elements *= int(size)
        nbytes = max(16, -(-elements * dtype.itemsize // 16) * 16)
        windows = self._windows.setdefault(nbytes, [])
        if not windows:  # all at once: making one waits for the card and for the other hosts
            windows += [self._make(nbytes, self.group, device) for _ in range(self.depth)]
        turn = self._turn.get(nbytes, 0)
        window = windows[turn % self.depth]
        key = window.local.data_ptr()
        before = self._used.get(key)
        if before is not None and not before.expired():
            raise RuntimeError(
                f"all {self.depth} windows of {nbytes} bytes are in use: more collectives are under way than "
                "CommConfig.windows provides for; raise it (the prefetch depth plus two)"
            )
        self._turn[nbytes] = turn + 1
        # A storage of its own over the same memory: it ends with the last tensor of this use, whoever holds it.
        storage = torch._C._construct_storage_from_data_pointer(key, window.local.device, nbytes)
        tensor = torch.empty(0, dtype=dtype, device=window.local.device).set_(storage)  # type: ignore[call-overload]
        tensor = tensor[:elements].view(shape)
        self._used[key], self._home[key] = StorageWeakRef(storage), window
        return tensor

    def window(self, tensor: torch.Tensor) -> Window:
        """The window that `take` gave the tensor from."""
        return self._home[tensor.untyped_storage().data_ptr()]


def pull(
    window: Window, output: torch.Tensor, nbytes: int, group: Any, *, whole: bool, lanes: Sequence[Any] = ()
) -> None:
    """Gather `nbytes` bytes of every rank into output, size x nbytes bytes in the order of ranks.

    With `whole`, output is this rank's window itself and every rank's part lies at its place there; else a window holds
    its rank's part alone. Copies start with the next rank, so that no card is read by all at once, and take turns on
    the streams in `lanes`, beside one another, if there are any.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    flat = output.view(-1).view(torch.uint8)
    window.barrier()  # everyone has written its part
    pairs = []
    for step in range(whole, size):
        other = (rank + step) % size
        begin = other * nbytes
        source = window.peer(other)[begin : begin + nbytes] if whole else window.peer(other)[:nbytes]
        pairs.append((flat[begin : begin + nbytes], source))
    _copy(pairs, lanes)
    window.barrier()  # everyone has read


def push(window: Window, output: torch.Tensor, nbytes: int, group: Any, *, lanes: Sequence[Any] = ()) -> None:
    """As `pull` with `whole`, but every rank writes its part into the others' windows."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    begin = rank * nbytes
    own = output.view(-1).view(torch.uint8)[begin : begin + nbytes]
    window.barrier()  # everyone has taken the window for this
    others = [(rank + step) % size for step in range(1, size)]
    _copy([(window.peer(other)[begin : begin + nbytes], own) for other in others], lanes)
    window.barrier()  # everyone has written


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]], lanes: Sequence[Any]) -> None:
    if not lanes:
        for to, of in pairs:
            to.copy_(of)
        return
    here = torch.cuda.current_stream()
    for lane in lanes[: len(pairs)]:
        lane.wait_stream(here)
    for i, (to, of) in enumerate(pairs):
        with torch.cuda.stream(lanes[i % len(lanes)]):
            to.copy_(of)
    for lane in lanes[: len(pairs)]:
        here.wait_stream(lane)
