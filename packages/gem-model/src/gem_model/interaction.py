"""Wukong: interactions of non-sequence tokens by a factorisation machine block beside a linear block.

`B` samples, `N` tokens in, `M` tokens out, `d` width, `k` rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TokenMix(nn.Module):
    """A linear map of tokens: Y = W X, W in R^{M x N}, X in R^{B x N x d}. Wukong's linear compression block (LCB)."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, M, d]."""
        return torch.bmm(self.weight.to(x.dtype).expand(x.shape[0], -1, -1), x)  # matmul would copy x transposed


class FactorizationMachine(nn.Module):
    """FMB(X) = reshape(Linear(MLP(LN(flatten(X (X^T Y)))))), Y in R^{N x k}: pairwise products, compressed to rank k.

    X X^T holds the inner product of every two tokens; X (X^T Y) is X X^T Y without ever making the N x N matrix.
    """

    def __init__(self, n_in: int, n_out: int, width: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.n_out, self.width = n_out, width
        self.compress = nn.Parameter(torch.empty(n_in, rank))  # Y
        self.norm = nn.LayerNorm(n_in * rank)
        self.mlp = nn.Sequential(nn.Linear(n_in * rank, hidden), nn.ReLU())
        self.linear = nn.Linear(hidden, n_out * width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, M, d]."""
        y = torch.bmm(x.transpose(1, 2), self.compress.to(x.dtype).expand(x.shape[0], -1, -1))  # [B, d, k]
        products = torch.bmm(x, y).flatten(1)  # [B, N * k]
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
        return self.norm(torch.cat((self.fmb(x), self.lcb(x)), dim=1) + self.proj(x))
