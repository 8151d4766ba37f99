"""DHEN (Zhang et al. 2022): an ensemble of interaction experts; every sample visits every expert.

`B` samples, `N` tokens in, `M` tokens out, `d` width; behind the N there may be tokens of zeros
(:func:`gem_model.interaction.aligned`), which no expert sees. The experts' parameters have the role "expert": whoever
distributes the model may spread the experts of one :class:`Ensemble` over ranks.
"""

from __future__ import annotations

import torch
from gem_kernels import jagged_attention
from gem_kernels.nn import NormLinear
from torch import Tensor, nn

from gem_model.config import GemConfig
from gem_model.history import uniform_offsets
from gem_model.interaction import FactorizationMachine, TokenMix, aligned, mixed_together


class WukongExpert(nn.Module):
    """[FMB(X) || LCB(X)]: a layer of Wukong without its residual and norm, which the ensemble has."""

    def __init__(self, n_in: int, config: GemConfig) -> None:
        super().__init__()
        hidden = config.interaction_hidden * config.width
        self.fmb = FactorizationMachine(n_in, config.interaction_fm, config.width, config.interaction_rank, hidden)
        self.lcb = TokenMix(n_in, config.n_tokens - config.interaction_fm)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, M, d]."""
        x = aligned(x)
        compressed, linear = mixed_together(x, self.fmb.compress.t(), self.lcb.weight)
        return torch.cat((self.fmb.of_products(x, compressed), linear), dim=1)


class CrossExpert(nn.Module):
    """mix(x * (U V x + b)), x = flatten(LN X) in R^{N d}: the cross of DCNv2 (Wang et al. 2021), of rank r.

    The + x of the paper's cross is the ensemble's shortcut. V in R^{r x N d} and U in R^{N d x r}; ``mix`` takes N
    tokens to M.
    """

    def __init__(self, n_in: int, config: GemConfig) -> None:
        super().__init__()
        self.n_in = n_in
        self.norm = nn.LayerNorm(config.width)
        self.down = nn.Linear(n_in * config.width, config.cross_rank, bias=False)
        self.up = nn.Linear(config.cross_rank, n_in * config.width)
        self.mix = TokenMix(n_in, config.n_tokens)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, M, d]."""
        x = self.norm(x[:, : self.n_in])
        return self.mix(x * self.up(self.down(x.flatten(1))).view(x.shape))


class AttentionExpert(nn.Module):
    """mix(MHA(LN X)): the tokens of one sample attend to each other (AutoInt, Song et al. 2019)."""

    def __init__(self, n_in: int, config: GemConfig) -> None:
        super().__init__()
        self.n_in, self.heads = n_in, config.heads
        self.qkv = NormLinear(config.width, 3 * config.width, norm="layer")
        self.out = nn.Linear(config.width, config.width)
        self.mix = TokenMix(n_in, config.n_tokens)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, M, d]."""
        x = x[:, : self.n_in]
        batch, count = x.shape[:2]
        q, k, v = self.qkv(x.flatten(0, 1)).unflatten(1, (3, self.heads, -1)).unbind(1)  # [B N, H, D]
        offsets = uniform_offsets(batch, count, x.device)
        seen = jagged_attention(q, k, v, offsets, offsets, count, count)
        assert isinstance(seen, Tensor)
        return self.mix(self.out(seen.flatten(1)).view(x.shape))


KINDS: dict[str, type[WukongExpert] | type[CrossExpert] | type[AttentionExpert]] = {
    "wukong": WukongExpert,
    "dcn": CrossExpert,
    "attention": AttentionExpert,
}


class Ensemble(nn.Module):
    """sum_i E_i(X). Nothing but its experts, so that it may be spread over ranks by activations."""

    def __init__(self, experts: list[nn.Module]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, M, d]."""
        first, *others = self.experts
        total: Tensor = first(x)
        for expert in others:
            total = total + expert(x)
        return total


class DHEN(nn.Module):
    """X' = LN(sum_i E_i(X) + proj(X)), from N to M tokens; ``proj`` is the shortcut between numbers of tokens."""

    def __init__(self, n_in: int, config: GemConfig) -> None:
        super().__init__()
        self.ensemble = Ensemble([KINDS[kind](n_in, config) for kind in config.experts])
        self.proj = TokenMix(n_in, config.n_tokens)
        self.norm = nn.LayerNorm(config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, M, d]."""
        return self.norm(self.ensemble(x) + self.proj(x))
