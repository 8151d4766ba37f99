"""Jagged tensors: B sequences laid end to end in one tensor, and offsets that say where each begins.

values  [T, ...]   the tokens of all sequences; sequence b is values[offsets[b]:offsets[b + 1]]
offsets [B + 1]    int32 or int64, non-decreasing, offsets[0] = 0 and offsets[B] = T
max_len            a host int, at least the longest sequence: it sizes grids and padding without asking the device
"""

from __future__ import annotations

import torch
from torch import Tensor


def lengths(offsets: Tensor) -> Tensor:
    """The length of every sequence, [B]."""
    return offsets[1:] - offsets[:-1]


def sequence_ids(offsets: Tensor, total: int) -> Tensor:
    """Which sequence each of the `total` tokens belongs to, [T] int64; no device sync."""
    ids = torch.arange(offsets.numel() - 1, device=offsets.device)
    return torch.repeat_interleave(ids, lengths(offsets), output_size=total)


def positions(offsets: Tensor, total: int) -> Tensor:
    """The place of each token inside its sequence, [T] int64, counted from 0."""
    token = torch.arange(total, device=offsets.device)
    return token - offsets.to(torch.int64)[sequence_ids(offsets, total)]


def dense_index(offsets: Tensor, total: int, max_len: int) -> Tensor:
    """Where each token lands in a flattened [B * max_len] padded tensor, [T] int64."""
    shift = torch.arange(offsets.numel() - 1, device=offsets.device) * max_len - offsets[:-1]
    token = torch.arange(total, device=offsets.device)
    return token + torch.repeat_interleave(shift, lengths(offsets), output_size=total)


def pad(values: Tensor, index: Tensor, batch: int, max_len: int) -> Tensor:
    """[T, ...] -> [B, max_len, ...], zeros after the end of each sequence; `index` is from `dense_index`."""
    dense = values.new_zeros(batch * max_len, *values.shape[1:]).index_copy_(0, index, values)
    return dense.view(batch, max_len, *values.shape[1:])


def unpad(dense: Tensor, index: Tensor) -> Tensor:
    """[B, max_len, ...] -> [T, ...], the inverse of `pad`."""
    return dense.flatten(0, 1).index_select(0, index)


def longest(offsets: Tensor, max_len: int) -> int:
    """The padding to use: the longest sequence where reading it is free (eager, CPU), else `max_len`."""
    if offsets.device.type != "cpu" or torch.compiler.is_compiling() or offsets.numel() < 2:
        return max_len
    return int(lengths(offsets).max())


def block_offsets(offsets: Tensor, total: int, block: int) -> Tensor:
    """Offsets that cut every sequence into blocks of `block` tokens, the last one of each sequence shorter: [N + 1]
    int64.

    N = total // block + B is a bound known without asking the device; what is over is empty blocks at the end.
    """
    batch = offsets.numel() - 1
    offsets = offsets.to(torch.int64)
    counts = (lengths(offsets) + (block - 1)) // block
    after = counts.cumsum(0)  # how many blocks there are up to and with each sequence
    index = torch.arange(total // block + batch + 1, device=offsets.device)
    sequence = torch.searchsorted(after, index, right=True).clamp(max=max(batch - 1, 0))
    if batch == 0:
        return torch.zeros_like(index)
    return (offsets[sequence] + (index - (after - counts)[sequence]) * block).clamp(max=total)
