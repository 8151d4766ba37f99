"""What the partitions of the Hopper kernels agree on: a record's size, and the steps over keys that follow from it."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCK = gl.constexpr(64)  # query rows of one product (the M of one warpgroup MMA), and keys of a short step
FIELDS = gl.constexpr(8)  # int32 fields of a tile record, see gem_kernels.schedule
RECORDS = gl.constexpr(4)  # tile records in shared memory: how far the loaders run ahead


@gluon.jit
def tile_count(count_ptr):
    """How many tiles this program has: tiles are dealt in zigzag order, one row of programs after the other."""
    total = gl.load(count_ptr)
    programs = gl.num_programs(0)
    rows = total // programs
    column = gl.program_id(0)
    column = gl.where(rows % 2 == 0, column, programs - 1 - column)
    return rows + gl.where(column < total - rows * programs, 1, 0)


@gluon.jit
def apart(x):
    """x, of which the compiler does not know that it is x.

    ptxas 12.8 computes what two loops have in common in the first of them alone, whether or not that loop is entered
    (docs/notes/hopper-attention.md). A descriptor that each loop makes from its own copy of an index is not in common.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, is_pure=False, pack=1)


@gluon.jit
def steps_of(position, rows, k_len, left, right, BN: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """The keys that a tile's rows see: (first key, steps of BLOCK keys, steps of BN keys).

    From the last key to the first: the short steps, then the whole ones. Without a mask the whole ones hold keys of the
    sequence alone; with one every step is masked where that is needed, and short steps are what does not fill a whole
    one.
    """
    lo = 0
    hi = k_len
    if RIGHT:
        hi = gl.minimum(k_len, gl.maximum(position + rows + right, 0))
    if LEFT:
        lo = gl.minimum(gl.maximum(position - left, 0), k_len)
    keys = gl.maximum(hi - lo, 0)
    if LEFT or RIGHT:
        blocks = gl.cdiv(keys, BLOCK)
        wholes = blocks // (BN // BLOCK)
        shorts = blocks - wholes * (BN // BLOCK)
    else:
        wholes = keys // BN
        shorts = gl.cdiv(keys - wholes * BN, BLOCK)
    return lo, shorts, wholes
