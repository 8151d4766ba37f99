"""From a history of any length to a few tokens: pooling by learned queries, in one step or two.

`B` samples, `T` events, `d` width.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from gem_kernels import most_recent
from gem_kernels.nn import PMA, LayerNorm, NormLinear
from torch import Tensor, nn

from gem_model.config import GemConfig
from gem_model.history import History, Seats
from gem_model.interaction import TokenMix, mix_tokens
from gem_model.projection import hooked, late_product, plain

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
        recent: int = 0,
        seats: Seats | None = None,
        bare_eps: float | None = None,
        inside: str = "none",
    ) -> Any:
        """Tokens [T, d] of offsets [B + 1] -> [B, q, d]; with a residual, of s + residual, and that sum as well; with
        ``recent``, also the most recent rows of that, [B, recent, d]. With seats the residual is [T + B C, d] and has
        the events' rows there, and what is returned is that, the sum, the most recent rows or None, and LayerNorm of
        the sum without weight and bias where a kernel makes it with ``bare_eps``, or None; not where the reader is
        `watched`. ``inside``: as of `Tower`.
        """
        if watched(self.read):
            z, *others = self._read(s, offsets, max_len, residual, residual_bias, recent)
        else:
            kv = self.read.kv
            residual = None if residual is None else residual.to(s.dtype)
            given = (s, residual, residual_bias, offsets, recent)
            late = None if inside == "none" else late_product(kv.linear, s)  # type: ignore[arg-type]
            options = {} if late is None else {"product": late}
            if seats is None:
                normal, *others = kv.norm.rows(*given, **options)  # type: ignore[operator, union-attr]
            elif bare_eps is None:
                normal, *others = kv.norm.rows(*given, seats.events, seats.cls, **options)  # type: ignore[operator, union-attr]
                others.append(None)
            else:
                normal, *others = kv.norm.rows_twice(*given, seats.events, seats.cls, bare_eps, **options)  # type: ignore[operator, union-attr]
            bias = kv.linear.bias  # type: ignore[union-attr]
            if late is None:
                packed = kv.linear(normal)  # type: ignore[operator]
            else:
                packed = late(normal, None if bias is None else bias.to(normal.dtype))  # type: ignore[operator, arg-type]
            z = self.read.pooled(packed, offsets, max_len)
        pooled = self._combine(self.norm(z))
        if seats is not None:
            return pooled, *others
        total, latest = others
        if recent:
            return pooled, total, latest
        return pooled if residual is None else (pooled, total)

    def _read(
        self,
        s: Tensor,
        offsets: Tensor,
        max_len: int,
        residual: Tensor | None,
        residual_bias: Tensor | None,
        recent: int,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The seeds' answers by the module as it is."""
        if residual is None:
            z, total = self.read(s, offsets, max_len), s
        else:
            z, total = self.read(s, offsets, max_len, residual, residual_bias)
        return z, total, most_recent(total, offsets, recent) if recent else None

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


def watched(reader: PMA) -> bool:
    """Whether the parts of a pooling must be called as modules: a precision recipe's, or those that have hooks."""
    kv = reader.kv
    return type(kv) is not NormLinear or hooked(reader) or hooked(kv) or hooked(kv.norm) or hooked(kv.linear)


def pool(
    module: nn.Module, history: History, recent: int, bare_eps: float | None = None
) -> tuple[Tensor, History, Tensor | None]:  # fmt: skip
    """What a pooling makes of the tokens, [B, q, d], the history with the tokens settled, and the most recent of them,
    [B, recent, d], if asked for. With ``bare_eps``, somebody else is to norm the tokens with this eps.
    """
    at = (history.offsets, history.max_len)
    reader = module.read if isinstance(module, SeedPooling) else module
    more, bias = history.more, history.more_bias
    sits = history.seated and isinstance(module, SeedPooling) and not watched(module.read)
    seats = history.seats if sits else None
    if more is not None and (type(reader.kv) is not NormLinear or (history.seated and seats is None)):
        more, bias = history.whole, None  # of a precision recipe, or read by modules that know of no seats
    if seats is not None:
        if module._compiled_call_impl is not None:
            bare_eps = None  # no kernel of ours there; and one graph serves all layers
        given = (more, bias, recent, seats, bare_eps, history.inside)
        pooled, tokens, latest, bare = module(history.tokens, *at, *given)
        return pooled, history.settled(tokens, bare, bare_eps or 0.0), latest
    if isinstance(module, SeedPooling) and recent:
        pooled, tokens, latest = module(history.tokens, *at, more, bias, recent, inside=history.inside)
        return pooled, history.settled(tokens), latest
    if more is None:
        pooled = module(history.tokens, *at)
    else:
        pooled, tokens = module(history.tokens, *at, more, bias)
        history = history.settled(tokens)
    return pooled, history, most_recent(history.tokens, history.offsets, recent) if recent else None
