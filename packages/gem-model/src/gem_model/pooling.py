"""From a history of any length to a few tokens: pooling by learned queries, in one step or two.

`B` samples, `T` events, `d` width.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from gem_kernels.nn import PMA, LayerNorm, NormLinear
from torch import Tensor, nn

from gem_model.config import GemConfig
from gem_model.interaction import TokenMix, mix_tokens
from gem_model.projection import plain
from gem_model.sequence import History

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
        self.norm = LayerNorm(width)
        self.dims = nn.Linear(width, KRONECKER_TERMS * width, bias=False)  # B_r
        self.mix = TokenMix(KRONECKER_TERMS * seeds, queries)  # A_r

    def forward(
        self,
        s: Tensor,
        offsets: Tensor,
        max_len: int,
        residual: Tensor | None = None,
        residual_bias: Tensor | None = None,
    ) -> Any:
        """Tokens [T, d] of offsets [B + 1] -> [B, q, d]; with a residual, of s + residual, and that sum as well."""
        if residual is None:
            z, *total = (self.read(s, offsets, max_len),)
        else:
            z, *total = self.read(s, offsets, max_len, residual, residual_bias)
        pooled = self._combine(self.norm(z))
        return (pooled, *total) if total else pooled

    def _combine(self, z: Tensor) -> Tensor:
        """sum_r A_r Z B_r, [B, s, d] -> [B, q, d]. Every A_r comes first: it leaves fewer tokens to B_r, and one
        product of [A_1 Z || A_2 Z] with the B_r adds up.
        """
        if not plain(self.dims):
            return self.mix(self.dims(z).unflatten(2, (KRONECKER_TERMS, -1)).flatten(1, 2))  # type: ignore[no-any-return]
        seeds, width = z.shape[1:]
        a = self.mix.weight.unflatten(1, (seeds, KRONECKER_TERMS)).transpose(1, 2).flatten(0, 1)  # [q terms, s]
        b = self.dims.weight.unflatten(0, (KRONECKER_TERMS, width)).transpose(0, 1).flatten(1)  # [d, terms d]
        return F.linear(mix_tokens(a, z).view(z.shape[0], -1, KRONECKER_TERMS * width), b)


def make_pool(config: GemConfig) -> nn.Module | None:
    """The pooling that the configuration asks for: (tokens [T, d], offsets, max_len) -> [B, pma_queries, d]."""
    if config.pma_seeds:
        return SeedPooling(config.width, config.pma_seeds, config.pma_queries, config.heads)
    if config.pma_queries:
        return PMA(config.width, config.pma_queries, config.heads, pre_norm=True)
    return None


def pool(module: nn.Module, history: History) -> tuple[Tensor, History]:
    """What a pooling makes of the tokens, [B, q, d], and the history with the tokens settled."""
    at = (history.offsets, history.max_len)
    if history.more is None:
        return module(history.tokens, *at), history
    reader = module.read if isinstance(module, SeedPooling) else module
    if type(reader.kv) is NormLinear:
        pooled, tokens = module(history.tokens, *at, history.more, history.more_bias)
    else:  # of a precision recipe
        pooled, tokens = module(history.tokens, *at, history.whole)
    return pooled, history.settled(tokens)
