"""Steps whose loss is far above what it was: which ones, and which samples they were made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from gem_data import JaggedBatch
from torch import Tensor

from gem_train.losses import sample_losses

MEMORY = 0.98  # of the running mean and variance, per step
SETTLING = 50  # steps before anything counts as a spike: the loss falls fast at first
WORST = 8  # samples that are named with their loss


@dataclass(kw_only=True)
class LossHistory:
    """Running mean and variance of the loss; part of the position, so that a resumed run sees the same spikes."""

    seen: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def is_spike(self, loss: float, sigmas: float) -> bool:
        """Whether `loss` lies more than `sigmas` standard deviations above the mean; never while settling."""
        return bool(sigmas) and self.seen >= SETTLING and loss > self.mean + sigmas * math.sqrt(self.variance)

    def add(self, loss: float) -> None:
        """Take one more loss into the mean m and the variance v, exponentially weighted (Welford's update)."""
        self.seen += 1
        share = max(1.0 - MEMORY, 1.0 / self.seen)
        delta = loss - self.mean
        self.mean += share * delta
        self.variance = (1.0 - share) * (self.variance + share * delta * delta)


def worst_samples(logits: Tensor, batch: JaggedBatch) -> list[dict[str, Any]]:
    """The samples with the largest losses, largest first: {"sample", "loss"} each."""
    losses = sample_losses(logits.detach(), batch)[0].sum(1)  # [b]
    values, places = torch.topk(losses, min(WORST, len(losses)))
    ids = batch.sample_ids[places].tolist()
    return [{"sample": i, "loss": v} for i, v in zip(ids, values.tolist(), strict=True) if i >= 0]
