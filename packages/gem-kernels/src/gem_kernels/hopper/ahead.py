"""Another order of a tile's steps in the Hopper forward: the next step's scores are under way during a softmax.

One product after the other leaves a consumer waiting for both of a step. Here it issues S of the next step and P V of
this one, waits for S alone, and computes its softmax while P V runs. That takes the registers of a second block of
scores, so steps are of 64 keys, and there are no masks.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.hopper.activations import activate
from gem_kernels.hopper.records import BLOCK
from gem_kernels.hopper.softmax import load_bias, partial, rescaled


@gluon.jit
def _weights(
    S, m, total, scale, bias, SL: gl.constexpr, ACT: gl.constexpr, LAZY: gl.constexpr, BIAS: gl.constexpr
):  # fmt: skip
    """Weights, what O so far is to be multiplied by, the new maximum and the new sums per thread."""
    if BIAS:
        S = S * scale + bias.to(gl.float32) * 1.4426950408889634
        scale = 1.0
    if ACT == "softmax":
        top = gl.max(gl.max(S.reshape([BLOCK, BLOCK // 8, 8]), 1), 1)
        m_new = gl.maximum(m, gl.convert_layout(top * scale, m.type.layout, True))
        if LAZY:
            m_new = gl.where(m_new > m + 8.0, m_new, m)
        shift = m_new
        if BIAS:  # a row may have seen -inf alone
            shift = gl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = gl.exp2(m - shift)
        p = gl.exp2(S * scale - gl.convert_layout(shift, gl.SliceLayout(1, SL))[:, None])
        part = gl.convert_layout(partial(p), total.type.layout, True)
        total = total * gl.convert_layout(alpha, gl.SliceLayout(1, total.type.layout), True)[:, None] + part
        m = m_new
    else:
        p = activate(S * scale, ACT)
        alpha = m
    return p, alpha, m, total


@triton.constexpr_function
def _touch(n):
    """Nothing is changed: a word in shared memory is combined with 0, and that only if n registers are all ones."""
    ands = " ".join(f"and.b32 all, all, ${i};" for i in range(1, n))
    test = f"mov.b32 all, $0; {ands} setp.eq.u32 ones, all, 0xffffffff;"
    return f"{{ .reg .pred ones; .reg .b32 all, at; mov.b32 at, 0; {test} @ones red.shared.or.b32 [at], 0; }}"


@triton.constexpr_function
def _in_place(n):
    return ",".join(["=r"] * n + [str(i) for i in range(n)])


@gluon.jit
def _now(P):
    """The weights, which the compiler now has to have before it waits: ptxas moves arithmetic behind a wait for
    products, where it does not run beside them, but not what may write to memory.
    """
    N: gl.constexpr = P.shape[0] * P.shape[1] // 128
    return gl.inline_asm_elementwise(_touch(N // 2), _in_place(N // 2), [P], P.dtype, False, N)


@gluon.jit
def steps_ahead(
    q, buffers, acc, m, scale, step, n, before, k_len, barriers, bias,
    D: gl.constexpr, KS: gl.constexpr, OL: gl.constexpr, ACT: gl.constexpr, LAZY: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """All n steps of one block, of 64 keys, the last keys first: O, maxima and sums per thread."""
    _q_buf, k_buf, v_buf = buffers
    k_full, k_empty, v_full, v_empty = barriers
    before_empty, has_before = before
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    total = partial(acc)  # zeros
    s = step % KS
    mbarrier.wait(k_full.index(s), (step // KS) & 1)
    none = gl.zeros([BLOCK, BLOCK], gl.float32, SL)
    S = warpgroup_mma(q, k_buf.index(s).reshape([BLOCK, D]).permute((1, 0)), none, use_acc=False, is_async=True)
    b = 0
    if BIAS:
        b = load_bias(bias, (n - 1) * BLOCK, k_len, BLOCK, SL, True)
    S = warpgroup_mma_wait(0, deps=(S,))
    mbarrier.arrive(k_empty.index(s), count=1)
    if has_before:
        tma.store_wait(0)  # O of the tile before has left the buffer that it shares with Q
        mbarrier.arrive(before_empty, count=1)
    left = k_len - (n - 1) * BLOCK
    if left < BLOCK:
        hidden: gl.constexpr = float("-inf") if ACT == "softmax" else 0.0
        S = gl.where((gl.arange(0, BLOCK, gl.SliceLayout(0, SL)) < left)[None, :], S, hidden)
    p, _alpha, m, total = _weights(S, m, total, scale, b, SL, ACT, LAZY, BIAS)
    P = gl.convert_layout(p.to(q.dtype), PL)
    for i in range(1, n):
        s = (step + i) % KS
        o = (step + i - 1) % KS
        mbarrier.wait(k_full.index(s), ((step + i) // KS) & 1)
        none = gl.zeros([BLOCK, BLOCK], gl.float32, SL)
        S = warpgroup_mma(q, k_buf.index(s).reshape([BLOCK, D]).permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(o), ((step + i - 1) // KS) & 1)
        acc = warpgroup_mma(P, v_buf.index(o).reshape([BLOCK, D]), acc, is_async=True)
        if BIAS:
            b = load_bias(bias, (n - 1 - i) * BLOCK, k_len, BLOCK, SL, False)
        S, acc, P = warpgroup_mma_wait(1, deps=(S, acc, P))
        mbarrier.arrive(k_empty.index(s), count=1)
        p, alpha, m, total = _weights(S, m, total, scale, b, SL, ACT, LAZY, BIAS)
        weights = _now(gl.convert_layout(p.to(q.dtype), PL))
        acc, P = warpgroup_mma_wait(0, deps=(acc, P))
        mbarrier.arrive(v_empty.index(o), count=1)
        if ACT == "softmax":
            acc = rescaled(acc, alpha, LAZY)
        P = weights
    o = (step + n - 1) % KS
    mbarrier.wait(v_full.index(o), ((step + n - 1) // KS) & 1)
    acc = warpgroup_mma(P, v_buf.index(o).reshape([BLOCK, D]), acc, is_async=True)
    acc, P = warpgroup_mma_wait(0, deps=(acc, P))
    mbarrier.arrive(v_empty.index(o), count=1)
    return acc, m, total
