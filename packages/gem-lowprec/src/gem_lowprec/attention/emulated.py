"""Low-precision attention with exact operands in float32: the numerics of `fp8` and `mxfp8` on any device, and the
specification of the Hopper kernels.

Everything is padded to [B, H, L, D], so that blocks begin where sequences do. With Q(x) a quantised x, along the
contraction of the product that it enters:

    S = scale Q(Q) Q(K)^T        P = exp(S - max)        O = Q(P) Q(V) / sum P

    dP = dO V^T        dS = P (dP - rowsum(dO o O)) scale        dQ = dS K        dK = dS^T Q        dV = P^T dO

"fp8": Q has a scale for every row, K and V for 128 keys, P the fixed scale 2^-8 below a power of two that is at least
the row's largest. The backward pass has the forward's Q, K and V, and quantises nothing else.
"mxfp8": every operand of all seven products has an E8M0 scale for 32 elements along the contraction (MXFP8, OCP MX).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from gem_kernels.dense import Dense, densify, full_precision
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_lowprec.attention.operands import quantise_reference
from gem_lowprec.formats import E4M3, decode, encode
from gem_lowprec.quantize import MXFP8, quantize

AttentionPrecision = Literal["fp8", "mxfp8"]
PRECISIONS = ("fp8", "mxfp8")
SHIFT = 8  # of P's exponent: 2^8 is below E4M3's 448
LN2 = 0.6931471805599453


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What an attention call is besides its tensors; `q_offsets` None for learned queries."""

    q_offsets: Tensor | None
    k_offsets: Tensor
    max_q: int
    max_k: int
    scale: float
    left: int
    right: int
    precision: AttentionPrecision

    def dense(self, q: Tensor, k: Tensor, v: Tensor) -> Dense:
        """Padded operands, 0 behind a sequence's end."""
        return densify(q, k, v, self.q_offsets, self.k_offsets, self.max_q, self.max_k)


def _mx(x: Tensor, dim: int) -> Tensor:
    """x as MXFP8 sees it, in blocks of 32 along `dim`."""
    return quantize(x.float(), MXFP8, dim, backend="reference").dequantize(x.dtype)


def _hidden(dense: Dense, problem: Problem) -> tuple[Tensor, Tensor]:
    """Where a query does not see a key, [B, 1, 1 or Lq, Lk] bool, and whether it sees any, [B, 1, 1 or Lq, 1]."""
    first, after = dense.interval(problem.left, problem.right)
    return dense.hidden(first, after, torch.bool), first < after


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[B or 1, H, L, ...] -> [B or 1, Hkv, G L, ...]: the query heads that share a key head below one another."""
    return x.unflatten(1, (kv_heads, -1)).flatten(2, 3)


@full_precision
def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """O [Tq, H, D] in q's dtype and LSE [Tq, H] (float64 for float64 inputs); 0 and -inf where no key is seen."""
    if problem.precision == "fp8":
        q, k, v = _rounded(q, k, v, problem)
    dense = problem.dense(q, k, v)
    hidden, sees = _hidden(dense, problem)
    if dense.shape[3] == 0:
        out = dense.rows(dense.q.new_zeros(*dense.shape[:3], q.shape[2])).to(q.dtype)
        return out, dense.q.new_full(out.shape[:2], float("-inf"))
    if problem.precision == "mxfp8":
        s = problem.scale * _scores(_mx(dense.q, -1), _mx(dense.k, -1), dense)
    else:
        s = dense.scores(problem.scale)
    s = (s / LN2).masked_fill(hidden, float("-inf"))
    most = s.amax(-1, keepdim=True).masked_fill(~sees, 0.0)
    if problem.precision == "fp8":
        most = most.ceil()
    p = torch.exp2(s - most)
    total = p.sum(-1, keepdim=True)
    if problem.precision == "fp8":
        p = decode(encode(p * 2**SHIFT, E4M3), E4M3).to(p.dtype) / 2**SHIFT
        out = dense.weighted(p)
    else:
        kv_heads = dense.k.shape[1]
        out = torch.matmul(_grouped(_mx(p, -1), kv_heads), _mx(dense.v, -2)).view(*dense.shape[:3], -1)
    out = out / total.masked_fill(~sees, 1.0)
    lse = ((most + total.log2()) * LN2).squeeze(-1)
    return dense.rows(out).to(q.dtype), dense.rows(lse)


