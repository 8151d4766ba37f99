"""Layers that FSDP2 shards one by one, each replayed from graphs of its own, inside FSDP2's hooks.

FSDP2 gathers a layer's parameters at other addresses each time, while a graph reads fixed ones. So every layer has
fixed copies of its weights, in the dtype in which its products read them (see casting.py), and its graphs work with
those. To FSDP2 a replayed layer is a layer like any other::

    gather -> [copy the weights; replay forward] -> free ... [replay backward; gradients in float32] -> reduce-scatter

The gradients of parameters go through autograd, so that FSDP2 reduces, accumulates and scatters them as always. What
the backward graphs read are the copies: parameters need not be gathered for the backward pass, which saves one
all-gather of two and costs the copies' memory (2 bytes a parameter under autocast).

What a layer makes stays where it lies: the fixed output of one layer is the fixed input of the next, and gradients
alike, so that nothing is copied between them. All graphs live in one pool of memory. They are captured in the order in
which they are replayed, forward passes, then backward passes in reverse, so that what one no longer needs is the next
one's memory; outside the graphs only addresses are kept.

No collective is part of a graph, and each rank captures for itself, when it meets a batch that no room serves. But all
ranks must issue the same collectives, whoever replays: a rank whose batch fits in no room launches its layers kernel by
kernel on parameters that it keeps from the forward to the backward pass.

`B` samples, `F` added samples, `N` non-sequence tokens, `T` events of one source, `d` width.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from gem_model.casting import _parts as parts
from gem_model.casting import _places as cast_places
from gem_model.layers import Inputs, Layers
from gem_model.projection import working_dtype
from gem_model.replay import WARM_UP, Room, Rooms, at_capacity, autocast_without_cache, on_cuda
from gem_model.sequence import History, Seats

Run = Callable[[], list[Tensor]]  # one pass over one layer: what it makes
Made = tuple[list[Tensor], Callable[[], Any]]  # where that lies, and what makes it there again
Recorder = Callable[[Run], Made]


class ShardedReplay(Rooms):
    """Runs layers that are FSDP2 units from CUDA graphs, a pair for each layer; see the module.

    A backward pass must come before the next forward pass. Made on all ranks together; becomes the layers' `replay`.

    Args:
        layers: each of them an FSDP2 unit, with no unit inside, whose parameters are gathered in their own dtype.
        recorder: what makes a pass repeatable; CUDA graphs by default.

    Raises:
        ValueError: layers that are no units, or have units inside; layers that are not on a CUDA device.
    """

    graphs: dict[Room, Chain]

    def __init__(self, layers: Layers, *, recorder: Recorder | None = None) -> None:
        super().__init__(layers)
        for i, layer in enumerate(layers):
            units = [name for name, m in layer.named_modules() if isinstance(m, FSDPModule)]
            if units != [""]:
                raise ValueError(f"layer {i} must be an FSDP2 unit with no unit inside, got units named {units} in it")
        if recorder is None:
            on_cuda(layers.parameters())
        self.record: Recorder = recorder or self._record
        self.weights: list[Weights] = []
        # Whoever calls the layers without coming by here finds them gathered in the backward pass as well.
        layers.register_forward_pre_hook(lambda *_: self._gather_again(True))

    def capture(self, room: Room, inputs: Inputs) -> Chain:
        """See `Rooms`."""
        x = inputs[0]
        on_card = [x.device] if x.is_cuda else []
        with self.at_rest(), autocast_without_cache(x.device.type), torch.random.fork_rng(on_card):
            if not self.weights:
                self.weights = [Weights(layer, x) for layer in self.layers]
            return Chain(self, room, *inputs)

    def __call__(self, x: Tensor, histories: dict[str, History], cls: dict[str, Tensor]) -> Tensor:
        """See `Rooms`."""
        self._gather_again(False)
        histories = {source: histories[source] for source in cls}
        chain = self.graph(x, histories, cls)
        if chain is None:
            with self._kept():
                return self.layers.through(x, histories, cls)
        self.passes += 1
        out: Tensor = chain.run(*at_capacity(x, histories, cls, chain.room))
        return out[: x.shape[0]]

    def forget(self) -> None:
        """Drop all graphs and their memory."""
        self.graphs.clear()
        gc.collect()  # a chain and its units hold one another
        super().forget()

    def _gather_again(self, again: bool) -> None:
        for layer in self.layers:
            assert isinstance(layer, FSDPModule)
            layer.set_unshard_in_backward(again)

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Parameters stay gathered after the forward pass, on this rank alone: no collective depends on it."""
        units = [layer for layer in self.layers if isinstance(layer, FSDPModule)]
        for unit in units:
            unit.set_reshard_after_forward(False)
        try:
            yield
        finally:
            for unit in units:
                unit.set_reshard_after_forward(True)

    def _record(self, run: Run) -> Made:
        """A CUDA graph in the common pool."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, which load data or watch collectives, may call CUDA meanwhile: only this one's are watched.
        options: dict[str, Any] = {"pool": self.pool, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(graph, **options), self.layers.lanes.joined():
            made = run()
        self.pool = graph.pool()
        return [at_address(t) for t in made], graph.replay


class Weights:
    """Fixed copies of one layer's weights, in the dtypes in which they are read; zero at first."""

    def __init__(self, layer: nn.Module, x: Tensor) -> None:
        held: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in layer.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    held.setdefault(p, []).append((module, name))
        self.places = list(held.values())  # of each parameter, all that are its own
        self.wanted = [i for i, p in enumerate(held) if p.requires_grad]
        self.gathered = [p.dtype for p in held]
        half = working_dtype(x)
        with self.exchanged([nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta")) for p in held]):
            cast = cast_places(layer) if half.itemsize == 2 else []
        kept = [half if places[0] in cast else dtype for places, dtype in zip(self.places, self.gathered, strict=True)]
        self.fixed = _empty(list(held), kept)
        for fixed in self.fixed:
            fixed.zero_()

    @contextlib.contextmanager
    def exchanged(self, others: Sequence[Tensor]) -> Iterator[None]:
        """Within the block the layer computes with these in the place of its parameters."""
        held = [module._parameters[name] for (module, name), *_ in self.places]
        self._put(others)
        try:
            yield
        finally:
            self._put(held)

    def _put(self, others: Sequence[Tensor | None]) -> None:
        for places, other in zip(self.places, others, strict=True):
            for module, name in places:
                module._parameters[name] = other  # type: ignore[assignment]

    def parameters(self) -> list[Tensor]:
        """What stands in the places now: inside FSDP2's hooks, the gathered parameters.

        Raises:
            TypeError: they are not plain tensors of their own dtype.
        """
        found = [module._parameters[name] for (module, name), *_ in self.places]
        for p, dtype in zip(found, self.gathered, strict=True):
            if type(p) is not nn.Parameter or p.dtype != dtype:
                raise TypeError(
                    f"replayed layers need parameters that FSDP2 gathers as plain tensors of their own dtype, {dtype}, "
                    f"got a {type(p).__name__} of {getattr(p, 'dtype', None)}"
                )
        return found  # type: ignore[return-value]


class Unit:
    """Both passes of one layer, on inputs of one room."""

    def __init__(self, chain: Chain, index: int, inputs: list[Tensor], bare: dict[str, float]) -> None:
        self.chain, self.events = chain, dict(chain.events)
        self.layer = chain.replay.layers[index]
        self.weights = chain.replay.weights[index]
        self.sources: list[str] = self.layer.sources  # type: ignore[assignment]
        self.last = index + 1 == len(chain.replay.layers)
        # Of the histories, what a later layer reads: their sources only become fewer.
        self.handed_on: list[str] = [] if self.last else chain.replay.layers[index + 1].sources  # type: ignore[assignment]
        self.inputs, self.bare = inputs, bare  # as `flat` gives them, and which events come normed, with which eps
        self.outputs: list[Tensor] = []  # the same of `handed_on`
        self.bare_outputs: dict[str, float] = {}
        self.seats: dict[str, Seats] = {}  # where this layer is the first to need any: they serve the later ones, too
        self.upstream: list[Tensor | None] = []  # the gradient of each output, if it has one
        self.found: list[int] = []  # which of inputs and weights have a gradient ...
        self.gradients: list[Tensor] = []  # ... and where it lies
        self.ahead: Callable[[], Any]
        self.back: Callable[[], Any]
        self._live: list[Tensor] = []
        self._sources: list[Tensor] = []

    def run_ahead(self) -> list[Tensor]:
        """The forward pass, by itself; behind the outputs come the parts of `seats`."""
        leaves = [nn.Parameter(t.detach(), requires_grad=False) for t in self.weights.fixed]
        for i in self.weights.wanted:
            leaves[i].requires_grad_()
        self._sources = [*self.inputs, *leaves]
        with torch.enable_grad(), self.weights.exchanged(leaves):
            x, histories, cls = shaped(self.inputs, self.sources, self.events, self.bare)
            lanes = self.chain.replay.layers.lanes.open(self.sources, x)
            histories = {s: replace(h, lane=lanes.get(s)) for s, h in histories.items()}
            x, histories, cls = type(self.layer).forward(self.layer, x, histories, cls)
        handed_on = {s: histories[s] for s in self.handed_on}
        self._live = flat(x, handed_on, cls, self.handed_on)
        self.bare_outputs = {s: h.bare_eps for s, h in handed_on.items() if h.bare is not None}
        self.seats = {s: h.seats for s, h in handed_on.items() if h.seats is not None and self.events[s].seats is None}
        return self._live + [t for seats in self.seats.values() for t in (seats.events, seats.cls, seats.offsets)]

    def run_back(self) -> list[Tensor]:
        """The backward pass of that forward pass."""
        wanted = [i for i, t in enumerate(self._sources) if t.requires_grad]
        pairs = [(t, g) for t, g in zip(self._live, self.upstream, strict=True) if g is not None]
        outputs, upstream = zip(*pairs, strict=True)
        sources = [self._sources[i] for i in wanted]
        made = torch.autograd.grad(outputs, sources, upstream, allow_unused=True)
        self.found = [i for i, g in zip(wanted, made, strict=True) if g is not None]
        return [g.contiguous() for g in made if g is not None]

    def release(self) -> None:
        """Let go of what only recording needs."""
        self._live, self._sources = [], []

    def gradient_of_inputs(self) -> list[Tensor | None]:
        """Of each input where its gradient lies."""
        at = dict(zip(self.found, self.gradients, strict=True))
        return [at.get(i) for i in range(len(self.inputs))]

    def forward(
        self, x: Tensor, histories: dict[str, History], cls: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, History], dict[str, Tensor]]:
        """In the place of the layer's forward, inside FSDP2's hooks."""
        given = flat(x, histories, cls, self.sources)
        assert len(given) == len(self.inputs)
        made = _Pass.apply(self, *given, *self.weights.parameters())
        return shaped(made, self.handed_on, histories, self.bare_outputs)


class Chain:
    """The layers one after the other, on inputs of one room."""

    def __init__(
        self, replay: ShardedReplay, room: Room, x: Tensor, histories: dict[str, History], cls: dict[str, Tensor]
    ) -> None:
        self.replay, self.room = replay, room
        self.events = {
            s: replace(h, **{name: getattr(h, name).detach().clone() for name in SHARED}) for s, h in histories.items()
        }
        first = flat(x, histories, cls, replay.layers[0].sources)  # type: ignore[arg-type]
        inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in first]
        if x.is_cuda and not replay.graphs:  # later ones find kernels compiled
            self._warm_up(inputs)
        self.units: list[Unit] = []
        self.kept: list[Seats] = []  # whose memory is theirs for good
        bare: dict[str, float] = {}
        for i in range(len(replay.layers)):
            unit = Unit(self, i, inputs, bare)
            made, unit.ahead = replay.record(unit.run_ahead)
            live = unit._live
            unit.outputs, places = made[: len(live)], iter(made[len(live) :])
            for source, seats in unit.seats.items():
                self.kept.append(seats)
                events, others, offsets = (next(places) for _ in range(3))
                here = Seats(events=events, cls=others, offsets=offsets, count=seats.count)
                self.events[source] = replace(self.events[source], seats=here)
            inputs = [t.detach().requires_grad_(of.requires_grad) for t, of in zip(unit.outputs, live, strict=True)]
            bare = unit.bare_outputs
            self.units.append(unit)
        upstream: list[Tensor | None] = [torch.zeros_like(unit.outputs[0])]
        behind: list[Tensor] = []  # what the next backward pass reads is kept until that is recorded
        for unit in reversed(self.units):
            unit.upstream = upstream
            owned: list[Tensor] = []
            unit.gradients, unit.back = replay.record(lambda unit=unit, owned=owned: _noted(unit.run_back(), owned))  # type: ignore[misc]
            unit.release()
            behind, upstream = owned, unit.gradient_of_inputs()
        del behind

    def run(self, x: Tensor, histories: dict[str, History], cls: dict[str, Tensor]) -> Tensor:
        """X of the last layer, of the samples added as well."""
        for source, history in histories.items():
            for name in SHARED:
                getattr(self.events[source], name).copy_(getattr(history, name))
        for unit in self.units:
            with _standing_in(unit.layer, unit.forward):
                x, histories, cls = unit.layer(x, histories, cls)
        return x

    def _warm_up(self, inputs: list[Tensor]) -> None:
        """Compile kernels and fill caches, layer by layer."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                given, bare = inputs, dict[str, float]()
                for i in range(len(self.replay.layers)):
                    unit = Unit(self, i, given, bare)
                    unit.run_ahead()
                    unit.upstream = [torch.zeros_like(t) for t in unit._live]
                    given, bare = [t.detach().requires_grad_(t.requires_grad) for t in unit._live], unit.bare_outputs
                    unit.run_back()
                    unit.release()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()  # what the warm-up held is the graphs' to take


SHARED = ("offsets", "rank", "age")  # what all layers read of a history


def flat(x: Tensor, histories: dict[str, History], cls: dict[str, Tensor], sources: list[str]) -> list[Tensor]:
    """X; of each of the sources its events, its CLS tokens, and its events normed, where somebody has done that."""
    found = [x]
    for source in sources:
        history = histories[source]
        assert history.more is None
        found += [history.tokens, cls[source], *([] if history.bare is None else [history.bare])]
    return found


def shaped(
    tensors: Sequence[Tensor], sources: list[str], events: dict[str, History], bare: dict[str, float]
) -> tuple[Tensor, dict[str, History], dict[str, Tensor]]:
    """X, histories and CLS tokens of tensors as `flat` gives them."""
    x, rest = tensors[0], iter(tensors[1:])
    histories, cls = {}, {}
    for source in sources:
        tokens, cls[source] = next(rest), next(rest)
        normed = {"bare": next(rest), "bare_eps": bare[source]} if source in bare else {"bare": None}
        histories[source] = replace(events[source], tokens=tokens, **normed)
    return x, histories, cls


def at_address(t: Tensor) -> Tensor:
    """The same numbers in the same place, without holding the memory: it belongs to the graphs."""
    kept = t.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(kept.data_ptr(), t.device, kept.nbytes())
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(storage, t.storage_offset(), t.shape, t.stride())  # type: ignore[call-overload, no-any-return]


@contextlib.contextmanager
def _standing_in(layer: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within the block, calling `layer` runs its hooks and `forward`."""
    layer.__dict__["forward"] = forward
    try:
        yield
    finally:
        del layer.__dict__["forward"]


