"""What it costs to compute a region's results again, one by one, and the curve that follows.

The region runs once with everything kept. Each result that could be computed again is, where it is first saved, on the
clocks of the device and of the host; which of the others it reads is noted, too. Then it runs backward, once, for what
that needs beside what was kept (`live.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map

from gem_parallel.memory.again import Result, Saving
from gem_parallel.memory.clock import REPEATS, Clock, cut_off, waits_for_units
from gem_parallel.memory.keeper import Keeper, is_weight
from gem_parallel.memory.live import Backward, Meter, Saved
from gem_parallel.memory.profile import Curve, Point, Size, bytes_of, has_storage, plain_tensors, stored, thin

REST = ""  # the name of what cannot be computed again
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the host's time in what is reckoned with


@dataclass
class Cost:
    """Of one result.

    Attributes:
        name: as in `Saving`.
        seconds: of the device (of the host, where there is none) to compute it once.
        host_s: of the host.
        nbytes: that need not be kept when it is computed again.
        whole: bytes of it when it has been computed, unpacked.
        first, last: when it is saved, counted in tensors; backward takes it in the opposite order.
        reads: names of other results that it is computed from.
        packing_s, packing_host_s: what packing it takes where it is kept, and unpacking it for all who saved it.
    """

    name: str
    seconds: float = 0.0
    host_s: float = 0.0
    nbytes: int = 0
    whole: int = 0
    first: int = 0
    last: int = 0
    reads: set[str] = field(default_factory=set)
    packing_s: float = 0.0
    packing_host_s: float = 0.0


class _Watching(Saving):
    """Keeps everything, and takes down what it sees."""

    def __init__(
        self, keeper: Keeper, *, least: int, module: nn.Module, size: Size, elsewhere: Collection[int] = ()
    ) -> None:
        super().__init__((), keeper, least=least, module=module)
        self.size, self.elsewhere = size, elsewhere
        self.costs: dict[str, Cost] = {}
        self.clocks: dict[str, Clock] = {}
        self.packing: dict[tuple[Any, ...], tuple[Clock, Clock, int]] = {}  # once, once again, and who saves it
        self.own = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers()) if has_storage(t)}
        self.places: dict[tuple[Any, ...], Saved] = {}  # what is kept
        self.storages: set[int] = set()  # of that; no other tensor gets one's address meanwhile
        self.backward = Backward(self.places.values())
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
        if has_storage(tensor) and not is_weight(tensor):
            key = tensor.untyped_storage()._cdata
            if key not in self.own and key not in self.elsewhere:
                self._count_bytes(tensor, name)
        own = self.size(tensor)
        return tensor.detach(), name, self.at, tensor.nbytes if own < tensor.nbytes else 0

    def unpacker(self) -> Callable[[Any], Tensor]:
        def unpack(kept: Any) -> Tensor:
            tensor, name, at, unpacked = kept
            if self.computing is None:
                self.backward.takes(at, unpacked)
            elif name is not None:
                self.computing.reads.add(name)
            return tensor  # type: ignore[no-any-return]

        return unpack

    def _time(self, result: Result, cost: Cost, tensor: Tensor) -> None:
        self.computing = cost
        clocks = [Clock(tensor.is_cuda) for _ in range(1 if tensor.is_cuda else REPEATS)]
        for clock in clocks:
            with clock:
                result.compute()
        self.clocks[cost.name] = min(clocks, key=lambda clock: clock.host_s)
        self.computing = None

    def _time_packing(self, tensor: Tensor) -> tuple[Clock, Clock, int]:
        quantiser = self.keeper.quantiser
        assert quantiser is not None
        there, back = Clock(tensor.is_cuda), Clock(tensor.is_cuda)
        with torch.no_grad():
            with there:
                small = quantiser.pack(tensor.detach())
            with back:
                quantiser.unpack(small)
        return there, back, 0

    def _count_bytes(self, tensor: Tensor, name: str | None) -> None:
        storage = tensor.untyped_storage()
        packed = self.size(tensor) < tensor.nbytes
        key = (storage._cdata, tensor.storage_offset(), tuple(tensor.shape)) if packed else (storage._cdata,)
        if key not in self.places:
            whole = 0 if storage._cdata in self.storages else storage.nbytes()
            self.storages.add(storage._cdata)
            self.places[key] = Saved(stored(tensor, self.size), whole, StorageWeakRef(storage))
            if packed and self.keeper.quantiser is not None and not self.keeper.offload_bytes:
                self.packing[key] = self._time_packing(tensor)
        self.places[key].names.add(name)
        if key in self.packing:
            there, back, savers = self.packing[key]
            self.packing[key] = there, back, savers + 1

    def finish(self) -> tuple[int, list[Cost]]:
        """Bytes that are kept in all, and the costs."""
        for name, clock in self.clocks.items():
            self.costs[name].seconds, self.costs[name].host_s = clock.seconds, clock.host_s
        rest = Cost(REST)
        for key, saved in self.places.items():
            cost = rest if saved.only is None else self.costs[saved.only]
            cost.nbytes += saved.nbytes
            cost.whole += saved.whole
            if key in self.packing:
                there, back, savers = self.packing[key]
                cost.packing_s += there.seconds + savers * back.seconds
                cost.packing_host_s += there.host_s + savers * back.host_s
        self.backward.packing_s = sum(c.packing_s for c in (rest, *self.costs.values()))
        self.backward.packing_host_s = sum(c.packing_host_s for c in (rest, *self.costs.values()))
        return sum(saved.nbytes for saved in self.places.values()), list(self.costs.values())


def watch(
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    module: nn.Module,
    keeper: Keeper,
    *,
    least: int,
    before: Callable[[], None] = lambda: None,
    elsewhere: Collection[int] = (),
) -> tuple[int, list[Cost], Backward]:
    """Run a region for what it would keep. Generators are left as they were; nothing of the run is left.

    Args:
        before: called when everything is ready to run.
        elsewhere: storages that regions before it keep anyway.

    Returns:
        (bytes that autograd would save beside parameters and buffers, costs of what can be computed again, the backward
        pass, without a moment in it where none was run: FSDP units inside a region wait for their own)
    """
    watching = _Watching(
        keeper, least=least, module=module, size=keeper.size_saved if keeper.works else bytes_of, elsewhere=elsewhere
    )
    devices = sorted({t.device.index for t in plain_tensors((args, kwargs)) if t.is_cuda})
    with torch.random.fork_rng(devices):
        args, kwargs = tree_map(cut_off, (args, dict(kwargs)))
        before()
        with watching.hooks():
            out = function(*args, **kwargs)
        made = plain_tensors(out)
        storages = watching.storages
        watching.backward.results = tuple(i for i, t in enumerate(made) if t.untyped_storage()._cdata in storages)
        found = [t for t in made if t.requires_grad]
        leaves = [t for t in (*plain_tensors((args, kwargs)), *module.parameters()) if t.requires_grad]
        del out, made
        if found and leaves and not waits_for_units(module):
            device = found[0].device
            watching.backward.run(found, leaves)
            watching.backward.ahead = _ahead(device, function, args, kwargs)
    saved, costs = watching.finish()
    return saved, costs, watching.backward


def _ahead(device: torch.device, function: Callable[..., Any], args: Any, kwargs: Any) -> int:
    """The most bytes that a second forward pass needs: what it saves, and the gradients of its results beside them. A
    run of its own, for under a mode kernels may leave other nodes than they do.
    """
    with Meter(device) as meter:
        out = function(*args, **kwargs)
        most = meter.take()
    return most + sum(t.nbytes for t in plain_tensors(out) if t.requires_grad)


def computed(costs: Sequence[Cost], names: Collection[str]) -> Callable[[int], int]:
    """How many bytes of the results `names` backward has computed when it takes a tensor, by the tensor's number.

    A result is there from the backward of the last that saved it, or that another one which is computed again reads it
    for, until that of the first.
    """
    chosen = {cost.name: cost for cost in costs if cost.name in names}
    start: dict[str, int] = {}
    for cost in sorted(chosen.values(), key=lambda c: -c.last):  # readers are saved after what they read
        start[cost.name] = max(cost.last, start.get(cost.name, 0))
        for read in cost.reads & chosen.keys():
            start[read] = max(start.get(read, 0), start[cost.name])
    spans = [(c.first, start[c.name], c.whole or c.nbytes) for c in chosen.values()]
    return lambda now: sum(nbytes for first, last, nbytes in spans if first <= now <= last)


def working(costs: Sequence[Cost], names: Collection[str]) -> int:
    """The most bytes of the results `names` that backward has computed at a time."""
    there = computed(costs, names)
    return max((there(cost.last) for cost in costs), default=0)


def curve(
    region: str,
    costs: Sequence[Cost],
    *,
    inputs: int,
    saved: int,
    unpacked: int,
    forward_s: float,
    host_s: float | None = None,
    backward: Backward | None = None,
    inside: str = "none",
    inside_s: float = 0.0,
    packs: bool = True,
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
        backward: its backward pass, as `watch` saw it; without, a point's working bytes are what is kept and computed
            again alone.
        inside: what backward kernels write on their way while all this was measured, and
        inside_s: what that takes of the device, of the host where there is none.
        packs: as of Point.
    """
    whole = max(saved, inputs)
    seen = backward if backward is not None and backward.moments else None
    packing_s = 0.0 if backward is None else backward.packing_s
    packing_host_s = 0.0 if backward is None else backward.packing_host_s
    part = min(inputs / max(saved, 1), 1.0)  # of what is packed, where inputs alone are kept
    worth = [c for c in costs if c.nbytes > 0]

    def seconds(device: float, host: float) -> float:
        device += inside_s
        return device if host_s is None else step_seconds(forward_s, host_s, device, host)

    points = [
        Point(
            kept=inputs,
            seconds=seconds(forward_s + part * packing_s, (host_s or 0.0) + part * packing_host_s),
            names=(),
            working=max(unpacked, inputs, seen.most(whole=True) if seen else 0, seen.ahead if seen else 0),
        ),
        Point(
            kept=whole,
            seconds=seconds(packing_s, packing_host_s),
            names=None,
            working=max(whole, seen.most() if seen else 0),
        ),
    ]
    for share in SHARES if host_s is not None else SHARES[:1]:

        def dear(cost: Cost, share: float = share) -> float:
            device, host = cost.seconds - cost.packing_s, cost.host_s - cost.packing_host_s
            return ((1 - share) * device + share * host) / cost.nbytes

        order = sorted(worth, key=dear)
        for count in range(1, len(order) + 1):
            again = order[:count]
            kept = max(whole - sum(c.nbytes for c in again), inputs)
            spent = seconds(
                packing_s + sum(c.seconds - c.packing_s for c in again),
                packing_host_s + sum(c.host_s - c.packing_host_s for c in again),
            )
            points.append(Point(kept=kept, seconds=spent, names=None, again=tuple(c.name for c in again)))
    falling: list[Point] = []
    for point in sorted(points, key=lambda p: (p.kept, p.seconds)):
        if falling and point.seconds >= falling[-1].seconds and point is not points[1]:
            continue  # more bytes for nothing
        if point.again:
            names = frozenset(point.again)
            most = seen.most(names, computed(costs, names)) if seen else point.kept + working(costs, names)
            point = replace(point, working=max(point.kept, most))
        falling.append(replace(point, inside="none" if point.names == () else inside, packs=packs))
    return Curve(region=region, points=tuple(thin(falling)), forward_s=forward_s)


def merged(plain: Curve, *others: Curve) -> Curve:
    """The curve of a region that may pack what it keeps or leave it as it is, and have its backward kernels write or
    not, whichever costs less for its bytes: to pack a tensor and unpack it moves six bytes for each that it saves of 16
    bits, to compute a norm again two, to write it on the way one.
    """
    points = [point for found in (plain, *others) for point in found.points]
    falling: list[Point] = []
    for point in sorted(points, key=lambda p: (p.kept, p.seconds)):
        if not falling or point.seconds < falling[-1].seconds or point.kept == plain.whole:
            falling.append(point)
    return replace(plain, points=tuple(thin(falling)))


def step_seconds(forward_s: float, host_s: float, device: float, host: float) -> float:
    """What a step sees of `device` and `host` seconds more: whichever of the two takes longer.

    The device works twice as long on the backward pass as on the forward pass; the host launches both in equal time (an
    estimate: autograd launches without Python, but more).
    """
    before = max(3 * forward_s, 2 * host_s)
    return max(3 * forward_s + device, 2 * host_s + host) - before
