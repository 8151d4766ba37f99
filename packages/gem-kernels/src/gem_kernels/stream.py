"""Rows of a residual stream that several readers share: what they send back meets in the norm's backward pass.

A row of the stream is normed for one reader, passed on to the next sum, and the last rows of every sequence are taken
out for a third. As operators of their own these send back three gradients, of which autograd makes one in passes over
memory that move more than the operators themselves.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

from gem_kernels import dispatch, norms, sequences
from gem_kernels.late import LateProduct
from gem_kernels.norms import placed

__all__ = ["norm_rows", "norm_rows_twice"]


def norm_rows(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    kind: Literal["rms", "layer"],
    eps: float,
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
    places: Tensor | None = None,
    others: Tensor | None = None,
    offsets: Tensor | None = None,
    recent: int = 0,
    product: LateProduct | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`rms_norm` or `layer_norm` of h = x + residual, h itself, and `most_recent` of h.

    With `places` the residual is [T + N, C] and h = x + residual[places]: what was made for the rows of x among others.

    Args:
        x: [T, C], see `rms_norm`.
        weight, bias, eps, residual, residual_bias: see there.
        kind: which norm.
        places: [T] int64, each row's in the residual; and
        others: [N] int64, those that are nobody's: together all numbers below T + N.
        offsets: [B + 1], for `recent`.
        recent: k of `most_recent`; 0 for none.
        product: the only one that reads y and needs it for its gradients: y is not kept for it, but written again by
            the backward pass of the norm.
        backend: of the norm: "reference" or "triton"; None lets `dispatch` choose.

    Returns:
        y [T, C]; h [T, C], which without a residual is x; the most recent rows [B, k, C] or None.

    Raises:
        TypeError, ValueError, RuntimeError: as `rms_norm`, `layer_norm` and `most_recent`.
    """
    if kind not in ("rms", "layer"):
        raise ValueError(f"kind must be 'rms' or 'layer'; got {kind!r}")
    if x.dim() != 2:
        raise ValueError(f"x must be [T, C]; got {tuple(x.shape)}")
    if recent and offsets is None:
        raise ValueError("the most recent rows need offsets")
    if places is None:
        norms._check(x, residual, weight, bias, residual_bias, eps)
    else:
        _check_places(x, residual, places, others)
        norms._check(x, x, weight, bias, residual_bias, eps)
    name = dispatch.choose("norms", x, backend, (f"norm:{kind}", *(["residual"] if residual is not None else ())))
    # A row's sum is added to in place, which whatever looks on need not know of: it sees operators apart.
    watched = torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None
    if places is not None and (name == dispatch.REFERENCE or watched):
        assert residual is not None
        residual = residual.index_select(0, places)
        places = None
    late = None if watched else product
    if late is not None:
        late.taken = True
    weights = (late and late.weight, late)
    if late is None and (name == dispatch.REFERENCE or watched):
        found = norms._norm(x, residual, residual_bias, weight, bias, kind, eps, False, backend)
        y, total = (found, x) if isinstance(found, Tensor) else found
        latest = None
    elif places is not None:
        y, total, latest = _Placed.apply(
            x, residual, residual_bias, weight, bias, places, others, offsets if recent else None, recent, kind,
            float(eps), name, *weights,
        )  # fmt: skip
    elif recent and late is None:
        assert offsets is not None
        sequences._check_offsets("offsets", offsets, x, False)
        y, total, latest = _Recent.apply(
            x, residual, residual_bias, weight, bias, offsets, recent, kind, float(eps), name
        )
    else:
        (y, total), latest = (
            _Rows.apply(x, residual, residual_bias, weight, bias, kind, float(eps), name, *weights),
            None,
        )
    if recent and latest is None:
        assert offsets is not None
        latest = sequences.most_recent(total, offsets, recent)
    return y, total, latest


