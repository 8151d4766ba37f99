"""What leaves the tensor cores in E4M3: rows with scales of their own, blocks of keys with one, values transposed.

A product's results lie in its accumulators, of every 8 columns two side by side in a thread, and every warp owns 16 of
64 rows. The layouts below give each thread 16 bytes that lie side by side in memory, and threads side by side whole
sectors; rows stay in their warp.
"""

from __future__ import annotations

from gem_kernels.hopper.records import apart
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gem_lowprec.tiles import _larger, _powers

ROWS = gl.constexpr(64)  # of one product
DIM = gl.constexpr(128)  # columns of one product: a head


@gluon.jit
def largest(x):
    """The largest magnitude of a tile; a NaN wins."""
    return gl.reduce(gl.reduce(gl.abs(x), 1, _larger), 0, _larger)


@gluon.jit
def store_rows(x, to_ptr, stride, row, rows, buf=None, NEAR: gl.constexpr = False):
    """x [64, 128] as E4M3 to `to_ptr` + row.. times `stride`, the first `rows` rows of it. `buf`: shared memory for
    [64, 128] bytes, where the compiler is to take none of its own. NEAR: addresses are made here, see
    `gem_kernels.hopper.records.apart`.
    """
    R: gl.constexpr = gl.BlockedLayout([4, 16], [4, 8], [4, 1], [1, 0])
    data = x.to(gl.float8e4nv).to(gl.uint8, bitcast=True)
    if buf is None:
        data = gl.convert_layout(data, R)
    else:
        buf.store(data)
        data = buf.load(R)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, R))
    if NEAR:
        r = apart(r)
    c = gl.arange(0, DIM, gl.SliceLayout(0, R))
    gl.store(to_ptr + ((row + r).to(gl.int64) * stride)[:, None] + c[None, :], data, mask=(r < rows)[:, None])


@gluon.jit
def store_scaled_rows(
    x, to_ptr, stride, scale_ptr, scale_stride, row, rows, THRESHOLD: gl.constexpr, EMAX: gl.constexpr, buf=None,
    NEAR: gl.constexpr = False,
):  # fmt: skip
    """Each row of x [64, 128] with a scale of its own; scales go to `scale_ptr` + row.. times `scale_stride`."""
    scale, inverse = _powers(gl.reduce(gl.abs(x), 1, _larger), THRESHOLD, EMAX)
    store_rows(x * inverse[:, None], to_ptr, stride, row, rows, buf, NEAR)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, x.type.layout))
    if NEAR:
        r = apart(r)
    gl.store(scale_ptr + (row + r).to(gl.int64) * scale_stride, scale, mask=r < rows)


@gluon.jit
def store_turned(x, to_ptr):
    """x [64 keys, 128] as E4M3, transposed, to 128 lines of 128 bytes; the keys of every 16 in the order of
    `operands.ORDER`.
    """
    T: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    data = x.to(gl.float8e4nv).to(gl.uint8, bitcast=True)
    data = data.reshape([ROWS // 16, 2, 4, 2, DIM]).permute((0, 2, 1, 3, 4)).reshape([ROWS, DIM]).permute((1, 0))
    data = gl.convert_layout(data, T)
    d = gl.arange(0, DIM, gl.SliceLayout(1, T))
    s = gl.arange(0, ROWS, gl.SliceLayout(0, T))
    gl.store(to_ptr + (d * 128)[:, None] + s[None, :], data)
