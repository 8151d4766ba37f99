"""Selective recomputation of one region, operator by operator, on torch's non-reentrant checkpoint.

The forward pass runs under a dispatch mode that keeps the results of chosen operators; in backward the region runs
again under a mode that hands those results out instead of computing them. An operator is called by its name and how
often it has occurred in the region ("aten.mm.default#3"): forward and recomputation count alike.

Random operators come out the same: the checkpoint restores the generators' state before it recomputes, and a random
operator whose result was kept puts them where they stood after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

from gem_parallel.memory.keeper import Keeper
from gem_parallel.memory.numbers import Numbers

Function = Callable[..., Any]


def may_be_kept(op: Any) -> bool:
    """Whether an operator's results may be kept: they are new memory, and it changes nothing else.

    Casts are left out, because autocast caches those of weights in one pass and not in the other, so that their
    count may differ; so are operators that only allocate.
    """
    schema = op._schema
    aliases = any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))
    return not aliases and not schema.name.startswith(_NEVER)


_NEVER = ("aten::_to_copy", "aten::empty", "aten::new_empty", "aten::zeros", "aten::ones", "aten::full", "prim::")


def watched(tensor: torch.Tensor) -> torch.Tensor:
    """An alias without the graph, for use inside a dispatch mode, whose version follows writes to the tensor."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class OpNames:
    """Names of operators in the order of a run."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._kinds: dict[Any, str] = {}

    def next(self, op: Any) -> str:
        """The name of this occurrence."""
        kind = self._kinds.get(op)
        if kind is None:
            kind = self._kinds[op] = str(op)
        name = f"{kind}#{self._counts[kind]}"
        self._counts[kind] += 1
        return name


class _Wanted:
    """Counts the kinds of operators of which some are wanted; the others pass at the cost of one look-up."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self._kinds = {name.split("#")[0] for name in names}
        self._count = OpNames()
        self._passes: dict[Any, bool] = {}

    def name(self, op: Any) -> str | None:
        """This occurrence's name when it is wanted."""
        passes = self._passes.get(op)
        if passes is None:
            passes = self._passes[op] = str(op) not in self._kinds or not may_be_kept(op)
        if passes:
            return None
        name = self._count.next(op)
        return name if name in self.names else None


