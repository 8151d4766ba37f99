"""From a history of any length to a few tokens: pooling by learned queries, in one step or two; the K most recent.

`B` samples, `T` events, `d` width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from gem_kernels.nn import PMA
from torch import Tensor, nn

from gem_model.config import GemConfig
from gem_model.interaction import TokenMix

KRONECKER_TERMS = 2


class SeedPooling(nn.Module):
    """Hierarchical seed pooling (Kunlun): s seeds read the history, their answers Z in R^{s x d} become q tokens.

    The second step is a sum of Kronecker products, Y = sum_r A_r LN(Z) B_r with A_r in R^{q x s} and B_r in R^{d x d}:
    s q + d^2 numbers a term in place of the s q d^2 of a full map.
    Where the history is empty, Z is zero and Y a constant.
    """

    def __init__(self, width: int, seeds: int, queries: int, heads: int) -> None:
        super().__init__()
        self.read = PMA(width, seeds, heads, pre_norm=True)
        self.norm = nn.LayerNorm(width)
        self.dims = nn.Linear(width, KRONECKER_TERMS * width, bias=False)  # B_r
        self.mix = TokenMix(KRONECKER_TERMS * seeds, queries)  # A_r

    def forward(self, s: Tensor, offsets: Tensor, max_len: int) -> Tensor:
        """Tokens [T, d] of offsets [B + 1] -> [B, q, d]."""
        z = self.norm(self.read(s, offsets, max_len))  # [B, s, d]
        return self.mix(self.dims(z).unflatten(2, (KRONECKER_TERMS, -1)).flatten(1, 2))


def make_pool(config: GemConfig) -> nn.Module | None:
    """The pooling that the configuration asks for: (tokens [T, d], offsets, max_len) -> [B, pma_queries, d]."""
    if config.pma_seeds:
        return SeedPooling(config.width, config.pma_seeds, config.pma_queries, config.heads)
    if config.pma_queries:
        return PMA(config.width, config.pma_queries, config.heads, pre_norm=True)
    return None


def most_recent(s: Tensor, offsets: Tensor, k: int) -> Tensor:
    """The last k events of each sample, latest first: [T, d] -> [B, k, d], zeros where the history is shorter."""
    if s.shape[0] == 0:
        s = F.pad(s, (0, 0, 0, 1))  # index_select needs a row to point at, and autograd an edge to the events
    back = torch.arange(1, k + 1, device=s.device)
    row = offsets[1:, None] - back  # [B, k]
    there = row >= offsets[:-1, None]
    tokens = s.index_select(0, row.clamp(min=0).flatten()).unflatten(0, row.shape)
    return tokens.masked_fill(~there[..., None], 0.0)
