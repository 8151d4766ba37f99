"""Rotary embedding in portable Triton. The backward pass is the same kernel, turning the other way."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels.tiling import (
    CompileCase,
    Tile,
    applies,
    launch,
    load_rows,
    padded_dim,
    rows_of,
    signature,
    store_rows,
    strides,
)

__all__ = ["applies", "compile_cases", "cos_sin", "forward", "turn", "turns"]


@triton.jit
def cos_sin(angle):
    """Of float32 angles, to 2e-6 up to 1e5, where a float32 angle is rounded to 4e-3 itself: whole quarter turns are
    taken off in three steps, whose factors have so few bits that the products are exact (Cody and Waite), and the rest
    goes into one short polynomial each (Cephes). The library's functions take four times the instructions.
    """
    quarters = tl.floor(angle * 0.6366197723675814 + 0.5)
    rest = angle - quarters * 1.5703125
    rest = rest - quarters * 4.837512969970703125e-4
    rest = rest - quarters * 7.54978995489188216e-8
    square = rest * rest
    sine = rest + rest * square * (-1.6666654611e-1 + square * (8.3321608736e-3 - square * 1.9515295891e-4))
    cosine = square * square * (4.166664568298827e-2 + square * (square * 2.443315711809948e-5 - 1.388731625493765e-3))
    cosine = cosine + (1.0 - 0.5 * square)
    turn = quarters.to(tl.int32)
    odd = (turn & 1) != 0
    cos = tl.where(odd, sine, cosine)
    sin = tl.where(odd, cosine, sine)
    return tl.where(((turn + 1) & 2) != 0, -cos, cos), tl.where((turn & 2) != 0, -sin, sin)


@triton.jit
def turns(position, D: tl.constexpr, DP: tl.constexpr, LOG2_BASE: tl.constexpr):
    """cos and sin of position * base^(-2 i / D), [rows, DP / 2] float32; float64 keeps the frequencies exact."""
    exponent = tl.arange(0, DP // 2).to(tl.float64) * (-2.0 * LOG2_BASE / D)
    angle = position[:, None] * tl.exp2(exponent).to(tl.float32)[None, :]
    return cos_sin(angle)


@triton.jit
def turn(x, cos, sin, ROWS: tl.constexpr, DP: tl.constexpr):
    """Rotate interleaved pairs of float32 rows [ROWS, DP]; -sin turns back."""
    even, odd = tl.split(tl.reshape(x, (ROWS, DP // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (ROWS, DP))


@triton.jit(do_not_specialize=["tokens"])
def _kernel(
    x_ptr, y_ptr, positions_f32, x_row, x_head, tokens,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
    LOG2_BASE: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = rows < tokens
    cos, sin = turns(tl.load(positions_f32 + rows, mask=inside, other=0.0), D, DP, LOG2_BASE)
    if INVERSE:
        sin = -sin
    for h in range(HEADS):
        x = load_rows(x_ptr + h * x_head, rows, inside, x_row, D, DP, True).to(tl.float32)
        store_rows(y_ptr + h * D, turn(x, cos, sin, BM, DP), rows, inside, HEADS * D, D, DP)


def tile(dim: int) -> Tile:
    """Rows a program turns: about 4096 elements of a head at a time."""
    return Tile(bm=max(16, 4096 // dim), bn=0)


def forward(x: Tensor, positions: Tensor, base: float, inverse: bool) -> Tensor:
    """Turn x [T, H, D] by positions [T] float32, or back if `inverse`."""
    x = rows_of(x)
    tokens, heads, dim = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    t = tile(padded_dim(dim))
    launch(
        _kernel, triton.cdiv(tokens, t.bm), x.device, t,
        x, y, positions.contiguous(), *strides(x), tokens,
        HEADS=heads, D=dim, DP=padded_dim(dim), BM=t.bm, LOG2_BASE=math.log2(base), INVERSE=inverse,
    )  # fmt: skip
    return y


def compile_cases() -> list[CompileCase]:
    """The kernel at two head dimensions."""
    cases = []
    for dim in (64, 128):
        t = tile(dim)
        constants: dict[str, object] = {
            "HEADS": 4, "D": dim, "DP": dim, "BM": t.bm, "LOG2_BASE": math.log2(1e4), "INVERSE": True,
        }  # fmt: skip
        types, divisible = signature(_kernel, "bf16", constants)
        cases.append(CompileCase(f"rotary bf16 d{dim}", _kernel, types, constants, t, divisible))
    return cases
