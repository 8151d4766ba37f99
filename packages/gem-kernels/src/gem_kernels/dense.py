"""What the plain PyTorch references share: jagged tensors padded head by head to [B, H, L, D], for batched matmul.

Legend: B samples, H query heads, Hkv key heads, G = H / Hkv query heads per key head, Lq and Lk padded lengths,
D head dimension, Tq and Tk tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from gem_kernels import jagged
from gem_kernels.checks import UNLIMITED

P = ParamSpec("P")
R = TypeVar("R")


def full_precision(attention: Callable[P, R]) -> Callable[P, R]:
    """Keep autocast out of a reference: it computes in the precision that it states."""

    @functools.wraps(attention)
    def run(*args: P.args, **options: P.kwargs) -> R:
        q = args[0]
        assert isinstance(q, Tensor)
        if not torch.amp.is_autocast_available(q.device.type):  # "meta", say
            return attention(*args, **options)
        with torch.autocast(q.device.type, enabled=False):
            return attention(*args, **options)

    return run


@dataclass(frozen=True)
class Dense:
    """Padded operands of one attention problem, and the way back to jagged rows."""

    q: Tensor  # [B or 1, H, Lq, D]
    k: Tensor  # [B, Hkv, Lk, D]
    v: Tensor  # [B, Hkv, Lk, D]
    q_lengths: Tensor  # [B, 1, 1, 1]
    k_lengths: Tensor  # [B, 1, 1, 1]
    q_index: Tensor | None  # [Tq, H], where each row of each head lands; None for learned queries
    shape: tuple[int, int, int, int]  # B, H, Lq, Lk

    def scores(self, scale: float) -> Tensor:
        """scale Q K^T, [B, H, Lq, Lk]."""
        q = (self.q * scale).unflatten(1, (self.k.shape[1], -1)).flatten(2, 3)  # [B or 1, Hkv, G * Lq, D]
        return torch.matmul(q, self.k.transpose(-1, -2)).view(self.shape)

    def weighted(self, p: Tensor) -> Tensor:
        """P V, [B, H, Lq, D]; P is [B, H, Lq, Lk]."""
        grouped = p.unflatten(1, (self.v.shape[1], -1)).flatten(2, 3)  # [B, Hkv, G * Lq, Lk]
        return torch.matmul(grouped, self.v).view(*self.shape[:3], self.v.shape[3])

    def rows(self, x: Tensor) -> Tensor:
        """[B, H, Lq, ...] -> [Tq, H, ...]."""
        if self.q_index is None:
            return x.transpose(1, 2).flatten(0, 1).contiguous()
        return x.flatten(0, 2).index_select(0, self.q_index.flatten()).unflatten(0, (-1, x.shape[1]))

    def interval(self, left: int, right: int) -> tuple[Tensor, Tensor]:
        """The first key that each query sees and the one after the last, both [B, 1, 1 or Lq, 1]."""
        first, after = torch.zeros_like(self.k_lengths), self.k_lengths
        # The diagonal joins the last query to the last key: query i stands at key i + (Lk - Lq).
        row = torch.arange(self.shape[2], device=self.k.device)[:, None] + (self.k_lengths - self.q_lengths)
        if left != UNLIMITED:
            first = (row - left).clamp(min=0)
        if right != UNLIMITED:
            after = torch.minimum(row + (right + 1), after)
        return first, after

    def hidden(self, first: Tensor, after: Tensor, dtype: torch.dtype) -> Tensor:
        """1 where a query does not see a key and 0 where it does, [B, 1, 1 or Lq, Lk]."""
        column = torch.arange(self.shape[3], device=self.k.device, dtype=torch.int32)
        mask = column >= after.int()
        if first.shape[2] != 1:  # a left edge
            mask = mask | (column < first.int())
        return mask.to(dtype)


def densify(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, max_q: int, max_k: int
) -> Dense:
    """Pad q, k, v of one problem; float16 and bfloat16 are computed in float32."""
    work = torch.promote_types(q.dtype, torch.float32)
    batch, heads, kv_heads, dim = k_offsets.numel() - 1, q.shape[1], k.shape[1], q.shape[2]

    def index(offsets: Tensor, total: int, heads: int, length: int) -> Tensor:  # [T, H]: row (b * H + h) * L + l
        shift = torch.arange(batch, device=q.device) * (heads * length) - offsets[:-1]
        place = torch.arange(total, device=q.device) + torch.repeat_interleave(
            shift, jagged.lengths(offsets), output_size=total
        )
        return place[:, None] + torch.arange(heads, device=q.device) * length

    def padded(x: Tensor, index: Tensor, length: int) -> Tensor:  # [T, H, D] -> [B, H, L, D]
        rows = x.to(work).reshape(-1, dim)
        dense = rows.new_zeros(batch * x.shape[1] * length, dim).index_copy_(0, index.flatten(), rows)
        return dense.view(batch, x.shape[1], length, dim)

    len_k = jagged.longest(k_offsets, max_k)
    k_index = index(k_offsets, k.shape[0], kv_heads, len_k)
    k_lengths = jagged.lengths(k_offsets).view(-1, 1, 1, 1)
    if q_offsets is None:
        len_q, q_index = q.shape[0], None
        q_dense = q.to(work).transpose(0, 1).unsqueeze(0)  # [1, H, Lq, D]
        q_lengths = torch.full_like(k_lengths, len_q)
    else:
        len_q = jagged.longest(q_offsets, max_q)
        same = q_offsets is k_offsets and heads == kv_heads and len_q == len_k
        q_index = k_index if same else index(q_offsets, q.shape[0], heads, len_q)
        q_dense = padded(q, q_index, len_q)
        q_lengths = jagged.lengths(q_offsets).view(-1, 1, 1, 1)
    return Dense(
        q=q_dense,
        k=padded(k, k_index, len_k),
        v=padded(v, k_index, len_k),
        q_lengths=q_lengths,
        k_lengths=k_lengths,
        q_index=q_index,
        shape=(batch, heads, len_q, len_k),
    )
