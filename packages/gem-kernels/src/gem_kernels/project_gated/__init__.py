"""A packed projection with its gate and its queries' norm, and the product behind the gate with the gate's backward."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gem_kernels import dispatch
from gem_kernels.checks import FLOATS, check_count, check_number, dense
from gem_kernels.project_gated.functions import GatedDown, project, watched
from gem_kernels.projections import gated_heads
from gem_kernels.projections.checks import check_vector

__all__ = ["GatedDown", "project_gated", "watched"]


def project_gated(
    x: Tensor,
    weight: Tensor,
    hidden: int,
    heads: int,
    gain: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    down: GatedDown | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`gated_heads` of a projection, made where the projection is::

        [gate || up || q] = x W^T + b      h = silu(gate) * up      q_h = q_h / sqrt(mean(q_h^2) + eps) * gain

    On Hopper one kernel makes all of it, from the product's registers; elsewhere the product is torch's. What is
    `watched` is made apart.

    Args:
        x: [T, K] float16, bfloat16, float32 or float64.
        weight: W [2 hidden + H D, K] in x's dtype.
        hidden: columns of gate and of up, at least 1.
        heads: H. There may be no q: D = 0.
        gain: [D] floating; without it q is as it is.
        bias: [2 hidden + H D] floating.
        eps: added to the mean square, positive.
        down: the only reader of h, whose backward pass then goes through the gate as well.
        backend: "reference", "triton" or "hopper"; None lets `dispatch` choose.

    Returns:
        h [T, hidden] and q [T, H, D] in x's dtype.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or eps that do not fit.
        RuntimeError: the backend asked for cannot run this.

    Sources: Shazeer, 2020 (GLU variants); Henry et al., 2020 (query-key normalisation).
    """
    check_count("hidden", hidden, 1)
    check_count("heads", heads, 1)
    check_number("eps", eps, positive=True)
    if x.dtype not in FLOATS or weight.dtype != x.dtype:
        raise TypeError(f"x and weight must be of one floating dtype; got {x.dtype} and {weight.dtype}")
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[1] != x.shape[1] or x.shape[1] == 0:
        raise ValueError(f"x must be [T, K] and weight [N, K]; got {tuple(x.shape)} and {tuple(weight.shape)}")
    width = weight.shape[0] - 2 * hidden
    if width < 0 or width % heads:
        raise ValueError(f"weight must have {2 * hidden} + a multiple of {heads} rows; got {weight.shape[0]}")
    if gain is not None:
        check_vector("gain", gain, width // heads)
    if bias is not None:
        check_vector("bias", bias, weight.shape[0])
    for what, tensor in (("weight", weight), ("gain", gain), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{what} must be on {x.device} with x; got {tensor.device}")
    features = (f"hidden:{hidden}", f"head:{width // heads}", f"behind:{width}")
    name = dispatch.choose("project_gated", x, backend, features)
    if name == dispatch.REFERENCE or watched():
        packed = F.linear(x, weight, None if bias is None else bias.detach().to(x.dtype))
        other = None if name == "hopper" else name
        return gated_heads(packed, hidden, heads, gain, bias=bias, eps=eps, backend=other)
    gain, bias = dense(gain, bias)
    return project(x, weight, gain, bias, hidden, heads, float(eps), name, backend, down)
