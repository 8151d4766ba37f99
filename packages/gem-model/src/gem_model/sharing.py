"""One history for all samples of a request: ten impressions of a page view are ten candidates, but one user and time.

A tower then works on R histories in place of B. What depends on the candidate stays each sample's own: the CLS tokens,
which ask their request's keys and values, and evidence. What the events are told of the sample is the mean of what its
request's samples would tell them; where every request has one sample, nothing is different.

`B` samples, `R` requests (and histories).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Which samples belong together."""

    of: Tensor  # [B] int64 in [0, R): the request of each sample
    order: Tensor  # [B]: the samples, those of one request side by side
    back: Tensor  # [B]: where each sample stands in that order
    offsets: Tensor  # [R + 1]: where the samples of each request begin in that order

    @classmethod
    def number(cls, of: Tensor, count: int) -> Requests:
        """From the request of each sample and R, nothing waiting for the device."""
        order = torch.argsort(of, stable=True)
        offsets = torch.searchsorted(of[order].contiguous(), torch.arange(count + 1, device=of.device))
        return cls(of=of, order=order, back=torch.argsort(order), offsets=offsets)

    def first(self, x: Tensor) -> Tensor:
        """[B] -> [R]: that of a request's first sample (of some other where it has none)."""
        return x[self.order[self.offsets[:-1].clamp(max=max(x.shape[0] - 1, 0))]]

    def mean(self, x: Tensor) -> Tensor:
        """[B, ...] -> [R, ...]: the mean of each request's samples, zero where it has none."""
        ordered = x[self.order].flatten(1).float()
        total = torch.segment_reduce(ordered, "sum", offsets=self.offsets, axis=0, unsafe=True)
        mean = total / self.offsets.diff().clamp(min=1)[:, None]
        return mean.to(x.dtype).unflatten(1, x.shape[1:])

    def each(self, x: Tensor) -> Tensor:
        """[R, ...] -> [B, ...]."""
        return x.index_select(0, self.of)
