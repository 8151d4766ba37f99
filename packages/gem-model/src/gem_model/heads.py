"""From tokens to one logit a task, and the loss.

`B` samples, `N` tokens, `d` width, `F` dense features, `K` tasks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gem_model.config import GemConfig, ModelInputs
from gem_model.dropout import Dropout
from gem_model.names import ByName
from gem_model.reader import Reader


class Heads(nn.Module):
    """logit_k = w_k . MLP_k([LN(flatten X) || LN(wide)]) + u_k . wide + r_k + b_k, the last products in float32.

    The dense features and the evidence also reach the logits linearly (the wide part of Wide & Deep): what a logistic
    regression sees is then learned in a few steps, and the rest of the model learns what it misses. They enter the
    hidden layer as they are, too: a number needs no detour through tokens to meet another. With ``config.reader``, r is
    what the reader makes of them by itself, and w starts at zero; otherwise there is no r.
    """

    def __init__(self, n_tokens: int, config: GemConfig, inputs: ModelInputs, *, n_wide: int) -> None:
        super().__init__()
        self.tasks = inputs.tasks
        self.norm = nn.LayerNorm(n_tokens * config.width)
        n_in = n_tokens * config.width + n_wide
        self.hidden = ByName({task: nn.Linear(n_in, config.head_hidden) for task in inputs.tasks})
        self.dropout = Dropout(config.dropout)
        self.out = ByName({task: nn.Linear(config.head_hidden, 1) for task in inputs.tasks})
        self.wide = nn.Linear(n_wide, len(inputs.tasks), bias=False) if n_wide else None
        self.wide_norm = nn.LayerNorm(n_wide) if n_wide else None
        self.reader = Reader(config, inputs, n_wide=n_wide) if config.reader and n_wide else None

    def forward(self, x: Tensor, wide: Tensor | None, content: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """[B, N, d], what reaches the logits linearly, [B, n_wide], and the reader's rows and dense features -> logits
        [B, K] float32.
        """
        read = None
        if self.reader is not None:
            assert wide is not None
            assert content is not None
            read = self.reader(wide, *content)
        x = self.norm(x.flatten(1))
        if self.wide_norm is not None:
            assert wide is not None
            x = torch.cat((x, self.wide_norm(wide).to(x.dtype)), dim=1)
        hidden = [self.dropout(F.gelu(self.hidden[task](x))) for task in self.tasks]
        with float32(x.device.type):
            logits = torch.cat([self.out[task](h.float()) for task, h in zip(self.tasks, hidden, strict=True)], dim=1)
            if self.wide is not None:
                assert wide is not None
                logits = logits + self.wide(wide.float())
            if read is not None:
                logits = logits + read.float()
        return logits

    @torch.no_grad()
    def init_bias(self, rates: Sequence[float] | Tensor) -> None:
        """Set b_k = log(r_k / (1 - r_k)): the untrained model then predicts each task's base rate.

        Raises:
            ValueError: unless there is one rate in (0, 1) for each task.
        """
        for task, value in zip(self.tasks, rate_logits(rates, self.tasks), strict=True):
            self.out[task].bias.fill_(value)  # type: ignore[operator, union-attr]


def float32(device: str) -> AbstractContextManager[object]:
    """No autocast inside; "meta" knows of none."""
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def rate_logits(rates: Sequence[float] | Tensor, tasks: Sequence[str]) -> list[float]:
    """log(r / (1 - r)) of each task's base rate; ValueError unless there is one rate in (0, 1) for each task."""
    values = [float(r) for r in rates]
    if len(values) != len(tasks) or not all(0.0 < r < 1.0 for r in values):
        raise ValueError(f"expected one rate in (0, 1) for each task of {list(tasks)}, got {values}")
    return [math.log(r / (1.0 - r)) for r in values]


def log_loss(logits: Tensor, labels: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """The mean over the tasks of each task's weighted mean log loss, counting the tasks that have a label in the batch.

    With w_bk = weights_b mask_bk and p = sigmoid(logits)::

        L_k = sum_b w_bk (-y log p - (1 - y) log(1 - p))_bk / sum_b w_bk        L = mean_k L_k

    Args:
        logits: [B, K] float32.
        labels: [B, K]; whatever stands where the mask is False, NaN too, is ignored.
        mask: [B, K] bool.
        weights: [B], not negative.

    Returns:
        A scalar in nats; 0 where no label is known.
    """
    w = mask * weights[:, None]  # [B, K]
    losses = F.binary_cross_entropy_with_logits(
        logits, torch.where(mask, labels, 0.0).to(logits.dtype), reduction="none"
    )
    total = w.sum(0)  # [K]
    known = total > 0
    per_task = (losses * w).sum(0) / torch.where(known, total, 1.0)
    return per_task.sum() / known.sum().clamp(min=1)
