"""Jagged helpers in plain PyTorch, on rows [T, C]. Differentiable by autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_kernels import jagged


def most_recent(values: Tensor, offsets: Tensor, k: int) -> Tensor:
    """The last k rows of every sequence, latest first: [B, k, C], zeros where it is shorter."""
    if values.shape[0] == 0:
        values = F.pad(values, (0, 0, 0, 1))  # index_select needs a row to point at
    offsets = offsets.to(torch.int64)
    row = offsets[1:, None] - torch.arange(1, k + 1, device=values.device)  # [B, k]
    there = row >= offsets[:-1, None]
    out = values.index_select(0, row.clamp(min=0).flatten()).unflatten(0, row.shape)
    return out.masked_fill(~there[..., None], 0.0)


def _places(a_offsets: Tensor, offsets: Tensor, a_total: int, total: int) -> tuple[Tensor, Tensor]:
    """Where the rows of a [Ta] and of b [Tb] stand in their concatenation."""
    b_offsets = offsets - a_offsets
    a = torch.arange(a_total, device=offsets.device) + b_offsets[jagged.sequence_ids(a_offsets, a_total)]
    b_total = total - a_total
    return a, torch.arange(b_total, device=offsets.device) + a_offsets[1:][jagged.sequence_ids(b_offsets, b_total)]


def concat(a: Tensor, b: Tensor, a_offsets: Tensor, offsets: Tensor) -> Tensor:
    """a's rows, then b's, in every sequence of `offsets`: [Ta + Tb, C]."""
    total = a.shape[0] + b.shape[0]
    at_a, at_b = _places(a_offsets, offsets, a.shape[0], total)
    out = a.new_zeros(total, a.shape[1])
    return out.index_copy(0, at_a, a).index_copy(0, at_b, b)


def split(values: Tensor, a_offsets: Tensor, offsets: Tensor, a_total: int) -> tuple[Tensor, Tensor]:
    """The inverse of `concat`."""
    at_a, at_b = _places(a_offsets, offsets, a_total, values.shape[0])
    return values.index_select(0, at_a), values.index_select(0, at_b)


def add(values: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """Every row plus its sequence's row of bias [B, C], in values' dtype."""
    work = torch.promote_types(values.dtype, torch.float32)
    return (values.to(work) + bias.to(work)[jagged.sequence_ids(offsets, values.shape[0])]).to(values.dtype)


def to_padded(values: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """Every sequence in a row of [B, longest, C], cut or followed by zeros."""
    if values.shape[0] == 0:
        values = F.pad(values, (0, 0, 0, 1))  # index_select needs a row to point at
    offsets = offsets.to(torch.int64)
    row = offsets[:-1, None] + torch.arange(longest, device=values.device)  # [B, longest]
    there = row < offsets[1:, None]
    out = values.index_select(0, torch.where(there, row, 0).flatten()).unflatten(0, row.shape)
    return out.masked_fill(~there[..., None], 0.0)


def from_padded(padded: Tensor, offsets: Tensor, total: int) -> Tensor:
    """The inverse of `to_padded`, [total, C]; zeros for places past the padded length."""
    longest = padded.shape[1]
    place = jagged.positions(offsets, total)
    row = jagged.sequence_ids(offsets, total) * longest + place.clamp(max=longest - 1)
    return padded.flatten(0, 1).index_select(0, row).masked_fill((place >= longest)[:, None], 0.0)
