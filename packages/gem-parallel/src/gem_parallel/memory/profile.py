"""What a region costs: the seconds and bytes of its operators, and the curve of seconds recomputed against bytes kept.

Operators are timed where they run, custom ones included. Where nothing can be timed (a plan without the device), a
custom operator is counted by what `declare_cost` says of it, and torch's partitioner, too, sees those FLOPs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, register_flop_formula

from gem_parallel.memory.allocate import Option
from gem_parallel.memory.keeper import is_weight
from gem_parallel.memory.recompute import EagerMode, Function, OpNames, may_be_kept, watched

POINTS = 16  # of a curve
DEVICE_LEAST_S = 20e-6  # of an operator on a card whose result a plan may keep
HOST_KEEPS_S = 30e-6  # of the host, to keep a result and to hand it out
HELD_CYCLES = 100_000_000  # of the device's clock, about 50 ms: some hundred operators' launches

Size = Callable[[torch.Tensor], int]


def bytes_of(tensor: torch.Tensor) -> int:
    """A tensor's own bytes."""
    return tensor.nbytes


_BYTES: dict[Any, Callable[..., float]] = {}


def declare_cost(op: Any, *, flops: Callable[..., float], nbytes: Callable[..., float] | None = None) -> None:
    """Tell the solvers what a custom operator costs.

    Args:
        op: a `torch.library` operator (`torch.ops.lib.name` or what `torch.library.custom_op` returned).
        flops: FLOPs from the operator's arguments, tensors given as their shapes (torch.Size), and `out_shape`, as
            for `torch.utils.flop_counter.register_flop_formula`, where it is registered.
        nbytes: bytes that it reads and writes, from the arguments themselves; by default its inputs and outputs.

    Raises:
        TypeError: not an operator.
    """
    packet = getattr(op, "_opoverload", op)
    packet = getattr(packet, "overloadpacket", packet)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        raise TypeError(f"declare_cost: expected a torch.library operator, got {op!r}")
    if packet in flop_registry:
        del flop_registry[packet]
    register_flop_formula(packet)(flops)  # type: ignore[arg-type]
    if nbytes is not None:
        _BYTES[packet] = nbytes


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates for operators that are not timed: seconds = max(flops / tflops, bytes / gbps)."""

    tflops: float = 350.0
    gbps: float = 3000.0

    def seconds(self, op: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> float:
        """The roofline of one call."""
        packet = op.overloadpacket
        flops = flop_registry[packet](*args, **kwargs, out_val=out) if packet in flop_registry else 0.0
        if packet in _BYTES:
            moved = _BYTES[packet](*args, **kwargs)
        else:
            moved = sum(t.nbytes for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor))
        return max(flops / (self.tflops * 1e12), moved / (self.gbps * 1e9))


@dataclass
class OpCost:
    """One operator of a region: seconds, bytes of its results, and whether these may be kept."""

    name: str
    seconds: float
    nbytes: int
    free: bool


class Recorder(EagerMode):
    """Times every operator that runs inside; with `machine` given, counts instead (fake tensors will do)."""

    def __init__(self, machine: Machine | None = None, size: Size = bytes_of) -> None:
        super().__init__()
        self._machine, self._size = machine, size
        self._count = OpNames()
        self._rows: list[
            tuple[str, Any, int, Any, bool]
        ] = []  # name, seconds or a pair of events, bytes, out, keepable

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = self._count.next(op)
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) if cuda else None
        if events:
            events[0].record()
        began = time.perf_counter()
        out = op(*args, **kwargs)
        took: Any = time.perf_counter() - began
        if events:
            events[1].record()
            took = events
        if self._machine is not None:
            took = self._machine.seconds(op, args, kwargs, out)
        tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        keep = may_be_kept(op) and bool(tensors)
        version = [(watched(t), t._version) for t in tensors] if keep and self._machine is None else []
        self._rows.append((name, took, sum(map(self._size, tensors)), version, keep))
        return out

    def costs(self) -> list[OpCost]:
        """The operators in their order; waits for the device. Results that were changed in place cannot be kept."""
        found = []
        for name, took, nbytes, versions, keep in self._rows:
            if isinstance(took, tuple):
                took[1].synchronize()
                took = took[0].elapsed_time(took[1]) * 1e-3
            unchanged = all(t._version == version for t, version in versions)
            found.append(OpCost(name, took, nbytes, keep and unchanged))
        self._rows.clear()
        return found


def is_on_card(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a region's inputs are on a CUDA device."""
    return any(t.is_cuda for t in plain_tensors((args, kwargs)))


