"""Between one packed projection and the operators that read its parts: one pass over memory each way.

A projection makes gate, up and q, or q, k and v, side by side in one matrix. Taken apart with plain operators each part
is normed, turned and copied by itself, and the gradients are copied together again; here a kernel writes each part
once, and one gradient of the whole matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_kernels import dispatch
from gem_kernels.checks import FLOATS
from gem_kernels.operator import operator
from gem_kernels.projections import reference

__all__ = ["Among", "Turn", "gated_heads", "key_value", "rotary_heads", "sigmoid_gate"]


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


def gated_heads(
    packed: Tensor,
    hidden: int,
    heads: int,
    weight: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The parts of [gate || up || q] = packed: SwiGLU's product, and heads of q, each divided by its root mean square::

        h = silu(gate) * up        q_h = q_h / sqrt(mean(q_h^2) + eps) * weight      in float32

    Args:
        packed: [T, 2 hidden + H D] float16, bfloat16, float32 or float64.
        hidden: columns of gate and of up, at least 1.
        heads: H. There may be no q: D = 0.
        weight: [D] floating; without it q is as it is.
        bias: [2 hidden + H D] floating, the projection's, which packed holds already. Its gradient is made here, where
            packed's is, so the projection should be given `bias.detach()`; otherwise it would count twice.
        eps: added to the mean square, positive.
        backend: "reference" or "triton"; None lets `dispatch` choose.

    Returns:
        h [T, hidden] and q [T, H, D] in packed's dtype.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or eps that do not fit.
        RuntimeError: the backend asked for cannot run this.

    Sources: Shazeer, 2020 (GLU variants); Henry et al., 2020 (query-key normalisation).
    """
    _check(packed, heads, 2 * hidden, (weight,), eps)
    if hidden < 1:
        raise ValueError(f"hidden must be at least 1; got {hidden}")
    width = packed.shape[1] - 2 * hidden
    if weight is not None:
        _check_weight("weight", weight, width // heads)
    _check_bias(bias, packed)
    name = dispatch.choose("projections", packed, backend, (f"head:{width // heads}",))
    if name == dispatch.REFERENCE:
        return reference.gated_heads(reference.with_bias(packed, bias), hidden, heads, weight, float(eps))
    return _Gated.apply(packed, weight, bias, hidden, heads, float(eps), name)  # type: ignore[no-any-return]


def rotary_heads(
    packed: Tensor,
    heads: int,
    weights: Sequence[Tensor | None],
    *,
    turns: Sequence[Turn] = (),
    readers: int = 1,
    among: Among | None = None,
    bias: Tensor | None = None,
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
        eps: added to the mean square, positive.
        backend: "reference" or "triton"; None lets `dispatch` choose.

    Returns:
        (q, k, v) or (k, v), [T, H, D] each, then k and v again for a second reader. v is a view of packed.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or eps that do not fit.
        RuntimeError: the backend asked for cannot run this.

    Sources: RoFormer (Su et al., 2021); Henry et al., 2020 (query-key normalisation).
    """
    weights = list(weights)
    if len(weights) not in (1, 2) or len(turns) > 2 or readers not in (1, 2):
        raise ValueError(
            f"expected 1 or 2 weights, 0 to 2 turns, 1 or 2 readers; got {len(weights)}, {len(turns)}, {readers}"
        )
    _check(packed, heads * (len(weights) + 1), 0, weights, eps)
    dim = packed.shape[1] // (heads * (len(weights) + 1))
    for i, weight in enumerate(weights):
        if weight is not None:
            _check_weight(f"weights[{i}]", weight, dim)
    if turns and dim % 2:
        raise ValueError(f"rotary embedding needs an even head dimension; got {dim}")
    for turn in turns:
        if turn.positions.shape != packed.shape[:1] or turn.positions.device != packed.device or turn.base <= 0:
            raise ValueError(
                f"a turn needs positions [{packed.shape[0]}] on {packed.device} and a positive base; got "
                f"{tuple(turn.positions.shape)} on {turn.positions.device} and {turn.base}"
            )
    _check_bias(bias, packed)
    if among is not None:
        _check_among(among, packed, heads, dim, len(weights))
    positions, bases = [t.positions.detach() for t in turns], [float(t.base) for t in turns]
    name = dispatch.choose("projections", packed, backend, (f"head:{dim}",))
    if name == dispatch.REFERENCE or (weights[0] is None) != (weights[-1] is None):
        whole = reference.with_bias(packed, bias)
        parts = reference.rotary_heads(whole, heads, weights, positions, bases, float(eps))
        if among is not None:
            parts = (reference.among(parts[0], among.rows, among.places, among.others), *parts[1:])
        return parts if readers == 1 else (*parts, *parts[-2:])
    rows, *places = (None, None, None) if among is None else (among.rows, among.places, among.others)
    return _Rotary.apply(  # type: ignore[no-any-return]
        packed, bias, rows, *weights, len(weights), heads, positions, bases, places, readers, float(eps), name
    )


def sigmoid_gate(x: Tensor, logits: Tensor, *, bias: Tensor | None = None, backend: str | None = None) -> Tensor:
    """y = x * sigmoid(logits), in float32.

    Args:
        x: [..., C] float16, bfloat16, float32 or float64.
        logits: like x.
        bias: [C] floating, which the logits hold already, as in `gated_heads`.
        backend: "reference" or "triton"; None lets `dispatch` choose.

    Returns:
        y [..., C] in x's dtype.

    Raises:
        TypeError, ValueError: dtypes, shapes or devices that do not fit.
        RuntimeError: the backend asked for cannot run this.
    """
    if x.dtype not in FLOATS or logits.dtype != x.dtype:
        raise TypeError(f"x and logits must be of one floating dtype; got {x.dtype} and {logits.dtype}")
    if x.dim() == 0 or logits.shape != x.shape or logits.device != x.device:
        raise ValueError(
            f"logits must be like x, {tuple(x.shape)} on {x.device}; got {tuple(logits.shape)} on {logits.device}"
        )
    if bias is not None:
        _check_weight("bias", bias, x.shape[-1])
    name = dispatch.choose("projections", x, backend, ())
    if name == dispatch.REFERENCE or x.numel() == 0:
        return reference.sigmoid_gate(x, reference.with_bias(logits, bias))
    return _Sigmoid.apply(x, logits, bias, name)  # type: ignore[no-any-return]


def key_value(packed: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The two parts of [k || v] = packed as they are: views [T, H, D] of [T, 2 H D].

    Their gradients become one without a copy where they lie side by side, as our Hopper kernels write them for keys and
    values that do.

    Raises:
        ValueError: where packed is not [T, a multiple of 2 H].
    """
    if packed.dim() != 2 or heads < 1 or packed.shape[1] % (2 * heads):
        raise ValueError(f"packed must be [T, a multiple of {2 * heads}]; got {tuple(packed.shape)}")
    if torch.compiler.is_compiling():
        k, v = packed.unflatten(1, (2, heads, -1)).unbind(1)
        return k, v
    return _KeyValue.apply(packed, heads)  # type: ignore[no-any-return]


def side_by_side(k: Tensor, v: Tensor) -> bool:
    """Whether k and v [T, H, D] are the two halves of the rows of one [T, 2 H D] matrix."""
    _, heads, dim = k.shape
    return (
        k.shape == v.shape
        and k.dtype == v.dtype
        and k.stride() == v.stride() == (2 * heads * dim, dim, 1)
        and k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        and v.storage_offset() - k.storage_offset() == heads * dim
    )


def _check(packed: Tensor, heads: int, before: int, weights: Sequence[Tensor | None], eps: float) -> None:
    if packed.dtype not in FLOATS:
        raise TypeError(f"packed must be float16, bfloat16, float32 or float64; got {packed.dtype}")
    width = packed.shape[-1] - before
    if packed.dim() != 2 or heads < 1 or width < 0 or width % heads:
        raise ValueError(f"packed must be [T, {before} + a multiple of {heads}]; got {tuple(packed.shape)}")
    if eps <= 0:
        raise ValueError(f"eps must be positive; got {eps}")
    for weight in weights:
        if weight is not None and weight.device != packed.device:
            raise ValueError(f"weights must be on {packed.device} with packed; got {weight.device}")


def _check_bias(bias: Tensor | None, packed: Tensor) -> None:
    if bias is not None:
        _check_weight("bias", bias, packed.shape[1])


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


def _check_weight(name: str, weight: Tensor, dim: int) -> None:
    if weight.shape != (dim,) or weight.dtype not in FLOATS:
        raise ValueError(f"{name} must be floating [{dim}]; got {tuple(weight.shape)} {weight.dtype}")


class _KeyValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        k, v = packed.view(packed.shape[0], 2, heads, packed.shape[1] // (2 * heads)).unbind(1)
        return k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor, None]:
        rows, heads, dim = dk.shape
        if side_by_side(dk, dv):
            return dk.as_strided((rows, 2 * heads * dim), (2 * heads * dim, 1)), None
        return torch.stack((dk, dv), dim=1).view(rows, 2 * heads * dim), None


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, logits: Tensor, bias: Tensor | None, backend: str) -> Tensor:
        ctx.save_for_backward(x, logits, bias)
        ctx.backend = backend
        return _sigmoid(x, logits, backend)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, logits, bias = ctx.saved_tensors
        dx, dlogits, dbias = _sigmoid_backward(dy, x, logits, bias, ctx.backend)
        return dx, dlogits, None if bias is None else dbias, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(packed, weight, bias)
        ctx.rest = rest
        return _gated(packed, weight, *rest)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dgated: Tensor, dq: Tensor) -> tuple[Any, ...]:
        packed, weight, bias = ctx.saved_tensors
        dpacked, dweight, dbias = _gated_backward(dgated, dq, packed, weight, bias, *ctx.rest)
        return dpacked, None if weight is None else dweight, None if bias is None else dbias, *(None,) * 4


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


