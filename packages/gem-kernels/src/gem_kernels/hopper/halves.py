"""A step of the Hopper forward whose second product is two: the weights of the second half of its keys are made under
the product of the first half's with their values.

No register more than in one piece (half of the weights are in flight while the other half are still scores), and Q K^T
stays one product: its operands come out of shared memory once for all keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.hopper.activations import activate
from gem_kernels.hopper.records import BLOCK
from gem_kernels.hopper.softmax import partial


@gluon.jit
def _weights(s, shift, scale, SL: gl.constexpr, ACT: gl.constexpr):
    """Weights of half a step; no thread gives or takes anything."""
    s = gl.convert_layout(s, SL, True)
    if ACT == "softmax":
        return gl.exp2(s * scale - gl.convert_layout(shift, gl.SliceLayout(1, SL), True)[:, None])
    else:
        return activate(s * scale, ACT)


@gluon.jit
def step_in_halves(
    q, k, v, acc, m, total, scale, step, before, key, k_len, barriers,
    N: gl.constexpr, KS: gl.constexpr, OL: gl.constexpr, ACT: gl.constexpr, EDGES: gl.constexpr, LEAN: gl.constexpr,
):  # fmt: skip
    """`consumers._step` of N keys, key.. of the sequence's k_len, without masks and biases, for head dimensions of one
    product: O so far, maxima, sums. EDGES: perhaps fewer than N keys.
    """
    HALF: gl.constexpr = N // 2
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    HL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    k_full, k_empty, v_full, v_empty = barriers
    before_empty, has_before = before
    slot = step % KS
    phase = (step // KS) & 1
    mbarrier.wait(k_full.index(slot), phase)
    none = gl.zeros([BLOCK, N], gl.float32, SL)
    S = warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
    S = warpgroup_mma_wait(0, deps=(S,))
    if not LEAN:
        mbarrier.arrive(k_empty.index(slot), count=1)
        if has_before:
            tma.store_wait(0)  # O of the tile before has left the buffer that it shares with Q
            mbarrier.arrive(before_empty, count=1)
    if EDGES and key + N > k_len:
        hidden: gl.constexpr = float("-inf") if ACT == "softmax" else 0.0
        S = gl.where((key + gl.arange(0, N, gl.SliceLayout(0, SL)) < k_len)[None, :], S, hidden)
    shift = m
    if ACT == "softmax":
        top = gl.max(gl.max(S.reshape([BLOCK, N // 8, 8]), 1), 1)
        shift = gl.maximum(m, gl.convert_layout(top * scale, m.type.layout, True))
        alpha = gl.exp2(m - shift)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OL))[:, None]
    first, second = gl.split(S.reshape([BLOCK, 2, HALF]).permute((0, 2, 1)))
    p = _weights(first, shift, scale, HL, ACT)
    P = gl.convert_layout(p.to(q.dtype), PL)
    if ACT == "softmax":
        sums = partial(p)
    if not LEAN:
        mbarrier.wait(v_full.index(slot), phase)
    acc = warpgroup_mma(P, v.slice(0, HALF), acc, is_async=True)
    p1 = _weights(second, shift, scale, HL, ACT)
    P1 = gl.convert_layout(p1.to(q.dtype), PL)
    if ACT == "softmax":
        sums += partial(p1)
    acc = warpgroup_mma(P1, v.slice(HALF, HALF), acc, is_async=True)
    acc, P, P1 = warpgroup_mma_wait(0, deps=(acc, P, P1))
    if LEAN:
        if has_before:
            tma.store_wait(0)
            mbarrier.arrive(before_empty, count=1)
        mbarrier.arrive(k_empty.index(slot), count=1)
    else:
        mbarrier.arrive(v_empty.index(slot), count=1)
    if ACT == "softmax":
        if LEAN:  # sums of what each thread holds
            alphas = gl.convert_layout(alpha, gl.SliceLayout(1, total.type.layout), True)
            total = total * alphas[:, None] + gl.convert_layout(sums, total.type.layout, True)
        else:
            total = total * alpha + gl.convert_layout(gl.sum(sums, 1), m.type.layout, True)
    return acc, shift, total
