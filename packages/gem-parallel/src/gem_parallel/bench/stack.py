"""A stack of transformer-like blocks of three kinds, whose activations cost differently to compute again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional


class Workload(NamedTuple):
    """What is trained.

    Attributes:
        model: holds the regions.
        regions: their names.
        loss: the forward pass, to the loss.
        graphs: where it can be had, a context within which regions are replayed from CUDA graphs, captured when what is
            handed in says that they may be; what they hold is let go of at its end.
    """

    model: nn.Module
    regions: list[str]
    loss: Callable[[], torch.Tensor]
    graphs: Callable[[Callable[[], bool]], AbstractContextManager[None]] | None = None


class Attention(nn.Module):
    """Norm, self-attention over `length` tokens, residual: much to compute for a byte."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, T, D] -> [B, T, D]
        """x with what the block adds."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v)  # [B, H, T, D / H]
        return x + self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Norm, two linear layers around a GELU, dropout, residual."""

    def __init__(self, width: int, times: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout)
        self.wide, self.narrow = nn.Linear(width, times * width), nn.Linear(times * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, T, D] -> [B, T, D]
        """x with what the block adds."""
        return x + self.drop(self.narrow(functional.gelu(self.wide(self.norm(x)))))


class Gates(nn.Module):
    """Elementwise work between two small products: many bytes for little to compute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.down, self.up = nn.LayerNorm(width), nn.Linear(width, width // 8), nn.Linear(width // 8, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, T, D] -> [B, T, D]
        """x with what the block adds."""
        y = self.norm(x)
        gate = torch.sigmoid(self.up(functional.silu(self.down(y))))
        return x + torch.tanh(gate * y) * gate


class Stack(nn.Module):
    """`layers` times attention, feed-forward, gates."""

    def __init__(self, layers: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        blocks: Iterator[nn.Module] = (
            block
            for _ in range(layers)
            for block in (Attention(width, heads), FeedForward(width, 4, dropout), Gates(width))
        )
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x with what the block adds."""
        for block in self.blocks:
            x = block(x)
        return x


def workload(device: torch.device, batch: int, *, layers: int = 4, width: int = 1024, length: int = 1024) -> Workload:
    """The stack under autocast on CUDA; the contract of `--workload`."""
    torch.manual_seed(0)
    model = Stack(layers, width, max(1, width // 128), 0.1).to(device)
    x = torch.randn(batch, length, width, device=device)

    def loss() -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            return model(x).float().square().mean()

    return Workload(model, [f"blocks.{i}" for i in range(3 * layers)], loss)


def small_workload(device: torch.device, batch: int) -> Workload:
    """The same of a size for tests."""
    return workload(device, batch, layers=1, width=64, length=32)