@operator("gated_heads")
def _gated(
    packed: Tensor, weight: Tensor | None, hidden: int, heads: int, eps: float, backend: str
) -> tuple[Tensor, Tensor]:
    return dispatch.module("projections", backend).gated(packed, weight, hidden, heads, eps)  # type: ignore[no-any-return]


@_gated.register_fake
def _(packed, weight, hidden, heads, eps, backend):  # type: ignore[no-untyped-def]
    rows = packed.shape[0]
    return packed.new_empty(rows, hidden), packed.new_empty(rows, heads, (packed.shape[1] - 2 * hidden) // heads)


@operator("gated_heads_backward")
def _gated_backward(
    dgated: Tensor,
    dq: Tensor,
    packed: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    hidden: int,
    heads: int,
    eps: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    backward = dispatch.module("projections", backend).gated_backward
    return backward(dgated, dq, packed, weight, bias, hidden, heads, eps)  # type: ignore[no-any-return]


@_gated_backward.register_fake
def _(dgated, dq, packed, weight, bias, *_rest):  # type: ignore[no-untyped-def]
    vectors = (packed.new_empty(0) if v is None else v.new_empty(v.shape) for v in (weight, bias))
    return packed.new_empty(packed.shape), *vectors


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


@operator("sigmoid_gate")
def _sigmoid(x: Tensor, logits: Tensor, backend: str) -> Tensor:
    return dispatch.module("projections", backend).sigmoid(x, logits)  # type: ignore[no-any-return]


@_sigmoid.register_fake
def _(x, logits, backend):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


@operator("sigmoid_gate_backward")
def _sigmoid_backward(
    dy: Tensor, x: Tensor, logits: Tensor, bias: Tensor | None, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    return dispatch.module("projections", backend).sigmoid_backward(dy, x, logits, bias)  # type: ignore[no-any-return]


@_sigmoid_backward.register_fake
def _(dy, x, logits, bias, backend):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(0) if bias is None else bias.new_empty(bias.shape)
