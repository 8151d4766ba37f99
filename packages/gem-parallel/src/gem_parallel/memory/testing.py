"""For tests: blocks whose activations cost something, and a training step of them."""

from __future__ import annotations

import torch
from torch import nn

from gem_parallel.memory.regions import Regions

WIDTH = 32


class Block(nn.Module):
    """A residual block with a norm, attention by hand and dropout."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.25) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.drop = nn.Linear(width, width), nn.Dropout(dropout)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.drop(self.out((q @ k.transpose(1, 2) / 8).softmax(-1) @ v))
        return x + self.drop(self.narrow(nn.functional.gelu(self.wide(x))))


def stack(blocks: int = 3, dropout: float = 0.25) -> nn.Module:
    """Blocks one after another, the same at every call."""
    torch.manual_seed(1)
    return nn.Sequential(*(Block(dropout=dropout) for _ in range(blocks)))


def sample(seed: int = 0, *, grad: bool = True) -> torch.Tensor:
    """Input [4, 24, WIDTH] of a stack."""
    return torch.randn(4, 24, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def train_step(model: nn.Module, seed: int, regions: Regions | None = None) -> list[torch.Tensor]:
    """[output, gradient of the input, gradients of the parameters]"""
    x = sample(seed)
    if regions is not None:
        regions.begin()
    torch.manual_seed(100 + seed)
    y = model(x)
    model.zero_grad()
    y.square().mean().backward()
    after = torch.rand(1)  # the generator stands where it would without recomputation
    assert x.grad is not None
    return [y.detach(), x.grad, after, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
