"""Dense features by bucket: a learned vector for each bucket of each feature, in place of the number times a vector.

A linear map can say that more is better; buckets can say anything of a number but what differs inside one. Trees'
splits and the tables of bucketised features (Cheng et al. 2016, "Wide & Deep Learning") do the same.

`B` samples, `F` dense features, `n` buckets.
"""

from __future__ import annotations

from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BucketLinear(nn.Module):
    """h = sum_f E[f, bucket(x_f)] + b: what ``nn.Linear(F, out)`` is to the numbers themselves.

    The buckets of a standardised feature are the n parts of the normal distribution that hold as much of it each; a
    feature of another shape fills them unevenly.
    """

    edges: Tensor

    def __init__(self, features: int, buckets: int, out: int) -> None:
        super().__init__()
        self.features, self.buckets = features, buckets
        self.weight = nn.Parameter(torch.empty(features * buckets, out))
        self.bias = nn.Parameter(torch.empty(out))
        self.register_buffer("edges", torch.empty(buckets - 1), persistent=False)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """[B, F] standardised -> [B, out] in the weights' dtype."""
        first = torch.arange(self.features, device=x.device) * self.buckets
        rows = torch.bucketize(x.float(), self.edges, right=True) + first
        return F.embedding_bag(rows, self.weight, mode="sum") + self.bias

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """N(0, 1 / F) vectors, no bias; the edges again, which :meth:`torch.nn.Module.to_empty` forgets."""
        nn.init.normal_(self.weight, std=self.features**-0.5)
        self.bias.zero_()
        normal = NormalDist()
        self.edges.copy_(torch.tensor([normal.inv_cdf(k / self.buckets) for k in range(1, self.buckets)]))
