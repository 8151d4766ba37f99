"""How results of operators are computed again from what their nodes in autograd's graph hold.

The nodes of this project's kernels are contexts of torch.autograd.Function, whose forward can be called again with what
the context holds; they are known by their names, nothing of them is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Outputs = Sequence[Tensor | None]  # of a node, by number


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How results of one sort of node are computed again.

    Attributes:
        label: of these results in a plan.
        again: from the node (of a torch.autograd.Function: its ctx) to its results, bit by bit as they were; None in
            the place of one that cannot be had.
        which: the numbers of those that can; none that the node saves itself. May look at the node's edges, but at
            nothing that it has saved.
    """

    label: str
    again: Callable[[Any], Outputs]
    which: Callable[[Any], Collection[int]] = lambda node: (0,)


_sorts: dict[type, Recipe | None] = {}


def declare_again(node: str, recipe: Recipe) -> None:
    """Results of this sort of node may be computed again.

    Args:
        node: its name (`grad_fn.name()`); of a torch.autograd.Function "module.Class", or the class's name alone where
            it is that of an operator, "library::name".
        recipe: how.
    """
    RECIPES[node] = recipe
    _sorts.clear()


def name_of(node: Any) -> str:
    """A node's name, whatever the ctx of a torch.autograd.Function has been given as its `name`."""
    name: str = type(node).name(node)
    return name


def recipe_of(node: Any) -> Recipe | None:
    """What is declared of this sort of node."""
    sort = type(node)
    if sort not in _sorts:
        _sorts[sort] = RECIPES.get(sort_of(node))
    return _sorts[sort]


def sort_of(node: Any) -> str:
    """What recipes know a node by: see `declare_again`."""
    cls = getattr(type(node), "_forward_cls", None)
    if cls is None or "::" in cls.__name__:
        return name_of(node) if cls is None else cls.__name__
    return f"{cls.__module__}.{cls.__qualname__}"


class _Context:
    """Stands in for the ctx of a forward that is called for its results alone."""

    def save_for_backward(self, *tensors: Any) -> None:
        """Nothing is saved."""

    def set_materialize_grads(self, value: bool) -> None:
        """There are no gradients."""


def _forward(ctx: Any, *args: Any) -> Any:
    return type(ctx)._forward_cls.forward(_Context(), *args)


def _module(ctx: Any) -> Any:
    """That the node's class is in."""
    return sys.modules[type(ctx)._forward_cls.__module__]


def _norm(ctx: Any) -> Outputs:
    """y of h = x + residual, which is kept: a norm of h without a residual."""
    total, weight, bias = ctx.saved_tensors
    return _forward(ctx, total, None, weight, bias, *ctx.rest)[0], None


def _summed(ctx: Any) -> Outputs:
    total, weight, bias, _ = ctx.saved_tensors
    return _forward(ctx, total, None, None, weight, bias, *ctx.rest)[0], None


def _rows(ctx: Any) -> Outputs:
    total, weight, bias, _ = ctx.saved_tensors
    kind, eps, _, backend = ctx.rest
    return _forward(ctx, total, None, None, weight, bias, kind, eps, backend)[0], None


def _recent(ctx: Any) -> Outputs:
    """The same, where the most recent rows were taken out as well; one of them is made here for nothing."""
    total, weight, bias, _, offsets = ctx.saved_tensors
    kind, eps, _, backend = ctx.rest
    return _forward(ctx, total, None, None, weight, bias, offsets, 1, kind, eps, backend)[0], None, None


def _gated(ctx: Any) -> Outputs:
    packed, weight, _ = ctx.saved_tensors
    if ctx.product is not None:
        return None, _module(ctx).heads_again(packed, weight, *ctx.rest)
    found: Outputs = _forward(ctx, packed, weight, None, *ctx.rest)
    return found


def _placed(ctx: Any) -> Outputs:
    """The same, where x and its residual had their rows in different places. A second norm of the sum is the next
    region's, which keeps what it gets.

    By the same kernel, for the same bits, with a row of zeros as everybody's residual.
    """
    total, places, _, weight, bias, *_ = ctx.saved_tensors
    placed = _module(ctx).placed
    zeros = total.new_zeros(1, total.shape[1]), torch.zeros_like(places)
    return placed.forward(total, *zeros, weight, bias, *ctx.rest)[0], None, None, None


