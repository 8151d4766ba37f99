"""A projection with an RMSNorm before or after it in portable Triton: a persistent product by tensor descriptors.

Before: a norm scales rows, and a matrix product commutes with that, so the rows' scales come from a small kernel of
their own and the product applies them to its result. (Adding up the squares inside the product's loop reads a tile both
by the tensor cores and by registers; triton 3.6 then keeps one buffer too few, and loads into a tile that is still
being multiplied.) Whoever multiplies by the norm's gain does so once, in the weight.

After: a program holds whole rows of the result, up to 256 wide, and normalises them before they are written.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gem_kernels import dispatch, tiling
from gem_kernels.norm_linear import WIDEST
from gem_kernels.norms import triton as norms
from gem_kernels.tiling import HALF, CompileCase, Tile, launch, signature

__all__ = ["addressable", "applies", "compile_cases", "forward", "forward_after", "scaled"]


@triton.jit(do_not_specialize=["rows"])
def _scale_kernel(
    x_ptr, scales_f32, x_row, rows,
    K: tl.constexpr, KP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """1 / sqrt(mean(x^2) + eps) of BM rows, BN columns at a time."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    squares = tl.zeros((BM, BN), tl.float32)
    for first in range(0, KP, BN):
        column = first + tl.arange(0, BN)
        mask = (row < rows)[:, None] & (column < K)[None, :]
        x = tl.load(x_ptr + row[:, None] * x_row + column[None, :], mask=mask, other=0.0).to(tl.float32)
        squares += x * x
    tl.store(scales_f32 + row, tl.rsqrt(tl.sum(squares, 1) / K + EPS), mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _kernel(
    x_desc, weight_desc, y_desc, scales_f32, gain_ptr, bias_ptr, rows,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EPS: tl.constexpr,
    BEFORE: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Tiles of one row of tiles follow each other, so that x comes from memory once."""
    columns: tl.constexpr = (N + BN - 1) // BN
    tiles = tl.cdiv(rows, BM) * columns
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        row, column = tile // columns * BM, tile % columns * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            x = x_desc.load([row, k])
            w = weight_desc.load([column, k])
            acc = tl.dot(x, w.T, acc, input_precision=PRECISION)
        at = column + tl.arange(0, BN)
        if BEFORE:
            below = row + tl.arange(0, BM)
            acc *= tl.load(scales_f32 + below, mask=below < rows, other=0.0)[:, None]
        if BIAS:
            acc += tl.load(bias_ptr + at, mask=at < N, other=0.0).to(tl.float32)[None, :]
        if not BEFORE:  # columns past N are 0
            acc *= tl.rsqrt(tl.sum(acc * acc, 1) / N + EPS)[:, None]
            acc *= tl.load(gain_ptr + at, mask=at < N, other=0.0).to(tl.float32)[None, :]
        y_desc.store([row, column], acc.to(y_desc.dtype))


def applies(problem: dispatch.Problem) -> tuple[bool, str]:
    """Half precision, and widths that descriptors can address, multiples of 8; rows that the norm's kernel can hold."""
    if problem.dtype not in HALF:
        return False, f"the kernel takes float16 and bfloat16; got {problem.dtype}"
    width = next((int(f.removeprefix("width:")) for f in problem.features if f.startswith("width:")), 8)
    if problem.head_dim % 8 or width % 8:
        return False, f"widths must be multiples of 8; got {problem.head_dim} and {width}"
    if "after" not in problem.features and problem.head_dim > norms.MAX_WIDTH:
        return False, f"the norm's backward pass takes rows of at most {norms.MAX_WIDTH}; got {problem.head_dim}"
    if "after" in problem.features and width > WIDEST:
        return False, f"the result's rows must fit in one tile to be normalised, at most {WIDEST} wide; got {width}"
    return tiling.applies_to_dtype(problem)


def tile(width: int) -> Tile:
    """The tile of the result; BK is 64."""
    return Tile(bm=128, bn=256 if width > 128 else 128, warps=8, stages=3)


BK = 64
SCALE = Tile(bm=8, bn=256, warps=4, stages=1)


@functools.cache
def _programs(device: torch.device) -> int:
    if device.type == "cpu":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])


