"""Single results that backward computes again from what is kept anyway, without running the region a second time.

Autograd's graph says which node made a tensor that is about to be saved, and that node holds what its own backward
needs. Often that is enough to make the tensor again: a norm's result from its input, a gated product from the
projection, a projection from its input and weight. Whoever wants to save such a tensor gets its place instead. In
backward the first one that takes it has it computed, and it lives until the last one has taken it.

No dispatch mode, no second forward pass: a hook looks at each tensor that is saved, and a result costs the host what
its launch costs. The node of a result is there as long as those who take it, because their gradients flow into it.

Results are named in the order in which they are first saved in a region: "linear#0", "norm#1". Small tensors are passed
over, and where one is small in some batches only, names after it shift: other results of that sort are kept then, and
nothing else changes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gem_parallel.memory.keeper import Keeper
from gem_parallel.memory.recipes import FOLDED, LINEAR, Outputs, Recipe, folded_bias, name_of, recipe_of, sort_of

_reading = threading.local()  # .depth > 0 while a result is computed, from places of others, say


class Result:
    """What one node made, to be made again once."""

    __slots__ = ("again", "left", "name", "node", "savers", "stream", "values", "which")

    def __init__(self, name: str, node: Any, recipe: Recipe) -> None:
        self.name, self.node = name, node
        self.again, self.which = recipe.again, recipe.which(node)
        self.savers = self.left = 0  # how often it was saved, and is still to be taken
        self.values: Outputs | None = None
        self.stream: Any = None  # that computed them, of a card

    def compute(self) -> Outputs:
        """The node's results."""
        depth = getattr(_reading, "depth", 0)
        _reading.depth = depth + 1
        try:
            with torch.no_grad():
                return self.again(self.node)
        finally:
            _reading.depth = depth

    def take(self, number: int) -> Tensor:
        """One of them. Whoever reads it to compute another one comes again for its own backward, and does not count."""
        fresh = self.values is None
        if self.values is None:
            self.values = self.compute()
        value = self.values[number]
        assert value is not None
        if value.is_cuda:
            here = torch.cuda.current_stream(value.device)
            if fresh:
                self.stream = here
            elif here != self.stream:  # the model runs in branches, and this is another one
                here.wait_stream(self.stream)
                value.record_stream(here)
        if not getattr(_reading, "depth", 0):
            self.left -= 1
        if self.left == 0:
            self.values, self.left = None, self.savers  # for another backward pass
        return value


class Place:
    """A saved tensor as (a view of) a result."""

    __slots__ = ("number", "result", "size", "view")

    def __init__(self, result: Result, number: int, size: int, view: tuple[Any, ...] | None) -> None:
        self.result, self.number, self.size, self.view = result, number, size, view

    def take(self) -> Tensor:
        """The tensor."""
        whole = self.result.take(self.number)
        if whole.numel() != self.size:
            raise RuntimeError(
                f"{self.result.name} of {name_of(self.result.node)} has {whole.numel()} elements when it is computed "
                f"again, and had {self.size}; its recipe does not know all that the node read"
            )
        return whole if self.view is None else whole.as_strided(*self.view)


