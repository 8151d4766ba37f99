"""Fit the polynomials of `gem_kernels.gdpa.activations` by the Remez exchange: `python tools/fit_activations.py`.

SiLU and GELU are x / 2 + g(x) with g even: (x / 2) tanh(x / 2) and (x / 2) erf(x / sqrt 2). On |x| <= bound the
polynomial sum c_j x^(2 j), j = 1 .. n, that deviates least from g: n coefficients and the deviation are the solution of
n + 1 equations at points where the error alternates, which move to the extrema of the error until it is level. There is
no constant, so act(0) = 0. What is printed goes into the module as it is; the last lines of each fit are its largest
errors, of the activation and of its derivative, evaluated in float32 as the kernels do.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_erf = np.vectorize(math.erf)


def _silu_even(x: Array) -> Array:
    return 0.5 * x * np.tanh(0.5 * x)


def _silu_slope(x: Array) -> Array:
    s = 1.0 / (1.0 + np.exp(-x))
    return np.asarray(s * (1.0 + x * (1.0 - s)))


def _gelu_even(x: Array) -> Array:
    return np.asarray(0.5 * x * _erf(x / math.sqrt(2.0)))


def _gelu_slope(x: Array) -> Array:
    return np.asarray(0.5 * (1.0 + _erf(x / math.sqrt(2.0))) + x * np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi))


EVEN: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "silu": (_silu_even, _silu_slope),
    "gelu": (_gelu_even, _gelu_slope),
}
FITS = (("silu", 2.0, 4), ("silu", 4.0, 7), ("silu", 6.0, 10), ("gelu", 2.0, 5), ("gelu", 4.0, 8))


@dataclass(frozen=True)
class Fit:
    """`coefficients` of x^2, x^4, ...; the largest errors on |x| <= bound in float32."""

    coefficients: tuple[float, ...]
    error: float
    slope_error: float


def remez(even: Callable[[Array], Array], bound: float, degree: int) -> Array:
    """The coefficients of x^2, x^4, ... x^(2 degree)."""
    t = np.linspace(0.0, 1.0, 40_001)[1:] ** 2  # (x / bound)^2, dense at 0
    wanted = even(bound * np.sqrt(t))
    powers = np.arange(1, degree + 1)
    basis = t[:, None] ** powers
    at = np.searchsorted(t, (1.0 - np.cos(np.pi * np.arange(1, degree + 2) / (degree + 1))) / 2.0).clip(0, len(t) - 1)
    for _ in range(100):
        system = np.concatenate([basis[at], (-1.0) ** np.arange(degree + 1)[:, None]], axis=1)
        *solved, level = np.linalg.solve(system, wanted[at])
        error = basis @ np.array(solved) - wanted
        edges = np.flatnonzero(np.diff(np.sign(error))) + 1
        runs = np.split(np.arange(len(t)), edges)
        peaks = [int(run[np.abs(error[run]).argmax()]) for run in runs]
        while len(peaks) > degree + 1:
            peaks.pop(0 if abs(error[peaks[0]]) < abs(error[peaks[-1]]) else -1)
        if len(peaks) < degree + 1:
            raise RuntimeError(f"the error of degree {degree} on {bound} does not alternate often enough")
        at = np.array(peaks)
        if np.abs(error).max() <= abs(level) * (1.0 + 1e-9):
            break
    return np.asarray(solved) / bound ** (2.0 * powers)


def fit(name: str, bound: float, degree: int) -> Fit:
    """The polynomial for one activation and bound, with its errors in float32."""
    even, slope = EVEN[name]
    c = remez(even, bound, degree)
    x = np.linspace(-bound, bound, 200_001)
    x32 = x.astype(np.float32)
    u = x32 * x32
    y, d = np.zeros_like(u), np.zeros_like(u)
    for j in range(degree, 0, -1):  # Horner, every step rounded
        y = y * u + np.float32(c[j - 1])
        d = d * u + np.float32(2 * j * c[j - 1])
    value, derivative = np.float32(0.5) * x32 + y * u, np.float32(0.5) + d * x32
    exact = 0.5 * x + even(x)
    return Fit(
        tuple(float(v) for v in c), float(np.abs(value - exact).max()), float(np.abs(derivative - slope(x)).max())
    )


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python tools/fit_activations.py", description=(__doc__ or "").split("\n")[0])
    parser.parse_args(arguments)
    for name, bound, degree in FITS:
        found = fit(name, bound, degree)
        print(f'    "{name}_poly{bound:g}": Polynomial(\n        bound={bound},\n        error={found.error:.1e},')
        print(f"        slope_error={found.slope_error:.1e},\n        coefficients=(")
        for c in found.coefficients:
            print(f"            {c!r},")
        print("        ),\n    ),")
    return 0


if __name__ == "__main__":
    sys.exit(main())
