"""The parts of packed projections in plain PyTorch. Differentiable by autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_kernels.norms import reference as norms
from gem_kernels.rotary import reference as rotary


def with_bias(packed: Tensor, bias: Tensor | None) -> Tensor:
    """packed, which holds the bias: only the gradient goes to it, too."""
    if bias is None:
        return packed
    return packed + (bias - bias.detach()).to(packed.dtype)


def normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of every head, or nothing without a weight."""
    return x if weight is None else norms.norm(x, None, weight, None, kind="rms", eps=eps, swish=False)[0]


def turned(x: Tensor, positions: list[Tensor], bases: list[float]) -> Tensor:
    """Rotate the heads of [T, H, D] by the first positions, or the first half by these and the rest by the second."""
    if not positions:
        return x
    if len(positions) == 1:
        return rotary.rotate(x, positions[0], bases[0])
    first = x.shape[1] // 2
    halves = x.split((first, x.shape[1] - first), dim=1)
    return torch.cat([rotary.rotate(h, p, b) for h, p, b in zip(halves, positions, bases, strict=True)], dim=1)


def sigmoid_gate(x: Tensor, logits: Tensor) -> Tensor:
    """x * sigmoid(logits), at least float32 in between."""
    work = torch.promote_types(x.dtype, torch.float32)
    return (x.to(work) * torch.sigmoid(logits.to(work))).to(x.dtype)


def gated_heads(packed: Tensor, hidden: int, heads: int, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """silu(gate) * up [T, hidden] and the normed heads [T, H, D]; at least float32 in between."""
    gate, up, rest = packed.split((hidden, hidden, packed.shape[1] - 2 * hidden), dim=1)
    work = torch.promote_types(packed.dtype, torch.float32)
    gated = (F.silu(gate.to(work)) * up.to(work)).to(packed.dtype)
    return gated, normed(rest.unflatten(1, (heads, rest.shape[1] // heads)), weight, eps)


def gated(packed: Tensor, weight: Tensor | None, hidden: int, heads: int, eps: float) -> tuple[Tensor, Tensor]:
    """As the kernels' of this name."""
    return gated_heads(packed, hidden, heads, weight, eps)


Small = tuple[Tensor, Tensor]


def shrunk(x: Tensor) -> Small:
    """[T, C] in E4M3 with a power of two for each row, [T, 1] int8, that brings the largest to 128 or a little more."""
    largest = x.detach().abs().amax(1, keepdim=True) if x.shape[1] else x.new_zeros(x.shape[0], 1)
    power = (torch.frexp(largest).exponent - 1).clamp(-100, 120)
    return torch.ldexp(x.detach(), 7 - power).to(torch.float8_e4m3fn), power.to(torch.int8)


def grown(small: Small, dtype: torch.dtype) -> Tensor:
    """The rows again."""
    data, power = small
    return torch.ldexp(data.to(dtype), power.int() - 7)


def gated_small(
    packed: Tensor, weight: Tensor | None, hidden: int, heads: int, eps: float
) -> tuple[Tensor, Tensor, Small, Tensor | None]:  # fmt: skip
    """As the kernels' of this name: h, q, gate and up in E4M3, and what multiplies the heads."""
    h, q = gated_heads(packed, hidden, heads, weight, eps)
    work = torch.promote_types(packed.dtype, torch.float32)
    rows = packed.shape[0]
    data, powers = shrunk(packed[:, : 2 * hidden].reshape(2 * rows, hidden))
    small = data.view(rows, 2 * hidden), powers.view(rows, 2)
    if weight is None:
        return h, q.clone(), small, None
    rest = packed[:, 2 * hidden :].unflatten(1, (heads, -1)).to(work)
    return h, q, small, (rest.square().mean(-1) + eps).rsqrt()


def gated_small_backward(
    dgated: Tensor, dq: Tensor, q: Tensor, small: Small, scales: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, hidden: int, heads: int, eps: float, again: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As the kernels' of this name."""
    work = torch.promote_types(q.dtype, torch.float32)
    data, powers = small
    parts = [grown((d, p), work) for d, p in zip(data.split(hidden, 1), powers.split(1, 1), strict=True)]
    with torch.enable_grad():
        gate, up = (part.requires_grad_() for part in parts)
        h = F.silu(gate) * up
    dgates = torch.autograd.grad(h, (gate, up), dgated.to(work))
    d, dweight = dq.to(work), q.new_empty(0)
    if weight is not None and scales is not None:
        wide = weight.to(work)
        normal = torch.where(wide == 0, 0, q.to(work) / torch.where(wide == 0, 1, wide))
        dweight = (d * normal).sum((0, 1)).to(weight.dtype)
        d = d * wide
        d = (d - normal * (d * normal).mean(-1, keepdim=True)) * scales[..., None]
    if again is not None:
        again.copy_(h.detach())
    dpacked = torch.cat((*dgates, d.flatten(1)), dim=1).to(q.dtype)
    dbias = q.new_empty(0) if bias is None else dpacked.sum(0, dtype=bias.dtype)
    return dpacked, dweight, dbias


def heads(packed: Tensor, weight: Tensor | None, heads: int, eps: float) -> Tensor:
    """As the kernels' of this name."""
    return normed(packed.unflatten(1, (heads, packed.shape[1] // heads)), weight, eps)


def gated_backward(
    dgated: Tensor, dq: Tensor, packed: Tensor, weight: Tensor | None, bias: Tensor | None, hidden: int, heads: int,
    eps: float, again: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As the kernels' of this name: gradients of packed, weight and bias; into `again`, SwiGLU's product."""
    with torch.enable_grad():
        leaf, scale = (None if t is None else t.detach().requires_grad_() for t in (packed, weight))
        assert leaf is not None
        h, q = gated_heads(leaf, hidden, heads, scale, eps)
    dpacked, *dweight = torch.autograd.grad((h, q), [leaf] if scale is None else [leaf, scale], (dgated, dq))
    if again is not None:
        again.copy_(h.detach())
    nothing = packed.new_empty(0)
    dbias = nothing if bias is None else dpacked.sum(0, dtype=bias.dtype)
    return dpacked, *(dweight or (nothing,)), dbias


def rotary_heads(
    packed: Tensor, heads: int, weights: list[Tensor | None], positions: list[Tensor], bases: list[float], eps: float
) -> tuple[Tensor, ...]:
    """[T, (n + 1) H D] -> n tensors [T, H, D], normed and turned, and the last one as it is."""
    *turning, v = packed.unflatten(1, (len(weights) + 1, heads, -1)).unbind(1)
    return (*(turned(normed(x, w, eps), positions, bases) for x, w in zip(turning, weights, strict=True)), v)


def among(x: Tensor, rows: Tensor, places: Tensor, others: Tensor) -> Tensor:
    """x [T, H, D] at its places and rows [N, H, D] at theirs, [T + N, H, D]."""
    whole = x.new_zeros(x.shape[0] + rows.shape[0], *x.shape[1:])
    return whole.index_copy(0, places, x).index_copy(0, others, rows)