def _noted(made: list[Tensor], notes: list[Tensor]) -> list[Tensor]:
    notes += made
    return made


def _empty(like: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Tensors of these shapes and dtypes, those of one dtype in one buffer."""
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(dtypes):
        mine = [i for i, other in enumerate(dtypes) if other == dtype]
        found |= zip(mine, parts(tuple(like[i] for i in mine), dtype), strict=True)
    return [found[i] for i in range(len(like))]


def _copy(to: Sequence[Tensor], of: Sequence[Tensor]) -> None:
    """One kernel for all pairs of the same dtypes."""
    kinds: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for a, b in zip(to, of, strict=True):
        group = kinds.setdefault((a.dtype, b.dtype), ([], []))
        group[0].append(a)
        group[1].append(b)
    for group in kinds.values():
        torch._foreach_copy_(*group)


def _bring(fixed: Tensor, given: Tensor) -> None:
    """Copy what does not lie there already."""
    assert fixed.dtype == given.dtype
    if fixed.data_ptr() != given.data_ptr():
        fixed.copy_(given)


class _Pass(torch.autograd.Function):
    """Both passes of one layer by its graphs."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.unit, ctx.number = unit, unit.chain.replay.passes
        count = len(unit.inputs)
        for fixed, t in zip(unit.inputs, given[:count], strict=True):
            _bring(fixed.detach(), t)
        _copy(unit.weights.fixed, given[count:])
        unit.ahead()
        if unit.last:  # others may keep it: the next pass must not overwrite it
            return (unit.outputs[0].clone(),)
        return tuple(t.detach() for t in unit.outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        unit: Unit = ctx.unit
        if ctx.number != unit.chain.replay.passes:
            raise RuntimeError(
                f"the backward pass of forward pass {ctx.number} of layers replayed from CUDA graphs comes after "
                f"forward pass {unit.chain.replay.passes}, which has overwritten what it needs; expected them in turn"
            )
        for fixed, t in zip(unit.upstream, upstream, strict=True):
            if fixed is not None and t is not None:
                _bring(fixed, t)
            elif fixed is not None:
                fixed.zero_()
        unit.back()
        count, gathered = len(unit.inputs), unit.weights.gathered
        found: list[Tensor | None] = [None] * (count + len(gathered))
        at = dict(zip(unit.found, unit.gradients, strict=True))
        mine = [i for i in unit.found if i >= count]
        own = _empty([at[i] for i in mine], [gathered[i - count] for i in mine])
        _copy(own, [at[i] for i in mine])  # theirs are overwritten by the next pass, these are autograd's to keep
        for i, gradient in (at | dict(zip(mine, own, strict=True))).items():
            found[i] = gradient
        return None, *found
