"""A consumer's steps of the FP8 forward: scores, weights in E4M3 and what they add to O, in a warpgroup's registers."""

from __future__ import annotations

from gem_kernels.hopper.records import BLOCK
from gem_kernels.hopper.softmax import partial
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

KEYS = gl.constexpr(128)  # keys that share the scales of K and V, a whole step
SHIFT = gl.constexpr(8.0)  # P is at most 2^8, E4M3 goes to 448
ROOM = gl.constexpr(3.0)  # LAZY: how far a row's maximum may rise, in powers of two, before O is scaled anew


def _where_needed(n: int) -> str:
    """n numbers of a thread times as many factors, of which two rows' are the 0th and the 2nd; nothing, if those of all
    threads of the warp are 1.
    """
    lines = [f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)]
    return (
        "{\n.reg .pred one, any;\n"
        f"setp.neu.f32 one, ${2 * n}, 0f3F800000;\nsetp.neu.or.f32 any, ${2 * n + 2}, 0f3F800000, one;\n"
        "vote.sync.any.pred one, any, 0xffffffff;\n@!one bra done;\n" + "\n".join(lines) + "\ndone:\n}"
    )


RESCALE = {d: gl.constexpr(_where_needed(d // 2)) for d in (64, 128)}
RESCALE_128, RESCALE_64 = RESCALE[128], RESCALE[64]
TIED_128 = gl.constexpr(",".join(["=f"] * 64 + [str(i) for i in range(64)] + ["f"] * 64))
TIED_64 = gl.constexpr(",".join(["=f"] * 32 + [str(i) for i in range(32)] + ["f"] * 32))


@gluon.jit
def steps_of(k_len, REST: gl.constexpr):
    """Steps of 64 keys and of 128, from the last key to the first. REST: what does not fill a whole step is one step
    all the same, a whole one from 65 keys on.
    """
    wholes = k_len // KEYS
    rest = k_len - wholes * KEYS
    if REST:
        shorts = gl.where((rest > 0) & (rest <= BLOCK), 1, 0)
        wholes += gl.where(rest > BLOCK, 1, 0)
    else:
        shorts = gl.cdiv(rest, BLOCK)
    return shorts, wholes


@gluon.jit
def _scales(told, s, row_scale, first, scale):
    """A step's scales, which a loader put beside its keys: of the rows with a tile's first step, of K, log2 of V's."""
    pairs, rows, w = told
    PL: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    sk, lv = pair(pairs.index(s).load(PL), PL)
    if first:
        row_scale = rows.index(3 * s + w).load(row_scale.type.layout).to(gl.float32) * scale
    return row_scale, sk, lv


@gluon.jit
def pair(x, L: gl.constexpr):
    """The two numbers of x [2], which every thread holds."""
    i = gl.arange(0, 2, L)
    return gl.sum(gl.where(i == 0, x, 0.0), 0), gl.sum(gl.where(i == 1, x, 0.0), 0)


@gluon.jit
def _weights(
    s, acc, m, total, row_scale, sk, lv, N: gl.constexpr, SL: gl.constexpr, OL: gl.constexpr, UP: gl.constexpr
):  # fmt: skip
    """One step of the online softmax: P as the next product's operand, O so far (rescaled), maximum and sum.

    `row_scale` [BLOCK] has the factor of the scores in log2 units; lv = log2 of V's scale.
    """
    c = row_scale * sk
    most = gl.convert_layout(gl.max(s, 1), m.type.layout) * c + lv
    m_new = gl.maximum(m, gl.ceil(most))
    shift = m_new - (lv + UP)
    of: gl.constexpr = gl.SliceLayout(1, SL)
    p = gl.exp2(s * gl.convert_layout(c, of)[:, None] - gl.convert_layout(shift, of)[:, None])
    alpha = gl.exp2(m - m_new)
    if len(total.shape) == 2:  # of what each thread holds
        alphas = gl.convert_layout(alpha, gl.SliceLayout(1, total.type.layout), True)
        total = total * alphas[:, None] + gl.convert_layout(partial(p), total.type.layout, True) * gl.exp2(-lv)
    else:
        total = total * alpha + gl.convert_layout(gl.sum(p, 1), m.type.layout) * gl.exp2(-lv)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OL))[:, None]
    return p, acc, m_new, total


@gluon.jit
def _operand(p, N: gl.constexpr, OL: gl.constexpr):
    """P with its keys in the order of V's blocks, as E4M3 in the registers of the second product.

    A thread has columns 2 t and 2 t + 1 of every 8 scores; of an operand it has 4 elements of every 16 side by side.
    """
    p = p.reshape([BLOCK, N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([BLOCK, N])
    return gl.convert_layout(p, gl.DotOperandLayout(0, OL, 4)).to(gl.float8e4nv)


@gluon.jit
def _seen(S, key, k_len, N: gl.constexpr, SL: gl.constexpr):
    """S of keys key.., -inf behind the sequence's end."""
    col = (key + gl.arange(0, N, gl.SliceLayout(0, SL)))[None, :]
    return gl.where(col < k_len, S, float("-inf"))


@gluon.jit
def step_of(
    q, k, v, acc, m, total, row_scale, sk, lv, told, first, scale, step, key, k_len, barriers,
    N: gl.constexpr, KS: gl.constexpr, OL: gl.constexpr, EDGE: gl.constexpr, TOLD: gl.constexpr, REST: gl.constexpr,
    LEAN: gl.constexpr, UP: gl.constexpr,
):  # fmt: skip
    """N keys, one product after the other. EDGE: some of them may lie behind the sequence's end; with REST that is
    looked at. LEAN: K and V come and go together, by `k_full` and `k_empty`.
    """
    k_full, k_empty, v_full, v_empty = barriers
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 32])
    s = step % KS
    phase = (step // KS) & 1
    mbarrier.wait(k_full.index(s), phase)
    S = warpgroup_mma(q, k.permute((1, 0)), gl.zeros([BLOCK, N], gl.float32, SL), use_acc=False, is_async=True)
    if TOLD:
        row_scale, sk, lv = _scales(told, s, row_scale, first, scale)
    S = warpgroup_mma_wait(0, deps=(S,))
    if not LEAN:
        mbarrier.arrive(k_empty.index(s), count=1)
    if REST:
        if key + N > k_len:
            S = _seen(S, key, k_len, N, SL)
    elif EDGE:
        S = _seen(S, key, k_len, N, SL)
    p, acc, m, total = _weights(S, acc, m, total, row_scale, sk, lv, N, SL, OL, UP)
    P = _operand(p, N, OL)
    if not LEAN:
        mbarrier.wait(v_full.index(s), phase)
    acc = warpgroup_mma(P, v.permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive((k_empty if LEAN else v_empty).index(s), count=1)
    return acc, m, total, row_scale


@gluon.jit
def _half(s, c, shift, SL: gl.constexpr):
    """Weights of half a step; no thread gives or takes anything."""
    of: gl.constexpr = gl.SliceLayout(1, SL)
    s = gl.convert_layout(s, SL, True)
    return gl.exp2(s * gl.convert_layout(c, of, True)[:, None] - gl.convert_layout(shift, of, True)[:, None])


@gluon.jit
def _largest(S, c, lv, m, N: gl.constexpr):
    """The new maximum of each row, an integer."""
    top = gl.max(gl.max(S.reshape([BLOCK, N // 8, 8]), 1), 1)
    return gl.maximum(m, gl.ceil(gl.convert_layout(top, m.type.layout, True) * c + lv))


@gluon.jit
def _add(total, alpha, sums, lv):
    """The sums of a row that each thread holds, and those of a step of weights that are 2^lv too large."""
    alphas = gl.convert_layout(alpha, gl.SliceLayout(1, total.type.layout), True)
    return total * alphas[:, None] + gl.convert_layout(sums, total.type.layout, True) * gl.exp2(-lv)


@gluon.jit
def _rescaled(acc, alpha, OL: gl.constexpr, LAZY: gl.constexpr):
    """acc [BLOCK, D] times alpha [BLOCK]. LAZY: unless alpha is 1 in a whole warp."""
    factor = gl.convert_layout(alpha, gl.SliceLayout(1, OL))[:, None]
    if not LAZY:
        return acc * factor
    elif acc.shape[1] == 128:
        return gl.inline_asm_elementwise(RESCALE_128, TIED_128, [acc, factor], gl.float32, is_pure=True, pack=64)
    else:
        return gl.inline_asm_elementwise(RESCALE_64, TIED_64, [acc, factor], gl.float32, is_pure=True, pack=32)


@gluon.jit
def step_in_halves(
    q, k, v_buf, acc, m, total, row_scale, told, first, scale, step, key, k_len, barriers,
    KS: gl.constexpr, OL: gl.constexpr, LEAN: gl.constexpr, LAZY: gl.constexpr, UP: gl.constexpr,
):  # fmt: skip
    """128 keys whose second product is two: the weights of the second 64 keys are made under the product of the first
    (`gem_kernels.hopper.halves`). V^T lies in two pieces of 64 keys.
    """
    k_full, k_empty, v_full, v_empty = barriers
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 32])
    HL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 32])
    s = step % KS
    phase = (step // KS) & 1
    mbarrier.wait(k_full.index(s), phase)
    S = warpgroup_mma(q, k.permute((1, 0)), gl.zeros([BLOCK, KEYS], gl.float32, SL), use_acc=False, is_async=True)
    row_scale, sk, lv = _scales(told, s, row_scale, first, scale)
    S = warpgroup_mma_wait(0, deps=(S,))
    if not LEAN:
        mbarrier.arrive(k_empty.index(s), count=1)
    if key + KEYS > k_len:
        S = _seen(S, key, k_len, KEYS, SL)
    c = row_scale * sk
    m_new = _largest(S, c, lv, m, KEYS)
    if LAZY:
        m_new = gl.where(m_new > m + ROOM, m_new, m)
    shift = m_new - (lv + UP)
    alpha = gl.exp2(m - m_new)
    acc = _rescaled(acc, alpha, OL, LAZY)
    first, second = gl.split(S.reshape([BLOCK, 2, BLOCK]).permute((0, 2, 1)))
    p = _half(first, c, shift, HL)
    P = _operand(p, BLOCK, OL)
    if not LEAN:
        mbarrier.wait(v_full.index(s), phase)
    acc = warpgroup_mma(P, v_buf.index(2 * s).permute((1, 0)), acc, is_async=True)
    p1 = _half(second, c, shift, HL)
    P1 = _operand(p1, BLOCK, OL)
    acc = warpgroup_mma(P1, v_buf.index(2 * s + 1).permute((1, 0)), acc, is_async=True)
    sums = partial(p) + partial(p1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive((k_empty if LEAN else v_empty).index(s), count=1)
    return acc, m_new, _add(total, alpha, sums, lv), row_scale