class Saving:
    """The saved-tensor hooks of one call of a region.

    Args:
        names: of the results that are computed again.
        keeper: packs what it likes of the others.
        least: bytes of the smallest tensor that is looked at; smaller ones are kept.
        module: the region, whose linear layers know their biases.
    """

    def __init__(self, names: Collection[str], keeper: Keeper, *, least: int, module: nn.Module) -> None:
        self._first = 0  # number of the first node of this call
        self.names, self.keeper, self.least, self.module = names, keeper, least, module
        self._results: dict[Any, Result | None] = {}  # by node
        self._count: Counter[str] = Counter()
        self._biases: list[tuple[Any, Tensor | None]] = []  # where a weight comes from, and the bias beside it

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Around the call. What is remembered of nodes is forgotten after it: nodes lead to these hooks."""
        self._first = torch._C._autograd._get_sequence_nr()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpacker()):
                yield
        finally:
            self._results.clear()
            self._biases.clear()

    def pack(self, tensor: Tensor) -> Any:
        """What is kept instead of the tensor."""
        place = self.find(tensor)
        if place is not None and place.result.name in self.names:
            place.result.savers += 1
            place.result.left += 1
            return place
        if self.keeper.works:
            kept = self.keeper.pack_saved(tensor)
            if kept is not tensor:
                return kept
        return tensor.detach(), tensor._version  # a node that saves its own result must not hold itself

    def unpacker(self) -> Callable[[Any], Tensor]:
        """From what was kept to the tensor; knows nothing of this call."""
        keeper = self.keeper

        def unpack(kept: Any) -> Tensor:
            if type(kept) is Place:
                return kept.take()
            if type(kept) is not tuple:
                return keeper.unpack(kept)
            tensor, version = kept
            if tensor._version != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} was changed in place after it had been saved for backward"
                )
            return tensor  # type: ignore[no-any-return]

        return unpack

    def find(self, tensor: Tensor) -> Place | None:
        """The tensor as a result or a view of one, whichever it is."""
        if tensor.numel() * tensor.element_size() < self.least:
            return None
        base = tensor if tensor._base is None else tensor._base
        node, number, is_view = base.grad_fn, base.output_nr, base is not tensor
        if node is None:
            return None
        if name_of(node) == "UnsafeViewBackward0":  # of a product of more than two dimensions
            (node, number), is_view = node.next_functions[0], True
        view = (tensor.shape, tensor.stride(), tensor.storage_offset()) if is_view else None
        if node is None:
            return None
        if node not in self._results:
            self._results[node] = self._named(node)
        result = self._results[node]
        return None if result is None or number not in result.which else Place(result, number, base.numel(), view)

    def _named(self, node: Any) -> Result | None:
        recipe = recipe_of(node)
        if recipe is not None and node._sequence_nr() < self._first:
            return None  # it made an input: another region knows what becomes of it
        if recipe is LINEAR:
            recipe = self._linear(node)
        if recipe is None:
            return None
        number = self._count[recipe.label]
        self._count[recipe.label] += 1
        return Result(f"{recipe.label}#{number}", node, recipe)

    def _linear(self, node: Any) -> Recipe | None:
        """bias + x W^T, whose node knows x and W. The bias comes from its edge or, where it was detached, from the
        module that has the weight."""
        to_bias, (to_x, _), to_weight = node.next_functions
        if to_x is None or to_weight[0] is None:  # then it has not saved both
            return None
        bias, weight = source(to_bias), source(to_weight)
        folded = weight[0] if isinstance(weight, tuple) and sort_of(weight[0]) == FOLDED else None
        if folded is not None:
            weight = source(folded.next_functions[0])
        if folded is not None or not isinstance(bias, Tensor):
            if not self._biases:
                linear = (m for m in self.module.modules() if isinstance(m, nn.Linear))
                self._biases = [(_made_by(m.weight), m.bias) for m in linear]
            bias = next((b for w, b in self._biases if same(w, weight)), None)
        if bias is None:
            return None
        detached = bias.detach()

        def again(node: Any) -> Outputs:
            x = node._saved_mat1
            beside = detached if folded is None else folded_bias(folded, detached)
            return (torch.addmm(beside.to(x.dtype), x, node._saved_mat2),)

        return Recipe(label=LINEAR.label, again=again)


def source(edge: tuple[Any, int]) -> Any:
    """The leaf that an edge passes its gradient on to, through casts and a transposition; else the edge at which that
    ends: of one of many weights that are cast at once, the cast's.
    """
    for _ in range(4):
        node = edge[0]
        if node is None:
            return None
        if hasattr(node, "variable"):
            return node.variable
        if len(node.next_functions) != 1:
            break
        edge = node.next_functions[0]
    return edge


def _made_by(weight: Tensor) -> Any:
    return weight if weight.grad_fn is None else source((weight.grad_fn, weight.output_nr))


def same(a: Any, b: Any) -> bool:
    """Whether two results of `source` are one."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return a[0] is b[0] and a[1] == b[1]
    return a is b and a is not None
