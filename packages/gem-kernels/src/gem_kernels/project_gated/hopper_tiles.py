"""What the two Hopper kernels of this folder share: a weight that stays, rows that pass, consumers in turn.

A program keeps 128 rows of the weight, all K of them, in shared memory (128 KB at K = 512) and walks tiles of 64 rows;
so from L2 come 64 KB for 8.4 MFLOP, where a ring of both operands in tiles of 128 x 256 takes 98 KB. Two consumers take
tiles in turn: what one does with its result hides under the other's products. Rows pass through one ring of [64, 64] a
step, a whole tile ahead where it has as many slots as a tile has steps. A slot is the one consumer's now and then the
other's, and a wait by parity must not miss a phase (docs/notes/norms.md, "A weight that stays"): so the barriers that
say that rows are there are PHASES, a multiple of the slots and of both consumers' steps, each of one consumer alone.

Programs of neighbouring numbers have the same rows and other columns: rows come from memory once.
"""

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

ROWS = gl.constexpr(64)  # of a tile: the M of one warpgroup MMA
COLUMNS = gl.constexpr(128)  # of a tile
HALF = gl.constexpr(64)  # columns that 128 bytes hold: of a step, and of what one TMA store takes
NC = gl.constexpr(2)  # consumers


@gluon.jit
def share(columns, tiles):
    """Of a phase with so many columns of tiles: this program's column, its first tile and its step from tile to tile.

    What programs are left over have no tiles.
    """
    across = gl.num_programs(0) // columns
    program = gl.program_id(0)
    first = gl.where(program < across * columns, program // columns, tiles)
    return program % columns, first, across


@gluon.jit
def own(first, tiles, across):
    """How many tiles of a phase are this program's."""
    return gl.maximum(gl.cdiv(tiles - first, across), 0)


@gluon.jit
def load_rows(
    x_desc, x_buf, full, empty, first, tiles, across, start,
    STEPS: gl.constexpr, SLOTS: gl.constexpr, PHASES: gl.constexpr,
):  # fmt: skip
    """Fills the ring with the rows of a phase, from step `start` of the program on; returns the step after."""
    step = start + 0
    for tile in range(first, tiles, across):
        for k in range(STEPS):
            slot = step % SLOTS
            barrier = full.index(step % PHASES)
            mbarrier.wait(empty.index(slot), ((step // SLOTS) & 1) ^ 1)
            mbarrier.expect(barrier, x_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(x_desc, [tile * ROWS, k * HALF], barrier, x_buf.index(slot))
            step += 1
    return step


@gluon.jit
def product(
    x_buf, w_buf, full, empty, step,
    STEPS: gl.constexpr, SLOTS: gl.constexpr, PHASES: gl.constexpr, ROWWISE: gl.constexpr, AL: gl.constexpr,
):  # fmt: skip
    """One tile [ROWS, COLUMNS]: rows of the ring by the weight. ROWWISE: the weight's buffers are [COLUMNS, HALF]."""
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, AL)
    for k in range(STEPS):
        mbarrier.wait(full.index(step % PHASES), (step // PHASES) & 1)
        w = w_buf.index(k)
        if ROWWISE:
            w = w.reshape([COLUMNS, HALF]).permute((1, 0))
        acc = warpgroup_mma(x_buf.index(step % SLOTS), w, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))  # the step before: its slot is free
        mbarrier.arrive(empty.index((step + SLOTS - 1) % SLOTS), count=1, pred=k > 0)
        step += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((step + SLOTS - 1) % SLOTS), count=1)
    return acc


@gluon.jit
def halves(x):
    """The left and the right half of [ROWS, COLUMNS]."""
    return gl.split(gl.permute(gl.reshape(x, [ROWS, 2, HALF]), (0, 2, 1)))


@gluon.jit
def put(part, desc, row, column, buffers, W: gl.constexpr, n, OUT: gl.constexpr):
    """The consumer's n-th part [ROWS, HALF] goes out through the next of its OUT buffers; returns n + 1."""
    buf = buffers.index(W * OUT + n % OUT)
    tma.store_wait(OUT - 1)  # the copy out of this buffer has read it
    buf.store(part)
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [row, column], buf)
    return n + 1


@gluon.jit
def sigmoid(x):
    """1 / (1 + e^-x) by two special-function instructions."""
    e = gl.exp2(x * -1.4426950408889634)
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [e + 1.0], dtype=gl.float32, is_pure=True, pack=1
    )
