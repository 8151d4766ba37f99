"""SASRec-style (Kang and McAuley 2018, "Self-Attentive Sequential Recommendation"), as a ranker of the candidate.

`T` events, `d` width, `H` heads, `D` head dim.
"""

from __future__ import annotations

import torch
from gem_kernels import jagged_attention
from gem_kernels.nn import NormLinear
from torch import Tensor, nn

from gem_model.baselines.sequential import SequentialBaseline, SequentialConfig
from gem_model.config import Source
from gem_model.dropout import Dropout
from gem_model.history import History

POSITIONS = 1024  # of a source that does not say how long its histories are; older events share the last position


class Block(nn.Module):
    """x = x + MHA(LN x), causal; x = x + W_2 ReLU(W_1 LN x)."""

    def __init__(self, config: SequentialConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = NormLinear(config.width, 3 * config.width, norm="layer")
        self.out = nn.Linear(config.width, config.width)
        self.up = NormLinear(config.width, 2 * config.width, norm="layer")
        self.down = nn.Linear(2 * config.width, config.width)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, history: History) -> Tensor:
        """[T, d] -> [T, d]."""
        q, k, v = self.qkv(x).unflatten(1, (3, self.heads, -1)).unbind(1)  # [T, H, D]
        offsets, longest = history.offsets, history.max_len
        seen = jagged_attention(q, k, v, offsets, offsets, longest, longest, causal=True)
        assert isinstance(seen, Tensor)
        x = x + self.dropout(self.out(seen.flatten(1)))
        return x + self.dropout(self.down(torch.relu(self.up(x))))


class Tower(nn.Module):
    """LN(Blocks(events + positions)), positions learned and counted from the candidate back."""

    def __init__(self, config: SequentialConfig, source: Source) -> None:
        super().__init__()
        self.positions = nn.Embedding((source.max_len or POSITIONS) + 1, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, history: History) -> Tensor:
        """[T, d]."""
        x = history.tokens + self.positions(history.rank.clamp(max=self.positions.num_embeddings - 1))
        for block in self.blocks:
            x = block(x, history)
        return self.norm(x)


class SASRec(SequentialBaseline):
    """Causal softmax self-attention over [history || candidate], learned positions.

    The paper scores items by the dot product of the last state with their embeddings. With the candidate as the last
    event the same network asks the history about it, in every layer; past ratings are part of the events' tokens.
    """

    def tower(self, config: SequentialConfig, source: Source) -> nn.Module:
        """The network of one source."""
        return Tower(config, source)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every parameter but the tables' again, and forget the dense features' statistics."""
        super().reset_parameters()
        for module in self.towers.modules():
            if isinstance(module, nn.Embedding):
                module.weight.normal_(std=0.1)
