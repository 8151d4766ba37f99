"""Copy engines in small steps, each a process group of its own that may hang: which part of them does what it should.

Run under torchrun with a time limit around it; prints as it goes, so that the last line says how far it came.

    make       windows of several sizes, on a card that is busy: milliseconds of each
    race       rank 0 signals into a window of rank 1, whose card is busy when it is made. `--zeroed late` makes it as
               torch alone does: a signal lost ends in torch's own message after three seconds and exit status 1
    gathers    all-gathers and reduce-scatters through windows that are made in between, beside a matrix product;
               compared with the backend's
    stack      a stack of blocks under FSDP2, step by step, compared with the backend's collectives

With `--held` every rank's host waits for its card behind every barrier of the last two: more than what loads a kernel
or takes memory makes it wait.
On a CPU, files stand for the memory of the cards.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gem_parallel.bench.stack import Stack
from gem_parallel.comm.apply import Collectives
from gem_parallel.comm.fsdp import CopyEngineAllGather, CopyEngineReduceScatter
from gem_parallel.comm.watch import Watch
from gem_parallel.comm.windows import CudaWindow, Make, Ring
from gem_parallel.config import CommConfig
from gem_parallel.dense.units import set_prefetch
from gem_parallel.runtime import Runtime, start

BUSY_S = 0.2


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the suite."""
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--step", required=True, choices=tuple(STEPS))
    parser.add_argument("--timeout", type=float, default=15, help="seconds that a rank waits for another")
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 32, 256], help="sizes of windows")
    parser.add_argument("--zeroed", default="before", choices=("before", "late"), help="windows in the race")
    parser.add_argument("--copies", default="read", choices=("read", "written"))
    parser.add_argument("--barriers", default="streams", choices=("streams", "kernels"))
    parser.add_argument("--held", action="store_true", help="hosts wait for their cards behind every barrier")
    parser.add_argument("--reduce", action="store_true", help="reduce by copies, too, in the stack")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=6)


def run(args: argparse.Namespace) -> int:
    """One step; 1 when it computed something else than the backend."""
    with start(args.device, timeout_s=args.timeout) as runtime, tempfile.TemporaryDirectory() as folder:
        if runtime.device.type == "cpu":
            from gem_parallel.testing import pretend_cards  # with TorchRec, which is slow to import

            pretend_cards(runtime.gather(folder, "a folder")[0])
        say = partial(_say, runtime, time.perf_counter())
        say(f"{args.step}: {runtime.world} x {runtime.device.type}, torch {torch.__version__}")
        good: bool = STEPS[args.step](args, runtime, say)
        say("equal" if good else "WRONG")
        runtime.barrier("the end of the step")
    return 0 if good else 1


def make(args: argparse.Namespace, runtime: Runtime, say: Callable[[str], None]) -> bool:
    """Four windows of every size."""
    made = maker(args, runtime)
    for mib in args.mib:
        took = []
        for _ in range(4):
            busy(runtime, BUSY_S / 10)
            began = time.perf_counter()
            made(mib * 2**20, dist.group.WORLD, runtime.device).barrier()
            took.append((time.perf_counter() - began) * 1e3)
        say(f"{mib} MiB: " + ", ".join(f"{ms:.1f}" for ms in took) + f" ms, beside {BUSY_S * 100:.0f} ms of work")
    return True


def race(args: argparse.Namespace, runtime: Runtime, say: Callable[[str], None]) -> bool:
    """Five windows; the barrier is torch's, which takes one signal for each."""
    if runtime.device.type != "cuda":
        say("on a CPU there is no stream that could come late (tests/test_parallel_windows.py pretends one)")
        return True
    side = torch.cuda.Stream()
    for i in range(5):
        if runtime.rank == 1:
            busy(runtime, BUSY_S)
        with unwaited() if args.zeroed == "late" else contextlib.nullcontext():
            window = CudaWindow(2**20, dist.group.WORLD, runtime.device, kernels=True)
        if runtime.rank == 1:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            window._handle.barrier(0, 3000)  # milliseconds
        say(f"window {i}: waiting")
        side.synchronize()
        say(f"window {i}: all have met")
    return True


