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
