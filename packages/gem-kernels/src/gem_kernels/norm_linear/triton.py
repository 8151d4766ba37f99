"""RMSNorm and projection in portable Triton: a persistent matrix product by tensor descriptors.

A norm scales rows, and a matrix product commutes with that: the kernel multiplies x as it is, adds up the squares of
every tile of x that passes, and scales the rows of the result. Whoever multiplies by the norm's gain does so once, in
the weight.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gem_kernels import dispatch, tiling
from gem_kernels.tiling import HALF, CompileCase, Tile, launch

__all__ = ["applies", "compile_cases", "forward"]


@triton.jit(do_not_specialize=["rows"])
def _kernel(
    x_desc, weight_desc, y_desc, bias_ptr, rows,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EPS: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Tiles of one row of tiles follow each other, so that x comes from memory once."""
    columns: tl.constexpr = (N + BN - 1) // BN
    tiles = tl.cdiv(rows, BM) * columns
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        row, column = tile // columns * BM, tile % columns * BN
        acc = tl.zeros((BM, BN), tl.float32)
        squares = tl.zeros((BM,), tl.float32)
        for k in range(0, K, BK):
            x = x_desc.load([row, k])
            w = weight_desc.load([column, k])
            acc = tl.dot(x, w.T, acc, input_precision=PRECISION)
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
        y = acc * tl.rsqrt(squares / K + EPS)[:, None]
        if BIAS:
            at = column + tl.arange(0, BN)
            y += tl.load(bias_ptr + at, mask=at < N, other=0.0).to(tl.float32)[None, :]
        y_desc.store([row, column], y.to(y_desc.dtype))


def applies(problem: dispatch.Problem) -> tuple[bool, str]:
    """Half precision, and widths that descriptors can address: multiples of 8."""
    if problem.dtype not in HALF:
        return False, f"the kernel takes float16 and bfloat16; got {problem.dtype}"
    width = next((int(f.removeprefix("width:")) for f in problem.features if f.startswith("width:")), 8)
    if problem.head_dim % 8 or width % 8:
        return False, f"widths must be multiples of 8; got {problem.head_dim} and {width}"
    return tiling.applies_to_dtype(problem)


def tile(width: int) -> Tile:
    """The tile of the result; BK is 64."""
    return Tile(bm=128, bn=256 if width > 128 else 128, warps=8, stages=3)


BK = 64


@functools.cache
def _programs(device: torch.device) -> int:
    if device.type == "cpu":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])


def _addressable(x: Tensor) -> Tensor:
    aligned = x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return x if x.stride(1) == 1 and aligned else x.contiguous()


def forward(x: Tensor, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """[M, K], [K], [N, K], [N] -> [M, N]."""
    rows, columns = x.shape[0], weight.shape[0]
    y = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    x = _addressable(x)
    scaled = (weight.float() * gain.float()).to(weight.dtype)
    t = tile(columns)
    tiles = triton.cdiv(rows, t.bm) * triton.cdiv(columns, t.bn)
    launch(
        _kernel, min(tiles, _programs(x.device)), x.device, t,
        _descriptor(x, t.bm, BK), _descriptor(scaled, t.bn, BK), _descriptor(y, t.bm, t.bn), bias, rows,
        N=columns, K=x.shape[1], BM=t.bm, BN=t.bn, BK=BK, EPS=eps, BIAS=bias is not None, PRECISION="ieee",
        FLATTEN=True,
    )  # fmt: skip
    return y


def compile_cases() -> list[CompileCase]:
    """The kernel at two widths."""
    cases = []
    for width in (128, 512):
        t = tile(width)
        constants: dict[str, object] = {
            "N": width, "K": 512, "BM": t.bm, "BN": t.bn, "BK": BK, "EPS": 1e-6, "BIAS": True, "PRECISION": "ieee",
            "FLATTEN": True,
        }  # fmt: skip
        types = {
            "x_desc": f"tensordesc<bf16[{t.bm}, {BK}]>", "weight_desc": f"tensordesc<bf16[{t.bn}, {BK}]>",
            "y_desc": f"tensordesc<bf16[{t.bm}, {t.bn}]>", "bias_ptr": "*bf16", "rows": "i32",
            **dict.fromkeys(constants, "constexpr"),
        }  # fmt: skip
        cases.append(CompileCase(f"norm_linear bf16 n{width}", _kernel, types, constants, t, ("bias_ptr",), (90, 100)))
    return cases
