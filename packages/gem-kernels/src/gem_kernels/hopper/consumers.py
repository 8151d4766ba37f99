"""The computing partitions of the Hopper forward: a block of 64 query rows for each warpgroup."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gem_kernels.hopper.exchange import unpack
from gem_kernels.hopper.halves import step_in_halves
from gem_kernels.hopper.once import one_step
from gem_kernels.hopper.records import BLOCK, FIELDS, RECORDS, apart, steps_of
from gem_kernels.hopper.softmax import load_bias, partial, weights


@gluon.jit
def _scores(q, k, DIM: gl.constexpr, N: gl.constexpr, SL: gl.constexpr):
    """Q K^T [BLOCK, N], issued and not waited for; without the zeros beyond column 96 if there is nothing else."""
    none = gl.zeros([BLOCK, N], gl.float32, SL)
    if DIM <= 64 or DIM > 96:
        return warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
    s = warpgroup_mma(q.slice(0, 64, dim=1), k.slice(0, 64, dim=1).permute((1, 0)), none, use_acc=False, is_async=True)
    return warpgroup_mma(q.slice(64, 32, dim=1), k.slice(64, 32, dim=1).permute((1, 0)), s, is_async=True)


@gluon.jit
def _hidden(
    S, key, position, k_len, window, N: gl.constexpr, SL: gl.constexpr,
    ACT: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """S of keys key.. and queries position.., with -inf (or 0 for an activation) where a query does not see a key."""
    left, right = window
    value: gl.constexpr = float("-inf") if ACT == "softmax" else 0.0
    last = key + N
    edge = last > k_len
    if RIGHT:
        edge = edge | (last > position + right + 1)
    if LEFT:
        edge = edge | (key < position + BLOCK - 1 - left)
    if edge:
        col = (key + gl.arange(0, N, gl.SliceLayout(0, SL)))[None, :]
        row = (position + gl.arange(0, BLOCK, gl.SliceLayout(1, SL)))[:, None]
        seen = col < k_len
        if RIGHT:
            seen = seen & (col <= row + right)
        if LEFT:
            seen = seen & (col >= row - left)
        S = gl.where(seen, S, value)
    return S


@gluon.jit
def _finish(
    acc, m, total, out, buf, out_row, rows, head,
    D: gl.constexpr, DIM: gl.constexpr, OL: gl.constexpr, ACT: gl.constexpr, MASKED: gl.constexpr,
    RESIDUAL: gl.constexpr, NEAR: gl.constexpr,
):  # fmt: skip
    """O and LSE of one block. A whole block goes out by TMA, a sequence's last block by masked stores: its other rows
    are the next sequence's.

    NEAR: a thread's rows are told from the compiler, so that it makes their addresses here and not before all loops,
    where they cost registers that are not there (docs/notes/hopper-attention.md).
    """
    o_desc, o_ptr, lse_ptr, heads, out_scale, residual_ptr = out
    if ACT == "softmax":
        if len(total.shape) == 2:  # of `partial`
            total = gl.convert_layout(gl.sum(total, 1), m.type.layout, True)
        if MASKED:  # a row that sees no key: O = 0, LSE = -inf
            inverse = 1.0 / gl.where(total == 0.0, 1.0, total)
        else:
            inverse = 1.0 / total
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, OL))[:, None]
    else:
        acc = acc * out_scale
        if RESIDUAL:
            at, own = _places(out_row, rows, head, heads, D, DIM, OL, NEAR)
            acc += gl.load(residual_ptr + at, mask=own, other=0.0).to(gl.float32)
    store_block(acc, o_desc, o_ptr, buf, out_row, rows, head, heads, D, DIM, NEAR)
    if ACT == "softmax":  # last: a fence waits for the global stores before it
        r = _here(gl.arange(0, BLOCK, m.type.layout), NEAR)
        lse = (m + _log2(total, NEAR)) * 0.6931471805599453
        gl.store(lse_ptr + (out_row + r).to(gl.int64) * heads + head, lse, mask=r < rows)


@gluon.jit
def store_block(
    acc, o_desc, o_ptr, buf, out_row, rows, head, heads, D: gl.constexpr, DIM: gl.constexpr, NEAR: gl.constexpr
):  # fmt: skip
    """A block of O through `buf`: a whole one by TMA, a sequence's last `rows` rows by masked stores."""
    flat = buf.reshape([BLOCK, D])
    flat.store(acc.to(o_ptr.dtype.element_ty))
    fence_async_shared()
    if rows >= BLOCK:
        tma.async_copy_shared_to_global(o_desc, [out_row, head, 0], buf)
    else:
        RL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
        r = _here(gl.arange(0, BLOCK, gl.SliceLayout(1, RL)), NEAR)
        c = gl.arange(0, D, gl.SliceLayout(0, RL))
        base = o_ptr + (out_row.to(gl.int64) * heads + head) * DIM
        inside = (r < rows)[:, None] & (c < DIM)[None, :]
        gl.store(base + (r * (heads * DIM))[:, None] + c[None, :], flat.load(RL), mask=inside)


