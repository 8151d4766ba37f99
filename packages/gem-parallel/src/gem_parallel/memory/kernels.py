"""Triton kernels that turn rows of numbers into E4M3 with one scale each, and back, in one pass over memory.

Imported only where there is a CUDA tensor to work on: Triton comes with torch's CUDA builds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gem_parallel.memory.quantise import SCALE

TILE = 4096  # elements of a program


@triton.jit
def _at(row, cols, step, n, rows, COLS: tl.constexpr, EXACT: tl.constexpr):
    """Where a tile's elements are, which of them there are, and which of these in x."""
    col = step * COLS + tl.arange(0, COLS)
    at = row[:, None] * cols + col[None, :]
    there = row[:, None] < rows
    if not EXACT:
        there = there & (col[None, :] < cols)
    return at, there, there & (at < n)


@triton.jit
def _scale(top_bits, FACTOR: tl.constexpr):
    """Of rows whose largest sizes have these bits; infinity or NaN where there is one in the row."""
    top = top_bits.to(tl.float32, bitcast=True)
    found = tl.where(top_bits == 0, 1.0, tl.maximum(top * FACTOR, 1.1754943508222875e-38))
    return tl.where(top_bits >= 0x7F800000, float("nan"), found)


@triton.jit
def _bits(value):
    """Of sizes, which as integers are in the same order, infinity and NaN behind all others."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _pack_kernel(
    x, data, scale, n, rows, cols, FACTOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if STEPS == 1:
        at, there, inside = _at(row, cols, 0, n, rows, COLS, EXACT)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        found = _scale(tl.max(_bits(value), 1), FACTOR)
        inverse = tl.div_rn(tl.full(found.shape, 1.0, tl.float32), found)
        tl.store(data + at, (value * inverse[:, None]).to(tl.float8e4nv), mask=there)
    else:
        top = tl.zeros((ROWS,), tl.int32)
        for step in range(STEPS):
            at, there, inside = _at(row, cols, step, n, rows, COLS, EXACT)
            value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            top = tl.maximum(top, tl.max(_bits(value), 1))
        found = _scale(top, FACTOR)
        inverse = tl.div_rn(tl.full(found.shape, 1.0, tl.float32), found)
        for step in range(STEPS):
            at, there, inside = _at(row, cols, step, n, rows, COLS, EXACT)
            value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(data + at, (value * inverse[:, None]).to(tl.float8e4nv), mask=there)
    tl.store(scale + row, found, mask=row < rows)


@triton.jit
def _unpack_kernel(
    data, scale, out, n, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr, EXACT: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    found = tl.load(scale + row, mask=row < rows, other=1.0)
    for step in range(STEPS):
        at, _, inside = _at(row, cols, step, n, rows, COLS, EXACT)
        value = tl.load(data + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, value * found[:, None], mask=inside)


def _tile(rows: int, cols: int) -> tuple[tuple[int], dict[str, int | bool]]:
    """Tiles of whole rows, or of the widest part of a row that leaves little of a tile empty."""
    wide = min(triton.next_power_of_2(cols), TILE)
    while wide > 128 and triton.cdiv(cols, wide) * wide > 1.15 * cols:
        wide //= 2
    high = max(1, TILE // wide)
    steps = triton.cdiv(cols, wide)
    return (triton.cdiv(rows, high),), {"ROWS": high, "COLS": wide, "STEPS": steps, "EXACT": steps * wide == cols}


def pack(x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, cols: int) -> None:
    """Write contiguous x [n] as data [rows cols] float8_e4m3fn and scale [rows] float32; x counts as 0 from n on."""
    rows = scale.numel()
    assert x.is_contiguous()
    assert data.numel() == rows * cols >= x.numel()
    if rows:
        grid, shape = _tile(rows, cols)
        _pack_kernel[grid](x, data, scale, x.numel(), rows, cols, FACTOR=SCALE, **shape)


def unpack(data: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, cols: int) -> None:
    """Write data [rows cols] times scale [rows] into contiguous out [n], n <= rows cols."""
    rows = scale.numel()
    assert out.is_contiguous()
    assert data.numel() == rows * cols >= out.numel()
    if rows:
        grid, shape = _tile(rows, cols)
        _unpack_kernel[grid](data, scale, out, out.numel(), rows, cols, **shape)


@triton.jit
def _mx4_code(size, negative):
    """E2M1 of size >= 0 to the nearest, ties to even, and its sign."""
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    return code + (size > 5.0).to(tl.int32) + (negative.to(tl.int32) << 3)


@triton.jit
def _mx4_value(code):
    exponent = (code & 7) >> 1
    size = (2 + (code & 1)) * (1 << exponent)  # times 1 / 4, but for the two least
    size = tl.where(exponent == 0, (code & 1) * 2, size).to(tl.float32) * 0.25
    return tl.where(code > 7, -size, size)


@triton.jit
def _pack_mx4_kernel(x, data, scale, n, rows, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * 32 + tl.arange(0, 32)[None, :]
    value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    bits = tl.max(_bits(value), 1)
    found = tl.maximum((bits >> 23) - 2 + ((bits & 0x7FFFFF) > 0x400000).to(tl.int32), 1)
    found = tl.where(bits >= 0x7F800000, 255, found)
    inverse = (tl.maximum(254 - found, 1) << 23).to(tl.float32, bitcast=True)[:, None]
    code = _mx4_code(tl.abs(value) * inverse, value < 0)
    low, high = tl.split(tl.reshape(code, (ROWS, 16, 2)))
    to = row[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(data + to, (low | (high << 4)).to(tl.uint8), mask=row[:, None] < rows)
    tl.store(scale + row, found.to(tl.uint8), mask=row < rows)


@triton.jit
def _unpack_mx4_kernel(data, scale, out, n, rows, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    found = tl.load(scale + row, mask=row < rows, other=127).to(tl.int32)
    power = (found << 23).to(tl.float32, bitcast=True)
    power = tl.where(found == 255, float("nan"), power)[:, None]
    to = row[:, None] * 16 + tl.arange(0, 16)[None, :]
    code = tl.load(data + to, mask=row[:, None] < rows, other=0).to(tl.int32)
    value = tl.join(_mx4_value(code & 15) * power, _mx4_value(code >> 4) * power)
    at = row[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out + at, tl.reshape(value, (ROWS, 32)), mask=at < n)


def pack_mx4(x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor) -> None:
    """Write contiguous x [n] as data [rows, 16] and scale [rows], both uint8; x counts as 0 from n on."""
    rows = scale.numel()
    assert x.is_contiguous()
    assert data.numel() == rows * 16 >= x.numel() / 2
    if rows:
        _pack_mx4_kernel[(triton.cdiv(rows, TILE // 32),)](x, data, scale, x.numel(), rows, ROWS=TILE // 32)


def unpack_mx4(data: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Write data [rows, 16] and scale [rows] as contiguous out [n], n <= 32 rows."""
    rows = scale.numel()
    assert out.is_contiguous()
    assert data.numel() == rows * 16 >= out.numel() / 2
    if rows:
        _unpack_mx4_kernel[(triton.cdiv(rows, TILE // 32),)](data, scale, out, out.numel(), rows, ROWS=TILE // 32)
