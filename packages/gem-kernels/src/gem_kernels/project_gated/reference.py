"""The product behind the gate in plain PyTorch; what is before it is that of `projections.reference`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def down(h: Tensor, weight: Tensor, told: Tensor | None, other: Tensor | None, bias: Tensor | None) -> Tensor:
    """h W^T + told V^T + b."""
    y = F.linear(h, weight, bias)
    return y if told is None or other is None else torch.addmm(y, told, other.t())
