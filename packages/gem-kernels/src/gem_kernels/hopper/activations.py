"""GDPA's activations and their derivatives on register tiles, for Gluon kernels.

Every function maps 0 to 0. The transcendental ones are built on one hardware instruction (`tanh.approx`, error about 5e-4, below the
rounding of BF16 weights); `gelu_poly` uses none at all.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gem_kernels.gdpa.activations import GELU_COEFFICIENTS, GELU_RANGE

_C = tuple(float(c) for c in GELU_COEFFICIENTS)
_RANGE = float(GELU_RANGE)


@gluon.jit
def tanh(x):
    """Hyperbolic tangent by one special-function instruction."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


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
    else:
        gl.static_assert(ACT == "hardswish", "unknown activation")
        y = x * gl.minimum(gl.maximum(x * (1.0 / 6.0) + 0.5, 0.0), 1.0)
    return y
