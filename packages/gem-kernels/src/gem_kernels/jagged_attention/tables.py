"""Biases of `jagged_attention` from small learned tables: by relative position, and by the time between two events.

Plain PyTorch: the dense bias is what the kernels read, and its gradient goes back into the table through an embedding.
Entries beyond a sequence's queries and keys are those of a table, too; nothing reads them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_kernels import jagged

__all__ = ["position_bias", "time_bias"]


def position_bias(
    table: Tensor, max_q: int, max_k: int, *, q_offsets: Tensor | None = None, k_offsets: Tensor | None = None
) -> Tensor:
    """bias[b, h, i, j] = table[clip(j - p, -R, R) + R, h], where query i of a sequence stands at key p = i + Lk - Lq,
    as for `causal`.

    Args:
        table: [2 R + 1, H], one row for each distance from -R to R; the outer two stand for all that is farther away.
        max_q, max_k: as `jagged_attention` takes them.
        q_offsets, k_offsets: [B + 1], where sequences have other numbers of queries than of keys. Without them (self-
            attention) p = i.

    Returns:
        [1, H, max_q, max_k] without offsets, else [B, H, max_q, max_k], in the table's dtype.

    Raises ValueError: a table of an even number of rows, one set of offsets without the other, or of another length.

    Source: Shaw et al. (2018) and Raffel et al. (2020) for learned relative positions; HSTU (Zhai et al., 2024).
    """
    reach = _rows(table) // 2
    if table.shape[0] % 2 == 0:
        raise ValueError(f"table must have an odd number of rows, -R to R; got {table.shape[0]}")
    at = torch.arange(max_q, device=table.device)[None, :]
    if (q_offsets is None) != (k_offsets is None):
        raise ValueError("q_offsets and k_offsets are given together or not at all")
    if q_offsets is not None and k_offsets is not None:
        if q_offsets.shape != k_offsets.shape:
            raise ValueError(f"offsets of {q_offsets.numel() - 1} and {k_offsets.numel() - 1} sequences")
        at = at + (k_offsets.diff() - q_offsets.diff())[:, None]
    distance = torch.arange(max_k, device=table.device) - at[:, :, None]
    return _looked_up(table, distance.clamp(-reach, reach) + reach)


def time_bias(
    table: Tensor, bounds: Tensor, q_times: Tensor, k_times: Tensor, q_offsets: Tensor, k_offsets: Tensor,
    max_q: int, max_k: int,
) -> Tensor:  # fmt: skip
    """bias[b, h, i, j] = table[n, h], where n of the bounds lie below the time from key j to query i.

    Args:
        table: [N + 1, H].
        bounds: [N] ascending, in the unit of the times: powers of two for steps in the logarithm of the age.
        q_times, k_times: [Tq] and [Tk], when the event of each query and key was; any real dtype.
        q_offsets, k_offsets, max_q, max_k: as `jagged_attention` takes them.

    Returns:
        [B, H, max_q, max_k] in the table's dtype: B H max_q max_k numbers, which the kernels read once.

    Raises ValueError: shapes that do not fit together.

    Source: HSTU (Zhai et al., 2024), whose relative attention bias has a temporal part.
    """
    if bounds.ndim != 1 or _rows(table) != bounds.numel() + 1:
        raise ValueError(f"{bounds.numel()} bounds need a table of {bounds.numel() + 1} rows; got {tuple(table.shape)}")
    if q_offsets.shape != k_offsets.shape:
        raise ValueError(f"offsets of {q_offsets.numel() - 1} and {k_offsets.numel() - 1} sequences")
    batch = q_offsets.numel() - 1
    dense = []
    for times, offsets, longest in ((q_times, q_offsets, max_q), (k_times, k_offsets, max_k)):
        if times.ndim != 1:
            raise ValueError(f"times must be one-dimensional; got {tuple(times.shape)}")
        dense.append(jagged.pad(times, jagged.dense_index(offsets, times.shape[0], longest), batch, longest))
    age = dense[0][:, :, None] - dense[1][:, None, :]
    return _looked_up(table, torch.bucketize(age, bounds))


def _rows(table: Tensor) -> int:
    if table.ndim != 2 or not table.is_floating_point():
        raise ValueError(f"table must be floating, [rows, heads]; got {table.dtype} {tuple(table.shape)}")
    return table.shape[0]


def _looked_up(table: Tensor, index: Tensor) -> Tensor:
    """Rows of the table [R, H] by index [B, Q, K], as [B, H, Q, K] contiguous."""
    return F.embedding(index, table).permute(0, 3, 1, 2).contiguous()
