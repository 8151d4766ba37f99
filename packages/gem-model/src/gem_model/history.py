"""The events of one history on their way through the layers: what is known of them, and how layers read them.

`B` samples, `T` events of all samples, `d` width, `C` CLS tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from gem_kernels import Turn
from gem_kernels.nn import NormLinear
from torch import Tensor, nn

from gem_model.batch import SequenceLike
from gem_model.lanes import Lane
from gem_model.projection import folded, hooked, late_product, plain, project, project_bare, taken, with_bias
from gem_model.sharing import Requests

ROPE_BASE = 10_000.0
ROTE_BASE = 100.0  # log time runs from 0 to about 15, not to 10,000: a smaller base keeps every frequency useful


@dataclass(frozen=True, kw_only=True)
class Seats:
    """Where CLS tokens and events stand in one jagged tensor of both: each sample's C CLS tokens before its events."""

    events: Tensor  # [T]
    cls: Tensor  # [B C]
    offsets: Tensor  # [B + 1]
    count: int  # C

    @classmethod
    def of(cls, offsets: Tensor, total: int, count: int) -> Seats:
        """Of T events with `offsets`, nothing waiting for the device."""
        device = offsets.device
        event = torch.arange(total, device=device)
        before = torch.arange(offsets.shape[0], device=device) * count
        sample = torch.searchsorted(offsets[1:], event, right=True)
        return cls(
            events=event + (sample + 1) * count,
            cls=((offsets + before)[:-1, None] + torch.arange(count, device=device)).flatten(),
            offsets=offsets + before,
            count=count,
        )


@dataclass(frozen=True, kw_only=True)
class History:
    """The events of one source on their way through the layers.

    The tokens are S = ``tokens`` + ``more``: what a block adds to them is left to the next norm, which adds it in the
    pass over memory that it makes anyway (:func:`read`, :meth:`settled`). ``more_bias`` is in ``more`` already; its
    gradient is left to that norm, too.
    """

    tokens: Tensor  # [T, d]
    offsets: Tensor  # [B + 1]
    max_len: int
    rank: Tensor  # [T] int64: 1 for the latest event of a sample, 2 for the one before
    age: Tensor  # [T] float32: log(1 + dt / time_scale) from the event to the request
    more: Tensor | None = None  # [T, d]; [T + B C, d] where it is `seated`
    more_bias: Tensor | None = None  # [d]
    requests: Requests | None = None  # whose samples share these histories; None is one sample each
    bare: Tensor | None = None  # LayerNorm of the tokens without weight and bias [T, d], where a kernel made it ...
    bare_eps: float = 0.0  # ... with this eps
    seats: Seats | None = None  # made once for all layers
    seated: bool = False  # what is added to event t is row seats.events[t] of ``more``
    lane: Lane | None = None  # what works on them is captured there
    arrival: torch.cuda.Event | None = None  # after it, what comes from outside the lane is there
    inside: str = "none"  # as of the tower that has them (interformer.Tower)

    def plus(self, more: Tensor, bias: Tensor | None, seats: Seats | None = None) -> History:
        """The same events with something to be added to their tokens; only where nothing is waiting for that."""
        assert self.more is None
        return replace(self, more=more, more_bias=bias, seats=seats or self.seats, seated=seats is not None)

    def settled(self, tokens: Tensor | None = None, bare: Tensor | None = None, bare_eps: float = 0.0) -> History:
        """With ``more`` added; ``tokens`` is the sum where somebody has it already, ``bare`` a norm of it."""
        if tokens is None:
            tokens = self.tokens if self.more is None else self.tokens + self.whole.to(self.tokens.dtype)
        return replace(
            self, tokens=tokens, more=None, more_bias=None, seated=False, bare=bare, bare_eps=bare_eps
        )  # fmt: skip

    def meet(self) -> None:
        """What is enqueued on the lane from now on may read what comes from outside."""
        if self.arrival is not None:
            torch.cuda.current_stream().wait_event(self.arrival)

    @property
    def whole(self) -> Tensor:
        """``more`` of every event [T, d], from which gradients also reach the bias in it."""
        assert self.more is not None
        more = self.more
        if self.seated:
            assert self.seats is not None
            more = taken(more, self.seats.events, self.seats.cls)
        return more if self.more_bias is None else with_bias(more, self.more_bias)


def read(layer: NormLinear, history: History) -> tuple[Tensor, Tensor | None, History]:
    """What a layer makes of the tokens, [T, out], its bias as :func:`project` gives it, and the history settled."""
    (out,), bias, history = read_parts(layer, history, ())
    return out, bias, history