def hold_back() -> None:
    """Let the device wait, so that the host launches a region ahead of it.

    Between the events around an operator there would otherwise be the time that the host takes to launch it, which is
    most of a small operator's, and a plan would keep what is cheap to compute.
    """
    torch.cuda._sleep(HELD_CYCLES)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One way to run a region.

    Attributes:
        kept: bytes between forward and backward.
        seconds: what backward recomputes.
        names: operators whose results are kept, while the region runs again; None: it does not.
        again: results that are computed again by themselves; everything else that autograd saves is kept.
        budget: for a compiled region, the share that its partitioner may keep.
        working: bytes while its backward runs, which hold what was computed again, unpacked.
        packs: whether what is kept is quantised, where that is asked for.
        inside: what backward kernels write on their way, as of MemoryConfig.
    """

    kept: int
    seconds: float
    names: tuple[str, ...] | None
    again: tuple[str, ...] = ()
    budget: float = 1.0
    working: int = 0
    packs: bool = True
    inside: str = "none"

    @property
    def option(self) -> Option:
        """For the allocation."""
        return Option(kept=self.kept, seconds=self.seconds, working=self.working)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A region's Pareto curve.

    Attributes:
        points: from the fewest bytes (only its inputs) to all of them.
        forward_s: seconds of its forward pass.
    """

    region: str
    points: tuple[Point, ...]
    forward_s: float = field(default=0.0)

    @property
    def whole(self) -> int:
        """Bytes that are kept without recomputation."""
        return self.points[-1].kept


def curve(
    region: str, costs: list[OpCost], inputs: int, saved: int, unpacked: int = 0, *, least_s: float = 0.0
) -> Curve:
    """The curve of a region whose operators are `costs`.

    Keeping an operator's results spares its seconds in backward. Operators in the order of seconds per byte: every
    prefix is the best choice for the bytes that it takes.

    Args:
        inputs: bytes of the region's inputs, which stay in any case.
        saved: bytes that autograd saves without recomputation.
        unpacked: the same when nothing is packed; by default `saved`.
        least_s: what takes less is always computed again: to keep a result and hand it out costs the host more.
    """
    working = max(unpacked or saved, inputs)
    total = sum(cost.seconds for cost in costs)
    worth = [c for c in costs if c.free and c.nbytes and c.seconds >= least_s]
    order = sorted(worth, key=lambda c: c.nbytes / max(c.seconds, 1e-12))
    points = [Point(kept=inputs, seconds=total, names=(), working=working)]
    names: list[str] = []
    kept, seconds = inputs, total
    for cost in order:
        names.append(cost.name)
        kept, seconds = kept + cost.nbytes, seconds - cost.seconds
        if kept >= saved:
            break  # to keep everything is smaller
        points.append(Point(kept=kept, seconds=max(seconds, 0.0), names=tuple(names), working=working))
    points.append(Point(kept=max(saved, inputs), seconds=0.0, names=None))
    return Curve(region=region, points=tuple(thin(points)), forward_s=total)


def thin(points: list[Point]) -> list[Point]:
    """At most POINTS of a falling curve: both ends, and of equal parts of the bytes between the point that is deepest
    below the line from end to end."""
    if len(points) <= POINTS:
        return points
    first, last = points[0], points[-1]
    slope = (first.seconds - last.seconds) / max(last.kept - first.kept, 1)
    part = (last.kept - first.kept) / (POINTS - 2)
    best: dict[int, Point] = {}

    def below(point: Point) -> float:
        return (last.kept - point.kept) * slope - (point.seconds - last.seconds)

    for point in points[1:-1]:
        key = min(int((point.kept - first.kept) / part), POINTS - 3)
        if key not in best or below(point) > below(best[key]):
            best[key] = point
    return [first, *(best[key] for key in sorted(best)), last]


@dataclass(frozen=True, kw_only=True)
class HostCost:
    """Seconds that the host takes to launch a region's forward pass, as it is and under a dispatch mode."""

    forward_s: float
    modes_s: float


