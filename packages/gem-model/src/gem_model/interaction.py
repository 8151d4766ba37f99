"""Wukong: interactions of non-sequence tokens by a factorisation machine block beside a linear block.

`B` samples, `N` tokens in, `M` tokens out, `d` width, `k` rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gem_model.projection import unaligned


def aligned(x: Tensor) -> Tensor:
    """Tokens [B, N, d] with the tokens of zeros behind them that products over tokens want: see `unaligned`."""
    extra = unaligned(x.shape[1], x)
    return F.pad(x, (0, 0, 0, extra)) if extra else x


def mix_tokens(weight: Tensor, x: Tensor) -> Tensor:
    """Y = W X: [B, N, d] -> [B, M, d] for W [M, N]. X may hold further tokens of zeros, as of :func:`aligned`."""
    weight, extra = weight.to(x.dtype), x.shape[1] - weight.shape[1]
    weight = F.pad(weight, (0, extra)) if extra else weight
    return torch.bmm(weight.expand(x.shape[0], -1, -1), x)  # matmul would copy x transposed


class TokenMix(nn.Module):
    """A linear map of tokens: Y = W X, W in R^{M x N}, X in R^{B x N x d}. Wukong's linear compression block (LCB)."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[B, N, d] -> [B, M, d]; a bias [d] is added to every token: one token more, that goes to all of them."""
        weight: Tensor = self.weight
        if bias is not None:
            x = torch.cat((x, bias.to(x.dtype).expand(x.shape[0], 1, -1)), dim=1)
            weight = F.pad(weight, (0, 1), value=1.0)
        return mix_tokens(weight, aligned(x))


def mixed_together(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """W X for every W [M, N]: one product, so that X [B, N, d] is read once in each pass and gets one gradient."""
    together = mix_tokens(torch.cat([w.to(x.dtype) for w in weights]), x)
    return together.split([w.shape[0] for w in weights], dim=1)


class FactorizationMachine(nn.Module):
    """FMB(X) = reshape(Linear(MLP(LN(flatten(X (X^T Y)))))), Y in R^{N x k}: pairwise products, compressed to rank k.

    X X^T holds the inner product of every two tokens; X (X^T Y) is X X^T Y without ever making the N x N matrix.
    """

    def __init__(self, n_in: int, n_out: int, width: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.n_in, self.n_out, self.width = n_in, n_out, width
        self.compress = nn.Parameter(torch.empty(n_in, rank))  # Y
        self.norm = nn.LayerNorm(n_in * rank)
        self.mlp = nn.Sequential(nn.Linear(n_in * rank, hidden), nn.ReLU())
        self.linear = nn.Linear(hidden, n_out * width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, M, d]; zeros behind the N tokens change nothing."""
        x = aligned(x)
        return self.of_products(x, mix_tokens(self.compress.t(), x))

    def of_products(self, x: Tensor, compressed: Tensor) -> Tensor:
        """The same of X and Y^T X [B, k, d], which is a product of tokens as others of X are: see `mixed_together`."""
        products = torch.bmm(x, compressed.transpose(1, 2))[:, : self.n_in].flatten(1)  # [B, N * k]
        return self.linear(self.mlp(self.norm(products))).unflatten(1, (self.n_out, self.width))


class Wukong(nn.Module):
    """X' = LN([FMB(X) || LCB(X)] + proj(X)), from N to M tokens (Wukong, Zhang et al. 2024).

    ``proj`` maps N tokens to M, as the residual of layers whose numbers of tokens differ.
    """

    def __init__(self, n_in: int, n_out: int, width: int, *, n_fm: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.fmb = FactorizationMachine(n_in, n_fm, width, rank, hidden)
        self.lcb = TokenMix(n_in, n_out - n_fm)
        self.proj = TokenMix(n_in, n_out)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, M, d]."""
        x = aligned(x)
        compressed, linear, shortcut = mixed_together(x, self.fmb.compress.t(), self.lcb.weight, self.proj.weight)
        return self.norm(torch.cat((self.fmb.of_products(x, compressed), linear), dim=1) + shortcut)
