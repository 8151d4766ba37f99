"""The interleaved layers replayed from CUDA graphs: what the host would launch kernel by kernel costs it two calls.

A layer of GEM is some five hundred kernels in both passes, most of them short; launching them can take the host longer
than the device needs to run them. A graph fixes shapes and addresses, while the number of events differs from batch to
batch. So the events are brought to a *capacity*: samples are added that hold what is left of it, and whose outputs
nobody reads. Every operator sees ordinary jagged data, no gradient comes from the added samples (that of their output
is zero), and a few graphs of growing capacity serve all batches.

The backward graph adds the parameters' gradients to `.grad` itself. Dropout draws its numbers from the seed of the
moment, as it does without graphs, but for other shapes: masks differ from those of the same layers without graphs.

`B` samples, `F` added samples, `N` non-sequence tokens, `T` events of one source, `d` width.

Source: partial-network capture as torch.cuda.make_graphed_callables does it, which knows neither jagged inputs nor
accumulated gradients.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from gem_model import replay_checks
from gem_model.layers import Inputs, Layers
from gem_model.recorder import CudaGraphs, Recorder, autocast_without_cache, checking, on_cuda, warming_up
from gem_model.sequence import History

STEPS = 64  # capacities between a power of two and the next, ...
LEAST = 32  # ... and the least distance between two of them, in events
ROOM = 1 / 16  # of a graph's capacity that may stay empty, before a smaller graph is worth its memory
GRAPHS = 8  # that are kept; a batch that fits in none of them then goes without
WARM_UP = 2  # passes before a capture, which compile kernels and fill caches


def capacity(events: int) -> int:
    """The least capacity for so many events: multiples of 1/64 of the power of two below, and of 32."""
    step = max(LEAST, (1 << max(events - 1, 1).bit_length() - 1) // STEPS)
    return max(1, -(-events // step)) * step


@dataclass(frozen=True, kw_only=True)
class Room:
    """What one graph has been captured for."""

    batch: int  # B
    events: tuple[int, ...]  # capacity of each source
    longest: tuple[int, ...]  # the longest history of each source that it serves

    def __str__(self) -> str:
        return f"room of {self.batch} samples, {self.events} events, histories of up to {self.longest}"

    @property
    def added(self) -> int:
        """F: enough samples for what a batch may leave of any source, none of them longer than the longest."""
        sizes = zip(self.events, self.longest, strict=True)
        return max((-(-self._left(e) // longest) for e, longest in sizes), default=0)

    def serves(self, batch: int, events: tuple[int, ...], longest: tuple[int, ...]) -> bool:
        """Whether a batch fits, without leaving too much empty."""
        sizes = zip(self.events, events, strict=True)
        same = (self.batch, self.longest) == (batch, longest)
        return same and all(0 <= e - n <= self._left(e) for e, n in sizes)

    @staticmethod
    def _left(events: int) -> int:
        return max(LEAST, int(events * ROOM))


def at_capacity(
    x: Tensor, histories: dict[str, History], cls: dict[str, Tensor], room: Room
) -> tuple[Tensor, dict[str, History], dict[str, Tensor]]:
    """The layers' inputs with F samples added: x [B + F, N, d], the events of every source at its capacity.

    Nothing waits for the device. The added events are zeros, from the moment of the request.
    """
    more, full = room.added, {}
    for (source, history), size, longest in zip(histories.items(), room.events, room.longest, strict=True):
        assert history.more is None
        left = size - history.tokens.shape[0]
        each = -(-left // more)
        assert left >= 0
        assert each <= longest
        ends = history.offsets[-1] + torch.arange(1, more + 1, device=x.device).mul(each).clamp(max=left)
        full[source] = History(
            tokens=F.pad(history.tokens, (0, 0, 0, left)),
            offsets=torch.cat([history.offsets, ends.to(history.offsets.dtype)]),
            max_len=longest,
            rank=F.pad(history.rank, (0, left)),
            age=F.pad(history.age, (0, left)),
        )
    return F.pad(x, (0, 0, 0, 0, 0, more)), full, {s: F.pad(c, (0, 0, 0, 0, 0, more)) for s, c in cls.items()}


class Rooms:
    """Which graph runs a batch: the part of replaying that does not know what a graph is.

    Attributes:
        layers: whose `replay` this becomes.
        rooms: which of them serves a batch follows from these alone.
        graphs: what has been captured; `forget` and a new process capture it again.
        record: what captures a pass.
        checks: whether batches and gradients are looked at (gem_model.recorder).
        passes: forward passes so far; each overwrites what the one before has kept for its backward pass.
        ready: whether what the layers do is settled by now; until it is, they are called as they are.
    """

    def __init__(self, layers: Layers, recorder: Recorder | None = None) -> None:
        self.layers = layers
        self.rooms: list[Room] = []
        self.graphs: dict[Room, Any] = {}
        self.record: Recorder = recorder or CudaGraphs(layers.lanes)
        self.checks = checking()
        self.passes = 0
        self.ready: Callable[[], bool] = lambda: True
        self._announced = False

    def capture(self, room: Room, inputs: Inputs) -> Any:
        """The graph of a room, captured with these inputs of its capacity; raises torch.OutOfMemoryError."""
        raise NotImplementedError

    def __call__(self, x: Tensor, histories: dict[str, History], cls: dict[str, Tensor]) -> Tensor:
        """X of the last layer, [B, N, d]."""
        raise NotImplementedError

    def state(self) -> list[dict[str, Any]]:
        """The rooms: with them a resumed run does the very same arithmetic, captured anew."""
        return [asdict(room) for room in self.rooms]

    def load(self, state: list[dict[str, Any]]) -> None:
        """Take the rooms of an earlier process."""
        self.rooms = [Room(batch=r["batch"], events=tuple(r["events"]), longest=tuple(r["longest"])) for r in state]

    def forget(self) -> None:
        """Drop all graphs and their memory."""
        self.graphs.clear()
        self.record.forget()

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Within the block the layers are called as they are."""
        self.layers.replay = None
        try:
            yield
        finally:
            self.layers.replay = self

    def graph(self, x: Tensor, histories: dict[str, History], cls: dict[str, Tensor]) -> Any:
        """What serves a batch, captured if need be, or None."""
        batch, events = x.shape[0], tuple(h.tokens.shape[0] for h in histories.values())
        longest = tuple(1 << (max(h.max_len, 1) - 1).bit_length() for h in histories.values())
        found = [room for room in self.rooms if room.serves(batch, events, longest)]
        if not found and len(self.rooms) == GRAPHS:
            if not self._announced:
                warnings.warn(
                    f"none of the {GRAPHS} CUDA graphs of the layers serves {batch} samples with {events} events: such "
                    "batches are launched kernel by kernel",
                    stacklevel=2,
                )
            self._announced = True
            return None
        if not found:
            found = [Room(batch=batch, events=tuple(map(capacity, events)), longest=longest)]
            self.rooms += found
        room = min(found, key=lambda room: sum(room.events))
        if self.checks:
            replay_checks.batch(x, histories, cls, room.longest)
        if room in self.graphs:
            return self.graphs[room]
        inputs = at_capacity(x, histories, cls, room)
        graph = self._beside_others(room, inputs)
        if graph is None:
            # The pool is in pieces of other sizes. This one may well fit alone, and the others again beside it.
            self.forget()
            graph = self.capture(room, inputs)
        self.graphs[room] = graph
        return graph

    def _beside_others(self, room: Room, inputs: Inputs) -> Any:
        try:
            return self.capture(room, inputs)
        except torch.OutOfMemoryError:
            if not self.graphs:
                raise
            return None


