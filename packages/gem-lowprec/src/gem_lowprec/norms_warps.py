"""`tiles.norm_kernel` for wide rows: a program has several warps, which share gain and bias and nothing else.

What a wide row costs a warp is registers (docs/notes/lowprec.md, "Norms that write FP8"): x as float32, the next row,
gain and bias. Here gain and bias are in shared memory in float32, once for all warps of a program; they lie in halves,
the first four columns of all groups of eight and then the other four, so that eight threads read 128 bytes side by side
and no bank twice. The result is made in pieces of 256 columns, eight of a lane, so that nothing of it lives longer than
its piece. No warp waits for another one: a row belongs to one warp, and the 16 lanes of a block of 128 each make its
scale themselves. Programs, as many as fit at once, go on to the rows of the next round until there are none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from gem_kernels.hopper.launch import programs
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gem_lowprec.formats import E4M3, ScaleMode
from gem_lowprec.kernels import threshold
from gem_lowprec.tiles import _add, _larger, powers

__all__ = ["WAYS", "Way", "constants", "norm_kernel", "run"]


@dataclass(frozen=True, kw_only=True)
class Way:
    """Rows that a warp has at once, warps of a program, programs on an SM at once, registers of a thread that allow
    them. `ahead`: the next rows are loaded while these are computed. `packed`: rows stay as they came, two numbers a
    register, and are widened again for each thing that is done with them.
    """

    rows: int = 1
    warps: int = 4
    resident: int = 4
    registers: int = 128
    ahead: bool = False
    packed: bool = False


# By whether there is a bias and by width.
WAYS = {
    (True, 1024): {"2 rows ahead": Way(rows=2, ahead=True)},
    (True, 2048): {"1 row ahead": Way(ahead=True)},
    (True, 4096): {"1 row": Way(resident=3, registers=168, packed=True)},
    (False, 4096): {"1 row": Way(resident=5, registers=96, packed=True)},
}  # fmt: skip


def constants(layer: bool, cols: int, mode: ScaleMode, way: Way) -> dict[str, Any]:
    """The kernel's."""
    return {
        "RW": way.rows, "TK": cols, "WARPS": way.warps, "AHEAD": way.ahead, "PACKED": way.packed,
        "NORM": 2 if layer else 1,
        "THRESHOLD": threshold(E4M3, mode), "EMAX": E4M3.emax,
    }  # fmt: skip


