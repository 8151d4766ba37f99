"""From a history of any length to a few tokens, beside PMA (``gem_kernels.nn.PMA``): the K most recent events.

`B` samples, `T` events, `d` width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def most_recent(s: Tensor, offsets: Tensor, k: int) -> Tensor:
    """The last k events of each sample, latest first: [T, d] -> [B, k, d], zeros where the history is shorter."""
    if s.shape[0] == 0:
        s = F.pad(s, (0, 0, 0, 1))  # index_select needs a row to point at, and autograd an edge to the events
    back = torch.arange(1, k + 1, device=s.device)
    row = offsets[1:, None] - back  # [B, k]
    there = row >= offsets[:-1, None]
    tokens = s.index_select(0, row.clamp(min=0).flatten()).unflatten(0, row.shape)
    return tokens.masked_fill(~there[..., None], 0.0)
