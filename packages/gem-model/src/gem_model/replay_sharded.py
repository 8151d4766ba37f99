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
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from gem_model.layers import Inputs, Layers
from gem_model.recorder import Recorder, autocast_without_cache, on_cuda, warming_up
from gem_model.replay import WARM_UP, Room, Rooms, at_capacity
from gem_model.replay_unit import Unit, Weights, at_address, flat
from gem_model.sequence import History, Seats

SHARED = ("offsets", "rank", "age")  # what all layers read of a history


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
        super().__init__(layers, recorder)
        for i, layer in enumerate(layers):
            units = [name for name, m in layer.named_modules() if isinstance(m, FSDPModule)]
            if units != [""]:
                raise ValueError(f"layer {i} must be an FSDP2 unit with no unit inside, got units named {units} in it")
        if recorder is None:
            on_cuda(layers.parameters())
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
            unit = self._unit(i, inputs, bare)
            made, unit.ahead = replay.record(unit.run_ahead, f"forward pass of layer {i} in a {room}")
            live = unit.live
            made = [at_address(t) for t in made]
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
        for i, unit in reversed(list(enumerate(self.units))):
            unit.upstream = upstream
            made, unit.back = replay.record(unit.run_back, f"backward pass of layer {i} in a {room}")
            unit.gradients = [at_address(t) for t in made]
            unit.release()
            behind, upstream = made, unit.gradient_of_inputs()
        del behind, made

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
        with warming_up():
            for _ in range(WARM_UP):
                given, bare = inputs, dict[str, float]()
                for i in range(len(self.replay.layers)):
                    unit = self._unit(i, given, bare)
                    unit.run_ahead()
                    unit.upstream = [torch.zeros_like(t) for t in unit.live]
                    given, bare = [t.detach().requires_grad_(t.requires_grad) for t in unit.live], unit.bare_outputs
                    unit.run_back()
                    unit.release()
            del given, unit

    def _unit(self, index: int, inputs: list[Tensor], bare: dict[str, float]) -> Unit:
        return Unit(self.replay, index, self.replay.weights[index], self.events, inputs, bare)


@contextlib.contextmanager
def _standing_in(layer: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within the block, calling `layer` runs its hooks and `forward`."""
    layer.__dict__["forward"] = forward
    try:
        yield
    finally:
        del layer.__dict__["forward"]
