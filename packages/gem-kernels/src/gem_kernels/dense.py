"""What the plain PyTorch references share: jagged tensors padded to [B, Hkv, G * L, D], so that batched matmul does the work.

Legend: B samples, H query heads, Hkv key heads, G = H / Hkv query heads per key head, Lq and Lk padded lengths, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gem_kernels import jagged
from gem_kernels.checks import UNLIMITED


@dataclass(frozen=True)
class Dense:
    """Padded operands of one attention problem, and the way back to jagged rows."""

    q: Tensor  # [B or 1, Hkv, G * Lq, D]
    k: Tensor  # [B, Hkv, Lk, D]
    v: Tensor  # [B, Hkv, Lk, D]
    q_lengths: Tensor  # [B, 1, 1, 1]
    k_lengths: Tensor  # [B, 1, 1, 1]
    q_index: Tensor | None  # [Tq], None for learned queries shared by every sample
    shape: tuple[int, int, int, int]  # B, H, Lq, Lk

    def scores(self) -> Tensor:
        """Q K^T for every head, [B, H, Lq, Lk]."""
        return torch.matmul(self.q, self.k.transpose(-1, -2)).view(self.shape)

    def weighted(self, p: Tensor) -> Tensor:
        """P V as jagged rows, [Tq, H, D]; P is [B, H, Lq, Lk]."""
        batch, heads, len_q, len_k = self.shape
        kv_heads, dim = self.v.shape[1], self.v.shape[3]
        out = torch.matmul(p.reshape(batch, kv_heads, -1, len_k), self.v)
        return self.rows(out.view(batch, heads, len_q, dim))

    def rows(self, x: Tensor) -> Tensor:
        """[B, H, Lq, ...] -> [Tq, H, ...]."""
        x = x.transpose(1, 2)
        return x.flatten(0, 1).contiguous() if self.q_index is None else jagged.unpad(x, self.q_index)

    def visible(self, left: int, right: int, *, tail: bool) -> Tensor | None:
        """Which keys a query may see, [B, 1, 1 or Lq, Lk]; `tail` also hides the padding after the last key. None: all."""
        len_q, len_k = self.shape[2:]
        column = torch.arange(len_k, device=self.k.device)
        mask = (column < self.k_lengths) if tail else None
        if left == UNLIMITED and right == UNLIMITED:
            return mask
        # The diagonal joins the last query to the last key: query i stands at key i + (Lk - Lq).
        distance = column - (torch.arange(len_q, device=self.k.device)[:, None] + self.k_lengths - self.q_lengths)
        if left != UNLIMITED:
            near = distance >= -left
            mask = near if mask is None else mask & near
        if right != UNLIMITED:
            near = distance <= right
            mask = near if mask is None else mask & near
        return mask


def densify(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, max_q: int, max_k: int
) -> Dense:
    """Pad q, k, v of one problem; float16 and bfloat16 are computed in float32."""
    work = torch.promote_types(q.dtype, torch.float32)
    batch, heads, kv_heads, dim = k_offsets.numel() - 1, q.shape[1], k.shape[1], q.shape[2]
    len_k = jagged.longest(k_offsets, max_k)
    k_index = jagged.dense_index(k_offsets, k.shape[0], len_k)

    def padded(x: Tensor, index: Tensor, length: int) -> Tensor:  # [T, H, D] -> [B, L, H, D] -> [B, H, L, D]
        return jagged.pad(x.to(work), index, batch, length).transpose(1, 2)

    k_dense, v_dense = padded(k, k_index, len_k), padded(v, k_index, len_k)
    if q_offsets is None:
        len_q, q_index = q.shape[0], None
        q_dense = q.to(work).transpose(0, 1).unsqueeze(0)  # [1, H, Lq, D]
        q_lengths = torch.full((batch, 1, 1, 1), len_q, device=q.device)
    else:
        len_q = jagged.longest(q_offsets, max_q)
        q_index = (
            k_index if q_offsets is k_offsets and len_q == len_k else jagged.dense_index(q_offsets, q.shape[0], len_q)
        )
        q_dense = padded(q, q_index, len_q)
        q_lengths = jagged.lengths(q_offsets).view(-1, 1, 1, 1)
    q_dense = q_dense.reshape(q_dense.shape[0], kv_heads, (heads // kv_heads) * len_q, dim)
    return Dense(
        q=q_dense,
        k=k_dense,
        v=v_dense,
        q_lengths=q_lengths,
        k_lengths=jagged.lengths(k_offsets).view(-1, 1, 1, 1),
        q_index=q_index,
        shape=(batch, heads, len_q, len_k),
    )