def run(x: Tensor, arguments: tuple[Any, ...], layer: bool, mode: ScaleMode, way: Way) -> None:
    """Launch with `arguments` as `tiles.norm_kernel` takes them."""
    tiles = -(-x.shape[0] // (way.rows * way.warps))
    if tiles:
        with torch.cuda.device_of(x):
            norm_kernel[(min(tiles, programs(x.device) * way.resident),)](
                *arguments, tiles, 16, -65536, **constants(layer, x.shape[1], mode, way), num_warps=way.warps,
                maxnreg=way.registers,
            )  # fmt: skip


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
def _anew(x, shift, mask, PACKED: gl.constexpr):
    """`_wide` again. PACKED: with a shift of 16 and a mask of which the compiler knows nothing, or it would keep what
    the first time gave, which takes twice the registers.
    """
    if not PACKED or x.dtype == gl.float32:
        return _wide(x)
    elif x.dtype == gl.bfloat16:
        bits = gl.inline_asm_elementwise(
            "shl.b32 $0, $2, $4; and.b32 $1, $2, $6;", "=r,=r,r,r,r,r,r", [x, shift, mask], gl.int32,
            is_pure=True, pack=2,
        )  # fmt: skip
        return bits.to(gl.float32, bitcast=True)
    else:
        same = gl.inline_asm_elementwise(
            "xor.b32 $0, $1, $2;", "=r,r,r,r", [x, shift - 16], x.dtype, is_pure=True, pack=2
        )
        return same.to(gl.float32)


@gluon.jit
def _fill(buffer, ptr, TK: gl.constexpr, WARPS: gl.constexpr):
    """A vector into shared memory: pieces of 256, each in halves."""
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    at = gl.arange(0, TK, FLAT)
    column = at // 256 * 256 + at % 128 // 4 * 8 + at % 256 // 128 * 4 + at % 4
    buffer.store(gl.load(ptr + column).to(gl.float32))


@gluon.jit
def _read(buffer, j: gl.constexpr, PIECES: gl.constexpr, HALVES: gl.constexpr, OF_COLUMN: gl.constexpr):
    """[2, 128] of it, the columns of piece j."""
    shape: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    x = buffer._reinterpret(gl.float32, [PIECES, 2, 2, 16, 4], shape).index(j).load(HALVES)
    return gl.convert_layout(x.permute((1, 2, 0, 3)).reshape([2, 128]), OF_COLUMN, assert_trivial=True)


@gluon.jit
def _rows(x_ptr, own, tile, rows, x_row, col, HEIGHT: gl.constexpr, PIECES: gl.constexpr):
    """A tile's pieces [HEIGHT, 2, 128] as they are; behind the last row stands the last row again."""
    r = gl.minimum(own + tile * HEIGHT, rows - 1)
    at = x_ptr + (r.to(gl.int64) * x_row)[:, None, None] + col
    pieces = (gl.load(at),)
    for j in gl.static_range(1, PIECES):
        pieces = pieces + (gl.load(at + j * 256),)  # type: ignore[assignment]  # noqa: RUF005  no star in a kernel
    return pieces


@gluon.jit
def _mean(x, HEIGHT: gl.constexpr, TK: gl.constexpr, OF_ROW: gl.constexpr):
    return gl.convert_layout(gl.reduce(x.reshape([HEIGHT, 256]), 1, _add) * (1.0 / TK), OF_ROW)


@gluon.jit(do_not_specialize=["rows", "pitch", "tiles", "shift", "mask"])
def norm_kernel(
    x_ptr, gain_ptr, bias_ptr, data_ptr, scale_ptr, mean_ptr, rstd_ptr, rows, x_row, pitch, eps, tiles,
    shift, mask, RW: gl.constexpr, TK: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr,
    PACKED: gl.constexpr, NORM: gl.constexpr, THRESHOLD: gl.constexpr, EMAX: gl.constexpr,
):  # fmt: skip
    """As `tiles.norm_kernel`; a tile is RW rows of each warp."""
    L: gl.constexpr = gl.BlockedLayout([RW, 1, 8], [1, 2, 16], [WARPS, 1, 1], [2, 1, 0])
    OF_ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
    OF_BLOCK: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, L))
    OF_COLUMN: gl.constexpr = gl.SliceLayout(0, L)
    HALVES: gl.constexpr = gl.BlockedLayout([2, 1, 1, 4], [1, 2, 16, 1], [1, WARPS, 1, 1], [3, 2, 1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    HEIGHT: gl.constexpr = WARPS * RW
    PIECES: gl.constexpr = TK // 256
    own = gl.arange(0, HEIGHT, OF_ROW)
    b = gl.arange(0, 2, OF_BLOCK)
    c = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    col = (b * 128)[None, :, None] + c[None, None, :]
    block = b.to(gl.int64) * pitch
    first = gl.program_id(0)
    step = gl.num_programs(0)
    if AHEAD:  # before gain and bias: they come in the same time
        after = _rows(x_ptr, own, first, rows, x_row, col, HEIGHT, PIECES)
    gain_buf = gl.allocate_shared_memory(gl.float32, [TK], LINE)
    _fill(gain_buf, gain_ptr, TK, WARPS)
    if NORM == 2:
        bias_buf = gl.allocate_shared_memory(gl.float32, [TK], LINE)
        _fill(bias_buf, bias_ptr, TK, WARPS)
    tl.debug_barrier()  # the compiler's own would be in the loop
    for tile in range(first, tiles, step):
        if AHEAD:
            x = after
            after = _rows(x_ptr, own, gl.minimum(tile + step, tiles - 1), rows, x_row, col, HEIGHT, PIECES)
        else:
            x = _rows(x_ptr, own, tile, rows, x_row, col, HEIGHT, PIECES)
        r = gl.minimum(own + tile * HEIGHT, rows - 1)
        mean = gl.zeros([HEIGHT], gl.float32, OF_ROW)
        if NORM == 2:
            total = _wide(x[0])
            for j in gl.static_range(1, PIECES):
                total = total + _wide(x[j])
            mean = _mean(total, HEIGHT, TK, OF_ROW)
            gl.store(mean_ptr + r, mean)
        square = gl.zeros([HEIGHT, 2, 128], gl.float32, L)
        for j in gl.static_range(PIECES):
            d = _anew(x[j], shift, mask, PACKED and NORM == 2)
            if NORM == 2:
                d = d - mean[:, None, None]
            square = d * d + square
        rstd = gl.rsqrt(_mean(square, HEIGHT, TK, OF_ROW) + eps)
        gl.store(rstd_ptr + r, rstd)
        to = data_ptr + (r.to(gl.int64) * TK)[:, None, None] + col
        scale_to = scale_ptr + block[None, :] + r[:, None]
        for j in gl.static_range(PIECES):
            y = _anew(x[j], shift, mask, PACKED)
            if NORM == 2:
                y = y - mean[:, None, None]
            y = y * rstd[:, None, None] * _read(gain_buf, j, PIECES, HALVES, OF_COLUMN)[None, :, :]
            if NORM == 2:
                y = y + _read(bias_buf, j, PIECES, HALVES, OF_COLUMN)[None, :, :]
            scale, inverse = powers(gl.reduce(gl.abs(y), 2, _larger), THRESHOLD, EMAX)
            gl.store(scale_to + (2 * j) * pitch.to(gl.int64), scale)
            gl.store(to + j * 256, (y * inverse[:, :, None]).to(gl.float8e4nv).to(gl.uint8, bitcast=True))
