"""Element-wise activations of GDPA: every one maps 0 to 0, so that zero-filled padding adds nothing and needs no mask.

`gelu_poly` is GELU without a transcendental: x / 2 + g(x^2) for |x| < GELU_RANGE and relu(x) beyond, g a polynomial
fitted to the even part of erf-GELU (minimax, meeting |x| / 2 at the border in value and slope). Its error is at most
GELU_ERROR everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

GELU_RANGE = 3.25
GELU_COEFFICIENTS = (  # of x^2, x^4, ... x^10
    0.390792656043396,
    -0.05654592929377823,
    0.005794229301593107,
    -0.00031563146017881717,
    6.89520198301932e-06,
)
GELU_ERROR = 2.2e-3


def gelu_poly(x: Tensor) -> Tensor:
    """GELU by polynomial inside |x| < GELU_RANGE, relu outside."""
    x2 = x * x
    even = torch.full_like(x, GELU_COEFFICIENTS[-1])
    for c in reversed(GELU_COEFFICIENTS[:-1]):
        even = even * x2 + c
    return torch.where(x.abs() < GELU_RANGE, 0.5 * x + even * x2, F.relu(x))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.01),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_poly": gelu_poly,
    "silu": F.silu,
    "hardswish": F.hardswish,
}


def check_activation(name: str) -> None:
    """Raise ValueError for an activation that is not in ACTIVATIONS."""
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; expected one of {', '.join(ACTIVATIONS)}")
