"""Jagged softmax attention in plain PyTorch: the specification, and what runs on a CPU. Differentiable by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_kernels.dense import densify, full_precision


@full_precision
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    bias: Tensor | None = None,
    left: int = -1,
    right: int = -1,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """O [Tq, H, D] and, if asked for, the log-sum-exp [Tq, H] of every query's scores (float64 for float64 inputs)."""
    dense = densify(q, k, v, q_offsets, k_offsets, max_q, max_k)
    len_q, len_k = dense.shape[2:]
    s = dense.scores(scale)  # [B, H, Lq, Lk]
    first, after = dense.interval(left, right)
    # A finite floor, not -inf, keeps NaN out of rows that see no key; adding it is much faster than masked_fill.
    s = s + dense.hidden(first, after, s.dtype).mul_(torch.finfo(s.dtype).min / 4)
    if bias is not None:
        s = s + bias[:, :, :len_q, :len_k].to(s.dtype)
    sees = first < after  # [B, 1, 1 or Lq, 1]
    p = torch.softmax(s, dim=-1)
    out = dense.rows(dense.weighted(p) * sees.to(s.dtype)).to(q.dtype)
    if not return_lse:
        return out, None
    if len_k == 0:
        return out, s.new_full(out.shape[:2], float("-inf"))
    lse = torch.logsumexp(s, dim=-1).masked_fill(~sees.squeeze(-1), float("-inf"))  # [B, H, Lq]
    return out, dense.rows(lse)
