"""A consumer's steps of the FP8 forward: scores, weights in E4M3 and what they add to O, in a warpgroup's registers."""

from __future__ import annotations

from gem_kernels.hopper.records import BLOCK
from gem_kernels.hopper.softmax import partial
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

KEYS = gl.constexpr(128)  # keys that share the scales of K and V, a whole step
ROOM = gl.constexpr(3.0)  # how far a row's maximum may rise, in powers of two, before O is scaled anew
SHIFT = gl.constexpr(5.0)  # P is at most 2^5 by the maximum that it is relative to, and 2^8 in all; E4M3 goes to 448
WHOLE = gl.constexpr(12582912.0)  # 1.5 2^23: what is added to it loses its fraction


@gluon.constexpr_function
def _where_needed(n):
    """n numbers of a thread times 2 to the power of as many others, of which those of its two rows are the 0th and the
    2nd; nothing, if they are 0 in the whole warp.
    """
    lines = [f"mul.f32 ${i}, ${i}, {'ab'[i % 4 // 2]};" for i in range(n)]
    return (
        "{\n.reg .pred one, any;\n.reg .f32 a, b;\n"
        f"setp.neu.f32 one, ${2 * n}, 0f00000000;\nsetp.neu.or.f32 any, ${2 * n + 2}, 0f00000000, one;\n"
        "vote.sync.any.pred one, any, 0xffffffff;\n@!one bra done;\n"
        f"ex2.approx.ftz.f32 a, ${2 * n};\nex2.approx.ftz.f32 b, ${2 * n + 2};\n" + "\n".join(lines) + "\ndone:\n}"
    )


@gluon.constexpr_function
def _tied(n):
    """Operands of `_where_needed`: results that stand where the numbers stood."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def _rescaled(acc, power, OL: gl.constexpr):
    """acc [BLOCK, D] times 2^power [BLOCK], which is mostly 0: the multiplications stand behind a branch that each warp
    takes or not by itself.
    """
    N: gl.constexpr = acc.shape[1] // 2  # numbers of a thread
    of_rows = gl.convert_layout(power, gl.SliceLayout(1, OL))[:, None]
    return gl.inline_asm_elementwise(_where_needed(N), _tied(N), [acc, of_rows], gl.float32, is_pure=True, pack=N)


@gluon.jit
def steps_of(k_len):
    """Steps of 64 keys and of 128, from the last key to the first: what does not fill a whole step is one step all the
    same, a whole one from 65 keys on.
    """
    wholes = k_len // KEYS
    rest = k_len - wholes * KEYS
    shorts = gl.where((rest > 0) & (rest <= BLOCK), 1, 0)
    return shorts, wholes + gl.where(rest > BLOCK, 1, 0)


@gluon.jit
def _scores(q, k, told, row_scale, scale, s, first, full, phase, N: gl.constexpr, SL: gl.constexpr):
    """Q K^T of a step; the rows' scales; that of K, and log2 of V's. A loader put them beside the keys, the rows'
    beside a tile's first ones.
    """
    pairs, rows, w = told
    PL: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    mbarrier.wait(full.index(s), phase)
    S = warpgroup_mma(q, k.permute((1, 0)), gl.zeros([BLOCK, N], gl.float32, SL), use_acc=False, is_async=True)
    x = pairs.index(s).load(PL)
    i = gl.arange(0, 2, PL)
    sk = gl.sum(gl.where(i == 0, x, 0.0), 0)
    lv = gl.sum(gl.where(i == 1, x, 0.0), 0)
    if first:
        row_scale = rows.index(3 * s + w).load(row_scale.type.layout).to(gl.float32) * scale
    S = warpgroup_mma_wait(0, deps=(S,))
    return S, row_scale, sk, lv


@gluon.jit
def _seen(S, key, k_len, N: gl.constexpr, SL: gl.constexpr):
    """S of keys key.., -inf behind the sequence's end."""
    if key + N > k_len:
        col = (key + gl.arange(0, N, gl.SliceLayout(0, SL)))[None, :]
        S = gl.where(col < k_len, S, float("-inf"))
    return S


