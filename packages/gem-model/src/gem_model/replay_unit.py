"""One layer of those that FSDP2 shards, as graphs run it: fixed copies of its weights, and both its passes.

See replay_sharded.py for how layers follow one another.

`B` samples, `N` non-sequence tokens, `d` width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gem_model.casting import _parts as parts
from gem_model.casting import _places as cast_places
from gem_model.layers import Layers
from gem_model.projection import working_dtype
from gem_model.sequence import History, Seats


class Turn(Protocol):
    """Whose layers these are, and how many forward passes they have made so far."""

    layers: Layers
    passes: int


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
        self.fixed = empty(list(held), kept)
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

    def __init__(
        self, turn: Turn, index: int, weights: Weights, events: dict[str, History], inputs: list[Tensor],
        bare: dict[str, float],
    ) -> None:  # fmt: skip
        self.turn, self.events = turn, dict(events)
        self.layer = turn.layers[index]
        self.weights = weights
        self.sources: list[str] = self.layer.sources  # type: ignore[assignment]
        self.last = index + 1 == len(turn.layers)
        # Of the histories, what a later layer reads: their sources only become fewer.
        self.handed_on: list[str] = [] if self.last else turn.layers[index + 1].sources  # type: ignore[assignment]
        self.inputs, self.bare = inputs, bare  # as `flat` gives them, and which events come normed, with which eps
        self.outputs: list[Tensor] = []  # the same of `handed_on`
        self.bare_outputs: dict[str, float] = {}
        self.seats: dict[str, Seats] = {}  # where this layer is the first to need any: they serve the later ones, too
        self.upstream: list[Tensor | None] = []  # the gradient of each output, if it has one
        self.found: list[int] = []  # which of inputs and weights have a gradient ...
        self.gradients: list[Tensor] = []  # ... and where it lies
        self.ahead: Callable[[], Any]
        self.back: Callable[[], Any]
        self.live: list[Tensor] = []
        self._sources: list[Tensor] = []

    def run_ahead(self) -> list[Tensor]:
        """The forward pass, by itself; behind the outputs come the parts of `seats`."""
        leaves = [nn.Parameter(t.detach(), requires_grad=False) for t in self.weights.fixed]
        for i in self.weights.wanted:
            leaves[i].requires_grad_()
        self._sources = [*self.inputs, *leaves]
        with torch.enable_grad(), self.weights.exchanged(leaves):
            x, histories, cls = shaped(self.inputs, self.sources, self.events, self.bare)
            lanes = self.turn.layers.lanes.open(self.sources, x)
            histories = {s: replace(h, lane=lanes.get(s)) for s, h in histories.items()}
            x, histories, cls = type(self.layer).forward(self.layer, x, histories, cls)
        handed_on = {s: histories[s] for s in self.handed_on}
        self.live = flat(x, handed_on, cls, self.handed_on)
        self.bare_outputs = {s: h.bare_eps for s, h in handed_on.items() if h.bare is not None}
        self.seats = {s: h.seats for s, h in handed_on.items() if h.seats is not None and self.events[s].seats is None}
        return self.live + [t for seats in self.seats.values() for t in (seats.events, seats.cls, seats.offsets)]

    def run_back(self) -> list[Tensor]:
        """The backward pass of that forward pass."""
        wanted = [i for i, t in enumerate(self._sources) if t.requires_grad]
        pairs = [(t, g) for t, g in zip(self.live, self.upstream, strict=True) if g is not None]
        outputs, upstream = zip(*pairs, strict=True)
        sources = [self._sources[i] for i in wanted]
        with torch.autocast(sources[0].device.type, enabled=False):  # as after the forward pass's block
            made = torch.autograd.grad(outputs, sources, upstream, allow_unused=True)
        self.found = [i for i, g in zip(wanted, made, strict=True) if g is not None]
        return [g.contiguous() for g in made if g is not None]

    def release(self) -> None:
        """Let go of what only recording needs."""
        self.live, self._sources = [], []

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


def empty(like: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
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
        ctx.unit, ctx.number = unit, unit.turn.passes
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
        if ctx.number != unit.turn.passes:
            raise RuntimeError(
                f"the backward pass of forward pass {ctx.number} of layers replayed from CUDA graphs comes after "
                f"forward pass {unit.turn.passes}, which has overwritten what it needs; expected them in turn"
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
        own = empty([at[i] for i in mine], [gathered[i - count] for i in mine])
        _copy(own, [at[i] for i in mine])  # theirs are overwritten by the next pass, these are autograd's to keep
        for i, gradient in (at | dict(zip(mine, own, strict=True))).items():
            found[i] = gradient
        return None, *found
