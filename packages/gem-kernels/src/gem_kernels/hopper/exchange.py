"""How a persistent program takes tiles off its list while it runs, and tells its other warps of them.

Programs take the next tile with an atomic add, so that no cost model has to be right; results do not depend on it, a
tile's arithmetic is the same wherever it runs. What is known of a tile goes through a ring in shared memory from the
warp that took it to the others: eight int32, the second of which is the tile's rows, 0 behind the last tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gem_kernels.hopper.records import FIELDS


@gluon.jit
def _next(cursor_ptr):
    """How many tiles were taken before this one; for a partition of one warp."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 lane, old;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        mov.u32 old, 0;
        @first atom.global.add.u32 old, [$1], 1;
        shfl.sync.idx.b32 $0, old, 0, 31, 0xffffffff;
        }""",
        "=r,l", [cursor_ptr.to(gl.int64)], gl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def take(cursor_ptr, total):
    """How many tiles of `total` were taken before this one; for a partition of one warp. Who takes the last leaves the
    cursor at 0, for the next launch.
    """
    taken = _next(cursor_ptr)
    if taken == total - 1:
        gl.store(cursor_ptr, 0)
    return taken


@gluon.jit
def tile_row(tiles_ptr, t, total, L: gl.constexpr):
    """Row t of a tile list, in every thread; zeros behind its end."""
    i = gl.arange(0, FIELDS, L)
    return gl.load(tiles_ptr + t.to(gl.int64) * FIELDS + i, mask=(i >= 0) & (t < total), other=0)


@gluon.jit
def pack(a, b, c, d, e, f, g, h, L: gl.constexpr):
    """Eight numbers as a record."""
    i = gl.arange(0, FIELDS, L)
    low = gl.where(i == 0, a, gl.where(i == 1, b, gl.where(i == 2, c, d)))
    high = gl.where(i == 4, e, gl.where(i == 5, f, gl.where(i == 6, g, h)))
    return gl.where(i < 4, low, high)


@gluon.jit
def unpack(x, L: gl.constexpr):
    """The eight numbers of a record; every thread holds all of it."""
    i = gl.arange(0, FIELDS, L)
    return (
        gl.sum(gl.where(i == 0, x, 0), 0),
        gl.sum(gl.where(i == 1, x, 0), 0),
        gl.sum(gl.where(i == 2, x, 0), 0),
        gl.sum(gl.where(i == 3, x, 0), 0),
        gl.sum(gl.where(i == 4, x, 0), 0),
        gl.sum(gl.where(i == 5, x, 0), 0),
        gl.sum(gl.where(i == 6, x, 0), 0),
        gl.sum(gl.where(i == 7, x, 0), 0),
    )