def addressable(x: Tensor) -> Tensor:
    """x [R, C], copied where TMA cannot address its rows."""
    aligned = x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return x if x.stride(1) == 1 and aligned else x.contiguous()


def scaled(weight: Tensor, gain: Tensor) -> Tensor:
    """The weight [N, K] with the norm's gain [K] in it."""
    wide = torch.promote_types(weight.dtype, gain.dtype)  # a product in half precision is rounded once, as it is here
    return (weight.to(wide) * gain).to(weight.dtype)


def _run(
    x: Tensor, weight: Tensor, scales: Tensor | None, gain: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """`scales` [M] of the rows, or the `gain` [N] of the norm after the product."""
    rows, columns = x.shape[0], weight.shape[0]
    y = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    t = tile(columns)
    tiles = triton.cdiv(rows, t.bm) * triton.cdiv(columns, t.bn)
    launch(
        _kernel, min(tiles, _programs(x.device)), x.device, t,
        _descriptor(x, t.bm, BK), _descriptor(addressable(weight), t.bn, BK), _descriptor(y, t.bm, t.bn),
        scales, gain, bias, rows,
        N=columns, K=x.shape[1], BM=t.bm, BN=t.bn, BK=BK, EPS=eps, BEFORE=scales is not None, BIAS=bias is not None,
        PRECISION="ieee", FLATTEN=True,
    )  # fmt: skip
    return y


def forward(x: Tensor, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """The norm before the product: [M, K], [K], [N, K], [N] -> [M, N]."""
    rows, width = x.shape
    if rows == 0:
        return torch.empty(0, weight.shape[0], dtype=x.dtype, device=x.device)
    x = addressable(x)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    launch(
        _scale_kernel, triton.cdiv(rows, SCALE.bm), x.device, SCALE,
        x, scales, x.stride(0), rows,
        K=width, KP=triton.cdiv(width, SCALE.bn) * SCALE.bn, BM=SCALE.bm, BN=SCALE.bn, EPS=eps,
    )  # fmt: skip
    return _run(x, scaled(weight, gain), scales, None, bias, eps)


def forward_after(x: Tensor, weight: Tensor, gain: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """The norm after the product: [M, K], [N, K], [N], [N] -> [M, N], N <= 256."""
    assert weight.shape[0] <= WIDEST, "applies() refuses wider ones"
    if x.shape[0] == 0:
        return torch.empty(0, weight.shape[0], dtype=x.dtype, device=x.device)
    return _run(addressable(x), weight, None, gain, bias, eps)


def compile_cases() -> list[CompileCase]:
    """The product in both orders at two widths, and the rows' scales."""
    cases = []
    for before, width in ((True, 128), (True, 512), (False, 256)):
        t = tile(width)
        constants: dict[str, object] = {
            "N": width, "K": 512, "BM": t.bm, "BN": t.bn, "BK": BK, "EPS": 1e-6, "BEFORE": before, "BIAS": True,
            "PRECISION": "ieee", "FLATTEN": True,
        }  # fmt: skip
        types = {
            "x_desc": f"tensordesc<bf16[{t.bm}, {BK}]>", "weight_desc": f"tensordesc<bf16[{t.bn}, {BK}]>",
            "y_desc": f"tensordesc<bf16[{t.bm}, {t.bn}]>", "scales_f32": "*fp32", "gain_ptr": "*bf16",
            "bias_ptr": "*bf16", "rows": "i32", **dict.fromkeys(constants, "constexpr"),
        }  # fmt: skip
        label = f"norm_linear {'before' if before else 'after'} bf16 n{width}"
        pointers = ("scales_f32", "gain_ptr", "bias_ptr")
        cases.append(CompileCase(label, _kernel, types, constants, t, pointers, (90, 100)))
    constants = {"K": 512, "KP": 512, "BM": SCALE.bm, "BN": SCALE.bn, "EPS": 1e-6}
    types, divisible = signature(_scale_kernel, "bf16", constants)
    cases.append(CompileCase("norm_linear scales bf16 k512", _scale_kernel, types, constants, SCALE, divisible))
    return cases