class EagerMode(TorchDispatchMode):
    """A mode for code that runs as written: torch's guard against its compiler costs more than many an operator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Keep(EagerMode):
    """The forward pass: results of the operators called `names` go into `store`."""

    def __init__(self, names: frozenset[str], keeper: Keeper, store: dict[str, Any]) -> None:
        super().__init__()
        self.keeper, self.store, self.wanted = keeper, store, _Wanted(names)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        name = self.wanted.name(op)
        if name is not None:
            kept = tree_map(lambda t: self._kept(t) if isinstance(t, torch.Tensor) else t, out)
            self.store[name] = (kept, _shapes(args), _random_state(op, out))
        return out

    def _kept(self, tensor: torch.Tensor) -> _Entry:
        own = watched(tensor)
        return _Entry(self.keeper.pack(own), own._version)


class _Entry:
    """A kept tensor and the version that it had: what is written in place later must not come back unseen."""

    __slots__ = ("kept", "version")

    def __init__(self, kept: Any, version: int) -> None:
        self.kept, self.version = kept, version


class _Reuse(EagerMode):
    """The recomputation: what is in `store` is handed out, once."""

    def __init__(self, names: frozenset[str], keeper: Keeper, store: dict[str, Any]) -> None:
        super().__init__()
        self.keeper, self.store, self.wanted = keeper, store, _Wanted(names)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self.wanted.name(op)
        found = self.store.pop(name, None) if name is not None else None
        if name is None or found is None:
            return op(*args, **(kwargs or {}))
        kept, shapes, random = found
        if shapes != _shapes(args):
            raise RuntimeError(
                f"recomputation took another course than the forward pass: {name} had inputs of {shapes}, now "
                f"{_shapes(args)}; a region's forward must do the same when it is called again with the same inputs"
            )
        if random is not None:
            _set_random_state(random)
        return tree_map(lambda e: self._given(e, name) if isinstance(e, _Entry) else e, kept)

    def _given(self, entry: _Entry, name: str) -> torch.Tensor:
        if isinstance(entry.kept, torch.Tensor) and entry.kept._version != entry.version:
            raise RuntimeError(f"the result of {name} was kept and then changed in place by the region")
        return self.keeper.unpack(entry.kept)


def capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def recompute(
    function: Function,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    names: frozenset[str],
    keeper: Keeper,
    *,
    numbers: bool | None = None,
) -> Any:
    """`function(*args, **kwargs)`, of which backward keeps the inputs and the results of the operators `names` only.

    With a keeper that quantises, large floating-point inputs and results are kept in its form, and the recomputation
    starts from what comes back; gradients flow to the original inputs.

    Args:
        numbers: keep random numbers instead of generators' states (`numbers.py`), and nothing else (`names` is empty);
            by default, while a CUDA graph is captured.
    """
    store: dict[str, Any] = {}
    numbers = capturing() if numbers is None else numbers
    assert not (numbers and names), "results of operators are kept by modes that put generators back"

    def contexts() -> tuple[Any, Any]:
        if numbers:
            draw = Numbers()
            return draw.drawn, _InGraph(function, args, kwargs, draw)
        if not names:  # nothing to look for, and dispatch modes cost the host time
            return nullcontext(), nullcontext()
        return _Keep(names, keeper, store), _Reuse(names, keeper, store)

    held = _Inputs(args, kwargs, keeper) if keeper.works else None
    how: dict[str, Any] = {"use_reentrant": False, "context_fn": contexts, "preserve_rng_state": not numbers}
    if held is None:
        return checkpoint(function, *args, **how, **kwargs)

    def run(held: _Inputs, *_: torch.Tensor) -> Any:
        args, kwargs = held.take()
        return function(*args, **kwargs)

    # The checkpoint looks among its arguments for the devices whose generators it has to put back.
    return checkpoint(run, held, *held.places, **how)


class _InGraph:
    """Around what a graph computes again.

    Streams among the arguments (their attribute `stream`) go on from the current one: a region that runs on several of
    them has them forked in the forward pass by whoever captures it, and here. What stood in the places of the region's
    parameters stands there again: copies of another precision, say, that were made for all regions at once.
    """

    def __init__(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], numbers: Numbers) -> None:
        module = getattr(function, "__self__", function)
        self._copies = [
            (inner, {name: p for name, p in inner._parameters.items() if not isinstance(p, nn.Parameter | None)})
            for inner in (module.modules() if isinstance(module, nn.Module) else ())
        ]
        found = (getattr(leaf, "stream", None) for leaf in tree_leaves((args, dict(kwargs))))
        self._streams = {stream for stream in found if isinstance(stream, torch.cuda.Stream)}
        self._numbers = numbers.again

    def __enter__(self) -> None:
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        self._held = [(inner, {name: inner._parameters[name] for name in copies}) for inner, copies in self._copies]
        for inner, copies in self._copies:
            inner._parameters.update(copies)
        self._numbers.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._numbers.__exit__(*error)
        for inner, held in self._held:
            inner._parameters.update(held)


class _Inputs:
    """A call's inputs: themselves for the forward pass, then their kept forms."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], keeper: Keeper) -> None:
        leaves, self._tree = tree_flatten((args, dict(kwargs)))
        self._keeper = keeper
        self._first: list[Any] | None = leaves
        devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
        self.places = [torch.empty(0, device=device) for device in devices]
        self._kept = [
            (keeper.pack(leaf), leaf.requires_grad) if isinstance(leaf, torch.Tensor) else (leaf, None)
            for leaf in leaves
        ]

    def take(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves, self._first = self._first, None
        if leaves is None:
            leaves = [value if grad is None else self._given(value, grad) for value, grad in self._kept]
        args, kwargs = tree_unflatten(leaves, self._tree)
        return args, kwargs

    def _given(self, value: Any, grad: bool) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value
        with _disable_current_modes(), torch.no_grad():  # these operators are not the region's
            whole = self._keeper.unpack(value)
        return whole.requires_grad_(grad)


def _shapes(args: Any) -> tuple[torch.Size, ...]:
    """Of an operator's tensors, which are arguments or in lists."""
    tensors = [a for arg in args for a in (arg if isinstance(arg, list | tuple) else (arg,))]
    return tuple(t.shape for t in tensors if isinstance(t, torch.Tensor))


def _random_state(op: Any, out: Any) -> tuple[torch.device, torch.Tensor] | None:
    """Where the generator stands after a random operator."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return None
    tensor = next(leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, torch.Tensor))
    if tensor.is_cuda:
        return tensor.device, torch.cuda.get_rng_state(tensor.device)
    return tensor.device, torch.get_rng_state()


def _set_random_state(state: tuple[torch.device, torch.Tensor]) -> None:
    device, value = state
    if device.type == "cuda":
        torch.cuda.set_rng_state(value, device)
    else:
        torch.set_rng_state(value)
