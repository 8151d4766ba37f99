"""GDPA's activations and their derivatives on register tiles, for Gluon kernels.

Every function maps 0 to 0. The transcendental ones are built on one hardware instruction (`tanh.approx`, error about
5e-4, below the
rounding of BF16 weights); `gelu_poly` uses none at all.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gem_kernels.gdpa.activations import GELU_COEFFICIENTS, GELU_RANGE

ACTIVATIONS = ("identity", "relu", "relu2", "leaky_relu", "gelu", "gelu_tanh", "gelu_poly", "silu", "hardswish")

assert len(GELU_COEFFICIENTS) == 5
_C1, _C2, _C3, _C4, _C5 = (gl.constexpr(float(c)) for c in GELU_COEFFICIENTS)
_RANGE = gl.constexpr(float(GELU_RANGE))


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


@gluon.jit
def activate(x, ACT: gl.constexpr):
    """act(x), float32."""
    if ACT == "identity":
        y = x
    elif ACT == "relu":
        y = gl.maximum(x, 0.0)
    elif ACT == "relu2":
        r = gl.maximum(x, 0.0)
        y = r * r
    elif ACT == "leaky_relu":
        y = gl.maximum(x, 0.01 * x)
    elif ACT == "silu":
        h = 0.5 * x
        y = h * tanh(h) + h
    elif ACT == "gelu_tanh":
        h = 0.5 * x
        y = h * tanh(x * (0.7978845608028654 + 0.035677408136300125 * x * x)) + h
    elif ACT == "gelu":
        cdf, _density = _normal(x)
        y = x * cdf
    elif ACT == "gelu_poly":
        x2 = x * x
        even = x2 * (_C1 + x2 * (_C2 + x2 * (_C3 + x2 * (_C4 + x2 * _C5))))
        z = gl.maximum(x, -x)
        y = 0.5 * x + gl.where(z < _RANGE, even, 0.5 * z)
    else:
        gl.static_assert(ACT == "hardswish", "unknown activation")
        y = x * gl.minimum(gl.maximum(x * (1.0 / 6.0) + 0.5, 0.0), 1.0)
    return y


@gluon.jit
def activate_with_grad(x, ACT: gl.constexpr):
    """act(x) and act'(x), float32."""
    if ACT == "identity":
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
        s = 0.5 * tanh(0.5 * x) + 0.5
        y = x * s
        d = s + y * (1.0 - s)
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
    elif ACT == "gelu_poly":
        x2 = x * x
        even = x2 * (_C1 + x2 * (_C2 + x2 * (_C3 + x2 * (_C4 + x2 * _C5))))
        odd = x * (2.0 * _C1 + x2 * (4.0 * _C2 + x2 * (6.0 * _C3 + x2 * (8.0 * _C4 + x2 * (10.0 * _C5)))))
        z = gl.maximum(x, -x)
        near = z < _RANGE
        y = 0.5 * x + gl.where(near, even, 0.5 * z)
        d = 0.5 + gl.where(near, odd, gl.where(x > 0, 0.5, -0.5))
    else:
        gl.static_assert(ACT == "hardswish", "unknown activation")
        h = gl.minimum(gl.maximum(x * (1.0 / 6.0) + 0.5, 0.0), 1.0)
        y = x * h
        d = h + gl.where((x > -3.0) & (x < 3.0), x * (1.0 / 6.0), 0.0)
    return y, d
