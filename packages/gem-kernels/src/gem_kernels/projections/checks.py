"""Validation of what the operators on packed projections share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gem_kernels.checks import FLOATS, check_number


def check_packed(packed: Tensor, heads: int, before: int, weights: Sequence[Tensor | None], eps: float) -> None:
    """packed [T, before + heads D] and the norms' weights must fit together; eps must be positive."""
    if packed.dtype not in FLOATS:
        raise TypeError(f"packed must be float16, bfloat16, float32 or float64; got {packed.dtype}")
    width = packed.shape[-1] - before
    if packed.dim() != 2 or width < 0 or width % heads:
        raise ValueError(f"packed must be [T, {before} + a multiple of {heads}]; got {tuple(packed.shape)}")
    check_number("eps", eps, positive=True)
    for weight in weights:
        if weight is not None and weight.device != packed.device:
            raise ValueError(f"weights must be on {packed.device} with packed; got {weight.device}")


def check_bias(bias: Tensor | None, packed: Tensor) -> None:
    """The projection's bias, if there is one, must be as wide as packed."""
    if bias is not None:
        check_vector("bias", bias, packed.shape[1])


def check_vector(name: str, weight: Tensor, dim: int) -> None:
    """`weight` must be a floating vector of `dim` numbers."""
    if weight.shape != (dim,) or weight.dtype not in FLOATS:
        raise ValueError(f"{name} must be floating [{dim}]; got {tuple(weight.shape)} {weight.dtype}")
