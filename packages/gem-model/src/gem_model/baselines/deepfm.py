"""DeepFM (Guo et al. 2017): a factorisation machine and a deep network on the same fields, added.

`B` samples, `N` fields, `d` width, `K` tasks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gem_model.baselines.base import BaselineConfig, FieldBaseline
from gem_model.batch import BatchLike
from gem_model.config import ModelInputs


class DeepFM(FieldBaseline):
    """logit_k = sum_i <w_ki, v_i> + a_k sum_{i < j} <v_i, v_j> + MLP_k(v) for fields v in R^{N x d}.

    Tables of one dim hold no first-order weight beside an id's row, so w reads it from the row. a_k gives each task its
    own measure of the pairwise sum, which all tasks share with the rows.
    """

    def __init__(
        self, config: BaselineConfig, inputs: ModelInputs, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__(config, inputs, device=device)
        tasks = len(inputs.tasks)
        with self.place:
            self.first = nn.Linear(self.n_fields * config.width, tasks, bias=False)
            self.second = nn.Parameter(torch.empty(tasks))  # a
        self.finish(self.n_fields * config.width)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every parameter but the tables' again, and forget the dense features' statistics."""
        super().reset_parameters()
        self.first.weight.mul_(0.1)
        self.second.fill_(0.1 / (self.n_fields * self.config.width**0.5))  # products of normed fields: about unit size

    def forward(self, batch: BatchLike) -> Tensor:
        """Logits [B, K] float32."""
        v, dense = self.fields(batch)
        flat = v.flatten(1)
        return self.top(flat, dense) + self.first(flat).float() + self.second * pairwise_sum(v).float()[:, None]


def pairwise_sum(v: Tensor) -> Tensor:
    """sum_{i < j} <v_i, v_j> = (|sum_i v_i|^2 - sum_i |v_i|^2) / 2, in O(N d): [B, N, d] -> [B]."""
    return 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1)
