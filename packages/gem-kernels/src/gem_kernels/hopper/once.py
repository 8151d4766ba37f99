"""The one step of a block whose keys all fit in it: a softmax that has nothing to correct."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.hopper.activations import activate
from gem_kernels.hopper.records import BLOCK
from gem_kernels.hopper.softmax import partial


@gluon.jit
def one_step(
    q, buffers, scale, step, before, k_len, barriers,
    D: gl.constexpr, KS: gl.constexpr, OL: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """O of one block and 1 to 64 keys, for softmax not yet divided; then maxima, and sums per thread."""
    _q_buf, k_buf, v_buf = buffers
    k_full, k_empty, v_full, v_empty = barriers
    before_empty, has_before = before
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    RL: gl.constexpr = gl.SliceLayout(1, OL)
    acc = gl.zeros([BLOCK, D], gl.float32, OL)
    s = step % KS
    phase = (step // KS) & 1
    mbarrier.wait(k_full.index(s), phase)
    none = gl.zeros([BLOCK, BLOCK], gl.float32, SL)
    S = warpgroup_mma(q, k_buf.index(s).reshape([BLOCK, D]).permute((1, 0)), none, use_acc=False, is_async=True)
    S = warpgroup_mma_wait(0, deps=(S,))
    mbarrier.arrive(k_empty.index(s), count=1)
    if has_before:
        tma.store_wait(0)  # O of the tile before has left the buffer that it shares with Q
        mbarrier.arrive(before_empty, count=1)
    if k_len < BLOCK:
        hidden: gl.constexpr = float("-inf") if ACT == "softmax" else 0.0
        S = gl.where((gl.arange(0, BLOCK, gl.SliceLayout(0, SL)) < k_len)[None, :], S, hidden)
    m = gl.zeros([BLOCK], gl.float32, RL)
    total = partial(acc)
    if ACT == "softmax":
        top = gl.max(gl.max(S.reshape([BLOCK, BLOCK // 8, 8]), 1), 1)
        m = gl.convert_layout(top * scale, RL, True)
        p = gl.exp2(S * scale - gl.convert_layout(m, gl.SliceLayout(1, SL))[:, None])
        total = gl.convert_layout(partial(p), total.type.layout, True)
    else:
        p = activate(S * scale, ACT)
    P = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, OL, 2))
    mbarrier.wait(v_full.index(s), phase)
    acc = warpgroup_mma(P, v_buf.index(s).reshape([BLOCK, D]), acc, use_acc=False, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(s), count=1)
    return acc, m, total
