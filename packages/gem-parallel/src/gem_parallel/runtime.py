"""The process: its rank, its device, and the process groups through which it talks to the others."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist


class PeerLostError(RuntimeError):
    """Another rank did not answer: it died, hangs, or left the common sequence of collectives."""


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """One rank of a running job; made by `start`, ended by `close` or by leaving its `with` block.

    Attributes:
        rank, world: this process among all.
        local_rank, local_world: this process among those of its host.
        device: the device of this rank, already current when it is a CUDA device.
        backend: "nccl" on CUDA, "gloo" on the CPU.
        timeout_s: how long a collective waits for the others before it fails.
        control: a gloo group of all ranks for barriers, errors and checkpoint metadata, never for the model's tensors.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device
    backend: str
    timeout_s: float
    control: Any = field(repr=False)
    owns_group: bool = field(default=True, repr=False)
    peers: tuple[tuple[str, int], ...] = field(default=(), repr=False)  # host name and process of every rank

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Say what was being waited for when a collective inside the block fails.

        Raises:
            PeerLostError: in place of the backend's error, when that error is about communication; others pass through.
        """
        began = time.monotonic()
        try:
            yield
        except PeerLostError:
            raise
        except RuntimeError as error:
            if not _is_about_communication(error):
                raise
            reason = " ".join(str(error).split())[:500] or type(error).__name__
            gone = self.gone()
            for _ in range(10):  # a killed process closes its connections a moment before it is gone
                if gone:
                    break
                time.sleep(0.1)
                gone = self.gone()
            who = "another rank, which died or hangs"
            if gone:
                who = f"rank {', '.join(map(str, gone))}, whose process on this host is gone"
            raise PeerLostError(
                f"rank {self.rank} of {self.world} waited {time.monotonic() - began:.1f} s for {what} and got no "
                f"answer from {who} (timeout {self.timeout_s:g} s): {reason}"
            ) from error

    def gone(self) -> list[int]:
        """Ranks of this host whose processes do not exist any more. Asks the system, not the ranks."""
        here = socket.gethostname()
        return [rank for rank, (host, pid) in enumerate(self.peers) if host == here and not _is_alive(pid)]

    def barrier(self, what: str) -> None:
        """Wait for all ranks; `what` names the reason in the error.

        Raises:
            PeerLostError: on a rank that waited longer than `timeout_s`; rank 0 names the ranks that are missing.
        """
        if self.world == 1:
            return
        with self.waiting(what):
            dist.monitored_barrier(self.control, timedelta(seconds=self.timeout_s), wait_all_ranks=True)

    def gather(self, value: Any, what: str) -> list[Any]:
        """Everyone's `value` (a small picklable object), in rank order, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        with self.waiting(what):
            dist.all_gather_object(values, value, group=self.control)
        return values

    def close(self) -> None:
        """End the process groups that `start` made; calling it again does nothing."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def start(
    device: str = "auto",
    timeout_s: float = 300,
    *,
    rank: int | None = None,
    world: int | None = None,
    init_method: str | None = None,
) -> Runtime:
    """Join the job that torchrun started, or begin a world of one when there is none.

    A world of one opens no port and needs no network. When a default process group exists already, it is adopted and
    left alone by `close`. Nothing about NCCL's algorithms is set here: the environment decides (NCCL_NVLS_ENABLE, ...).

    Args:
        device: "cpu", "cuda" or "auto" (CUDA where there is a device). Every rank takes the device of its local rank.
        timeout_s: seconds that a collective waits before it fails.
        rank, world, init_method: for launchers other than torchrun, as for `torch.distributed.init_process_group`
            (for example `init_method="file:///tmp/x"`).

    Raises:
        ValueError: an unknown device, CUDA asked for but absent, fewer devices than local ranks, or a rank outside
            the world.
    """
    kind = _device_kind(device)
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be > 0, got {timeout_s!r}")
    explicit = rank is not None or world is not None
    if explicit:
        if rank is None or world is None or not 0 <= rank < world:
            raise ValueError(f"rank and world go together with 0 <= rank < world, got rank={rank!r}, world={world!r}")
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    else:
        rank, world = 0, 1
    owns = not dist.is_initialized()
    if not owns:
        rank, world = dist.get_rank(), dist.get_world_size()
    local_world = _local_world(world, explicit)
    local_rank = int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ and not explicit else rank % local_world
    target = torch.device("cpu")
    if kind == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ValueError(f"local rank {local_rank} needs a CUDA device, but there are {torch.cuda.device_count()}")
        target = torch.device("cuda", local_rank)
        torch.cuda.set_device(target)
    backend = "nccl" if kind == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if owns:
        where: dict[str, Any]
        if world == 1 and init_method is None:
            where = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        elif init_method is not None:
            where = {"init_method": init_method, "rank": rank, "world_size": world}
        elif "MASTER_ADDR" in os.environ:
            where = {"init_method": "env://", "rank": rank, "world_size": world}
        else:
            raise ValueError(f"a world of {world} needs torchrun's MASTER_ADDR and MASTER_PORT, or init_method")
        dist.init_process_group(backend, timeout=timeout, device_id=target if kind == "cuda" else None, **where)
    backend = dist.get_backend()
    control = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout)
    peers: list[Any] = [None] * world
    if world > 1:
        dist.all_gather_object(peers, (socket.gethostname(), os.getpid()), group=control)
    else:
        peers = [(socket.gethostname(), os.getpid())]
    return Runtime(
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        device=target,
        backend=backend,
        timeout_s=timeout_s,
        control=control,
        owns_group=owns,
        peers=tuple(peers),
    )


def attach() -> Runtime:
    """The process group that exists, or, when there is none, a world of one without a process group."""
    if dist.is_initialized():
        return start("cuda" if "nccl" in dist.get_backend() else "cpu")
    return Runtime(
        rank=0,
        world=1,
        local_rank=0,
        local_world=1,
        device=torch.device("cpu"),
        backend="none",
        timeout_s=300,
        control=None,
        owns_group=False,
    )


def _device_kind(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ValueError(f'device must be "auto", "cpu" or "cuda", got {device!r}')
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError('device="cuda" was asked for, but torch finds no CUDA device')
    return device


def _local_world(world: int, explicit: bool) -> int:
    """Ranks per host: torchrun's LOCAL_WORLD_SIZE where it divides the world, else everyone."""
    value = 0 if explicit else int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    return value if value > 0 and world % value == 0 else world


def _is_alive(pid: int) -> bool:
    """Whether a process of this host runs; one that ended and was not waited for (a zombie) does not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except FileNotFoundError:
        return not os.path.isdir("/proc/self")  # without /proc nothing is known
    except OSError:
        return True


_SIGNS = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|timed out|monitoredbarrier|broken pipe", re.IGNORECASE
)


def _is_about_communication(error: RuntimeError) -> bool:
    # gloo reports a lost peer as a plain RuntimeError, so that its text is the only sign
    if isinstance(error, dist.DistError):
        return True
    return _SIGNS.search(str(error)) is not None
