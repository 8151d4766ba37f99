"""Cases that forked processes build side by side and then measure one after the other.

What a process has built, it measures: a compiled function lives where it was compiled. While one measures, the others
wait and nothing else is on the GPU. A kernel that reads where it must not takes one process with it; what that one had
left goes to a new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from gem_kernels.bench import timing

PATIENCE = 300.0  # seconds that a process may take for its builds, or for a case


class Suite(Protocol):
    """What a process does for one case."""

    def build(self, name: str, device: torch.device) -> None:
        """Run everything that it measures, once."""

    def measure(self, name: str, device: torch.device, ceilings: dict[str, float]) -> list[dict[str, Any]]:
        """Its rows."""


def compile_alone() -> None:
    """torch.compile shall compile in the process that asks: those are side by side already."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    config = sys.modules.get("torch._inductor.config")
    if config is not None:
        config.compile_threads = 1  # type: ignore[attr-defined]


def _serve(connection: Connection, names: list[str], suite: Suite) -> None:
    """A process's life: build, say which card there is, then answer until there is nothing more to do."""
    if not torch.cuda.is_available():
        connection.send(None)
        return
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        for name in names:
            suite.build(name, device)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    connection.send(torch.cuda.get_device_name())
    while (asked := connection.recv()) is not None:
        name, ceilings = asked
        try:
            answer = timing.ceilings(device) if name is None else suite.measure(name, device, ceilings)
        except Exception as error:  # a case that cannot be made, or none of it run, is no reason to lose the others
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            answer = []
        torch.cuda.synchronize()  # raises where a kernel brought the process's use of the GPU down
        torch.cuda.empty_cache()
        connection.send(answer)


class Workers:
    """`jobs` forked processes that share the cases; a context in which they are ready, each in its turn.

    lock: a file that several commands share: none measures while another builds or measures.
    """

    def __init__(self, names: list[str], jobs: int, suite: Suite, lock: Path | None = None) -> None:
        self.suite = suite
        self.context = multiprocessing.get_context("fork")  # the imports are done once; CUDA is not in use here
        self.shares = [names[i::jobs] for i in range(min(jobs, len(names)))]
        self.lock = None if lock is None else lock.open("a")
        self.card: str | None = None
        self.owner: dict[str, int] = {}
        self.processes: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Workers:
        self._hold(fcntl.LOCK_SH)
        begun = time.monotonic()
        self.processes = [self._start(share) for share in self.shares]
        self.owner = {name: i for i, share in enumerate(self.shares) for name in share}
        for i, share in enumerate(self.shares):
            if not self._ready(i):
                print(f"building {', '.join(share)}: the process ended", flush=True)
        print(f"built in {time.monotonic() - begun:.1f} s", flush=True)
        self._hold(fcntl.LOCK_EX)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        for process, connection in self.processes:
            with contextlib.suppress(OSError):
                connection.send(None)
            process.join(5)
            if process.is_alive():
                process.kill()
        if self.lock is not None:
            self.lock.close()

    def ceilings(self) -> dict[str, float]:
        """What the card can do at most, by the first process that lives; nothing if none does."""
        for i in range(len(self.processes)):
            answer = self._ask(i, (None, {}))
            if answer is not None:
                return dict(answer)
        return {}

    def measure(self, name: str, ceilings: dict[str, float]) -> list[dict[str, Any]]:
        """The rows of a case. A process that ends meanwhile gives what it had left to a new one."""
        i = self.owner[name]
        answer = self._ask(i, (name, ceilings))
        if answer is not None:
            self.shares[i].remove(name)
            return list(answer)
        print(f"{name}: the process ended; what it had left goes to a new one", flush=True)
        self.shares[i].remove(name)
        if self.shares[i]:
            self.processes[i] = self._start(self.shares[i])
            self._ready(i)
        return []

    def _start(self, share: list[str]) -> tuple[Any, Connection]:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(theirs, list(share), self.suite))
        process.start()
        theirs.close()
        return process, ours

    def _ready(self, i: int) -> bool:
        """Whether a process has built its share."""
        card = self._receive(i)
        self.card = card or self.card
        return card is not None

    def _ask(self, i: int, what: tuple[str | None, dict[str, float]]) -> Any:
        try:
            self.processes[i][1].send(what)
        except OSError:
            return None
        return self._receive(i)

    def _receive(self, i: int) -> Any:
        process, connection = self.processes[i]
        try:
            if connection.poll(PATIENCE):
                return connection.recv()
        except (EOFError, OSError):
            return None
        process.kill()  # hangs
        return None

    def _hold(self, how: int) -> None:
        if self.lock is not None:
            fcntl.flock(self.lock, how)
