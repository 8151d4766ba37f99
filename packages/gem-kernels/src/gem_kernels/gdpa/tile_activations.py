"""GDPA's activations and their derivatives on float32 tiles, for portable Triton kernels; `activations` is the
specification.

Constants stand to the right of tiles: the interpreter does not unwrap them on the left.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gem_kernels.gdpa import activations

terms = triton.constexpr_function(activations.terms)
coefficient = triton.constexpr_function(activations.coefficient)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY = tl.constexpr(0.3989422804014327)  # of the normal distribution at 0
_TANH_FACTOR = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(x, ACT: tl.constexpr):
    """act(x)."""
    N: tl.constexpr = terms(ACT)
    if N > 0:
        h = x * 0.5
        u = h * h
        y = u * coefficient(ACT, N - 1) + coefficient(ACT, N - 2)
        for j in tl.static_range(2, N):
            y = y * u + coefficient(ACT, N - 1 - j)  # a multiply-add
        y = y * u + h
    elif ACT == "identity":
        y = x
    elif ACT == "relu":
        y = tl.maximum(x, 0.0)
    elif ACT == "relu2":
        r = tl.maximum(x, 0.0)
        y = r * r
    elif ACT == "leaky_relu":
        y = tl.where(x > 0, x, 0.01 * x)
    elif ACT == "gelu":
        y = x * 0.5 * (1.0 + tl.math.erf(x * _SQRT_HALF))
    elif ACT == "gelu_tanh":  # (1 + tanh u) / 2 = sigmoid(2 u)
        y = x * sigmoid((x + 0.044715 * x * x * x) * (2.0 * _TANH_FACTOR))
    elif ACT == "silu":
        y = x * sigmoid(x)
    else:
        tl.static_assert(ACT == "hardswish", "unknown activation")
        y = x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    return y


@triton.jit
def slope(x, ACT: tl.constexpr):
    """act'(x)."""
    N: tl.constexpr = terms(ACT)
    if N > 0:
        h = x * 0.5
        u = h * h
        y = u * (coefficient(ACT, N - 1) * N) + coefficient(ACT, N - 2) * (N - 1)
        for j in tl.static_range(2, N):
            y = y * u + coefficient(ACT, N - 1 - j) * (N - j)
        y = y * h + 0.5
    elif ACT == "identity":
        y = tl.full(x.shape, 1.0, tl.float32)
    elif ACT == "relu":
        y = tl.where(x > 0, 1.0, 0.0)
    elif ACT == "relu2":
        y = 2.0 * tl.maximum(x, 0.0)
    elif ACT == "leaky_relu":
        y = tl.where(x > 0, 1.0, 0.01)
    elif ACT == "gelu":
        y = 0.5 * (1.0 + tl.math.erf(x * _SQRT_HALF)) + x * _DENSITY * tl.exp(-0.5 * x * x)
    elif ACT == "gelu_tanh":
        s = sigmoid((x + 0.044715 * x * x * x) * (2.0 * _TANH_FACTOR))
        y = s + 2.0 * x * s * (1.0 - s) * (1.0 + 3.0 * 0.044715 * x * x) * _TANH_FACTOR
    elif ACT == "silu":
        s = sigmoid(x)
        y = s * (1.0 + x * (1.0 - s))
    else:
        tl.static_assert(ACT == "hardswish", "unknown activation")
        y = tl.where(x < -3.0, 0.0, tl.where(x <= 3.0, x * (1.0 / 3.0) + 0.5, 1.0))
    return y
