"""What it costs to compute a region's results again, one by one, and the curve that follows.

The region runs once with everything kept. Each result that could be computed again is, where it is first saved, on the
clocks of the device and of the host; which of the others it reads is noted, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gem_parallel.memory.again import Result, Saving
from gem_parallel.memory.keeper import Keeper, is_weight
from gem_parallel.memory.profile import Curve, Point, Size, bytes_of, has_storage, plain_tensors, stored, thin

REPEATS = 3  # of a measurement on a CPU, which others may use meanwhile
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the host's time in what is reckoned with


@dataclass
class Cost:
    """Of one result.

    Attributes:
        name: as in `Saving`.
        seconds: of the device (of the host, where there is none) to compute it once.
        host_s: of the host.
        nbytes: that need not be kept when it is computed again.
        first, last: when it is saved, counted in tensors; backward takes it in the opposite order.
        reads: names of other results that it is computed from.
    """

    name: str
    seconds: float = 0.0
    host_s: float = 0.0
    nbytes: int = 0
    first: int = 0
    last: int = 0
    reads: set[str] = field(default_factory=set)


class _Watching(Saving):
    """Keeps everything, and takes down what it sees."""

    def __init__(self, keeper: Keeper, *, least: int, module: nn.Module, size: Size) -> None:
        super().__init__((), keeper, least=least, module=module)
        self.size = size
        self.costs: dict[str, Cost] = {}
        self.events: dict[str, tuple[Any, Any]] = {}
        self.own = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers()) if has_storage(t)}
        self.places: dict[Any, tuple[int, set[str | None]]] = {}  # what is kept: its bytes, and who it can be had from
        self.alive: list[Any] = []
        self.at = 0
        self.computing: Cost | None = None

    def pack(self, tensor: Tensor) -> Any:
        self.at += 1
        place = self.find(tensor)
        name = None
        if place is not None:
            name = place.result.name
            if name not in self.costs:
                self.costs[name] = Cost(name, first=self.at)
                self._time(place.result, self.costs[name], tensor)
            self.costs[name].last = self.at
        if has_storage(tensor) and tensor.untyped_storage()._cdata not in self.own and not is_weight(tensor):
            self._count_bytes(tensor, name)
        return tensor.detach(), name

    def unpacker(self) -> Callable[[Any], Tensor]:
        def unpack(kept: Any) -> Tensor:
            tensor, name = kept
            if name is not None and self.computing is not None:
                self.computing.reads.add(name)
            return tensor  # type: ignore[no-any-return]

        return unpack

    def _time(self, result: Result, cost: Cost, tensor: Tensor) -> None:
        self.computing = cost
        events = None
        if tensor.is_cuda:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
        took = []
        for _ in range(1 if tensor.is_cuda else REPEATS):
            began = time.perf_counter()
            result.compute()
            took.append(time.perf_counter() - began)
        cost.host_s = cost.seconds = min(took)
        if events is not None:
            events[1].record()
            self.events[cost.name] = events
        self.computing = None

    def _count_bytes(self, tensor: Tensor, name: str | None) -> None:
        storage = tensor.untyped_storage()
        packed = self.size(tensor) < tensor.nbytes
        key = (storage._cdata, tensor.storage_offset(), tuple(tensor.shape)) if packed else (storage._cdata,)
        if key not in self.places:
            self.places[key] = stored(tensor, self.size), set()
            self.alive.append(StorageWeakRef(storage))  # no other tensor gets its address meanwhile
        self.places[key][1].add(name)

    def finish(self) -> tuple[int, list[Cost]]:
        """Bytes that are kept in all, and the costs."""
        for name, (began, ended) in self.events.items():
            ended.synchronize()
            self.costs[name].seconds = began.elapsed_time(ended) * 1e-3
        for nbytes, names in self.places.values():
            (only, *others) = names
            if only is not None and not others:
                self.costs[only].nbytes += nbytes
        return sum(nbytes for nbytes, _ in self.places.values()), list(self.costs.values())


def watch(
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    module: nn.Module,
    keeper: Keeper,
    *,
    least: int,
    before: Callable[[], None] = lambda: None,
) -> tuple[int, list[Cost]]:
    """Run a region for what it would keep. Generators are left as they were; nothing of the run is left.

    Args:
        before: called when everything is ready to run.

    Returns:
        (bytes that autograd would save beside parameters and buffers, costs of what can be computed again)
    """
    watching = _Watching(keeper, least=least, module=module, size=keeper.size_saved if keeper.works else bytes_of)
    devices = sorted({t.device.index for t in plain_tensors((args, kwargs)) if t.is_cuda})
    with torch.random.fork_rng(devices):
        before()
        with watching.hooks():
            out = function(*args, **kwargs)
        del out
    return watching.finish()


def working(costs: Sequence[Cost], names: Collection[str]) -> int:
    """The most bytes of the results `names` that backward has computed at a time.

    A result is there from the backward of the last that saved it, or that another one which is computed again reads it
    for, until that of the first.
    """
    chosen = {cost.name: cost for cost in costs if cost.name in names}
    start: dict[str, int] = {}
    for cost in sorted(chosen.values(), key=lambda c: -c.last):  # readers are saved after what they read
        start[cost.name] = max(cost.last, start.get(cost.name, 0))
        for read in cost.reads & chosen.keys():
            start[read] = max(start.get(read, 0), start[cost.name])
    return max(
        (sum(c.nbytes for c in chosen.values() if c.first <= now <= start[c.name]) for now in start.values()), default=0
    )


def curve(
    region: str,
    costs: Sequence[Cost],
    *,
    inputs: int,
    saved: int,
    unpacked: int,
    forward_s: float,
    host_s: float | None = None,
) -> Curve:
    """The curve of a region: the whole again, all results again, fewer and fewer of them, none.

    Computed again first is what saves most bytes a second, of the device, of the host or of a mixture of both: where
    the host holds the step up, a large product is cheap, for it is one launch, and where the device does, what moves
    little memory is. The best of all these choices for each number of bytes are the points.

    Args:
        inputs: bytes of the region's inputs, which stay in any case.
        saved: bytes that are kept when nothing is computed again.
        unpacked: the same if nothing were packed.
        forward_s: seconds of the region's forward pass on the device.
        host_s: seconds of the host for it; given, points cost what a step sees of them (`step_seconds`).
    """
    whole = max(saved, inputs)
    worth = [c for c in costs if c.nbytes > 0]

    def seconds(device: float, host: float) -> float:
        return device if host_s is None else step_seconds(forward_s, host_s, device, host)

    points = [
        Point(kept=inputs, seconds=seconds(forward_s, host_s or 0.0), names=(), working=max(unpacked, inputs)),
        Point(kept=whole, seconds=0.0, names=None, working=whole),
    ]
    for share in SHARES if host_s is not None else SHARES[:1]:

        def dear(cost: Cost, share: float = share) -> float:
            return max((1 - share) * cost.seconds + share * cost.host_s, 1e-12) / cost.nbytes

        order = sorted(worth, key=dear)
        for count in range(1, len(order) + 1):
            again = order[:count]
            kept = max(whole - sum(c.nbytes for c in again), inputs)
            spent = seconds(sum(c.seconds for c in again), sum(c.host_s for c in again))
            points.append(Point(kept=kept, seconds=spent, names=None, again=tuple(c.name for c in again)))
    falling: list[Point] = []
    for point in sorted(points, key=lambda p: (p.kept, p.seconds)):
        if falling and point.seconds >= falling[-1].seconds and point is not points[1]:
            continue  # more bytes for nothing
        if point.again:
            point = replace(point, working=point.kept + working(costs, point.again))
        falling.append(point)
    return Curve(region=region, points=tuple(thin(falling)), forward_s=forward_s)


def step_seconds(forward_s: float, host_s: float, device: float, host: float) -> float:
    """What a step sees of `device` and `host` seconds more: whichever of the two takes longer.

    The device works twice as long on the backward pass as on the forward pass; the host launches both in equal time (an
    estimate: autograd launches without Python, but more).
    """
    before = max(3 * forward_s, 2 * host_s)
    return max(3 * forward_s + device, 2 * host_s + host) - before
