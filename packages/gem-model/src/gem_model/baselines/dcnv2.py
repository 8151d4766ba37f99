"""DCNv2 (Wang et al. 2021, "DCN V2: Improved Deep & Cross Network"): explicit crosses of bounded degree.

`B` samples, `N` fields, `d` width, `K` tasks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gem_model.baselines.base import BaselineConfig, FieldBaseline, at_least_one
from gem_model.batch import BatchLike
from gem_model.config import ModelInputs


@dataclass(frozen=True, kw_only=True)
class DCNv2Config(BaselineConfig):
    """``cross_layers`` crosses, each with a matrix of rank ``rank``; None is a full matrix."""

    cross_layers: int = 3
    rank: int | None = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one("cross_layers", self.cross_layers)
        if self.rank is not None:
            at_least_one("rank", self.rank)


class Cross(nn.Module):
    """x' = x_0 * (W x + b) + x, with W in R^{n x n} or W = U V of rank r: one more degree in x_0 a layer."""

    def __init__(self, n: int, rank: int | None) -> None:
        super().__init__()
        self.down = nn.Linear(n, rank, bias=False) if rank is not None else None  # V
        self.up = nn.Linear(n if rank is None else rank, n)  # W or U, and b

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """[B, n], [B, n] -> [B, n]."""
        return x0 * self.up(x if self.down is None else self.down(x)) + x


class DCNv2(FieldBaseline):
    """Stacked: logits = MLP(x_L), x_{l+1} = Cross_l(x_0, x_l), x_0 the fields side by side, in R^{N d}."""

    def __init__(self, config: DCNv2Config, inputs: ModelInputs, *, device: torch.device | str | None = None) -> None:
        super().__init__(config, inputs, device=device)
        n = self.n_fields * config.width
        with self.place:
            self.crosses = nn.ModuleList(Cross(n, config.rank) for _ in range(config.cross_layers))
        self.finish(n)

    def forward(self, batch: BatchLike) -> Tensor:
        """Logits [B, K] float32."""
        v, dense = self.fields(batch)
        x0 = x = v.flatten(1)
        for cross in self.crosses:
            x = cross(x0, x)
        return self.top(x, dense)
