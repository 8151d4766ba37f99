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
    value: float  # the loss of the global batch, the same on every rank; of a part, its share of the whole's
    mean: float  # of the samples at hand alone: the same as `value` unless the batch is a part
    sums: Tensor  # [K], this rank's part, to see which rank's is not finite
    tasks: tuple[tuple[float, float, float], ...]  # of each task: loss, weight and weight of positives, of all ranks
    stop: bool  # whether any rank was asked to stop
    flops: float  # the ranks' sum


def sample_losses(logits: Tensor, batch: JaggedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """w_bk L_bk, w_bk and w_bk y_bk, [b, K] each: w_bk = weights_b mask_bk, L the log loss in nats, y the label."""
    w = batch.label_mask * batch.weights[:, None]
    labels = torch.where(batch.label_mask, batch.labels, 0.0)
    losses = F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none")
    return losses * w, w, labels * w


def total_weights(batch: JaggedBatch, runtime: Runtime) -> list[float]:
    """sum_b w_bk of each task over the global batch: what a part of it must know of the whole before it is computed."""
    weights = (batch.label_mask * batch.weights[:, None]).sum(0).double().to(runtime.device)
    if runtime.world > 1:
        with runtime.waiting("the weights of the other ranks"):
            dist.all_reduce(weights)
    found: list[float] = weights.tolist()
    return found


def global_loss(
    logits: Tensor,
    batch: JaggedBatch,
    runtime: Runtime,
    *,
    whole: list[float] | None = None,
    stop: bool = False,
    flops: float = 0.0,
) -> GlobalLoss:
    """L = mean over the tasks k of  sum_b w_bk L_bk / sum_b w_bk  over the global batch, whatever its division.

    The same as `GEM.loss` on the undivided batch. A rank must not divide by the weights of its own part (the mean of
    means is another number), so the sums are reduced first: one all-reduce of 3 K + 2 numbers, which carries along the
    request to stop and the FLOPs. Tasks without a label in the global batch do not count. Where the batch is one part
    of several, `whole` holds the `total_weights` of all of them, and the parts' values add up to L.
    """
    parts = sample_losses(logits, batch)
    sums = parts[0].sum(0)
    tasks = sums.shape[0]
    more = torch.tensor([float(stop), flops], dtype=torch.float64, device=sums.device)
    stats = torch.cat([*(part.detach().sum(0).double() for part in parts), more])
    if runtime.world > 1:
        with runtime.waiting("the loss of the other ranks"):
            dist.all_reduce(stats)
    everyone = stats.tolist()  # the step's first wait for the device
    losses, weights, positives = (everyone[i * tasks : (i + 1) * tasks] for i in range(3))
    divisors = weights if whole is None else whole
    known = [k for k in range(tasks) if divisors[k] > 0]
    here = [k for k in range(tasks) if weights[k] > 0]
    shares = [runtime.world / (divisors[k] * len(known)) if k in known else 0.0 for k in range(tasks)]
    return GlobalLoss(
        backward=(sums * torch.tensor(shares, dtype=sums.dtype, device=sums.device)).sum(),
        value=sum(losses[k] / divisors[k] for k in known) / max(len(known), 1),
        mean=sum(losses[k] / weights[k] for k in here) / max(len(here), 1),
        sums=sums.detach(),
        tasks=tuple(zip(losses, weights, positives, strict=True)),
        stop=everyone[-2] > 0,
        flops=everyone[-1],
    )