class Replay(Rooms):
    """Runs layers in training from CUDA graphs, captured when a batch comes that none of them serves. See the module.

    Args:
        layers: of a model on one CUDA device, none of them sharded or hooked; becomes its `replay`.
        recorder: what makes a pass repeatable; CUDA graphs by default.

    Raises:
        ValueError: where the layers are not on a CUDA device.
    """

    graphs: dict[Room, Graph]

    def __init__(self, layers: Layers, *, recorder: Recorder | None = None) -> None:
        super().__init__(layers, recorder)
        named = {name: p for name, p in layers.named_parameters() if p.requires_grad}
        self.names, self.parameters = list(named), list(named.values())
        if recorder is None:
            on_cuda(self.parameters)
        self.sums = GradientSums(self.parameters)

    def capture(self, room: Room, inputs: Inputs) -> Graph:
        """See `Rooms`."""
        return Graph(self, room, *inputs)

    def __call__(self, x: Tensor, histories: dict[str, History], cls: dict[str, Tensor]) -> Tensor:
        """See `Rooms`."""
        histories = {source: histories[source] for source in cls}
        graph = self.graph(x, histories, cls) if self.ready() else None
        if graph is None:
            return self.layers.through(x, histories, cls)
        out: Tensor = _Replayed.apply(graph, *tensors(*at_capacity(x, histories, cls, graph.room)))
        return out[: x.shape[0]]


