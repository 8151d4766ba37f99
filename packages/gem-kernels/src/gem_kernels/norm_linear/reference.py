"""A projection of normalised rows in plain PyTorch. Differentiable by autograd."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gem_kernels.norms import reference as norms


def norm_linear(x: Tensor, gain: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """y = W n + b of rows [M, K] with n their RMSNorm, rounded to x's dtype as the norm alone would."""
    normal, _ = norms.norm(x, None, gain, None, kind="rms", eps=eps, swish=False)
    return F.linear(normal, weight, bias)


def linear_norm(x: Tensor, weight: Tensor, gain: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """The RMSNorm of rows W x + b, [M, N]."""
    normal, _ = norms.norm(F.linear(x, weight, bias), None, gain, None, kind="rms", eps=eps, swish=False)
    return normal