def gathers(args: argparse.Namespace, runtime: Runtime, say: Callable[[str], None]) -> bool:
    """Rounds of sizes that are new, then known."""
    group, world, device, worst = dist.group.WORLD, runtime.world, runtime.device, 0.0
    made = maker(args, runtime)
    gather = CopyEngineAllGather(Ring(group, 4, made), pushes=args.copies == "written")
    scatter = CopyEngineReduceScatter(Ring(group, 4, made))
    beside = torch.randn(1024 if device.type == "cpu" else 8192, 1024, device=device)
    side = torch.cuda.Stream() if device.type == "cuda" else None
    for turn in range(8):
        for mib in args.mib:
            shard = mib * 2**18 // world
            own = torch.full((shard,), float(100 * turn + runtime.rank), device=device)
            whole, part = torch.empty(world * shard, device=device), torch.empty(shard, device=device)
            dist.all_gather_into_tensor(whole, own)
            dist.reduce_scatter_tensor(part, whole)
            for _ in range(1 + runtime.rank):  # ranks are not equally fast
                beside @ beside.T
            context = torch.cuda.stream(side) if side is not None else contextlib.nullcontext()
            if side is not None:
                side.wait_stream(torch.cuda.current_stream())
            with context:
                out = gather.allocate((world * shard,), dtype=torch.float32, device=device)
                mine = out[runtime.rank * shard : (runtime.rank + 1) * shard]
                mine.copy_(own)
                gather(output_tensor=out, input_tensor=mine, group=group)
                summed = scatter.allocate((world * shard,), dtype=torch.float32, device=device)
                found = scatter.allocate((shard,), dtype=torch.float32, device=device)
                summed.copy_(whole)
                scatter(output_tensor=found, input_tensor=summed, group=group, op=dist.ReduceOp.SUM)
            if side is not None:
                side.synchronize()
            worst = max(worst, float((out - whole).abs().max()), float((found - part).abs().max()))
            del out, mine, summed, found
        say(f"turn {turn}: error {worst:.1e}")
    return worst == 0.0


def stack(args: argparse.Namespace, runtime: Runtime, say: Callable[[str], None]) -> bool:
    """Losses of the same steps, with the backend's collectives and with windows."""
    reduce = "copy_engine" if args.reduce else "default"
    ours = CommConfig(all_gather="copy_engine", reduce_scatter=reduce, copies=args.copies, barriers=args.barriers)
    losses = [trained(args, runtime, say, config) for config in (CommConfig(), ours)]
    error = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
    say(f"largest relative difference of a loss: {error:.1e}")
    return error < 1e-4


def trained(args: argparse.Namespace, runtime: Runtime, say: Callable[[str], None], config: CommConfig) -> list[float]:
    """The loss of each step on this rank's batch."""
    torch.manual_seed(0)
    with runtime.device:
        model = Stack(args.layers, args.width, max(1, args.width // 128), 0.0)
    units = [f"blocks.{i}" for i in range(3 * args.layers)]
    mesh = init_device_mesh(runtime.device.type, (runtime.world,), mesh_dim_names=("shard",))
    for unit in units:
        fully_shard(model.get_submodule(unit), mesh=mesh)
    fully_shard(model, mesh=mesh)
    set_prefetch(model, units, 2)
    made = Collectives(config, runtime)
    if args.held:
        made._make = partial(Held, made._make)
    made.install(model.modules())
    say(made.why())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + runtime.rank)
    x = torch.randn(2, 128, args.width, device=runtime.device)
    losses = []
    for step in range(args.steps):
        began = time.perf_counter()
        loss = model(x).square().mean()
        say(f"step {step}: forward pass launched")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        held = sum(ring.nbytes for ring in made.rings) / 2**20
        say(f"step {step}: loss {losses[-1]:.6f}, {(time.perf_counter() - began) * 1e3:.0f} ms, windows {held:.0f} MiB")
    return losses


STEPS: dict[str, Callable[..., bool]] = {"make": make, "race": race, "gathers": gathers, "stack": stack}


def maker(args: argparse.Namespace, runtime: Runtime) -> Make:
    """Of windows as they are asked for, watched."""
    made: Make
    if runtime.device.type == "cpu":
        from gem_parallel.testing import FileWindow

        made = FileWindow
    else:
        made = partial(CudaWindow, kernels=args.barriers == "kernels", watch=Watch(runtime.timeout_s))
    return partial(Held, made) if args.held else made


class Held:
    """A window behind every barrier of which the host waits for all of its card: more than any call would make it."""

    def __init__(self, make: Make, nbytes: int, group: Any, device: torch.device) -> None:
        self._window, self._device = make(nbytes, group, device), device
        self.local = self._window.local

    def peer(self, rank: int) -> torch.Tensor:
        """See Window."""
        return self._window.peer(rank)

    def barrier(self) -> None:
        """See Window."""
        self._window.barrier()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def busy(runtime: Runtime, seconds: float) -> None:
    """Give this rank's default stream something to do; a card counts about 2 GHz."""
    if runtime.device.type == "cuda":
        torch.cuda._sleep(int(seconds * 2e9))


@contextlib.contextmanager
def unwaited() -> Iterator[None]:
    """Windows made within do not wait for their zeros."""
    whole = torch.cuda.default_stream
    torch.cuda.default_stream = lambda device=None: SimpleNamespace(synchronize=int)  # type: ignore[assignment, return-value]
    try:
        yield
    finally:
        torch.cuda.default_stream = whole


def _say(runtime: Runtime, began: float, text: str) -> None:
    for line in text.splitlines():
        print(f"{time.perf_counter() - began:7.2f} s  rank {runtime.rank}: {line}", flush=True)
