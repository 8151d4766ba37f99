"""The kernel of `orientations` with every layout in our own hands, for GPUs that convert to FP8 themselves.

Transposing bytes is what costs: a compiler moves them through shared memory one by one. Here a thread owns 16 rows x
8 columns of the tile of 128 x 128, so that both outputs are contiguous in it: 8 bytes along a row, 16 along a column.
The transposed copy pairs rows instead of columns when it converts, and nothing moves between threads; a line of x^T is
8 lanes of 16 bytes. Maxima along a row cross four lanes and four warps, along a column eight lanes.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

INFINITY = gl.constexpr(0x7F800000)  # bits of float32
NAN_WINS = gl.constexpr(tl.PropagateNan.ALL)


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=NAN_WINS)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _powers(amax, THRESHOLD: gl.constexpr, EMAX: gl.constexpr):
    """(scale, 1 / scale) as float32 from the largest magnitudes, as `formats.scale_code` has it."""
    bits = amax.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    bump = ((bits & 0x7FFFFF) > THRESHOLD).to(gl.int32)
    code = gl.minimum(gl.maximum((bits >> 23) - EMAX + bump, 0), 254)
    scale = gl.where(code == 0, 1 << 22, code << 23)  # 2^-127 is subnormal
    inverse = gl.where(code == 254, 1 << 22, (254 - code) << 23)
    scale = gl.where(bits >= INFINITY, 0x7FC00000, scale)
    inverse = gl.where(bits >= INFINITY, 0x7FC00000, inverse)
    return scale.to(gl.float32, bitcast=True), inverse.to(gl.float32, bitcast=True)


@gluon.jit(do_not_specialize=["rows", "row_pitch", "col_pitch"])
def both_kernel(
    x_ptr, mean_ptr, rstd_ptr, gain_ptr, bias_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, sum_ptr,
    rows, cols, x_row, row_row, row_pitch, col_row, col_pitch,
    THRESHOLD: gl.constexpr, EMAX: gl.constexpr, ROW: gl.constexpr, COL: gl.constexpr, SQUARE: gl.constexpr,
    SUMS: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """One tile of 128 x 128 per program of four warps; scales are powers of two."""
    L: gl.constexpr = gl.BlockedLayout([16, 8], [8, 4], [1, 4], [1, 0])
    # The same owners, transposed, rows of x first in a thread's registers.
    T: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        lane_bases=[[8, 0], [16, 0], [0, 16], [0, 32], [0, 64]],
        warp_bases=[[32, 0], [64, 0]],
        block_bases=[],
        shape=[128, 128],
    )
    across = gl.cdiv(cols, 128)
    tile_row = gl.program_id(0) // across
    tile_col = gl.program_id(0) - tile_row * across
    r = tile_row * 128 + gl.arange(0, 128, gl.SliceLayout(1, L))
    c = tile_col * 128 + gl.arange(0, 128, gl.SliceLayout(0, L))
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    x = gl.load(x_ptr + (r.to(gl.int64) * x_row)[:, None] + c[None, :], mask=inside, other=0.0).to(gl.float32)
    if NORM:  # 1 RMS, 2 layer: as `orientations.normalised`, rounded as a norm of its own would write it
        rstd = gl.load(rstd_ptr + r, mask=r < rows, other=0.0)
        gain = gl.load(gain_ptr + c, mask=c < cols, other=0.0).to(gl.float32)
        if NORM == 2:
            mean = gl.load(mean_ptr + r, mask=r < rows, other=0.0)
            bias = gl.load(bias_ptr + c, mask=c < cols, other=0.0).to(gl.float32)
            x = (x - mean[:, None]) * rstd[:, None] * gain[None, :] + bias[None, :]
        else:
            x = x * rstd[:, None] * gain[None, :]
        x = gl.where(inside, x.to(x_ptr.dtype.element_ty).to(gl.float32), 0.0)
    size = gl.abs(x)
    if SUMS:
        gl.store(sum_ptr + tile_row.to(gl.int64) * cols + c, gl.reduce(x, 0, _add), mask=c < cols)
    if ROW or SQUARE:
        row_max = gl.reduce(size, 1, _larger)
    if SQUARE:
        scale, inverse = _powers(gl.reduce(row_max, 0, _larger), THRESHOLD, EMAX)
        gl.store(row_scale_ptr + tile_row * row_pitch + tile_col, scale)
    if ROW:
        if SQUARE:
            y = x * inverse
        else:
            row_scale, row_inverse = _powers(row_max, THRESHOLD, EMAX)
            gl.store(row_scale_ptr + tile_col.to(gl.int64) * row_pitch + r, row_scale, mask=r < rows)
            y = x * row_inverse[:, None]
        data = y.to(gl.float8e4nv).to(gl.uint8, bitcast=True)
        to = row_ptr + (r.to(gl.int64) * row_row)[:, None] + c[None, :]
        gl.store(to, data, mask=(r < rows)[:, None] & (c < row_row)[None, :])
    if COL:
        if SQUARE:
            z = x * inverse
        else:
            col_scale, col_inverse = _powers(gl.reduce(size, 0, _larger), THRESHOLD, EMAX)
            gl.store(col_scale_ptr + tile_row.to(gl.int64) * col_pitch + c, col_scale, mask=c < cols)
            z = x * col_inverse[None, :]
        turned = gl.convert_layout(z.permute((1, 0)), T).to(gl.float8e4nv).to(gl.uint8, bitcast=True)
        tr = tile_row * 128 + gl.arange(0, 128, gl.SliceLayout(0, T))
        tc = tile_col * 128 + gl.arange(0, 128, gl.SliceLayout(1, T))
        to = col_ptr + (tc.to(gl.int64) * col_row)[:, None] + tr[None, :]
        gl.store(to, turned, mask=(tc < cols)[:, None] & (tr < col_row)[None, :])
