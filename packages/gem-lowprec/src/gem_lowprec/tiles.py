"""The kernels of `orientations` and `norms` with every layout in our own hands, where the GPU converts to FP8 itself.

Transposing bytes is what costs: a compiler moves them through shared memory one by one. Here a thread owns 16 rows x
8 columns of the tile of 128 x 128 and pairs rows when it converts: a line of x^T is 8 lanes of 16 bytes, and nothing
moves between threads. The rows themselves are quantised in a phase of its own, in which a warp owns whole rows; that
phase comes first, and the other one finds the tile in the L1 cache. So each needs half of the registers of one that
would do both at once, and neither maximum leaves a warp.
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


@gluon.jit
def powers(amax, THRESHOLD: gl.constexpr, EMAX: gl.constexpr):
    """`_powers` of numbers without a sign, in fewer instructions: exponents stay where they are."""
    bits = amax.to(gl.int32, bitcast=True)
    FIRST: gl.constexpr = EMAX << 23
    t = gl.maximum((bits + (0x7FFFFF - THRESHOLD)) & 0x7F800000, FIRST)
    scale = gl.where(t == FIRST, 1 << 22, t - FIRST)  # 2^-127 is subnormal
    inverse = 0x7F000000 - (t - FIRST)
    scale = gl.where(bits >= INFINITY, 0x7FC00000, scale)
    inverse = gl.where(bits >= INFINITY, 0x7FC00000, inverse)
    return scale.to(gl.float32, bitcast=True), inverse.to(gl.float32, bitcast=True)


@gluon.jit
def _block_scales(amax, THRESHOLD: gl.constexpr, EMAX: gl.constexpr, FEW: gl.constexpr):
    """FEW: in fewer instructions; both orientations are 2% faster for it, and with column sums too short of
    registers.
    """
    if FEW:
        return powers(amax, THRESHOLD, EMAX)
    else:
        return _powers(amax, THRESHOLD, EMAX)


@gluon.jit
def _load(x_ptr, mean_ptr, rstd_ptr, gain_ptr, bias_ptr, r, c, rows, cols, x_row, NORM: gl.constexpr):
    """x or the normalised x (NORM: 1 RMS, 2 layer) as float32, 0 outside."""
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    x = gl.load(x_ptr + (r.to(gl.int64) * x_row)[:, None] + c[None, :], mask=inside, other=0.0).to(gl.float32)
    if NORM:
        rstd = gl.load(rstd_ptr + r, mask=r < rows, other=0.0)
        gain = gl.load(gain_ptr + c, mask=c < cols, other=0.0).to(gl.float32)
        if NORM == 2:
            mean = gl.load(mean_ptr + r, mask=r < rows, other=0.0)
            bias = gl.load(bias_ptr + c, mask=c < cols, other=0.0).to(gl.float32)
            x = (x - mean[:, None]) * rstd[:, None] * gain[None, :] + bias[None, :]
        else:
            x = x * rstd[:, None] * gain[None, :]
        x = gl.where(inside, x, 0.0)
    return x


@gluon.jit(do_not_specialize=["rows", "row_pitch", "col_pitch"])
def both_kernel(
    x_ptr, mean_ptr, rstd_ptr, gain_ptr, bias_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, sum_ptr,
    rows, cols, x_row, row_row, row_pitch, col_row, col_pitch,
    THRESHOLD: gl.constexpr, EMAX: gl.constexpr, ROW: gl.constexpr, COL: gl.constexpr, SUMS: gl.constexpr,
    NORM: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """One tile of 128 x 128 per program of WARPS warps, 4 or 8; scales are powers of two. ROW, COL: 1 for blocks of
    1 x 128, 2 for the whole tile, whose scale is written once if it serves both.
    """
    across = gl.cdiv(cols, 128)
    tile_row = gl.program_id(0) // across
    tile_col = gl.program_id(0) - tile_row * across
    FEW: gl.constexpr = ROW == 1 and COL == 1 and not SUMS
    L: gl.constexpr = gl.BlockedLayout([16, 32 // WARPS], [8, 4], [1, WARPS], [1, 0])
    # The same owners, transposed, rows of x first in a thread's registers.
    REGS: gl.constexpr = [[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [2, 0]] + ([[4, 0]] if WARPS == 4 else [])
    STEP: gl.constexpr = 32 // WARPS
    OWNERS: gl.constexpr = [[32, 0], [64, 0]] if WARPS == 4 else [[16, 0], [32, 0], [64, 0]]
    T: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=REGS,
        lane_bases=[[STEP, 0], [2 * STEP, 0], [0, 16], [0, 32], [0, 64]],
        warp_bases=OWNERS,
        block_bases=[],
        shape=[128, 128],
    )
    R: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    first = tile_row * 128
    left = tile_col * 128
    if ROW:
        r = first + gl.arange(0, 128, gl.SliceLayout(1, R))
        c = left + gl.arange(0, 128, gl.SliceLayout(0, R))
        x = _load(x_ptr, mean_ptr, rstd_ptr, gain_ptr, bias_ptr, r, c, rows, cols, x_row, NORM)
        row_max = gl.reduce(gl.abs(x), 1, _larger)
        if ROW == 2:
            scale, inverse = _powers(gl.reduce(row_max, 0, _larger), THRESHOLD, EMAX)
            gl.store(row_scale_ptr + tile_row * row_pitch + tile_col, scale)
            y = x * inverse
        else:
            row_scale, row_inverse = _block_scales(row_max, THRESHOLD, EMAX, FEW)
            gl.store(row_scale_ptr + tile_col.to(gl.int64) * row_pitch + r, row_scale, mask=r < rows)
            y = x * row_inverse[:, None]
        data = y.to(gl.float8e4nv).to(gl.uint8, bitcast=True)
        to = row_ptr + (r.to(gl.int64) * row_row)[:, None] + c[None, :]
        gl.store(to, data, mask=(r < rows)[:, None] & (c < row_row)[None, :])
    if COL or SUMS:
        r = first + gl.arange(0, 128, gl.SliceLayout(1, L))
        c = left + gl.arange(0, 128, gl.SliceLayout(0, L))
        x = _load(x_ptr, mean_ptr, rstd_ptr, gain_ptr, bias_ptr, r, c, rows, cols, x_row, NORM)
        if SUMS:
            gl.store(sum_ptr + tile_row.to(gl.int64) * cols + c, gl.reduce(x, 0, _add), mask=c < cols)
        if COL:
            if COL == 2:
                if ROW != 2:
                    col_max = gl.reduce(gl.abs(x), 0, _larger)
                    scale, inverse = _powers(gl.reduce(col_max, 0, _larger), THRESHOLD, EMAX)
                    gl.store(col_scale_ptr + tile_row * col_pitch + tile_col, scale)
                z = x * inverse
            else:
                col_max = gl.reduce(gl.abs(x), 0, _larger)
                col_scale, col_inverse = _block_scales(col_max, THRESHOLD, EMAX, FEW)
                gl.store(col_scale_ptr + tile_row.to(gl.int64) * col_pitch + c, col_scale, mask=c < cols)
                z = x * col_inverse[None, :]
            turned = gl.convert_layout(z.permute((1, 0)), T).to(gl.float8e4nv).to(gl.uint8, bitcast=True)
            tr = first + gl.arange(0, 128, gl.SliceLayout(0, T))
            tc = left + gl.arange(0, 128, gl.SliceLayout(1, T))
            to = col_ptr + (tc.to(gl.int64) * col_row)[:, None] + tr[None, :]
            gl.store(to, turned, mask=(tc < cols)[:, None] & (tr < col_row)[None, :])


@gluon.jit
def _mean(x, HEIGHT: gl.constexpr, TK: gl.constexpr):
    """Of each row, in one reduction: what a thread holds first, then five exchanges."""
    return gl.reduce(x.reshape([HEIGHT, TK]), 1, _add) * (1.0 / TK)


@gluon.jit(do_not_specialize=["rows", "pitch"])
def norm_kernel(
    x_ptr, gain_ptr, bias_ptr, data_ptr, scale_ptr, mean_ptr, rstd_ptr, rows, x_row, pitch, eps,
    RW: gl.constexpr, TK: gl.constexpr, STEPS: gl.constexpr, WARPS: gl.constexpr, NORM: gl.constexpr,
    THRESHOLD: gl.constexpr, EMAX: gl.constexpr,
):  # fmt: skip
    """`norms._norm_rows` for rows of TK features, a power of two from 256 on: each of WARPS warps owns RW rows of a
    step. NORM: 1 RMS, 2 layer.

    Rows are [TK / 128, 128]: 16 lanes of 8 columns share a scale, and one of them makes it. Gain and bias, four bytes a
    column each where x has two, stay in registers for STEPS times so many rows, and a step's rows are loaded in the
    step before. Nothing is masked: behind the last row stands the last row again, and whoever meets it writes the same.
    """
    L: gl.constexpr = gl.BlockedLayout([RW, 1, 8], [1, 2, 16], [WARPS, 1, 1], [2, 1, 0])
    OF_ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
    OF_BLOCK: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, L))
    OF_COL: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, L))
    ACROSS: gl.constexpr = min(32, TK // 128)
    ONCE: gl.constexpr = gl.BlockedLayout([1, 1], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    HEIGHT: gl.constexpr = WARPS * RW
    first = gl.program_id(0) * (HEIGHT * STEPS)
    own = first + gl.arange(0, HEIGHT, OF_ROW)
    once = first + gl.arange(0, HEIGHT, gl.SliceLayout(1, ONCE))
    block = gl.arange(0, TK // 128, gl.SliceLayout(0, ONCE)).to(gl.int64) * pitch
    b = gl.arange(0, TK // 128, OF_BLOCK)
    c = gl.arange(0, 128, OF_COL)
    col = (b * 128)[None, :, None] + c[None, None, :]
    gain = gl.load(gain_ptr + col).to(gl.float32)
    if NORM == 2:
        bias = gl.load(bias_ptr + col).to(gl.float32)
    r = gl.minimum(own, rows - 1)
    after = gl.load(x_ptr + (r.to(gl.int64) * x_row)[:, None, None] + col)
    for i in range(STEPS):
        x = after.to(gl.float32)
        r = gl.minimum(own + i * HEIGHT, rows - 1)
        if STEPS > 1:
            to = gl.minimum(own + gl.minimum(i + 1, STEPS - 1) * HEIGHT, rows - 1)
            after = gl.load(x_ptr + (to.to(gl.int64) * x_row)[:, None, None] + col)
        if NORM == 2:
            mean = gl.convert_layout(_mean(x, HEIGHT, TK), OF_ROW)
            gl.store(mean_ptr + r, mean)
            x = x - mean[:, None, None]
        rstd = gl.convert_layout(gl.rsqrt(_mean(x * x, HEIGHT, TK) + eps), OF_ROW)
        gl.store(rstd_ptr + r, rstd)
        y = x * rstd[:, None, None] * gain
        if NORM == 2:
            y = y + bias
        amax = gl.convert_layout(gl.reduce(gl.abs(y), 2, _larger), ONCE)
        scale, inverse = _powers(amax, THRESHOLD, EMAX)
        gl.store(scale_ptr + block[None, :] + gl.minimum(once + i * HEIGHT, rows - 1)[:, None], scale)
        inverse = gl.convert_layout(inverse, gl.SliceLayout(2, L))
        data = (y * inverse[:, :, None]).to(gl.float8e4nv).to(gl.uint8, bitcast=True)
        gl.store(data_ptr + (r.to(gl.int64) * TK)[:, None, None] + col, data)
