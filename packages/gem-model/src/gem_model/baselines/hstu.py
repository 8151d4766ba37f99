"""HSTU (Zhai et al. 2024, "Actions Speak Louder than Words"), in its ranking form: the candidate stands last.

`T` events, `d` width, `H` heads, `D` head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from gem_kernels import gdpa, rope
from gem_kernels.nn import NormLinear
from torch import Tensor, nn

from gem_model.baselines.sequential import SequentialBaseline, SequentialConfig
from gem_model.config import Source
from gem_model.dropout import Dropout
from gem_model.history import ROPE_BASE, ROTE_BASE, History


class HSTULayer(nn.Module):
    """U, V, Q, K = SiLU(W_1 LN(x));  A = SiLU(Q K^T / sqrt(D)), causal;  x = x + W_2 (LN(A V) * U).

    Relative position and time enter the scores by rotation (half of the heads turn with the rank, the others with the
    log of the age) in place of the paper's additive bias, which attention without padding does not take. The paper
    divides A by the longest length, a factor that the norm takes out again.
    """

    def __init__(self, config: SequentialConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.up = NormLinear(config.width, 4 * config.width, norm="layer")
        self.norm = nn.LayerNorm(config.width)
        self.down = nn.Linear(config.width, config.width)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, history: History) -> Tensor:
        """[T, d] -> [T, d]."""
        u, v, q, k = F.silu(self.up(x)).chunk(4, dim=1)
        q, k, v = (t.unflatten(1, (self.heads, -1)) for t in (q, k, v))  # [T, H, D]
        q, k = rotate(q, history), rotate(k, history)
        offsets, longest = history.offsets, history.max_len
        told = gdpa(q, k, v, offsets, offsets, longest, longest, activation="silu", causal=True).flatten(1)
        return x + self.dropout(self.down(self.norm(told) * u))


def rotate(x: Tensor, history: History) -> Tensor:
    """Rotate [T, H, D] by rank in the first half of the heads and by age in the others."""
    ranked, aged = x.split((x.shape[1] // 2, x.shape[1] - x.shape[1] // 2), dim=1)
    ranked = rope(ranked, None, base=ROPE_BASE, positions=history.rank)
    return torch.cat((ranked, rope(aged, None, base=ROTE_BASE, positions=history.age)), dim=1)


class Tower(nn.Module):
    """LN(layers(events))."""

    def __init__(self, config: SequentialConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(HSTULayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, history: History) -> Tensor:
        """[T, d]."""
        x = history.tokens
        for layer in self.layers:
            x = layer(x, history)
        return self.norm(x)


class HSTU(SequentialBaseline):
    """HSTU layers over [history || candidate]; the logits read the candidate's state beside the features."""

    def tower(self, config: SequentialConfig, source: Source) -> nn.Module:
        """The network of one source."""
        if config.heads < 2:
            raise ValueError(
                f"HSTU turns half of its heads by rank, half by age: heads must be at least 2, got {config.heads}"
            )
        return Tower(config)
