"""The loss of the global batch, from each rank's part of it.

`b` samples on this rank, `K` tasks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gem_data import JaggedBatch
from gem_parallel import Runtime
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GlobalLoss:
    """What one reduction over the ranks tells every rank."""

    backward: Tensor  # scalar, this rank's share; the gradient averaged over the ranks is that of `value`
    value: float  # the loss of the global batch, the same on every rank
    sums: Tensor  # [K], this rank's part, to see which rank's is not finite
    stop: bool  # whether any rank was asked to stop
    flops: float  # the ranks' sum


def task_sums(logits: Tensor, batch: JaggedBatch) -> tuple[Tensor, Tensor]:
    """Of each task k: sum_b w_bk L_bk and sum_b w_bk, [K] each.

    w_bk = weights_b mask_bk, and L is the log loss in nats.
    """
    w = batch.label_mask * batch.weights[:, None]  # [b, K]
    labels = torch.where(batch.label_mask, batch.labels, 0.0)
    losses = F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none")
    return (losses * w).sum(0), w.sum(0)


def global_loss(
    logits: Tensor, batch: JaggedBatch, runtime: Runtime, *, stop: bool = False, flops: float = 0.0
) -> GlobalLoss:
    """L = mean over the tasks k of  sum_b w_bk L_bk / sum_b w_bk  over the global batch, whatever its division.

    The same as `GEM.loss` on the undivided batch. A rank must not divide by the weights of its own part (the mean of
    means is another number), so the sums are reduced first: one all-reduce of 2 K + 2 numbers, which carries along the
    request to stop and the FLOPs. Tasks without a label in the global batch do not count.
    """
    sums, totals = task_sums(logits, batch)
    tasks = sums.shape[0]
    more = torch.tensor([float(stop), flops], dtype=torch.float64, device=sums.device)
    stats = torch.cat([sums.detach().double(), totals.double(), more])
    if runtime.world > 1:
        with runtime.waiting("the loss of the other ranks"):
            dist.all_reduce(stats)
    everyone = stats.tolist()  # the step's first wait for the device
    known = [k for k in range(tasks) if everyone[tasks + k] > 0]
    shares = [runtime.world / (everyone[tasks + k] * len(known)) if k in known else 0.0 for k in range(tasks)]
    return GlobalLoss(
        backward=(sums * torch.tensor(shares, dtype=sums.dtype, device=sums.device)).sum(),
        value=sum(everyone[k] / everyone[tasks + k] for k in known) / max(len(known), 1),
        sums=sums.detach(),
        stop=everyone[-2] > 0,
        flops=everyone[-1],
    )
