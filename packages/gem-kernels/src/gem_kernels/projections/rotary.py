"""Heads of a packed projection of q, k and v: normed, turned, and q among rows of another tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

from gem_kernels import dispatch
from gem_kernels.checks import check_count, dense
from gem_kernels.operator import operator
from gem_kernels.projections import reference
from gem_kernels.projections.checks import check_packed, check_vector

__all__ = ["Among", "Turn", "rotary_heads"]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A rotary embedding (see `gem_kernels.rope`): positions [T], integers or floats, and its base."""

    positions: Tensor
    base: float = 10000.0


@dataclass(frozen=True, kw_only=True)
class Among:
    """Rows [N, H, D] of another tensor that are to stand among the T rows of a part, with no copy of these.

    `places` [T] and `others` [N], int64, say where the part's own rows and the others stand; together they are all
    numbers below T + N.
    """

    rows: Tensor
    places: Tensor
    others: Tensor


def rotary_heads(
    packed: Tensor,
    heads: int,
    weights: Sequence[Tensor | None],
    *,
    turns: Sequence[Turn] = (),
    readers: int = 1,
    among: Among | None = None,
    bias: Tensor | None = None,
    values: Tensor | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """The parts of [q || k || v] = packed, or of [k || v]: q and k normed (`rms_norm`) and turned (`rope`), v as it is.

    Args:
        packed: [T, (n + 1) H D] float16, bfloat16, float32 or float64.
        heads: H.
        weights: of the norms of the n = 1 or 2 parts before v, [D] each, or None for no norm.
        turns: none; one for all heads; or two, of the first H // 2 heads and of the others.
        readers: 2 gives k and v twice, for two operators that read them: their gradients then meet in the kernel.
        among: other queries, as they are, to stand among those of packed: q is then [T + N, H, D].
        bias: [(n + 1) H D] floating, the projection's, as in `gated_heads`.
        values: [T, H D], v by itself: packed is then [q || k] with two weights, and is not kept for the backward pass,
            where what q and k were before their norms follows from what they are (rounded as they are; where a weight
            is 0, its gradient is). Not where torch.compile or a dispatch mode looks on.
        eps: added to the mean square, positive.
        backend: "reference" or "triton"; None lets `dispatch` choose.

    Returns:
        (q, k, v) or (k, v), [T, H, D] each, then k and v again for a second reader. v is a view of packed.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or eps that do not fit.
        RuntimeError: the backend asked for cannot run this.

    Sources: RoFormer (Su et al., 2021); Henry et al., 2020 (query-key normalisation).
    """
    check_count("heads", heads, 1)
    weights = list(weights)
    if not isinstance(turns, Sequence):
        raise TypeError(f"turns must be a sequence of Turn; got {type(turns).__name__}")
    if len(weights) not in (1, 2) or len(turns) > 2 or readers not in (1, 2):
        raise ValueError(
            f"expected 1 or 2 weights, 0 to 2 turns, 1 or 2 readers; got {len(weights)}, {len(turns)}, {readers}"
        )
    if values is not None:
        if len(weights) != 2 or readers != 1 or values.shape != (packed.shape[0], packed.shape[1] // 2):
            raise ValueError(
                f"values [{packed.shape[0]}, {packed.shape[1] // 2}] stand beside q and k for one reader; got "
                f"{tuple(values.shape)}, {len(weights)} weights, {readers} readers"
            )
        if values.dtype != packed.dtype:
            raise TypeError(f"values must be of packed's dtype, {packed.dtype}; got {values.dtype}")
    parts_of = len(weights) + (values is None)  # that packed has
    check_packed(packed, heads * parts_of, 0, weights, eps)
    dim = packed.shape[1] // (heads * parts_of)
    for i, weight in enumerate(weights):
        if weight is not None:
            check_vector(f"weights[{i}]", weight, dim)
    if turns and dim % 2:
        raise ValueError(f"rotary embedding needs an even head dimension; got {dim}")
    for turn in turns:
        if turn.positions.shape != packed.shape[:1] or turn.positions.device != packed.device or turn.base <= 0:
            raise ValueError(
                f"a turn needs positions [{packed.shape[0]}] on {packed.device} and a positive base; got "
                f"{tuple(turn.positions.shape)} on {turn.positions.device} and {turn.base}"
            )
    if bias is not None:
        check_vector("bias", bias, packed.shape[1] + (0 if values is None else values.shape[1]))
    if among is not None:
        _check_among(among, packed, heads, dim, len(weights))
    positions, bases = [t.positions.detach() for t in turns], [float(t.base) for t in turns]
    name = dispatch.choose("projections", packed, backend, (f"head:{dim}",))
    watched = torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None
    mixed = (weights[0] is None) != (weights[-1] is None)
    if values is not None and (name == dispatch.REFERENCE or watched or mixed):
        packed, values = torch.cat((packed, values), dim=1), None
    if name == dispatch.REFERENCE or (weights[0] is None) != (weights[-1] is None):
        whole = reference.with_bias(packed, bias)
        parts = reference.rotary_heads(whole, heads, weights, positions, bases, float(eps))
        if among is not None:
            parts = (reference.among(parts[0], among.rows, among.places, among.others), *parts[1:])
        return parts if readers == 1 else (*parts, *parts[-2:])
    bias, *weights = dense(bias, *weights)
    rows, *places = (None, None, None) if among is None else (among.rows, among.places, among.others)
    if values is not None:
        return _RotaryMade.apply(  # type: ignore[no-any-return]
            packed, values, bias, rows, *weights, heads, positions, bases, places, float(eps), name
        )
    return _Rotary.apply(  # type: ignore[no-any-return]
        packed, bias, rows, *weights, len(weights), heads, positions, bases, places, readers, float(eps), name
    )


def _check_among(among: Among, packed: Tensor, heads: int, dim: int, slots: int) -> None:
    if slots != 2:
        raise ValueError("rows can stand among queries alone, and there are none beside one weight")
    rows, given = among.rows, (among.places, among.others)
    if rows.dtype != packed.dtype or rows.shape[1:] != (heads, dim) or rows.dim() != 3:
        raise ValueError(f"among.rows must be [N, {heads}, {dim}] {packed.dtype}; got {tuple(rows.shape)} {rows.dtype}")
    for name, x, count in zip(("places", "others"), given, (packed.shape[0], rows.shape[0]), strict=True):
        if x.shape != (count,) or x.dtype != torch.int64 or x.device != packed.device:
            raise ValueError(
                f"among.{name} must be [{count}] int64 on {packed.device}; got {tuple(x.shape)} {x.dtype} on {x.device}"
            )


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, bias: Tensor | None, rows: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
        *weights, count, heads, positions, bases, (places, others), readers, eps, backend = args
        ctx.save_for_backward(packed, bias, *weights, *positions, places, others)
        ctx.rest = (count, heads, bases, eps, backend)
        added = 0 if rows is None else rows.shape[0]
        *parts, k = _rotary(packed, weights, heads, positions, bases, places, added, eps, backend)
        if rows is not None:
            parts[0].index_copy_(0, others, rows)
        v = packed.view(packed.shape[0], count + 1, heads, k.shape[2])[:, count]
        return (*parts, k, v) if readers == 1 else (*parts, k, v, k.view(k.shape), v.view(v.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        count, heads, bases, eps, backend = ctx.rest
        packed, bias, *saved, places, others = ctx.saved_tensors
        weights, positions = saved[:count], saved[count:]
        found = [*((None,) if count == 1 else ()), *grads]
        dpacked, dbias, *dweights = _rotary_backward(
            found, packed, weights, bias, heads, positions, bases, places, eps, backend
        )
        drows = None if others is None else grads[0].index_select(0, others)
        dweights = [None if w is None else dw for w, dw in zip(weights, dweights, strict=True)]
        return dpacked, None if bias is None else dbias, drows, *dweights, *(None,) * 8


class _RotaryMade(torch.autograd.Function):
    """q and k of [q || k], which are kept, beside v."""

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, v: Tensor, bias: Tensor | None, rows: Tensor | None, *args: Any
    ) -> tuple[Tensor, ...]:  # fmt: skip
        *weights, heads, positions, bases, (places, others), eps, name = args
        added = 0 if rows is None else rows.shape[0]
        made = dispatch.module("projections", name).rotary_made
        (q, k), scales = made(packed, weights, heads, positions, bases, places, added, eps)
        if rows is not None:
            q.index_copy_(0, others, rows)
        ctx.save_for_backward(q, k, scales, bias, *weights, *positions, places, others)
        ctx.rest = (bases, eps, name)
        return q, k, v.view(k.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        bases, eps, name = ctx.rest
        q, k, scales, bias, *saved, places, others = ctx.saved_tensors
        weights, positions = saved[:2], saved[2:]
        back = dispatch.module("projections", name).rotary_made_backward
        dpacked, dbias, *dweights = back(list(grads), (q, k), scales, weights, bias, positions, bases, places, eps)
        drows = None if others is None else grads[0].index_select(0, others)
        dweights = [None if w is None else dw for w, dw in zip(weights, dweights, strict=True)]
        dqk, dv = dpacked.tensor_split([dpacked.shape[1] // 3 * 2], dim=1)
        return dqk, dv, None if bias is None else dbias, drows, *dweights, *(None,) * 6


@operator("rotary_heads")
def _rotary(
    packed: Tensor,
    weights: list[Tensor | None],
    heads: int,
    positions: list[Tensor],
    bases: list[float],
    places: Tensor | None,
    added: int,
    eps: float,
    backend: str,
) -> list[Tensor]:
    rotary = dispatch.module("projections", backend).rotary
    return rotary(packed, weights, heads, positions, bases, places, added, eps)  # type: ignore[no-any-return]


@_rotary.register_fake
def _(packed, weights, heads, positions, bases, places, added, *_rest):  # type: ignore[no-untyped-def]
    dim = packed.shape[1] // ((len(weights) + 1) * heads)
    return [packed.new_empty(packed.shape[0] + (added if i == 0 else 0), heads, dim) for i in range(len(weights))]


@operator("rotary_heads_backward")
def _rotary_backward(
    grads: list[Tensor | None],
    packed: Tensor,
    weights: list[Tensor | None],
    bias: Tensor | None,
    heads: int,
    positions: list[Tensor],
    bases: list[float],
    places: Tensor | None,
    eps: float,
    backend: str,
) -> list[Tensor]:
    backward = dispatch.module("projections", backend).rotary_backward
    return backward(grads, packed, weights, bias, heads, positions, bases, places, eps)  # type: ignore[no-any-return]


@_rotary_backward.register_fake
def _(grads, packed, weights, bias, *_rest):  # type: ignore[no-untyped-def]
    vectors = [packed.new_empty(0) if v is None else v.new_empty(v.shape) for v in (bias, *weights)]
    return [packed.new_empty(packed.shape), *vectors]
