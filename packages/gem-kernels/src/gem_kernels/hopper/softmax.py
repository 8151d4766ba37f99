"""The online softmax of the Hopper forward, and its bias, in the registers of one warpgroup."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gem_kernels.hopper.activations import activate
from gem_kernels.hopper.records import BLOCK


@gluon.jit
def load_bias(bias, key, k_len, N: gl.constexpr, SL: gl.constexpr, EDGES: gl.constexpr):
    """The bias of keys key.. for the block's rows. Rows past the last one read that one: they are never stored."""
    base, stride, first, last = bias
    row = gl.minimum(first + gl.arange(0, BLOCK, gl.SliceLayout(1, SL)), last)
    col = key + gl.arange(0, N, gl.SliceLayout(0, SL))
    at = (base + row.to(gl.int64) * stride)[:, None] + col[None, :]
    if EDGES:
        return gl.load(at, mask=(col < k_len)[None, :], other=0.0)
    return gl.load(at)


@gluon.jit
def _rescaled(acc, alpha):
    """acc [BLOCK, D] times alpha [BLOCK]."""
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def weights(
    s, acc, m, total, scale, SL: gl.constexpr, OL: gl.constexpr, ACT: gl.constexpr, MASKED: gl.constexpr,
    LEAN: gl.constexpr,
):  # fmt: skip
    """One step of the online softmax, or the activation: weights, O so far (rescaled), new maximum and new sum.

    MASKED: a row may have seen no key yet. LEAN: maxima in two chains for each row; sums of what each thread holds,
    which need no other thread until the end; O rescaled between the exponentials.
    """
    if ACT == "softmax":
        if LEAN:
            top = gl.max(gl.max(s.reshape([BLOCK, s.shape[1] // 8, 8]), 1), 1)
        else:
            top = gl.max(s, 1)
        m_new = gl.maximum(m, gl.convert_layout(top * scale, m.type.layout, True))
        shift = m_new
        if MASKED:
            shift = gl.where(m_new == float("-inf"), 0.0, m_new)
        if LEAN:
            alpha = gl.exp2(m - shift)
            acc = _rescaled(acc, alpha)
            p = gl.exp2(s * scale - gl.convert_layout(shift, gl.SliceLayout(1, SL))[:, None])
            part = gl.convert_layout(partial(p), total.type.layout, True)
            total = total * gl.convert_layout(alpha, gl.SliceLayout(1, total.type.layout), True)[:, None] + part
        else:
            p = gl.exp2(s * scale - gl.convert_layout(shift, gl.SliceLayout(1, SL))[:, None])
            alpha = gl.exp2(m - shift)
            total = total * alpha + gl.convert_layout(gl.sum(p, 1), m.type.layout)
            acc = _rescaled(acc, alpha)
        m = m_new
    else:
        p = activate(s * scale, ACT)
    return p, acc, m, total


@gluon.jit
def partial(p):
    """Of each row the sums over the columns that one thread holds, [BLOCK, 4]."""
    return gl.sum(gl.sum(p.reshape([BLOCK, p.shape[1] // 8, 4, 2]), 3), 1)