def norm_rows_twice(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    kind: Literal["rms", "layer"],
    eps: float,
    bare_eps: float,
    residual: Tensor,
    residual_bias: Tensor | None = None,
    places: Tensor,
    others: Tensor,
    offsets: Tensor | None = None,
    recent: int = 0,
    product: LateProduct | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """`norm_rows` with places, and LayerNorm of h without weight and bias, for a reader who has these in its weights.

    Args:
        bare_eps: of that LayerNorm.
        others: all as of `norm_rows`.

    Returns:
        As `norm_rows`, and the bare rows [T, C]; None where no kernel makes them in passing (the reference, and where
        torch.compile or a dispatch mode looks on), since then a norm of its own costs no more.

    Raises:
        TypeError, ValueError, RuntimeError: as `norm_rows`.
    """
    asked = {"residual": residual, "residual_bias": residual_bias, "places": places, "others": others}
    name = dispatch.choose("norms", x, backend, (f"norm:{kind}", "residual"))
    watched = torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None
    if name == dispatch.REFERENCE or watched:
        rest = {"offsets": offsets, "recent": recent, "product": product, "backend": backend}
        return *norm_rows(x, weight, bias, kind=kind, eps=eps, **asked, **rest), None  # type: ignore[arg-type]
    if bare_eps <= 0:
        raise ValueError(f"bare_eps must be positive; got {bare_eps}")
    _check_places(x, residual, places, others)
    norms._check(x, x, weight, bias, residual_bias, eps)
    if recent:
        if offsets is None:
            raise ValueError("the most recent rows need offsets")
        sequences._check_offsets("offsets", offsets, x, False)
    if product is not None:
        product.taken = True
    return _PlacedTwice.apply(  # type: ignore[no-any-return]
        x, residual, residual_bias, weight, bias, places, others, offsets if recent else None, recent, kind,
        float(eps), name, float(bare_eps), product and product.weight, product,
    )  # fmt: skip


def _check_places(x: Tensor, residual: Tensor | None, places: Tensor, others: Tensor | None) -> None:
    if residual is None or others is None:
        raise ValueError("places are those of rows in a residual, and need the others there")
    for name, index in (("places", places), ("others", others)):
        if index.dim() != 1 or index.dtype != torch.int64 or index.device != x.device:
            raise ValueError(
                f"{name} must be int64 [.] on {x.device}; got {tuple(index.shape)} {index.dtype} on {index.device}"
            )
    rows = (x.shape[0] + others.shape[0], x.shape[1])
    if places.shape != x.shape[:1] or residual.shape != rows or residual.dtype != x.dtype:
        raise ValueError(
            f"with places [{x.shape[0]}] and {others.shape[0]} others, residual must be {rows} {x.dtype}; got "
            f"{tuple(places.shape)} and {tuple(residual.shape)} {residual.dtype}"
        )


def _forward(
    ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float,
    name: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    ctx.set_materialize_grads(False)
    ctx.rest = (kind, eps, False, name)
    ctx.residual = residual is not None
    y, total = norms._forward(x, residual, weight, bias, *ctx.rest)
    return y, total if ctx.residual else x.view_as(x)


def _backward(
    ctx: Any, dy: Tensor | None, dtotal: Tensor | None, total: Tensor, *vectors: Tensor | None
) -> tuple[Tensor, list[Tensor | None]]:
    """The gradient of h, and those of weight, bias, residual_bias and a product's weight."""
    dy = torch.zeros_like(total) if dy is None else dy
    product: Tensor | None = None
    if ctx.product is not None and ctx.product.waits:
        again = dispatch.module("norms", ctx.rest[3]).backward_again
        dx, *found, y = again(dy, dtotal, total, *vectors, *ctx.rest[:2])
        product = ctx.product.gradient(y)
    elif ctx.rest[3] == dispatch.REFERENCE:
        dx, *found, _ = norms.reference.backward_again(dy, dtotal, total, *vectors, *ctx.rest[:2])  # type: ignore[arg-type]
    elif vectors[2] is None:
        dx, *found = norms._backward(dy, dtotal, total, *vectors[:2], *ctx.rest)
        found.append(None)
    else:
        dx, *found = norms._backward_with_sums(dy, dtotal, total, *vectors, *ctx.rest)
    return dx, [*(None if v is None else d for v, d in zip(vectors, found, strict=True)), product]


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, residual_bias: Tensor | None, weight: Tensor | None,
        bias: Tensor | None, kind: str, eps: float, name: str, _weight: Tensor | None = None,
        product: LateProduct | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.product = product
        y, total = _forward(ctx, x, residual, weight, bias, kind, eps, name)
        ctx.save_for_backward(total if ctx.residual else x, weight, bias, residual_bias)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        dx, (dweight, dbias, dsums, dproduct) = _backward(ctx, dy, dtotal, *ctx.saved_tensors)
        return dx, dx if ctx.residual else None, dsums, dweight, dbias, *(None,) * 3, dproduct, None


class _Recent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, residual_bias: Tensor | None, weight: Tensor | None,
        bias: Tensor | None, offsets: Tensor, recent: int, *rest: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ctx.product = None
        y, total = _forward(ctx, x, residual, weight, bias, *rest)
        ctx.save_for_backward(total if ctx.residual else x, weight, bias, residual_bias, offsets)
        return y, total, sequences._most_recent(total, offsets, recent, ctx.rest[3])

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Tensor | None, dtotal: Tensor | None, dlatest: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *saved, offsets = ctx.saved_tensors
        dx, (dweight, dbias, dsums, _) = _backward(ctx, dy, dtotal, *saved)
        if dlatest is not None:
            _add_latest(dx, dsums, dlatest, offsets, ctx.rest[3])
        return dx, dx if ctx.residual else None, dsums, dweight, dbias, *(None,) * 5


def _add_latest(dx: Tensor, dsums: Tensor | None, dlatest: Tensor, offsets: Tensor, name: str) -> Tensor:
    """Add what comes back for the most recent rows to the gradient of all, and to its columns' sums; returns which of
    the most recent rows there are, [B, k].
    """
    dispatch.module("sequences", name).add_to_most_recent(dx, dlatest, offsets)
    there = torch.arange(dlatest.shape[1], device=dx.device) < offsets.diff()[:, None]
    if dsums is not None:  # h holds the bias in these rows, too
        dsums += (dlatest.flatten(0, 1).t() @ there.flatten().to(dlatest.dtype)).to(dsums.dtype)
    return there


class _Placed(torch.autograd.Function):
    """Both of the above for a residual with its rows elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, residual_bias: Tensor | None, weight: Tensor | None,
        bias: Tensor | None, places: Tensor, others: Tensor, offsets: Tensor | None, recent: int, kind: str,
        eps: float, name: str, _weight: Tensor | None = None, product: LateProduct | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.rest = (kind, eps)
        ctx.name, ctx.product = name, product
        y, total, _ = placed.forward(x, residual, places, weight, bias, *ctx.rest)
        ctx.save_for_backward(total, places, others, weight, bias, residual_bias, offsets)
        return y, total, None if offsets is None else sequences._most_recent(total, offsets, recent, name)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Tensor | None, dtotal: Tensor | None, dlatest: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *found, dproduct = _placed_backward(ctx, dy, dtotal, dlatest)
        return *found, *(None,) * 7, dproduct, None


class _PlacedTwice(torch.autograd.Function):
    """The same with a second norm of the sum."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, residual_bias: Tensor | None, weight: Tensor | None,
        bias: Tensor | None, places: Tensor, others: Tensor, offsets: Tensor | None, recent: int, kind: str,
        eps: float, name: str, bare_eps: float, _weight: Tensor | None = None, product: LateProduct | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.rest, ctx.name, ctx.bare_eps, ctx.product = (kind, eps), name, bare_eps, product
        y, total, bare = placed.forward(x, residual, places, weight, bias, kind, eps, bare_eps)
        ctx.save_for_backward(total, places, others, weight, bias, residual_bias, offsets)
        latest = None if offsets is None else sequences._most_recent(total, offsets, recent, name)
        return y, total, latest, bare

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Tensor | None, dtotal: Tensor | None, dlatest: Tensor | None, dbare: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *found, dproduct = _placed_backward(ctx, dy, dtotal, dlatest, dbare, ctx.bare_eps)
        return *found, *(None,) * 8, dproduct, None


def _placed_backward(
    ctx: Any, dy: Tensor | None, dtotal: Tensor | None, dlatest: Tensor | None, dbare: Tensor | None = None,
    bare_eps: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of x, residual, residual_bias, weight, bias and a product's weight."""
    total, places, others, weight, bias, residual_bias, offsets = ctx.saved_tensors
    kind, eps = ctx.rest
    dy = torch.zeros_like(total) if dy is None else dy
    y = torch.empty_like(total) if ctx.product is not None and ctx.product.waits else None
    dx, dresidual, (dweight, dbias, dsums) = placed.backward(
        dy, dtotal, total, places, others, weight, bias, residual_bias, kind, eps, dbare, bare_eps, y
    )
    dproduct = None if y is None else ctx.product.gradient(y)
    if dlatest is not None and dx.shape[0]:
        there = _add_latest(dx, dsums, dlatest, offsets, ctx.name)
        back = torch.arange(1, dlatest.shape[1] + 1, device=dx.device)
        rows = (offsets[1:, None] - back).clamp(min=0).flatten()  # where there is none, nothing is added to any
        added = torch.where(there[..., None], dlatest, 0).flatten(0, 1)
        dresidual.index_add_(0, places[rows], added.to(dresidual.dtype))
    return dx, dresidual, dsums, dweight, dbias, dproduct
