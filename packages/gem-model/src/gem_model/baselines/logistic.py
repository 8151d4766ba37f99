"""Logistic regression on the dense features, fitted to the optimum."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_model.batch import BatchLike


class LogisticRegression:
    """p_k = sigmoid(w_k . (x - mean) / std + b_k), one regression a task, in float64 on the CPU.

    Minimises the weighted mean log loss + l2 / 2 |w|^2 by LBFGS over the whole data; a feature that never varies gets w
    = 0. After ``fit``: ``weight`` [K, F] on the standardised features, ``bias`` [K], ``mean`` and ``std`` [F].

    Args:
        l2: the penalty on w, per mean log loss (1e-4 is weak).
        max_iter: LBFGS iterations.
    """

    weight: Tensor | None = None
    bias: Tensor
    mean: Tensor
    std: Tensor

    def __init__(self, *, l2: float = 1e-4, max_iter: int = 200) -> None:
        if l2 < 0 or max_iter < 1:
            raise ValueError(f"expected l2 >= 0 and max_iter >= 1, got l2={l2}, max_iter={max_iter}")
        self.l2, self.max_iter = l2, max_iter

    def fit(self, batches: Iterable[BatchLike]) -> LogisticRegression:
        """Fit on all batches at once; ValueError without samples, dense features or labels."""
        parts = [(b.dense, b.labels, b.label_mask, b.weights) for b in batches]
        if not parts:
            raise ValueError("cannot fit a logistic regression on no batches")
        x, y, mask, sample = (torch.cat([t.detach().cpu() for t in column]) for column in zip(*parts, strict=True))
        if x.shape[1] == 0:
            raise ValueError("cannot fit a logistic regression: the batches have no dense features")
        x, y, sample = x.double(), torch.where(mask, y, 0.0).double(), sample.double()
        w = mask * sample[:, None]  # [N, K]
        if not bool((w.sum(0) > 0).all()):
            raise ValueError(f"every task needs labels with positive weight; weights found: {w.sum(0).tolist()}")
        w = w / w.sum(0)
        share = (sample / sample.sum())[:, None]
        self.mean = (share * x).sum(0)
        std = (share * (x - self.mean) ** 2).sum(0).sqrt()
        varies = std > 1e-9 * (1.0 + self.mean.abs())
        self.std = torch.where(varies, std, 1.0)
        x = torch.where(varies, (x - self.mean) / self.std, 0.0)

        rates = (w * y).sum(0).clamp(1e-6, 1 - 1e-6)
        weight = torch.zeros(y.shape[1], x.shape[1], dtype=torch.float64, requires_grad=True)
        bias = torch.logit(rates).clone().requires_grad_()
        solver = torch.optim.LBFGS(
            [weight, bias],
            max_iter=self.max_iter,
            tolerance_grad=1e-9,
            tolerance_change=1e-16,
            line_search_fn="strong_wolfe",
        )

        def objective() -> Tensor:
            solver.zero_grad()
            losses = F.binary_cross_entropy_with_logits(F.linear(x, weight, bias), y, reduction="none")
            total = (w * losses).sum() + 0.5 * self.l2 * weight.square().sum()
            total.backward()
            return total

        with torch.enable_grad():
            solver.step(objective)
        self.weight, self.bias = weight.detach(), bias.detach()
        return self

    def __call__(self, batch: BatchLike) -> Tensor:
        """Logits [B, K] float64, on the batch's device."""
        if self.weight is None:
            raise RuntimeError("fit the baseline before asking it to predict")
        x = (batch.dense.detach().cpu().double() - self.mean) / self.std
        return F.linear(x, self.weight, self.bias).to(batch.dense.device)