@gluon.jit
def _reference(S, c, lv, m, N: gl.constexpr):
    """What P of each row is relative to from now on, an integer in log2 units, at most 1 above the maximum: as before,
    unless that has risen by more than ROOM. Rounded by two additions, which do not queue behind exponentials.
    """
    top = gl.max(gl.max(S.reshape([BLOCK, N // 8, 8]), 1), 1)
    most = (gl.convert_layout(top, m.type.layout, True) * c + (lv + 0.5)) + WHOLE - WHOLE
    return gl.where(most > m + ROOM, most, m)


@gluon.jit
def _weights(s, c, shift, SL: gl.constexpr):
    """P of some keys; no thread gives or takes anything."""
    of: gl.constexpr = gl.SliceLayout(1, SL)
    s = gl.convert_layout(s, SL, True)
    return gl.exp2(s * gl.convert_layout(c, of, True)[:, None] - gl.convert_layout(shift, of, True)[:, None])


@gluon.jit
def _operand(p, N: gl.constexpr, OL: gl.constexpr):
    """P with its keys in the order of V's blocks, as E4M3 in the registers of the second product.

    A thread has columns 2 t and 2 t + 1 of every 8 scores; of an operand it has 4 elements of every 16 side by side.
    """
    p = p.reshape([BLOCK, N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([BLOCK, N])
    return gl.convert_layout(p, gl.DotOperandLayout(0, OL, 4)).to(gl.float8e4nv)


@gluon.jit
def _add(total, power, sums, lv):
    """2^power times the sums of a row that each thread holds, and those of a step, whose weights are 2^lv too large."""
    alphas = gl.convert_layout(gl.exp2(power), gl.SliceLayout(1, total.type.layout), True)
    return total * alphas[:, None] + gl.convert_layout(sums, total.type.layout, True) * gl.exp2(-lv)


@gluon.jit
def short_step(
    q, k, v, acc, m, total, row_scale, told, scale, step, key, k_len, barriers,
    KS: gl.constexpr, OL: gl.constexpr,
):  # fmt: skip
    """Up to 64 keys, the first step of a tile that has it."""
    full, empty = barriers
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 32])
    s = step % KS
    S, row_scale, sk, lv = _scores(q, k, told, row_scale, scale, s, True, full, (step // KS) & 1, BLOCK, SL)
    S = _seen(S, key, k_len, BLOCK, SL)
    c = row_scale * sk
    reference = _reference(S, c, lv, m, BLOCK)
    p = _weights(S, c, reference - (lv + SHIFT), SL)
    acc = warpgroup_mma(_operand(p, BLOCK, OL), v.permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(s), count=1)
    return acc, reference, _add(total, m - reference, partial(p), lv), row_scale


@gluon.jit
def whole_step(
    q, k, v_buf, acc, m, total, row_scale, told, scale, step, first, key, k_len, barriers,
    KS: gl.constexpr, OL: gl.constexpr,
):  # fmt: skip
    """Up to 128 keys. The second product is two: the weights of the second 64 keys are made under the product of the
    first (`gem_kernels.hopper.halves`), so V^T lies in pieces of 64 keys.
    """
    full, empty = barriers
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 32])
    HL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 32])
    s = step % KS
    S, row_scale, sk, lv = _scores(q, k, told, row_scale, scale, s, first, full, (step // KS) & 1, KEYS, SL)
    S = _seen(S, key, k_len, KEYS, SL)
    c = row_scale * sk
    reference = _reference(S, c, lv, m, KEYS)
    shift = reference - (lv + SHIFT)
    acc = _rescaled(acc, m - reference, OL)
    one, two = gl.split(S.reshape([BLOCK, 2, BLOCK]).permute((0, 2, 1)))
    p = _weights(one, c, shift, HL)
    P = _operand(p, BLOCK, OL)
    acc = warpgroup_mma(P, v_buf.index(2 * s).permute((1, 0)), acc, is_async=True)
    p1 = _weights(two, c, shift, HL)
    P1 = _operand(p1, BLOCK, OL)
    acc = warpgroup_mma(P1, v_buf.index(2 * s + 1).permute((1, 0)), acc, is_async=True)
    sums = partial(p) + partial(p1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(s), count=1)
    return acc, reference, _add(total, m - reference, sums, lv), row_scale