def read_parts(
    layer: NormLinear, history: History, sizes: Sequence[int]
) -> tuple[tuple[Tensor, ...], Tensor | None, History]:  # fmt: skip
    """The same with what the layer makes in columns of these sizes, each in memory of its own, where a late product
    makes it; else as one.
    """
    whole = type(layer) is NormLinear and not hooked(layer) and not hooked(layer.norm)
    if whole and history.bare is not None and history.more is None and _folds(layer, history.bare_eps):
        tokens = None if history.inside == "none" else history.tokens
        out, bias = project_bare(layer, history.bare, tokens, history.bare_eps)
        return (out,), bias, history.settled()
    if whole and not history.seated:
        more = None if history.more is None else history.more.to(history.tokens.dtype)
        late = None if history.inside == "none" else late_product(layer.linear, history.tokens)
        given = {} if late is None else {"product": late}
        out, tokens, _ = layer.norm.rows(history.tokens, more, history.more_bias, **given)  # type: ignore[operator]
        bias = layer.linear.bias
        if late is not None and late.taken and sizes and bias is not None:
            parts = late.parts(out, sizes, bias.detach().to(out.dtype))  # type: ignore[operator, union-attr, arg-type]
            return parts, bias, history.settled(tokens)  # type: ignore[return-value]
        out, left = project(layer.linear, out, late)
        return (out,), left, history.settled(tokens)
    if history.more is None:
        return (layer(history.tokens),), None, history
    out, tokens = layer(history.tokens, history.whole.to(history.tokens.dtype))
    return (out,), None, history.settled(tokens)


def rows_for(layer: NormLinear, history: History) -> tuple[Tensor, Tensor, Tensor, History] | None:
    """What a layer multiplies, [T, d], by which weight, its bias, and the history settled, for who makes the product
    and the bias's gradient himself; None where that is the layer's own affair, or rows are not to be kept for it.
    """
    norm, linear = layer.norm, layer.linear
    if type(layer) is not NormLinear or hooked(layer) or hooked(norm) or not plain(linear) or linear.bias is None:
        return None
    if history.inside != "none" or history.seated:
        return None
    if history.bare is not None and history.more is None and _folds(layer, history.bare_eps):
        return history.bare, *folded(layer), history.settled()
    more = None if history.more is None else history.more.to(history.tokens.dtype)
    out, tokens, _ = norm.rows(history.tokens, more, history.more_bias)  # type: ignore[operator]
    return out, linear.weight, linear.bias, history.settled(tokens)  # type: ignore[return-value]


def askers(x: Tensor, history: History) -> tuple[Tensor, Tensor, int]:
    """Tokens [B, C, d] in the order of their histories, the offsets of each history's [R + 1], and the most that one
    may have.
    """
    batch, count = x.shape[:2]
    if history.requests is None:
        return x, uniform_offsets(batch, count, x.device), count
    return x[history.requests.order], history.requests.offsets * count, batch * count


def answers(x: Tensor, history: History) -> Tensor:
    """What `askers` were told, [B, ...], in the order of the samples."""
    return x if history.requests is None else x[history.requests.back]


def _folds(layer: NormLinear, eps: float) -> bool:
    """Whether the layer's norm is a LayerNorm with this eps, whose weight and bias its projection can take over."""
    norm, linear = layer.norm, layer.linear
    return isinstance(norm, nn.LayerNorm) and norm.eps == eps and plain(linear) and linear.bias is not None


def uniform_offsets(batch: int, count: int, device: torch.device) -> Tensor:
    """Offsets of ``count`` >= 1 tokens in each of B samples, [B + 1]: 0, count, 2 count, ..., B count."""
    return torch.arange(0, batch * count + 1, count, device=device)


def place_events(sequence: SequenceLike, request_time: Tensor, time_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Where each event stands, without waiting for the device.

    Returns:
        rank [T] int64: 1 for a sample's latest event, 2 for the one before it.
        age [T] float32: log(1 + dt / time_scale), dt from the event to the request; 0 where an event is later than
            that.
        gap [T] float32: the same of the time since the sample's previous event; 0 for its first.
    """
    offsets, time = sequence.offsets, sequence.time
    total = time.shape[0]
    index = torch.arange(total, device=time.device)
    sample = torch.repeat_interleave(
        torch.arange(offsets.shape[0] - 1, device=time.device), offsets.diff(), output_size=total
    )
    elapsed = request_time[sample] - time
    since = torch.where(index == offsets[sample], 0, time - time.roll(1))
    age, gap = (torch.log1p(t.clamp(min=0).float() / time_scale) for t in (elapsed, since))
    return offsets[sample + 1] - index, age, gap


def turns(history: History, rotary: str) -> list[Turn]:
    """What rotates q and k: nothing, rank ("position"), age ("time"), or rank the first half of the heads and age the
    others ("both").
    """
    rank, age = Turn(positions=history.rank, base=ROPE_BASE), Turn(positions=history.age, base=ROTE_BASE)
    return {"none": [], "position": [rank], "time": [age], "both": [rank, age]}[rotary]
