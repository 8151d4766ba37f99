"""A packed projection of q, k and v with its heads' norms and rotation made where the projection is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_kernels import dispatch
from gem_kernels.checks import FLOATS, check_number, dense
from gem_kernels.project_gated.functions import watched
from gem_kernels.projections.checks import check_vector
from gem_kernels.projections.rotary import Among, Turn, _check_among, _Rotary, rotary_heads

__all__ = ["project_rotary"]


def project_rotary(
    x: Tensor,
    weight: Tensor,
    heads: int,
    gains: Sequence[Tensor | None],
    *,
    turns: Sequence[Turn] = (),
    readers: int = 1,
    among: Among | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """`rotary_heads` of a projection, [q || k || v] = x W^T + b or [k || v], made where the projection is.

    On Hopper one kernel makes all of it, from the product's registers; elsewhere the product is torch's. There a gain
    for one of q and k alone, and what is watched (as of `project_gated`), is made apart, too.

    Args:
        x: [T, K] float16, bfloat16, float32 or float64.
        weight: W [(n + 1) H D, K] in x's dtype.
        heads: H.
        gains: weights of the norms of the n = 1 or 2 parts before v, [D] each, or None for no norm.
        turns, readers, among, eps: as of `rotary_heads`.
        bias: [(n + 1) H D] floating.
        backend: "reference", "triton" or "hopper"; None lets `dispatch` choose.

    Returns:
        As `rotary_heads`.

    Raises:
        TypeError, ValueError: as `rotary_heads`, and where x and W do not fit.
        RuntimeError: the backend asked for cannot run this.

    Sources: RoFormer (Su et al., 2021); Henry et al., 2020 (query-key normalisation).
    """
    if x.dtype not in FLOATS or weight.dtype != x.dtype:
        raise TypeError(f"x and weight must be of one floating dtype; got {x.dtype} and {weight.dtype}")
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[1] != x.shape[1] or x.shape[1] == 0:
        raise ValueError(f"x must be [T, K] and weight [N, K]; got {tuple(x.shape)} and {tuple(weight.shape)}")
    gains = list(gains)
    whole = heads * (len(gains) + 1)
    if heads < 1 or weight.shape[0] % whole:
        raise ValueError(f"weight must have a multiple of {whole} rows; got {weight.shape[0]}")
    width = weight.shape[0] // (len(gains) + 1)
    features = (f"head:{width // heads}", f"behind:{width}")
    name = dispatch.choose("project_rotary", x, backend, features)
    if name != "hopper" or watched() or (gains[0] is None) != (gains[-1] is None):
        packed = F.linear(x, weight, None if bias is None else bias.detach().to(x.dtype))
        return rotary_heads(
            packed, heads, gains, turns=turns, readers=readers, among=among, bias=bias, eps=eps,
            backend=None if name == "hopper" else name,
        )  # fmt: skip
    _check(x, weight, heads, gains, turns, readers, among, bias, eps)
    bias, *gains = dense(bias, *gains)
    rows, places, others = (None, None, None) if among is None else (among.rows, among.places, among.others)
    positions, bases = [t.positions.detach() for t in turns], [float(t.base) for t in turns]
    added = 0 if rows is None else rows.shape[0]
    forward = dispatch.module("project_rotary", name).forward
    with torch.no_grad():
        packed, parts = forward(x, weight, bias, gains, heads, positions, bases, places, added, float(eps))
    packed = _Projected.apply(x, weight, packed)
    given = (len(gains), heads, positions, bases, (places, others), readers, float(eps), parts)
    return _Parts.apply(packed, bias, rows, *gains, *given)  # type: ignore[no-any-return]


def _check(
    x: Tensor, weight: Tensor, heads: int, gains: list[Tensor | None], turns: Sequence[Turn], readers: int,
    among: Among | None, bias: Tensor | None, eps: float,
) -> None:  # fmt: skip
    """Raises as `rotary_heads`."""
    if len(gains) not in (1, 2) or len(turns) > 2 or readers not in (1, 2):
        raise ValueError(
            f"expected 1 or 2 gains, 0 to 2 turns, 1 or 2 readers; got {len(gains)}, {len(turns)}, {readers}"
        )
    dim = weight.shape[0] // (heads * (len(gains) + 1))
    check_number("eps", eps, positive=True)
    for i, gain in enumerate(gains):
        if gain is not None:
            check_vector(f"gains[{i}]", gain, dim)
    for turn in turns:
        if turn.positions.shape != x.shape[:1] or turn.positions.device != x.device or turn.base <= 0:
            raise ValueError(
                f"a turn needs positions [{x.shape[0]}] on {x.device} and a positive base; got "
                f"{tuple(turn.positions.shape)} on {turn.positions.device} and {turn.base}"
            )
    if bias is not None:
        check_vector("bias", bias, weight.shape[0])
    for what, tensor in (("weight", weight), ("bias", bias), ("gains[0]", gains[0]), ("gains[-1]", gains[-1])):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{what} must be on {x.device} with x; got {tensor.device}")
    if among is not None:
        _check_among(among, x, heads, dim, len(gains))


class _Projected(torch.autograd.Function):
    """x W^T + b, made already; no gradient of b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, packed: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return packed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dpacked: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = dpacked @ weight if ctx.needs_input_grad[0] else None
        return dx, dpacked.t() @ x if ctx.needs_input_grad[1] else None, None


class _Parts(_Rotary):
    """The parts of packed, of which q and k are made already; gradients as those of `rotary_heads`."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, bias: Tensor | None, rows: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
        *gains, count, heads, positions, bases, (places, others), readers, eps, made = args
        ctx.save_for_backward(packed, bias, *gains, *positions, places, others)
        ctx.rest = (count, heads, bases, eps, "triton")
        *parts, k = made
        if rows is not None:
            parts[0].index_copy_(0, others, rows)
        v = packed.view(packed.shape[0], count + 1, heads, k.shape[2])[:, count]
        return (*parts, k, v) if readers == 1 else (*parts, k, v, k.view(k.shape), v.view(v.shape))
