"""The base rate of every task: NE 1 by definition on its own data."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gem_model.batch import BatchLike


class ConstantRate:
    """Predicts each task's weighted mean label, whatever the sample. ``rates`` [K] float64 once fitted."""

    rates: Tensor | None = None

    def fit(self, batches: Iterable[BatchLike]) -> ConstantRate:
        """Read the base rates; ValueError where a task has no label at all."""
        positives = total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            w = (batch.label_mask * batch.weights[:, None]).double().cpu()
            positives = positives + (w * torch.where(batch.label_mask, batch.labels, 0.0).cpu()).sum(0)
            total = total + w.sum(0)
        if total.dim() == 0 or not bool((total > 0).all()):
            raise ValueError(
                f"every task needs a label with positive weight to have a base rate; weights found: {total.tolist()}"
            )
        self.rates = positives / total
        return self

    def __call__(self, batch: BatchLike) -> Tensor:
        """Logits [B, K] float64, on the batch's device."""
        if self.rates is None:
            raise RuntimeError("fit the baseline before asking it to predict")
        return torch.logit(self.rates.to(batch.dense.device)).expand(batch.labels.shape[0], -1)
