"""What GEM_CHECK_GRAPHS=1 looks at around a replay: which batch, which pass and which gradient a fault is in."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gem_model.sequence import History

if TYPE_CHECKING:
    from gem_model.replay import Graph

NAMED = 5  # parameters in a message


def batch(x: Tensor, histories: dict[str, History], cls: dict[str, Tensor], longest: tuple[int, ...]) -> None:
    """Whether a batch is what a room for histories of these lengths takes.

    Raises ValueError: offsets that do not run from 0 to the number of events, that descend or leave a history longer
    than the longest; tokens that are not finite.
    """
    for (source, history), most in zip(histories.items(), longest, strict=True):
        offsets, events = history.offsets.cpu(), history.tokens.shape[0]
        lengths = offsets.diff()
        if offsets[0] != 0 or offsets[-1] != events or bool((lengths < 0).any()):
            raise ValueError(
                f"the offsets of {source!r} must ascend from 0 to its {events} events; they run from {int(offsets[0])} "
                f"to {int(offsets[-1])}, with lengths from {int(lengths.min())} on"
            )
        if offsets.shape[0] != x.shape[0] + 1:
            raise ValueError(f"{source!r} has {offsets.shape[0]} offsets for {x.shape[0]} samples; expected one more")
        if len(lengths) and int(lengths.max()) > most:
            raise ValueError(f"{source!r} holds a history of {int(lengths.max())} events; its room takes up to {most}")
        if history.rank.shape[0] != events or history.age.shape[0] != events:
            raise ValueError(f"{source!r} has {events} events, {len(history.rank)} ranks and {len(history.age)} ages")
    for name, tokens in {"X": x, **{f"CLS tokens of {s}": c for s, c in cls.items()}}.items():
        if not bool(torch.isfinite(tokens).all()):
            raise ValueError(f"the layers are given {name} that are not finite")
    for source, history in histories.items():
        if not bool(torch.isfinite(history.tokens).all()):
            raise ValueError(f"the layers are given events of {source!r} that are not finite")


def random_state(like: Tensor) -> Tensor:
    """Where the random numbers of its device stand."""
    return torch.cuda.get_rng_state(like.device) if like.is_cuda else torch.get_rng_state()


def back_twice(graph: Graph, random: Tensor) -> None:
    """The backward pass, then both passes once more: kernels that do not race have the same bits, which stay.

    What differs, and what is not finite, is told with the names of the parameters.
    """
    sums, before = graph.replay.sums, graph.replay.sums.flat.clone()
    graph.back()
    once, given = sums.flat.clone(), [t.clone() for t in graph.downstream]
    sums.flat.copy_(before)
    with _random_numbers(random, graph.out):
        graph.ahead()
    graph.back()
    views = dict(zip(graph.replay.names, sums.views, strict=True))
    at = {name: view.storage_offset() for name, view in views.items()}
    first = {name: once[at[name] : at[name] + view.numel()].view(view.shape) for name, view in views.items()}
    inputs = {f"input {i}": (a, b) for i, a, b in zip(graph.found, given, graph.downstream, strict=True)}
    pairs = {name: (first[name], view) for name, view in views.items()} | inputs
    other = [name for name, (a, b) in pairs.items() if not torch.equal(_bits(a), _bits(b))]
    if other:
        by = max(
            float((a.float() - b.float()).abs().nan_to_num(torch.inf).max()) for a, b in map(pairs.__getitem__, other)
        )
        _tell(f"two replays differ by up to {by:.3g} in the gradients", other, graph)
    if bad := [name for name, (a, _) in pairs.items() if not bool(torch.isfinite(a).all())]:
        whence = "finite" if bool(torch.isfinite(graph.upstream).all()) else "not finite"
        _tell(f"of a gradient that was {whence}, a replay made gradients that are not finite", bad, graph)


def _tell(what: str, names: list[str], graph: Graph) -> None:
    more = f" and {len(names) - NAMED} others" if len(names) > NAMED else ""
    warnings.warn(
        f"{what} of {', '.join(names[:NAMED])}{more} (pass {graph.replay.passes}, {graph.room})", stacklevel=3
    )


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


@contextlib.contextmanager
def _random_numbers(state: Tensor, like: Tensor) -> Iterator[None]:
    """Within the block they are drawn from `state` on."""
    with torch.random.fork_rng([like.device] if like.is_cuda else []):
        if like.is_cuda:
            torch.cuda.set_rng_state(state, like.device)
        else:
            torch.set_rng_state(state)
        yield
