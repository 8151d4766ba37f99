"""What the kernels for windows on Hopper share: tiles of 64 rows, the steps of the other side, and masks.

A program of one warpgroup walks tiles of 64 query rows (for dK and dV: of 64 keys). The tile stays in shared memory,
the other side passes by in steps of 64 rows, of which SLOTS are in flight or in use; the next tile and its first steps
are asked for before this one is finished. Two programs share an SM: one computes while the other waits. Whatever is a
whole tile comes and goes by TMA: registers that write rows of a product's layout straight to memory fill 16 bytes at a
time, which cost more than the products.

A step has a mask only where it is at an edge of the window or of the sequence. Rows past a sequence's end are the next
sequence's: they are read, and weighted by 0, which does not keep an infinity or a NaN out.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

ROWS = gl.constexpr(64)  # of a tile and of a step
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def record(records_ptr, tile, tiles, HEADS: gl.constexpr):
    """A tile's head, and its record: first row, rows (0 past the last tile), place on the diagonal, first row of the
    other side's sequence, its length.
    """
    p = records_ptr + (tile // HEADS) * 8
    inside = tile < tiles
    return (
        tile % HEADS,
        gl.load(p, mask=inside, other=0),
        gl.load(p + 1, mask=inside, other=0),
        gl.load(p + 2, mask=inside, other=0),
        gl.load(p + 3, mask=inside, other=0),
        gl.load(p + 4, mask=inside, other=0),
    )


@gluon.jit
def barriers(N: gl.constexpr):
    """N barriers of one arrival each."""
    made = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(N):
        mbarrier.init(made.index(n), count=1)
    return made


@gluon.jit
def buffer(desc, N: gl.constexpr, D: gl.constexpr):
    """N tiles of ROWS rows, as `desc` reads or writes them."""
    return gl.allocate_shared_memory(desc.dtype, [N, ROWS, D], desc.layout)


@gluon.jit
def steps_of(place, rows, other_len, before, after):
    """The other side's rows that own rows at `place`.. on the diagonal see: [lo, lo + 64 n)."""
    lo = gl.maximum(place - before, 0) // ROWS * ROWS
    hi = gl.minimum(place + rows + after, other_len)
    return lo, gl.where(rows > 0, gl.maximum(hi - lo + (ROWS - 1), 0) // ROWS, 0)


@gluon.jit
def following(j, n, here, head, n1, there, head1, SLOTS: gl.constexpr):
    """What to load into the slot of step j of n: a step of this tile or, when it has no more, of the next; its first
    row, its head, and whether there is one.
    """
    later = j + SLOTS - n
    row = gl.where(later < 0, here + (j + SLOTS) * ROWS, there + later * ROWS)
    return row, gl.where(later < 0, head, head1), (later < 0) | (later < n1)


@gluon.jit
def ask(descs, bufs, barrier, slot, row, head, some, D: gl.constexpr):
    """Ask for one slot of some tensors, if there is `some`."""
    mbarrier.expect(barrier, len(descs) * descs[0].block_type.nbytes, pred=some)
    for n in gl.static_range(len(descs)):
        tma.async_copy_global_to_shared(descs[n], [row, head * D], barrier, bufs[n].index(slot), pred=some)


@gluon.jit
def limits_of(place, other_len, before, after):
    """The first row of the other side that each own row sees, and how many follow it, as unsigned numbers."""
    first = place - before
    last = gl.minimum(place + after, other_len - 1)
    none = last < first
    return gl.where(none, 1 << 30, first), gl.where(none, 0, last - first).to(gl.uint32)


@gluon.jit
def edge(step, place, other_len, before, after):
    """Whether some own row does not see the whole of the step that begins at row `step` of the other side."""
    return (step < place + (ROWS - 1) - before) | (step + (ROWS - 1) > place + after) | (step + ROWS > other_len)


@gluon.jit
def masked(x, step, limits, value: gl.constexpr, SL: gl.constexpr):
    """x of the step that begins at row `step` of the other side, with `value` where an own row does not see a row."""
    first, width = limits
    other = step + gl.arange(0, ROWS, gl.SliceLayout(0, SL))
    seen = (other[None, :] - first[:, None]).to(gl.uint32) <= width[:, None]
    return gl.where(seen, x, value)


@gluon.jit
def put(x, desc, ptr, stride, buf, row, rows, column, D: gl.constexpr, AL: gl.constexpr):
    """A whole tile leaves by TMA from `buf`, a sequence's last one by masked stores."""
    y = x.to(ptr.dtype.element_ty)
    if rows == ROWS:
        buf.store(y)
        fence_async_shared()
        tma.async_copy_shared_to_global(desc, [row, column], buf)
    else:
        r = gl.arange(0, ROWS, gl.SliceLayout(1, AL))
        c = gl.arange(0, D, gl.SliceLayout(0, AL))
        base = ptr + row.to(gl.int64) * stride + column
        gl.store(base + (r * stride)[:, None] + c[None, :], y, mask=(r < rows)[:, None])
