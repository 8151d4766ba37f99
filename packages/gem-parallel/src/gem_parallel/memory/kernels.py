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
def _pack_kernel(
    x, data, scale, n, rows, cols, FACTOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    top = tl.zeros((ROWS,), tl.float32)
    bad = tl.zeros((ROWS,), tl.float32)  # 0, or NaN where a row holds an infinity or NaN, which a maximum would drop
    for step in range(STEPS):
        at = row[:, None] * cols + step * COLS + col[None, :]
        inside = (row[:, None] < rows) & (step * COLS + col[None, :] < cols)
        value = tl.load(x + at, mask=inside & (at < n), other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.max(tl.abs(value), 1))
        bad += tl.sum(value * 0.0, 1)
    found = tl.where(top == 0.0, 1.0, tl.maximum(top * FACTOR, 1.1754943508222875e-38)) + bad
    for step in range(STEPS):
        at = row[:, None] * cols + step * COLS + col[None, :]
        inside = (row[:, None] < rows) & (step * COLS + col[None, :] < cols)
        value = tl.load(x + at, mask=inside & (at < n), other=0.0).to(tl.float32)
        tl.store(
            data + at, tl.div_rn(value, tl.broadcast_to(found[:, None], value.shape)).to(tl.float8e4nv), mask=inside
        )
    tl.store(scale + row, found, mask=row < rows)


@triton.jit
def _unpack_kernel(data, scale, out, n, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    found = tl.load(scale + row, mask=row < rows, other=1.0)
    for step in range(STEPS):
        at = row[:, None] * cols + step * COLS + col[None, :]
        inside = (row[:, None] < rows) & (step * COLS + col[None, :] < cols) & (at < n)
        value = tl.load(data + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, value * found[:, None], mask=inside)


def _tile(rows: int, cols: int) -> tuple[tuple[int], dict[str, int]]:
    wide = min(triton.next_power_of_2(cols), TILE)
    high = max(1, TILE // wide)
    return (triton.cdiv(rows, high),), {"ROWS": high, "COLS": wide, "STEPS": triton.cdiv(cols, wide)}


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
    half = tl.arange(0, 16)
    at = row[:, None] * 32 + half[None, :]
    low = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    high = tl.load(x + at + 16, mask=at + 16 < n, other=0.0).to(tl.float32)
    top = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1)
    bad = tl.sum(low * 0.0 + high * 0.0, 1)  # NaN where there is an infinity or NaN, which a maximum would drop
    bits = top.to(tl.int32, bitcast=True)
    found = tl.maximum((bits >> 23) - 2 + ((bits & 0x7FFFFF) > 0x400000).to(tl.int32), 1)
    found = tl.where(bad == 0.0, found, 255)
    inverse = (tl.maximum(254 - found, 1) << 23).to(tl.float32, bitcast=True)[:, None]
    code = _mx4_code(tl.abs(low) * inverse, low < 0) | (_mx4_code(tl.abs(high) * inverse, high < 0) << 4)
    tl.store(data + row[:, None] * 16 + half[None, :], code.to(tl.uint8), mask=(row < rows)[:, None])
    tl.store(scale + row, found.to(tl.uint8), mask=row < rows)


@triton.jit
def _unpack_mx4_kernel(data, scale, out, n, rows, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    half = tl.arange(0, 16)
    found = tl.load(scale + row, mask=row < rows, other=127).to(tl.int32)
    power = (found << 23).to(tl.float32, bitcast=True)
    power = tl.where(found == 255, float("nan"), power)[:, None]
    code = tl.load(data + row[:, None] * 16 + half[None, :], mask=(row < rows)[:, None], other=0).to(tl.int32)
    at = row[:, None] * 32 + half[None, :]
    tl.store(out + at, _mx4_value(code & 15) * power, mask=at < n)
    tl.store(out + at + 16, _mx4_value(code >> 4) * power, mask=at + 16 < n)


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
