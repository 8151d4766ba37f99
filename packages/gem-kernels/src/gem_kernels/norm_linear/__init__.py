"""RMSNorm folded into the projection that follows it, or into the one that it follows."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gem_kernels import dispatch
from gem_kernels.checks import FLOATS, check_number, dense
from gem_kernels.norm_linear import reference
from gem_kernels.norm_linear.operators import after, before
from gem_kernels.norms import rms_norm

__all__ = ["linear_norm", "norm_linear"]

WIDEST = 256  # columns of a result whose rows fit in one tile


def norm_linear(
    x: Tensor,
    gain: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """Normalise every row by its root mean square and project it, without writing the normalised rows::

        y = W (x * gain) / sqrt(mean(x^2) + eps) + b

    The kernel multiplies x by W diag(gain) and divides its rows at the end; on Hopper it sums the squares of x while
    the tiles pass. The kernel of the norm's backward pass writes the normalised rows once more, so that none are kept
    for it; the products are torch's.

    Args:
        x: [..., K] float16, bfloat16, float32 or float64.
        gain: [K] floating, the norm's weight.
        weight: [N, K] in x's dtype.
        bias: [N] in x's dtype.
        eps: added to the mean square, positive.
        backend: "reference", "triton" or "hopper"; None lets `dispatch` choose.

    Returns:
        y: [..., N] in x's dtype.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or eps that do not fit.
        RuntimeError: the backend asked for cannot run this.

    Source: Zhang and Sennrich, 2019, for the norm.
    """
    _check(x, gain, weight, bias, eps)
    features = (f"width:{weight.shape[0]}",)
    name = dispatch.choose("norm_linear", x, backend, features)
    if name == dispatch.REFERENCE:
        return reference.norm_linear(x, gain, weight, bias, eps=float(eps))
    gain, bias = dense(gain, bias)  # type: ignore[assignment]
    return before(x.flatten(0, -2), gain, weight, bias, float(eps), name).unflatten(0, x.shape[:-1])


def linear_norm(
    x: Tensor,
    weight: Tensor,
    gain: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """Project every row and normalise the result by its root mean square, without writing the projection::

        z = W x + b        y = z / sqrt(mean(z^2) + eps) * gain

    The rows of a result of up to 256 columns fit in one tile of the product, which normalises them before they are
    written; a wider one is torch's product and our norm. The backward pass computes z again.

    Args:
        x: [..., K] float16, bfloat16, float32 or float64.
        weight: [N, K] in x's dtype.
        gain: [N] floating, the norm's weight.
        bias: [N] in x's dtype.
        eps: added to the mean square, positive.
        backend: "reference", "triton" or "hopper"; None lets `dispatch` choose.

    Returns:
        y: [..., N] in x's dtype.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or eps that do not fit.
        RuntimeError: the backend asked for cannot run this, for "triton" and "hopper" also rows that are too wide.

    Source: Zhang and Sennrich, 2019, for the norm.
    """
    _check(x, gain, weight, bias, eps, gained=weight.shape[0] if weight.dim() == 2 else 0)
    if backend is None and weight.shape[0] > WIDEST:
        wide = rms_norm(F.linear(x, weight, bias), gain, eps=eps)
        assert isinstance(wide, Tensor)
        return wide
    name = dispatch.choose("norm_linear", x, backend, ("after", f"width:{weight.shape[0]}"))
    if name == dispatch.REFERENCE:
        return reference.linear_norm(x, weight, gain, bias, eps=float(eps))
    gain, bias = dense(gain, bias)  # type: ignore[assignment]
    return after(x.flatten(0, -2), weight, gain, bias, float(eps), name).unflatten(0, x.shape[:-1])


def _check(x: Tensor, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float, gained: int | None = None) -> None:
    """`gained`: how wide the gain must be, as wide as x by default."""
    if x.dtype not in FLOATS:
        raise TypeError(f"x must be float16, bfloat16, float32 or float64; got {x.dtype}")
    if x.dim() < 2 or x.shape[-1] == 0:
        raise ValueError(f"x must be [..., K] with K at least 1; got {tuple(x.shape)}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.shape[0] == 0:
        raise ValueError(f"weight must be [N, {x.shape[-1]}]; got {tuple(weight.shape)}")
    if gained is None and gain.shape != x.shape[-1:]:
        raise ValueError(f"gain must be [{x.shape[-1]}], as wide as x; got {tuple(gain.shape)}")
    if gained is not None and gain.shape != (gained,):
        raise ValueError(f"gain must be [{gained}], as wide as the result; got {tuple(gain.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}], one for each row of weight; got {tuple(bias.shape)}")
    if not gain.is_floating_point():
        raise TypeError(f"gain must be floating; got {gain.dtype}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise TypeError(f"{name} must be of x's dtype, {x.dtype}; got {tensor.dtype}")
    for name, tensor in (("gain", gain), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} must be on {x.device} with x; it is on {tensor.device}")
    check_number("eps", eps, positive=True)
