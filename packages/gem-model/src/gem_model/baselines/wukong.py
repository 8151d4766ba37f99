"""Wukong alone (Zhang et al. 2024): GEM's interaction layers on fields, without sequence layers.

`B` samples, `N` fields, `d` width, `K` tasks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gem_model.baselines.base import BaselineConfig, FieldBaseline, at_least_one
from gem_model.batch import BatchLike
from gem_model.config import ModelInputs
from gem_model.interaction import Wukong


@dataclass(frozen=True, kw_only=True)
class WukongConfig(BaselineConfig):
    """``layers`` of :class:`gem_model.interaction.Wukong` with ``n_tokens`` tokens, ``n_fm`` of them by its FMB."""

    layers: int = 2
    n_tokens: int = 12
    n_fm: int = 6
    rank: int = 8
    mlp: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("layers", "n_tokens", "n_fm", "rank", "mlp"):
            at_least_one(name, getattr(self, name))
        if self.n_fm >= self.n_tokens:
            raise ValueError(f"n_fm must lie between 1 and n_tokens - 1 = {self.n_tokens - 1}, got {self.n_fm}")


class WukongRanker(FieldBaseline):
    """logits = MLP(flatten X_L), X_{l+1} = LN([FMB(X_l) || LCB(X_l)] + proj(X_l)), X_0 the fields."""

    def __init__(self, config: WukongConfig, inputs: ModelInputs, *, device: torch.device | str | None = None) -> None:
        super().__init__(config, inputs, device=device)
        with self.place:
            self.layers = nn.ModuleList(
                Wukong(n, config.n_tokens, config.width, n_fm=config.n_fm, rank=config.rank, hidden=config.mlp)
                for n in [self.n_fields] + [config.n_tokens] * (config.layers - 1)
            )
        self.finish(config.n_tokens * config.width)

    def forward(self, batch: BatchLike) -> Tensor:
        """Logits [B, K] float32."""
        x, dense = self.fields(batch)
        for layer in self.layers:
            x = layer(x)
        return self.top(x.flatten(1), dense)

    def units(self) -> list[str]:
        """The layers, then the top."""
        return [f"layers.{i}" for i in range(len(self.layers))] + ["top"]