def _rounded(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """What the FP8 operands stand for. The power of two that the kernel takes out of V's blocks is in P here; the
    rounding of P to E4M3 is the same, as powers of two go through it, but for what underflows.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    offsets = problem.q_offsets
    if offsets is None:
        offsets = torch.tensor([0, q.shape[0]], device=q.device)
    rounded = quantise_reference(q, k, v, offsets, problem.k_offsets).dequantize(wide)
    return tuple(new.to(old.dtype) for new, old in zip(rounded, (q, k, v), strict=True))  # type: ignore[return-value]


def _scores(q: Tensor, k: Tensor, dense: Dense) -> Tensor:
    """q k^T, [B, H, Lq, Lk]."""
    return torch.matmul(_grouped(q, k.shape[1]), k.transpose(-1, -2)).view(dense.shape)


@full_precision
def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV in the dtypes of Q, K, V, of the forward's O and LSE."""
    mx = problem.precision == "mxfp8"
    if not mx:
        q, k, v = _rounded(q, k, v, problem)
    dense = problem.dense(q, k, v)
    hidden, sees = _hidden(dense, problem)
    delta = (dout.to(dense.q.dtype) * out.to(dense.q.dtype)).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    rows = [x.to(dense.q.dtype) for x in (dout, delta[..., None], lse[..., None])]
    grad, delta, lse = (_padded(x, problem, dense) for x in rows)
    kv_heads = dense.k.shape[1]

    def along(x: Tensor, dim: int) -> Tensor:
        return _mx(x, dim) if mx else x

    s = problem.scale * _scores(along(dense.q, -1), along(dense.k, -1), dense)
    p = torch.exp(s - lse.masked_fill(~sees, 0.0)).masked_fill(hidden, 0.0)
    dp = _scores(along(grad, -1), along(dense.v, -1), dense)
    ds = p * (dp - delta) * problem.scale
    dq = torch.matmul(_grouped(along(ds, -1), kv_heads), along(dense.k, -2)).view(*dense.shape[:3], -1)
    # Queries are contracted head by head: a block of 32 lies in one head.
    queries = along(dense.q, -2).expand(dense.shape[0], -1, -1, -1)
    dk = torch.matmul(along(ds, -2).transpose(-1, -2), queries)
    dv = torch.matmul(along(p, -2).transpose(-1, -2), along(grad, -2))
    dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
    if problem.q_offsets is None:
        dq_rows = dq.sum(0).transpose(0, 1)
    else:
        dq_rows = dense.rows(dq)
    keys = densify(k, k, v, problem.k_offsets, problem.k_offsets, problem.max_k, problem.max_k)
    return dq_rows.to(q.dtype), keys.rows(dk).to(k.dtype), keys.rows(dv).to(v.dtype)


def _padded(x: Tensor, problem: Problem, dense: Dense) -> Tensor:
    """Rows of queries [Tq, H, C] to [B, H, Lq, C]."""
    offsets, length = problem.q_offsets, dense.shape[2]
    if offsets is None:
        offsets = torch.arange(dense.shape[0] + 1, device=x.device) * length
    return densify(x, x, x, offsets, offsets, length, length).q


class Emulated(torch.autograd.Function):
    """The two passes joined; gradients go through the roundings as if they were not there."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        """(O, LSE)."""
        out, lse = forward(q, k, v, problem)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.problem = problem
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Of Q, K and V."""
        q, k, v, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return None, None, None, None
        dout = torch.zeros_like(out) if dout is None else dout
        return (*backward(dout, dlse, q, k, v, out, lse, ctx.problem), None)