def host_cost(function: Function, args: Any, kwargs: Any) -> HostCost:
    """Measured on the host's clock, with a device that has nothing else to do. Generators are left as they were."""
    devices = sorted({t.device.index for t in plain_tensors((args, kwargs)) if t.is_cuda})

    def wall(mode: Any) -> float:
        if devices:
            torch.cuda.synchronize()
        began = time.perf_counter()
        with mode:
            function(*args, **kwargs)
        return time.perf_counter() - began

    with torch.random.fork_rng(devices), torch.no_grad():
        return HostCost(forward_s=wall(nullcontext()), modes_s=wall(_Pass()))


def device_seconds(function: Function, args: Any, kwargs: Any) -> float:
    """A region's forward pass on the card, with the host ahead of it. Generators are left as they were."""
    devices = sorted({t.device.index for t in plain_tensors((args, kwargs)) if t.is_cuda})
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.random.fork_rng(devices), torch.no_grad():
        hold_back()
        began.record()
        function(*args, **kwargs)
        ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) * 1e-3


class _Pass(EagerMode):
    """A mode that looks at every operator and does nothing."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **(kwargs or {}))


def with_host(found: Curve, host: HostCost) -> Curve:
    """A curve of device times as the step sees it: whichever of device and host takes longer.

    The device works twice as long on the backward pass as on the forward pass; the host launches both in equal time (an
    estimate: autograd launches without Python, but more). Recomputation adds a forward pass to both. Keeping results
    of single operators adds what dispatch modes take, twice. Points that keep more than a faster one are dropped.
    """
    device, launches = 3 * found.forward_s, 2 * host.forward_s
    before = max(device, launches)
    points: list[Point] = []
    for point in found.points:
        more = 0.0 if point.names is None else host.forward_s
        if point.names:
            more += 2 * (host.modes_s - host.forward_s) + HOST_KEEPS_S * len(point.names)
        seconds = max(device + point.seconds, launches + more) - before
        if not points or seconds < points[-1].seconds or point.names is None:
            points.append(replace(point, seconds=seconds))
    return replace(found, points=tuple(points))


def tensor_bytes(tree: Any, size: Size = bytes_of) -> int:
    """Bytes of the tensors in a pytree, each storage once."""
    return sum({t.untyped_storage()._cdata: stored(t, size) for t in plain_tensors(tree)}.values())


def count_saved(function: Function, args: Any, kwargs: Any, module: nn.Module, size: Size = bytes_of) -> int:
    """Bytes that autograd would save of `function(*args, **kwargs)` beside `module`'s parameters and buffers.

    `size` says what a tensor takes; where it is less than the tensor's own bytes (packed), views count by themselves.

    The forward runs, but what it saves is dropped at once: it needs no more memory than an evaluation. Generators are
    left as they were.
    """
    own = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers()) if has_storage(t)}
    found: dict[tuple[Any, ...], int] = {}
    alive: list[Any] = []  # storages must not be freed while their addresses are compared

    def pack(tensor: torch.Tensor) -> None:
        if has_storage(tensor) and tensor.untyped_storage()._cdata not in own and not is_weight(tensor):
            storage = tensor.untyped_storage()
            packed = size(tensor) < tensor.nbytes
            key = (storage._cdata, tensor.storage_offset(), tuple(tensor.shape)) if packed else (storage._cdata,)
            if key not in found:
                found[key] = stored(tensor, size)
                alive.append(StorageWeakRef(storage))

    def unpack(nothing: None) -> torch.Tensor:
        raise AssertionError("a counting pass has no backward")

    devices = {t.device for t in plain_tensors((args, kwargs)) if t.is_cuda}
    with torch.random.fork_rng(list(devices)), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        function(*args, **kwargs)
    return sum(found.values())


def stored(tensor: torch.Tensor, size: Size) -> int:
    """Of a packed tensor its own bytes, of another the storage that it keeps alive."""
    own = size(tensor)
    return own if own < tensor.nbytes else tensor.untyped_storage().nbytes()


def plain_tensors(tree: Any) -> list[torch.Tensor]:
    """Of a pytree."""
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and has_storage(t)]


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor in memory of its own or of others."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