@gluon.jit
def _here(r, NEAR: gl.constexpr):
    """r; NEAR: of which the compiler does not know that what is made of it is the same for every tile."""
    if NEAR:
        r = apart(r)
    return r


@gluon.jit
def _log2(x, NEAR: gl.constexpr):
    """log2(x); NEAR: by one special-function instruction (absolute error 2^-22 between 1/2 and 2, relative elsewhere),
    where the library's takes 25.
    """
    if NEAR:
        return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    else:
        return gl.log2(x)


@gluon.jit
def _places(
    out_row, rows, head, heads, D: gl.constexpr, DIM: gl.constexpr, OL: gl.constexpr, NEAR: gl.constexpr
):  # fmt: skip
    """Where the numbers of a block of O [T, heads, DIM] are, and which are the sequence's own, in the layout OL."""
    r = _here(gl.arange(0, BLOCK, gl.SliceLayout(1, OL)), NEAR)
    c = gl.arange(0, D, gl.SliceLayout(0, OL))
    first = (out_row.to(gl.int64) * heads + head) * DIM
    return first + (r * (heads * DIM))[:, None] + c[None, :], (r < rows)[:, None] & (c < DIM)[None, :]


@gluon.jit
def _no_keys(
    out, out_row, rows, head,
    D: gl.constexpr, DIM: gl.constexpr, OL: gl.constexpr, ACT: gl.constexpr, RESIDUAL: gl.constexpr,
    NEAR: gl.constexpr,
):  # fmt: skip
    """Queries that see no key: O = 0 (or the residual), LSE = -inf."""
    _o_desc, o_ptr, lse_ptr, heads, _out_scale, residual_ptr = out
    r = _here(gl.arange(0, BLOCK, gl.SliceLayout(1, OL)), NEAR)
    at, inside = _places(out_row, rows, head, heads, D, DIM, OL, NEAR)
    if RESIDUAL:
        value = gl.load(residual_ptr + at, mask=inside, other=0.0)
    else:
        value = gl.zeros([BLOCK, D], o_ptr.dtype.element_ty, OL)
    gl.store(o_ptr + at, value, mask=inside)
    if ACT == "softmax":
        none = gl.full([BLOCK], float("-inf"), gl.float32, gl.SliceLayout(1, OL))
        gl.store(lse_ptr + (out_row + r).to(gl.int64) * heads + head, none, mask=r < rows)


