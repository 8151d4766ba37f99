"""What the kernels of the Hopper backward do with one block of 64 keys x 64 queries, in registers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from gem_kernels.hopper.activations import activate_with_slope, times_slope

BLOCK = gl.constexpr(64)  # rows of either side of a block of dS, and of what one product makes


@gluon.jit
def in_sight(d, before, after, n, BEFORE: gl.constexpr, AFTER: gl.constexpr):
    """The blocks of `n` in a row, begin and end, that see one of 64 rows at positions d.. from the row's start, of
    which each is seen from at most `before` positions in front of it to `after` behind it.
    """
    begin = 0
    end = n
    if BEFORE:
        begin = gl.minimum(gl.maximum(d - before, 0) // BLOCK, n)
    if AFTER:
        end = gl.minimum(gl.maximum(d + after + 2 * BLOCK - 1, 0) // BLOCK, n)
    return begin, end


@gluon.jit
def product(a, b, SL: gl.constexpr):
    """a b^T [BLOCK, BLOCK], issued and not waited for."""
    return warpgroup_mma(a, b.permute((1, 0)), gl.zeros([BLOCK, BLOCK], gl.float32, SL), use_acc=False, is_async=True)


@gluon.jit
def _seen(d, q_left, k_left, mask, SL: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Which of 64 queries, `q_left` of them the sequence's own, see which of 64 keys, `k_left` of them its own, the
    first of which stands d behind the first query.
    """
    left, right = mask
    key = gl.arange(0, BLOCK, gl.SliceLayout(1, SL))
    query = gl.arange(0, BLOCK, gl.SliceLayout(0, SL))
    seen = (key < k_left)[:, None] & (query < q_left)[None, :]
    if RIGHT:
        seen = seen & ((key + (d - right))[:, None] <= query[None, :])
    if LEFT:
        seen = seen & ((key + (d + left))[:, None] >= query[None, :])
    return seen


@gluon.jit
def _at_edge(d, mask, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Whether some of 64 queries do not see some of 64 keys that stand d behind them."""
    left, right = mask
    edge = d != d
    if RIGHT:
        edge = edge | (d + BLOCK - 1 > right)
    if LEFT:
        edge = edge | (d - (BLOCK - 1) < -left)
    return edge


@gluon.jit
def weights(
    S, scale, lse, q_left, d, mask,
    ACT: gl.constexpr, SL: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """P^T of a step, 0 for queries past the sequence's end (softmax: by their statistics), and what dP^T is multiplied
    by: P^T again, or the activation's slope (`activations.times_slope`). Only the LAST step may have queries past the
    end.
    """
    if ACT == "softmax":
        if LEFT or RIGHT:  # noqa: SIM102 - the first is decided by the compiler
            if _at_edge(d, mask, LEFT, RIGHT):
                S = gl.where(_seen(d, BLOCK, BLOCK, mask, SL, LEFT, RIGHT), S, float("-inf"))
        p = gl.exp2(S * scale - lse[None, :])
        slope = p
    else:
        if LEFT or RIGHT or LAST:  # noqa: SIM102
            if _at_edge(d, mask, LEFT, RIGHT) | (q_left < BLOCK):  # every activation maps 0 to 0
                S = gl.where(_seen(d, q_left, BLOCK, mask, SL, LEFT, RIGHT), S, 0.0)
        p, slope = activate_with_slope(S * scale, ACT)
    return p, slope


@gluon.jit
def score_gradient(
    slope, dP, delta, q_left, k_left, d, mask,
    ACT: gl.constexpr, SL: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """dS^T of a step, 0 for keys past the sequence's end and where a query does not see a key; with an activation
    `activations.slope_unit` is its unit, and those keys and their values are 0 (`clear_rows`), so that dP^T is.
    """
    if ACT == "softmax":
        ds = slope * (dP - delta[None, :])
        if k_left < BLOCK:
            ds = gl.where((gl.arange(0, BLOCK, gl.SliceLayout(1, SL)) < k_left)[:, None], ds, 0.0)
    else:
        ds = times_slope(slope, dP, ACT)
        if LEFT or RIGHT or LAST:  # noqa: SIM102
            if _at_edge(d, mask, LEFT, RIGHT) | (q_left < BLOCK):
                ds = gl.where(_seen(d, q_left, BLOCK, mask, SL, LEFT, RIGHT), ds, 0.0)
    return ds


@gluon.jit
def clear_rows(block, rows, D: gl.constexpr):
    """Zeros behind the first `rows` of a block [BLOCK, D] in shared memory, where TMA brought the next sequence's."""
    if rows < BLOCK:
        RL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
        own = (gl.arange(0, BLOCK, gl.SliceLayout(1, RL)) < rows)[:, None]
        x = block.load(RL)
        block.store(gl.where(own, x, gl.zeros_like(x)))
        fence_async_shared()


@gluon.jit
def put_rows(ptr, stride, stage, at_row, column, rows, D: gl.constexpr, DIM: gl.constexpr):
    """The first `rows` of a staged block [BLOCK, D], where the others are the next sequence's; 16 bytes a thread."""
    RL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    r = gl.arange(0, BLOCK, gl.SliceLayout(1, RL))
    c = gl.arange(0, D, gl.SliceLayout(0, RL))
    # The stride is read here: addresses computed from it ahead of every loop would cost registers all along.
    step = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [gl.to_tensor(stride)], gl.int32, False, 1)
    step = gl.multiple_of(step, 8)  # head dimensions are
    base = ptr + at_row.to(gl.int64) * stride + column
    inside = (r < rows)[:, None] & (c < DIM)[None, :]
    gl.store(base + (r * step)[:, None] + c[None, :], stage.load(RL), mask=inside)
