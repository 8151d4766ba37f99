"""GDPA's activations and their derivatives on register tiles, for Gluon kernels.

Every function maps 0 to 0. The transcendental ones are built on one hardware instruction (`tanh.approx`, error about
5e-4, below the rounding of BF16 weights); the polynomials of `gem_kernels.gdpa.activations` use none at all.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gem_kernels.gdpa.tile_activations import coefficient, terms


@gluon.jit
def tanh(x):
    """Hyperbolic tangent by one special-function instruction."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _normal(x):
    """The standard normal distribution and density at x: Abramowitz and Stegun 7.1.26, absolute error 1.5e-7."""
    z = gl.maximum(x, -x)
    t = 1.0 / (1.0 + 0.23164190 * z)
    e = gl.exp2(-0.72134752044448170 * z * z)
    tail = 0.5 * e * t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return gl.where(x > 0, 1.0 - tail, tail), 0.3989422804014327 * e


def slope_unit(act: str) -> float:
    """In which units `times_slope` gives act'(x) dP."""
    return 0.5 if act == "silu" else 1.0


@gluon.jit
def times_slope(slope, dP, ACT: gl.constexpr):
    """act'(x) dP in units of `slope_unit`, from what `activate_with_slope` gave."""
    if ACT == "silu":
        return slope * dP + dP  # one multiply-add
    else:
        return slope * dP


@gluon.jit
def activate_with_grad(x, ACT: gl.constexpr):
    """act(x) and act'(x), float32."""
    y, d = activate_with_slope(x, ACT)
    if ACT == "silu":
        d = 0.5 * d + 0.5
    return y, d


@gluon.jit
def activate_with_slope(x, ACT: gl.constexpr):
    """act(x), and for `times_slope` act'(x), or of SiLU 2 act'(x) - 1, which is an instruction less; float32."""
    N: gl.constexpr = terms(ACT)
    if N > 0:
        h = 0.5 * x
        u = h * h
        y = u * coefficient(ACT, N - 1) + coefficient(ACT, N - 2)
        d = u * (coefficient(ACT, N - 1) * N) + coefficient(ACT, N - 2) * (N - 1)
        for j in gl.static_range(2, N):
            y = y * u + coefficient(ACT, N - 1 - j)  # a multiply-add
            d = d * u + coefficient(ACT, N - 1 - j) * (N - j)
        y = y * u + h
        d = d * h + 0.5
    elif ACT == "identity":
        y = x
        d = x * 0.0 + 1.0
    elif ACT == "relu":
        y = gl.maximum(x, 0.0)
        d = gl.where(x > 0, 1.0, 0.0)
    elif ACT == "relu2":
        r = gl.maximum(x, 0.0)
        y = r * r
        d = 2.0 * r
    elif ACT == "leaky_relu":
        y = gl.maximum(x, 0.01 * x)
        d = gl.where(x > 0, 1.0, 0.01)
    elif ACT == "silu":
        h = 0.5 * x
        t = tanh(h)
        y = h * t + h
        d = (t - t * y) + y
    elif ACT == "gelu_tanh":
        x2 = x * x
        t = tanh(x * (0.7978845608028654 + 0.035677408136300125 * x2))
        h = 0.5 * t + 0.5
        y = x * h
        d = h + 0.5 * x * (1.0 - t * t) * (0.7978845608028654 + 0.10703222440890037 * x2)
    elif ACT == "gelu":
        cdf, density = _normal(x)
        y = x * cdf
        d = cdf + x * density
    else:
        gl.static_assert(ACT == "hardswish", "unknown activation")
        h = gl.minimum(gl.maximum(x * (1.0 / 6.0) + 0.5, 0.0), 1.0)
        y = x * h
        d = h + gl.where((x > -3.0) & (x < 3.0), x * (1.0 / 6.0), 0.0)
    return y, d


@gluon.jit
def activate(x, ACT: gl.constexpr):
    """act(x), float32; what only the derivative needs is not computed."""
    y, _slope = activate_with_slope(x, ACT)
    return y
