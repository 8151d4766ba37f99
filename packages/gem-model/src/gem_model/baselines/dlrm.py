"""DLRM (Naumov et al. 2019, "Deep Learning Recommendation Model"): dot products of all pairs of fields.

`B` samples, `N` fields, `d` width, `K` tasks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gem_model.baselines.base import BaselineConfig, FieldBaseline
from gem_model.batch import BatchLike
from gem_model.config import ModelInputs


class DLRM(FieldBaseline):
    """logits = MLP([fields || <v_i, v_j> for i < j]) for fields v in R^{N x d}.

    The paper passes only the dense features' field on beside the products; all fields cost little here and add what the
    products cannot say.
    """

    def __init__(
        self, config: BaselineConfig, inputs: ModelInputs, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__(config, inputs, device=device)
        n = self.n_fields
        self.finish(n * config.width + n * (n - 1) // 2)

    def forward(self, batch: BatchLike) -> Tensor:
        """Logits [B, K] float32."""
        v, dense = self.fields(batch)
        return self.top(torch.cat((v.flatten(1), pair_products(v)), dim=1), dense)


def pair_products(v: Tensor) -> Tensor:
    """<v_i, v_j> for all i < j: [B, N, d] -> [B, N (N - 1) / 2]."""
    first, second = torch.triu_indices(v.shape[1], v.shape[1], offset=1, device=v.device)
    return torch.bmm(v, v.transpose(1, 2))[:, first, second]