def _rotary(ctx: Any) -> Outputs:
    """(q, k, v, k, v) or (k, v): the values are views of what is kept."""
    count, heads, bases, eps, backend = ctx.rest
    packed, _, *saved = ctx.saved_tensors
    weights, positions, places = saved[:count], saved[count : count + len(bases)], saved[count + len(bases) :]
    if not _takes_rows(ctx):
        args = (packed, None, None, *weights, count, heads, positions, bases, (None, None), 1, eps, backend)
        parts = _forward(ctx, *args)
        return (*parts[:-1], None, parts[-2], None)
    found = _rows_of(ctx)
    if found is not None:
        node, number, recipe = found
        rows = recipe.again(node)[number]
        q, k, _ = _forward(ctx, packed, None, rows, *weights, 2, heads, positions, bases, places, 1, eps, backend)
        return q, k, None, k, None
    beside = packed[:, packed.shape[1] // 3 :]  # k and v alone
    k, _ = _forward(ctx, beside, None, None, weights[1], 1, heads, positions, bases, (None, None), 1, eps, backend)
    return None, k, None, k, None


def _takes_rows(ctx: Any) -> bool:
    """Whether other rows stand among the queries. They are an argument that the node does not save."""
    return ctx.rest[0] == 2 and bool(ctx.needs_input_grad[2])


def _rows_of(ctx: Any) -> tuple[Any, int, Recipe] | None:
    """The node that made those rows, which output they are, and how it is had again, if it is."""
    edges = ctx.next_functions  # of the tensors: packed, a bias or none, rows, and the weights of two norms or none
    node, number = edges[1 + len(edges) % 2]
    recipe = None if node is None else recipe_of(node)
    return None if recipe is None or recipe is LINEAR or number not in recipe.which(node) else (node, number, recipe)


def _turned(ctx: Any) -> Collection[int]:
    if ctx.rest[0] != 2:
        return (0, 2)
    return (1, 3) if _takes_rows(ctx) and _rows_of(ctx) is None else (0, 1, 3)


def _both(node: Any) -> Collection[int]:
    """A product has saved both factors when both get gradients."""
    return (0,) if all(edge is not None for edge, _ in node.next_functions) else ()


def _operand(ctx: Any) -> tuple[Any, int, Recipe] | None:
    """The node that made what a late product reads, which output it is, and how it is had again, if it is."""
    node, number = ctx.next_functions[0]
    recipe = None if node is None else recipe_of(node)
    return None if recipe is None or recipe is LINEAR or number not in recipe.which(node) else (node, number, recipe)


def _late(ctx: Any) -> Outputs:
    """x W^T + b of an x that is not kept."""
    found = _operand(ctx)
    assert found is not None
    node, number, recipe = found
    x, (weight, bias) = recipe.again(node)[number], ctx.saved_tensors
    assert x is not None
    return (functional.linear(x, weight, bias),)


def _last_part(ctx: Any) -> Outputs:
    """Of a late product in parts the last one, v beside [q || k]."""
    found = _operand(ctx)
    assert found is not None
    node, number, recipe = found
    x, (weight, bias) = recipe.again(node)[number], ctx.saved_tensors
    assert x is not None
    size = ctx.sizes[-1]
    part = functional.linear(x, weight[-size:], None if bias is None else bias[-size:])
    return *(None,) * (len(ctx.sizes) - 1), part


def _bare(ctx: Any) -> Outputs:
    weight, tokens, bias = ctx.saved_tensors
    return (functional.linear(_module(ctx).layer_norm(tokens, eps=ctx.eps), weight, bias),)


def folded_bias(node: Any, bias: Tensor) -> Tensor:
    """W h + b of gem_model's folded projection, from its node and b."""
    w, _, h = node.saved_tensors
    return torch.addmv(bias.to(w.dtype), w, h)


# Results, by number, that are never rounded although rows of them may be wide: LSE [Tq, H] of any number of heads.
EXACT: dict[str, Collection[int]] = {"gem_kernels::jagged_attention": (1,)}
FOLDED = "gem_model.projection._Folded"  # gives a weight, and the bias beside it, made of a projection's and a norm's
LINEAR = Recipe(label="linear", again=lambda node: ())  # whose bias must be found
RECIPES = {
    "AddmmBackward0": LINEAR,
    "MmBackward0": Recipe(label="mm", which=_both, again=lambda node: (torch.mm(node._saved_self, node._saved_mat2),)),
    "BmmBackward0": Recipe(
        label="bmm", which=_both, again=lambda node: (torch.bmm(node._saved_self, node._saved_mat2),)
    ),
    "SiluBackward0": Recipe(label="silu", again=lambda node: (functional.silu(node._saved_self),)),
    "GeluBackward0": Recipe(
        label="gelu", again=lambda node: (functional.gelu(node._saved_self, approximate=node._saved_approximate),)
    ),
    "gem_kernels::norm": Recipe(label="norm", again=_norm),
    "gem_kernels.norms._Summed": Recipe(label="norm", again=_summed),
    "gem_kernels.stream._Rows": Recipe(label="norm", again=_rows),
    "gem_kernels.stream._Recent": Recipe(label="norm", again=_recent),
    "gem_kernels.stream._Placed": Recipe(label="norm", again=_placed),
    "gem_kernels.stream._PlacedTwice": Recipe(label="norm", again=_placed),
    "gem_kernels.projections.gated._Gated": Recipe(
        label="gate", again=_gated, which=lambda ctx: (0, 1) if ctx.product is None else (1,)
    ),
    "gem_kernels.late._Product": Recipe(label="linear", again=_late, which=lambda ctx: (0,) if _operand(ctx) else ()),
    "gem_kernels.late._Parts": Recipe(
        label="linear", again=_last_part, which=lambda ctx: (len(ctx.sizes) - 1,) if _operand(ctx) else ()
    ),
    "gem_model.projection._BareProduct": Recipe(label="linear", again=_bare),
    "gem_kernels.projections.rotary._Rotary": Recipe(label="rotary", again=_rotary, which=_turned),
    "gem_kernels::gdpa": Recipe(label="gdpa", again=lambda ctx: (_forward(ctx, *ctx.saved_tensors, *ctx.rest),)),
}
