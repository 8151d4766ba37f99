"""GDPA in plain PyTorch: the specification, and what runs on a CPU. Differentiable by autograd."""

from __future__ import annotations

from torch import Tensor

from gem_kernels.checks import UNLIMITED
from gem_kernels.dense import densify, full_precision
from gem_kernels.gdpa.activations import formula


@full_precision
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    *,
    activation: str,
    scale: float,
    out_scale: float = 1.0,
    left: int = -1,
    right: int = -1,
    residual: Tensor | None = None,
) -> Tensor:
    """O [Tq, H, D]. As act(0) = 0, padding needs no mask (its keys are 0), and a score times 0 is hidden."""
    dense = densify(q, k, v, q_offsets, k_offsets, max_q, max_k)
    s = dense.scores(scale)  # [B, H, Lq, Lk]
    if left != UNLIMITED or right != UNLIMITED:
        s = s * (1.0 - dense.hidden(*dense.interval(left, right), s.dtype))
    out = dense.weighted(formula(activation)(s))
    rows = dense.rows(out if out_scale == 1.0 else out * out_scale)
    return (rows if residual is None else rows + residual).to(q.dtype)
