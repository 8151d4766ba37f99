"""`tiles.norm_kernel` once more, with gain and bias in shared memory: a variant, off by default.

Gain and bias are 4 bytes a column each, and a warp that keeps them in registers for its rows has 64 registers of a
thread for them at 1024 features and 128 at 2048: nine and eight warps on an SM, which are too few to fill its issue
slots (docs/notes/lowprec.md, "Counted bounds"). Here a program, one warp as before, has them in shared memory in
float32 for all of its rows. A thread reads them as it needs them, 16 bytes at a time. They lie in halves, the first
four columns of all groups of eight and then the other four, so that eight threads read 128 bytes side by side and no
bank twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gem_lowprec.formats import E4M3, ScaleMode
from gem_lowprec.kernels import threshold
from gem_lowprec.tiles import _larger, _mean, _powers

__all__ = ["WAYS", "constants", "norm_kernel", "run"]

# By whether there is a bias and by width: rows of a step, programs that an SM has at once, registers of a thread that
# allow them. At 512 features registers hold little of gain and bias, and more instructions would be a loss.
WAYS = {
    (True, 1024): (2, 15, 136),
    (True, 2048): (1, 13, 152),
    (False, 1024): (2, 16, 128),
    (False, 2048): (1, 16, 128),
}
SLOTS = 4 * 132  # programs in all, for each of those on an SM: four times what 132 SMs hold at once


def constants(layer: bool, cols: int, mode: ScaleMode) -> dict[str, Any]:
    """The kernel's."""
    return {
        "RW": WAYS[layer, cols][0], "TK": cols, "NORM": 2 if layer else 1, "THRESHOLD": threshold(E4M3, mode),
        "EMAX": E4M3.emax,
    }  # fmt: skip


def run(x: Tensor, arguments: tuple[Any, ...], layer: bool, mode: ScaleMode) -> None:
    """Launch with `arguments` as `tiles.norm_kernel` takes them."""
    rows, (height, resident, registers) = x.shape[0], WAYS[layer, x.shape[1]]
    steps = max(1, -(-rows // (height * resident * SLOTS)))
    if rows:
        with torch.cuda.device_of(x):
            norm_kernel[(-(-rows // (height * steps)),)](
                *arguments, steps, **constants(layer, x.shape[1], mode), num_warps=1, maxnreg=registers
            )


@gluon.jit
def _wide(x):
    """float32; of a pair of bfloat16 by a shift and a mask."""
    if x.dtype == gl.bfloat16:
        bits = gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], gl.int32, is_pure=True, pack=2
        )
        return bits.to(gl.float32, bitcast=True)
    else:
        return x.to(gl.float32)


@gluon.jit
def _fill(buffer, ptr, TK: gl.constexpr):
    """A vector into shared memory, in halves."""
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    at = gl.arange(0, TK, FLAT)
    half = at // (TK // 2)
    rest = at % (TK // 2)
    buffer.store(gl.load(ptr + rest // 4 * 8 + half * 4 + rest % 4).to(gl.float32))


@gluon.jit
def _read(buffer, TK: gl.constexpr, HALVES: gl.constexpr, OF_COLUMN: gl.constexpr):
    """[TK / 128, 128] of it."""
    shape: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    x = buffer._reinterpret(gl.float32, [2, TK // 128, 16, 4], shape).load(HALVES)
    return gl.convert_layout(x.permute((1, 2, 0, 3)).reshape([TK // 128, 128]), OF_COLUMN, assert_trivial=True)


@gluon.jit(do_not_specialize=["rows", "pitch", "steps"])
def norm_kernel(
    x_ptr, gain_ptr, bias_ptr, data_ptr, scale_ptr, mean_ptr, rstd_ptr, rows, x_row, pitch, eps, steps,
    RW: gl.constexpr, TK: gl.constexpr, NORM: gl.constexpr, THRESHOLD: gl.constexpr, EMAX: gl.constexpr,
):  # fmt: skip
    """As `tiles.norm_kernel`; a program is one warp and takes `steps` times RW rows."""
    L: gl.constexpr = gl.BlockedLayout([RW, 1, 8], [1, 2, 16], [1, 1, 1], [2, 1, 0])
    OF_ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
    OF_COLUMN: gl.constexpr = gl.SliceLayout(0, L)
    BLOCKS: gl.constexpr = TK // 128
    HALVES: gl.constexpr = gl.BlockedLayout([2, 1, 1, 4], [1, 2, 16, 1], [1, 1, 1, 1], [3, 2, 1, 0])
    ACROSS: gl.constexpr = min(32, BLOCKS)
    ONCE: gl.constexpr = gl.BlockedLayout([1, 1], [32 // ACROSS, ACROSS], [1, 1], [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    gain_buf = gl.allocate_shared_memory(gl.float32, [TK], LINE)
    _fill(gain_buf, gain_ptr, TK)
    if NORM == 2:
        bias_buf = gl.allocate_shared_memory(gl.float32, [TK], LINE)
        _fill(bias_buf, bias_ptr, TK)
    first = gl.program_id(0) * (RW * steps)
    own = first + gl.arange(0, RW, OF_ROW)
    once = first + gl.arange(0, RW, gl.SliceLayout(1, ONCE))
    block = gl.arange(0, BLOCKS, gl.SliceLayout(0, ONCE)).to(gl.int64) * pitch
    b = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, L)))
    c = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    col = (b * 128)[None, :, None] + c[None, None, :]
    r = gl.minimum(own, rows - 1)
    after = gl.load(x_ptr + (r.to(gl.int64) * x_row)[:, None, None] + col)
    for i in range(steps):
        x = _wide(after)
        r = gl.minimum(own + i * RW, rows - 1)
        to = gl.minimum(own + gl.minimum(i + 1, steps - 1) * RW, rows - 1)
        after = gl.load(x_ptr + (to.to(gl.int64) * x_row)[:, None, None] + col)
        if NORM == 2:
            mean = gl.convert_layout(_mean(x, RW, TK), OF_ROW)
            gl.store(mean_ptr + r, mean)
            x = x - mean[:, None, None]
        rstd = gl.convert_layout(gl.rsqrt(_mean(x * x, RW, TK) + eps), OF_ROW)
        gl.store(rstd_ptr + r, rstd)
        y = x * rstd[:, None, None] * _read(gain_buf, TK, HALVES, OF_COLUMN)[None, :, :]
        if NORM == 2:
            y = y + _read(bias_buf, TK, HALVES, OF_COLUMN)[None, :, :]
        amax = gl.convert_layout(gl.reduce(gl.abs(y), 2, _larger), ONCE)
        scale, inverse = _powers(amax, THRESHOLD, EMAX)
        gl.store(scale_ptr + block[None, :] + gl.minimum(once + i * RW, rows - 1)[:, None], scale)
        inverse = gl.convert_layout(inverse, gl.SliceLayout(2, L))
        data = (y * inverse[:, :, None]).to(gl.float8e4nv).to(gl.uint8, bitcast=True)
        gl.store(data_ptr + (r.to(gl.int64) * TK)[:, None, None] + col, data)
