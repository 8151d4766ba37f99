"""What makes a pass over the layers repeatable: CUDA graphs, all of one kind in one pool of memory.

A recorder runs a pass once and says how to run it again, on the same addresses: what the pass reads must stay where it
is, and what it makes is there again after each run. Tensors that a pass has made and that somebody holds keep their
memory; the rest of it is the next pass's.

GEM_CHECK_GRAPHS=1 in the environment is for a fault on a card: every batch is looked at on the host before it goes into
a room, the host waits after each replay and names the pass that failed, and a pass whose gradients are not finite, or
that has other ones when it is repeated, says for which parameters. Steps take three times as long.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from gem_model.lanes import Lanes

Run = Callable[[], list[Tensor]]  # one pass: what it makes
Again = Callable[[], Any]  # the same pass again, in the same memory


class Recorder(Protocol):
    """What makes passes repeatable."""

    def __call__(self, run: Run, name: str, /) -> tuple[list[Tensor], Again]:
        """What `run` has made, and what makes it there again; `name` tells the pass from others."""

    def forget(self) -> None:
        """Let go of the memory of all passes; nothing that was recorded is run again."""


class CudaGraphs:
    """Passes captured as CUDA graphs.

    Attributes:
        pool: the memory of all graphs, which never run at once.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self.pool: Any = None

    def __call__(self, run: Run, name: str) -> tuple[list[Tensor], Again]:
        """See `Recorder`. Raises torch.OutOfMemoryError."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, which load data or watch collectives, may call CUDA meanwhile: only this one's are watched.
        options: dict[str, Any] = {"pool": self.pool, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(graph, **options), self._lanes.joined():
            made = run()
        self.pool = graph.pool()
        return made, waited_for(graph.replay, name, torch.cuda.synchronize) if checking() else graph.replay

    def forget(self) -> None:
        """See `Recorder`."""
        self.pool = None
        torch.cuda.empty_cache()


def checking() -> bool:
    """Whether GEM_CHECK_GRAPHS asks for checks; see the module."""
    return os.environ.get("GEM_CHECK_GRAPHS", "0") not in ("", "0")


def waited_for(again: Again, name: str, wait: Callable[[], Any]) -> Again:
    """`again`, which is waited for and whose failure has its name.

    The runner raises RuntimeError: what is enqueued failed, before this pass or in it.
    """
    count = 0

    def run() -> None:
        nonlocal count
        count += 1
        for step, what in (
            (wait, f"what was enqueued before replay {count} of"),
            (again, f"replay {count} of"),
            (wait, f"replay {count} of"),
        ):
            try:
                step()
            except Exception as error:
                raise RuntimeError(f"{what} the {name} has failed: {error}") from error

    return run


def on_cuda(parameters: Iterable[Tensor]) -> None:
    """Raises ValueError unless the parameters are on a CUDA device."""
    places = {p.device.type for p in parameters}
    if places != {"cuda"}:
        raise ValueError(f"CUDA graphs need layers on a CUDA device; these have parameters on {sorted(places)}")


@contextlib.contextmanager
def warming_up() -> Iterator[None]:
    """Passes before a capture, which compile kernels and fill caches, on a stream of their own; after the block what
    they held is the graphs' to take.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def autocast_without_cache(device: str) -> Iterator[None]:
    """Autocast as it is, but casting a weight in every graph that uses it."""
    on = torch.is_autocast_enabled(device)
    with torch.autocast(device, dtype=torch.get_autocast_dtype(device), enabled=on, cache_enabled=False):
        yield