@gluon.jit
def pass_steps(step, n, barriers, KS: gl.constexpr, LEAN: gl.constexpr):
    """A consumer that needs nothing of n steps keeps the ring of K and V turning."""
    k_full, k_empty, v_full, v_empty = barriers
    for i in range(n):
        s = (step + i) % KS
        phase = ((step + i) // KS) & 1
        mbarrier.wait(k_full.index(s), phase)
        mbarrier.arrive(k_empty.index(s), count=1)
        if not LEAN:
            mbarrier.wait(v_full.index(s), phase)
            mbarrier.arrive(v_empty.index(s), count=1)


@gluon.jit
def _step(
    q, k, v, acc, m, total, scale, step, before, key, position, k_len, window, barriers, bias,
    DIM: gl.constexpr, N: gl.constexpr, KS: gl.constexpr, OL: gl.constexpr, ACT: gl.constexpr, EDGES: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, LEAN: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """N keys: one product after the other, which needs few registers, so that a third consumer fits, and hides under
    the others. EDGES: some of the keys may be hidden. LEAN: K and V come and go together, by `k_full` and `k_empty`.
    """
    k_full, k_empty, v_full, v_empty = barriers
    before_empty, has_before = before
    MASKED: gl.constexpr = LEFT or RIGHT or BIAS > 0
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    s = step % KS
    phase = (step // KS) & 1
    mbarrier.wait(k_full.index(s), phase)
    S = _scores(q, k, DIM, N, SL)
    if BIAS:  # read under the product
        b = load_bias(bias, key, k_len, N, SL, EDGES)
        S = warpgroup_mma_wait(0, deps=(S,))
        S = S * scale + b.to(gl.float32) * 1.4426950408889634
        scale = 1.0
    else:
        S = warpgroup_mma_wait(0, deps=(S,))
    if not LEAN:
        mbarrier.arrive(k_empty.index(s), count=1)
    if not LEAN and has_before:
        tma.store_wait(0)  # O of the tile before has left the buffer that it shares with Q
        mbarrier.arrive(before_empty, count=1)
    if EDGES:
        S = _hidden(S, key, position, k_len, window, N, SL, ACT, LEFT, RIGHT)
    p, acc, m, total = weights(S, acc, m, total, scale, SL, OL, ACT, MASKED, LEAN)
    P = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, OL, 2))
    if not LEAN:
        mbarrier.wait(v_full.index(s), phase)
    acc = warpgroup_mma(P, v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    if LEAN:
        if has_before:
            tma.store_wait(0)  # O of the tile before has left the buffer that it shares with Q
            mbarrier.arrive(before_empty, count=1)
        mbarrier.arrive(k_empty.index(s), count=1)
    else:
        mbarrier.arrive(v_empty.index(s), count=1)
    return acc, m, total


@gluon.jit
def _range(first, rows, k_len, lo, shorts, wholes, window, BN: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Of a tile's steps those that queries first .. first + rows - 1 need: short ones, and whole ones from .. to."""
    left, right = window
    begin = 0
    end = wholes
    if RIGHT:
        hi = gl.maximum(first + rows + right, lo)
        shorts = gl.where(lo + wholes * BN >= hi, 0, shorts)
        begin = gl.maximum(wholes - gl.cdiv(hi - lo, BN), 0)
    if LEFT:
        skipped = gl.maximum(first - left - lo, 0)
        shorts = gl.where(wholes * BN + BLOCK <= skipped, 0, shorts)
        end = gl.maximum(wholes - skipped // BN, begin)
    return shorts, begin, end


@gluon.jit
def _steps(
    block, acc, m, total, scale, step, steps, before, window, buffers, barriers, bias_at, SHORT: gl.constexpr,
    BN: gl.constexpr, D: gl.constexpr, DIM: gl.constexpr, KS: gl.constexpr, OL: gl.constexpr, ACT: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, LEAN: gl.constexpr, BIAS: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """All steps of one block: the short ones first, those that its rows see nothing of passed over."""
    slot, first, mine = block
    lo, shorts, wholes, k_len = steps
    before_empty, has_before = before
    q_buf, k_buf, v_buf = buffers
    MASKED: gl.constexpr = LEFT or RIGHT
    dtype: gl.constexpr = q_buf.dtype
    if LEAN:
        total = partial(acc)  # zeros
    my_shorts, begin, end = _range(first, gl.minimum(mine, BLOCK), k_len, lo, shorts, wholes, window, BN, LEFT, RIGHT)
    if MASKED:  # perhaps without a step
        tma.store_wait(0)
        mbarrier.arrive(before_empty, count=1, pred=has_before)
        pass_steps(step, shorts - my_shorts, barriers, KS, LEAN)
    q = q_buf.index(apart(slot)).reshape([BLOCK, D])
    for i in range(my_shorts):
        s = (step + i) % KS
        k = k_buf.index(s)._reinterpret(dtype, [BLOCK, 1, D], SHORT).reshape([BLOCK, D])
        v = v_buf.index(s)._reinterpret(dtype, [BLOCK, 1, D], SHORT).reshape([BLOCK, D])
        settle = False if MASKED else (i == 0) & has_before
        if HALVES:
            acc, m, total = step_in_halves(
                q, k, v, acc, m, total, scale, step + i, (before_empty, settle),
                wholes * BN + (shorts - 1 - i) * BLOCK, k_len, barriers, BLOCK, KS, OL, ACT, True, LEAN,
            )  # fmt: skip
        else:
            acc, m, total = _step(
                q, k, v, acc, m, total, scale, step + i, (before_empty, settle),
                lo + wholes * BN + (shorts - 1 - i) * BLOCK, first, k_len, window, barriers, bias_at,
                DIM, BLOCK, KS, OL, ACT, True, LEFT, RIGHT, LEAN, BIAS,
            )  # fmt: skip
    if MASKED:
        pass_steps(step + shorts, begin, barriers, KS, LEAN)
    q = q_buf.index(apart(slot)).reshape([BLOCK, D])
    for i in range(begin, end):
        s = (step + shorts + i) % KS
        settle = False if MASKED else (i == 0) & (shorts == 0) & has_before
        if HALVES:
            acc, m, total = step_in_halves(
                q, k_buf.index(s).reshape([BN, D]), v_buf.index(s).reshape([BN, D]), acc, m, total, scale,
                step + shorts + i, (before_empty, settle), 0, k_len, barriers, BN, KS, OL, ACT, False, LEAN,
            )  # fmt: skip
        else:
            acc, m, total = _step(
                q, k_buf.index(s).reshape([BN, D]), v_buf.index(s).reshape([BN, D]), acc, m, total, scale,
                step + shorts + i, (before_empty, settle), lo + (wholes - 1 - i) * BN, first,
                k_len, window, barriers, bias_at, DIM, BN, KS, OL, ACT, MASKED, LEFT, RIGHT, LEAN, BIAS,
            )  # fmt: skip
    if MASKED:
        pass_steps(step + shorts + end, wholes - end, barriers, KS, LEAN)
    return acc, m, total


@gluon.jit
def consume(
    W, scale, out, bias, records, buffers, q_barriers, barriers, window, SHORT: gl.constexpr,
    BN: gl.constexpr, D: gl.constexpr, DIM: gl.constexpr, NC: gl.constexpr, KS: gl.constexpr, QS: gl.constexpr,
    TURNS: gl.constexpr, ACT: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, LEAN: gl.constexpr,
    ONCE: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """One block of every tile: the first consumer the first, and so on. SHORT: the layout of a short step of K and V.

    TURNS: a tile's first block goes to the consumer after that which took the last block of the tile before. So none is
    idle for long where tiles have fewer blocks than there are consumers: it is ahead of the others, by as many steps as
    the rings hold. ONCE: no tile has more than one step.
    """
    record, record_full, record_empty = records
    q_buf, _k_buf, _v_buf = buffers
    q_full, q_empty = q_barriers
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    RL: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    MASKED: gl.constexpr = LEFT or RIGHT
    step = 0
    tile = 0
    rows = 1
    w = W  # which block of the tile
    before = 0  # the buffer of Q, and then of O, in the tile before
    while rows > 0:
        r = tile % RECORDS
        mbarrier.wait(record_full.index(r), (tile // RECORDS) & 1)
        x = record.index(r).load(RL)
        row, rows, _k, k_len, head, out_start, _b, position = unpack(x, RL)
        mbarrier.arrive(record_empty.index(r), count=1)
        if rows > 0:
            lo, shorts, wholes = steps_of(position, rows, k_len, window[0], window[1], BN, LEFT, RIGHT)
            n = shorts + wholes
            mine = rows - w * BLOCK
            first = position + w * BLOCK
            out_row = out_start + w * BLOCK
            slot = (tile % QS) * NC + W  # a consumer's own, whichever block it takes: see `load_queries`
            mbarrier.wait(q_full.index(slot), (tile // QS) & 1)
            if (mine > 0) & (n > 0):
                acc = gl.zeros([BLOCK, D], gl.float32, OL)
                m = gl.full([BLOCK], float("-inf"), gl.float32, gl.SliceLayout(1, OL))
                total = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, OL))
                bias_at = (0, 0, 0, 0)
                if BIAS:
                    bias_ptr, bias_batch, bias_head, bias_row, max_q = bias
                    sequence = gl.sum(gl.where(gl.arange(0, FIELDS, RL) == 6, x, 0), 0).to(gl.int64)
                    at = sequence * bias_batch + head.to(gl.int64) * bias_head
                    bias_at = (bias_ptr + at * BIAS, bias_row * BIAS, row + w * BLOCK, max_q - 1)
                settle = (q_empty.index(before), tile > 0)
                if ONCE:
                    acc, m, total = one_step(
                        q_buf.index(slot).reshape([BLOCK, D]), buffers, scale, step, settle, k_len, barriers,
                        D, KS, OL, ACT,
                    )  # fmt: skip
                else:
                    acc, m, total = _steps(
                        (slot, first, mine), acc, m, total, scale, step, (lo, shorts, wholes, k_len), settle, window,
                        buffers, barriers, bias_at, SHORT, BN, D, DIM, KS, OL, ACT, LEFT, RIGHT, LEAN, BIAS,
                        HALVES,
                    )  # fmt: skip
                _finish(
                    acc, m, total, out, q_buf.index(slot), out_row, mine, head, D, DIM, OL, ACT, MASKED or BIAS > 0,
                    RESIDUAL, HALVES,
                )  # fmt: skip
            else:
                tma.store_wait(0)
                mbarrier.arrive(q_empty.index(before), count=1, pred=tile > 0)
                if mine > 0:
                    _no_keys(out, out_row, mine, head, D, DIM, OL, ACT, RESIDUAL, HALVES)
                pass_steps(step, n, barriers, KS, LEAN)
            step += n
            before = slot
            if TURNS:
                w = (w + 2 * NC - gl.cdiv(rows, BLOCK)) % NC
        tile += 1
    tma.store_wait(0)
