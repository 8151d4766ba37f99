"""Element-wise activations of GDPA: every one maps 0 to 0, so that zero-filled padding adds nothing and needs no mask.

`silu_poly` and `gelu_poly` are SiLU and GELU by multiplications and additions alone, where a bound of the scores is
asserted: x / 2 + sum c_j x^(2 j). `resolve` picks the polynomial for a bound, or the exact function where there is
none. The coefficients are fitted by tools/fit_activations.py.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Polynomial:
    """`coefficients` of x^2, x^4, ... for |x| <= bound, where the activation is wrong by at most `error` and its
    derivative by at most `slope_error`, evaluated in float32.
    """

    bound: float
    error: float
    slope_error: float
    coefficients: tuple[float, ...]


POLYNOMIALS = {
    "silu_poly2": Polynomial(
        bound=2.0,
        error=1.7e-05,
        slope_error=7.9e-04,
        coefficients=(
            0.2498537429178397,
            -0.020448117327486262,
            0.0017563615607613745,
            -9.013793268711162e-05,
        ),
    ),
    "silu_poly4": Polynomial(
        bound=4.0,
        error=3.0e-05,
        slope_error=1.6e-03,
        coefficients=(
            0.24983139385010522,
            -0.020518588953145494,
            0.0018778586114871754,
            -0.0001427770652924123,
            7.674136850962225e-06,
            -2.456669444114779e-07,
            3.4405320940777985e-09,
        ),
    ),
    "silu_poly6": Polynomial(
        bound=6.0,
        error=1.0e-04,
        slope_error=2.8e-03,
        coefficients=(
            0.24980164042171815,
            -0.02050358463718312,
            0.0018874120462321232,
            -0.00014962648829871717,
            9.212311962351106e-06,
            -4.110227461565531e-07,
            1.2590989425422336e-08,
            -2.4866657908289916e-10,
            2.8366577890822197e-12,
            -1.4157706049215881e-14,
        ),
    ),
    "gelu_poly2": Polynomial(
        bound=2.0,
        error=8.5e-06,
        slope_error=5.6e-04,
        coefficients=(
            0.3988437859672437,
            -0.0661227132157007,
            0.0095211669795467,
            -0.0009358167991659807,
            4.620180990141629e-05,
        ),
    ),
    "gelu_poly4": Polynomial(
        bound=4.0,
        error=4.5e-05,
        slope_error=2.8e-03,
        coefficients=(
            0.39867339667778645,
            -0.06588784721151726,
            0.00950540061169284,
            -0.001006490997371831,
            7.48551284652989e-05,
            -3.657139136466168e-06,
            1.0419629252569999e-07,
            -1.3012984402577943e-09,
        ),
    ),
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # as they are without a bound
    "identity": lambda x: x,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.01),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_poly": F.gelu,
    "silu": F.silu,
    "silu_poly": F.silu,
    "hardswish": F.hardswish,
}


def check_activation(name: str) -> None:
    """Raise ValueError for an activation that is not in ACTIVATIONS."""
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; expected one of {', '.join(ACTIVATIONS)}")


def resolve(name: str, bound: float | None) -> str:
    """What the kernels compute for the activation `name` of scores within `bound`: for the polynomial ones the shortest
    of POLYNOMIALS that covers the bound, or the exact function, which is announced once.

    Raises ValueError for an unknown activation, and for a bound that is not a positive number.
    """
    check_activation(name)
    if bound is not None and not 0.0 < bound < math.inf:
        raise ValueError(f"score_bound must be a positive number; got {bound}")
    if not name.endswith("_poly"):
        return name
    fits = {p.bound: key for key, p in POLYNOMIALS.items() if key.startswith(name)}
    covering = [b for b in fits if bound is not None and bound <= b]
    if covering:
        return fits[min(covering)]
    if not torch.compiler.is_compiling():
        _announce_exact(name, bound, max(fits))
    return name.removesuffix("_poly")


@functools.cache
def _announce_exact(name: str, bound: float | None, widest: float) -> None:
    why = "no score_bound was given" if bound is None else f"the scores may be as large as {bound:g}"
    warnings.warn(
        f"{name} is computed exactly, with special functions: {why}, and its widest polynomial covers {widest:g}",
        stacklevel=4,
    )


def formula(name: str) -> Callable[[Tensor], Tensor]:
    """The function of a name that `resolve` gave."""
    return functools.partial(_polynomial, name) if name in POLYNOMIALS else ACTIVATIONS[name]


def _polynomial(name: str, x: Tensor) -> Tensor:
    u = x * x
    even = torch.zeros_like(x)
    for c in reversed(POLYNOMIALS[name].coefficients):
        even = (even + c) * u
    return 0.5 * x + even


def terms(name: str) -> int:
    """How many coefficients a polynomial has; 0 for what is none. For kernels, at compile time."""
    return len(POLYNOMIALS[name].coefficients) if name in POLYNOMIALS else 0


def coefficient(name: str, j: int) -> float:
    """The coefficient of h^(2 j + 2) where h = x / 2, which adds itself to it: in h a kernel needs one product less,
    as the half goes into the factor of the scores. For kernels, at compile time.
    """
    return POLYNOMIALS[name].coefficients[j] * 4.0 ** (j + 1)