class GradientSums:
    """One tensor for the gradients of all parameters, which graphs add to; a part of it is each one's `.grad`."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        sizes = [-(-p.numel() // 64) * 64 for p in parameters]  # every part begins at a multiple of 256 bytes
        self.flat = torch.zeros(sum(sizes), dtype=torch.float32, device=parameters[0].device)
        parts = zip(self.flat.split(sizes), parameters, strict=True)
        self.views = [part[: p.numel()].view(p.shape) for part, p in parts]

    def take(self, used: list[int]) -> None:
        """Make `.grad` of these parameters the part that is added to, holding what they have so far."""
        pairs = [(self.parameters[i], self.views[i]) for i in used]
        if all(p.grad is view for p, view in pairs):
            return
        new = all(p.grad is None for p, _ in pairs)
        if new:
            self.flat.zero_()
        for p, view in pairs:
            if p.grad is not None and p.grad is not view:
                view.copy_(p.grad)
            elif p.grad is None and not new:
                view.zero_()
            p.grad = view


def tensors(x: Tensor, histories: dict[str, History], cls: dict[str, Tensor]) -> list[Tensor]:
    """The layers' inputs as a list."""
    return [x, *(t for source, h in histories.items() for t in (h.tokens, cls[source], h.offsets, h.rank, h.age))]


class Graph:
    """Both passes of the layers on inputs of one room."""

    def __init__(
        self, replay: Replay, room: Room, x: Tensor, histories: dict[str, History], cls: dict[str, Tensor]
    ) -> None:
        self.room, self.replay = room, replay
        self.inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors(x, histories, cls)]
        at = iter(self.inputs)
        x, histories, cls = next(at), dict(histories), dict(cls)
        for source, history in histories.items():
            tokens, cls[source], offsets, rank, age = (next(at) for _ in range(5))
            histories[source] = replace(history, tokens=tokens, offsets=offsets, rank=rank, age=age)
        self.wanted = [i for i, t in enumerate(self.inputs) if t.requires_grad]
        # Autograd remembers on which stream a parameter was first used, and would wait for that stream in the capture:
        # the graphs see the same memory as leaves that nobody has used before.
        named = replay.layers.named_parameters()
        weights: dict[str, Tensor] = {
            name: nn.Parameter(p.detach(), requires_grad=p.requires_grad) for name, p in named
        }
        sources = [self.inputs[i] for i in self.wanted] + [p for p in weights.values() if p.requires_grad]

        def ahead() -> Tensor:
            out: Tensor = functional_call(replay.layers, weights, (x, histories, cls))
            return out

        def back(out: Tensor, upstream: Tensor) -> tuple[Tensor | None, ...]:
            with torch.autocast(x.device.type, enabled=False):  # as a backward pass runs after the forward's block
                return torch.autograd.grad(out, sources, upstream, allow_unused=True)

        on_card = [x.device] if x.is_cuda else []
        with replay.at_rest(), autocast_without_cache(x.device.type), torch.random.fork_rng(on_card):
            if x.is_cuda and not replay.graphs:  # later ones find kernels compiled, and may have no memory beside them
                with warming_up():
                    for _ in range(WARM_UP):
                        out = ahead()
                        back(out, torch.zeros_like(out))
                    del out
            (out,), self.ahead = replay.record(lambda: [ahead()], f"forward pass of a {room}")
            self.upstream = torch.zeros_like(out)
            self.used: list[int] = []

            def sum_up() -> list[Tensor]:
                found = back(out, self.upstream)
                gradients = {i: g for i, g in enumerate(found[len(self.wanted) :]) if g is not None}
                self.used = list(gradients)
                torch._foreach_add_([replay.sums.views[i] for i in self.used], list(gradients.values()))
                there = {i: g for i, g in zip(self.wanted, found, strict=False) if g is not None}
                self.found = list(there)
                return [*there.values(), *gradients.values()]

            made, self.back = replay.record(sum_up, f"backward pass of a {room}")
        self.downstream = made[: len(self.found)]
        self.out = out.detach()


class _Replayed(torch.autograd.Function):
    """Both passes by a graph; the parameters' gradients go around autograd."""

    @staticmethod
    def forward(ctx: Any, graph: Graph, *inputs: Tensor) -> Tensor:
        graph.replay.passes += 1
        ctx.graph, ctx.number = graph, graph.replay.passes
        for fixed, given in zip(graph.inputs, inputs, strict=True):
            fixed.copy_(given)
        if graph.replay.checks:
            ctx.random = replay_checks.random_state(graph.out)
        graph.ahead()
        return graph.out.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        graph: Graph = ctx.graph
        if ctx.number != graph.replay.passes:
            raise RuntimeError(
                f"the backward pass of forward pass {ctx.number} of layers replayed from CUDA graphs comes after "
                f"forward pass {graph.replay.passes}, which has overwritten what it needs; expected them in turn"
            )
        graph.upstream.copy_(upstream)
        graph.replay.sums.take(graph.used)
        if graph.replay.checks:
            replay_checks.back_twice(graph, ctx.random)
        else:
            graph.back()
        found: list[Tensor | None] = [None] * len(graph.inputs)
        for i, gradient in zip(graph.found, graph.downstream, strict=True):
            found[i] = gradient
        return None, *found
