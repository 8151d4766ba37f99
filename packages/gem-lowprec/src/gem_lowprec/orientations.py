"""Quantise a matrix to block-wise E4M3 along both dimensions in one pass: x is read once, and Q(x), Q(x^T) and the sums
of its columns are written, whichever are asked for.

A linear layer contracts its input over features in the forward and over tokens in the weight's gradient, and Hopper's
FP8 tensor cores read operands that are contiguous along the contraction alone. So a tensor is needed twice, once
transposed. A program takes a tile of 128 x 128; its magnitudes give the scales of both directions.

Scales are stored as the products load them: [blocks of the contraction, pitch], one block's scales for all rows side
by side, the pitch a multiple of 4 so that every line starts at 16 bytes. Lines of data are as long as those of x,
16 bytes apart at least: TMA asks for no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from gem_kernels.tiling import CompileCase, Tile, launch
from torch import Tensor

from gem_lowprec.formats import E4M3
from gem_lowprec.kernels import DTYPES, SCALES, _nearest, _over, _scale_of, hardware, threshold
from gem_lowprec.quantize import FP8_1X128, FP8_128X128, QTensor, QuantSpec

BLOCK = 128
LINES = ("_ptr", "x_row", "row_row", "cols", "col_row")  # multiples of 16
REGISTERS: int | None = None


@triton.jit
def _scaled(x, scale, code, SCALE: tl.constexpr, HARDWARE: tl.constexpr):
    """x / scale as E4M3 bytes; `scale` and `code` broadcast to x."""
    return _nearest(_over(x, scale, code, SCALE), 3, -6, 0x7E, HARDWARE)


@triton.jit
def normalised(x, mean, rstd, gain, bias, dtype: tl.constexpr, NORM: tl.constexpr):
    """(x - mean) * rstd * gain + bias, rounded to `dtype` as a norm of its own would write it; NORM: 1 RMS, 2 layer."""
    if NORM == 2:
        x = (x - mean) * rstd * gain + bias
    else:
        x = x * rstd * gain
    return x.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "row_pitch", "col_pitch"])
def _both(
    x_ptr, mean_ptr, rstd_ptr, gain_ptr, bias_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, sum_ptr,
    rows, cols, x_row, row_row, row_pitch, col_row, col_pitch,
    B: tl.constexpr, TR: tl.constexpr, LIMIT: tl.constexpr, THRESHOLD: tl.constexpr, EMAX: tl.constexpr,
    SCALE: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, SQUARE: tl.constexpr, SUMS: tl.constexpr,
    NORM: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One tile [TR, B] per program; TR = B unless only rows are quantised."""
    across = tl.cdiv(cols, B)
    tile_row, tile_col = tl.program_id(0) // across, tl.program_id(0) % across
    r = tile_row * TR + tl.arange(0, TR)
    c = tile_col * B + tl.arange(0, B)
    inside = (r[:, None] < rows) & (c[None, :] < cols)
    r64 = r.to(tl.int64)
    x = tl.load(x_ptr + r64[:, None] * x_row + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        rstd = tl.load(rstd_ptr + r, mask=r < rows, other=0.0)[:, None]
        gain = tl.load(gain_ptr + c, mask=c < cols, other=0.0).to(tl.float32)[None, :]
        mean = 0.0
        bias = 0.0
        if NORM == 2:
            mean = tl.load(mean_ptr + r, mask=r < rows, other=0.0)[:, None]
            bias = tl.load(bias_ptr + c, mask=c < cols, other=0.0).to(tl.float32)[None, :]
        x = tl.where(inside, normalised(x, mean, rstd, gain, bias, x_ptr.dtype.element_ty, NORM), 0.0)
    # Whole lines are stored, the zeros at their ends too: they are known to be multiples of 16, so the stores are wide.
    to_row = row_ptr + r64[:, None] * row_row + c[None, :]
    in_row = (r[:, None] < rows) & (c[None, :] < row_row)
    to_col = col_ptr + c.to(tl.int64)[:, None] * col_row + r[None, :]
    in_col = (c[:, None] < cols) & (r[None, :] < col_row)
    size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if SUMS:
        tl.store(sum_ptr + tile_row.to(tl.int64) * cols + c, tl.sum(x, 0), mask=c < cols)
    if SQUARE:
        amax = tl.max(tl.max(size, 1), 0)
        scale, code = _scale_of(amax + tl.zeros([1, 1], tl.int32), LIMIT, THRESHOLD, EMAX, SCALE)
        data = _scaled(x, scale, code, SCALE, HARDWARE)
        if ROW:
            tl.store(to_row, data, mask=in_row)
        if COL:
            tl.store(to_col, tl.trans(data), mask=in_col)
        one = tl.arange(0, 1)
        tl.store(row_scale_ptr + tile_row * row_pitch + tile_col + one[:, None] + one[None, :], scale)
    else:
        if ROW:
            scale, code = _scale_of(tl.max(size, 1), LIMIT, THRESHOLD, EMAX, SCALE)
            data = _scaled(x, scale[:, None], code[:, None], SCALE, HARDWARE)
            tl.store(to_row, data, mask=in_row)
            tl.store(row_scale_ptr + tile_col.to(tl.int64) * row_pitch + r, scale, mask=r < rows)
        if COL:
            scale, code = _scale_of(tl.max(size, 0), LIMIT, THRESHOLD, EMAX, SCALE)
            data = _scaled(x, scale[None, :], code[None, :], SCALE, HARDWARE)
            tl.store(to_col, tl.trans(data), mask=in_col)
            tl.store(col_scale_ptr + tile_row.to(tl.int64) * col_pitch + c, scale, mask=c < cols)


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A norm's gain [C] and bias [C], and of each row what `norm_quantize` found: 1 / sqrt(variance + eps) and, for a
    layer norm, the mean. `bias` and `mean` are None for an RMS norm.
    """

    gain: Tensor
    bias: Tensor | None
    rstd: Tensor
    mean: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Oriented:
    """What `quantize_both` made of x [R, C]: `row` contracts over C, `col` is x^T [C, R] and contracts over R; `sums`
    [C] float32 are the sums over R. What was not asked for is None.
    """

    row: QTensor | None
    col: QTensor | None
    sums: Tensor | None


def kind(norm: Norm | None) -> int:
    """0 for none, 1 for an RMS norm, 2 for a layer norm."""
    return 0 if norm is None else 1 if norm.mean is None else 2


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def scale_constants(spec: QuantSpec) -> dict[str, Any]:
    """What `_scale_of` and `_scaled` must know of an E4M3 specification."""
    return {
        "LIMIT": E4M3.max, "THRESHOLD": threshold(E4M3, spec.mode), "EMAX": E4M3.emax, "SCALE": SCALES[spec.scale],
    }  # fmt: skip


def _constants(
    spec: QuantSpec, *, row: bool, col: bool, sums: bool, hardware: bool, norm: int = 0
) -> tuple[dict[str, Any], Tile]:  # fmt: skip
    square = spec.block[0] == BLOCK
    height = BLOCK if col or square or sums else 64
    constants = {
        "B": BLOCK, "TR": height, **scale_constants(spec), "ROW": row, "COL": col, "SQUARE": square, "SUMS": sums,
        "NORM": norm, "HARDWARE": hardware,
    }  # fmt: skip
    return constants, Tile(bm=height, bn=BLOCK, warps=8 if height == BLOCK else 4)


def quantize_both(
    x: Tensor, spec: QuantSpec = FP8_1X128, *, row: bool = True, col: bool = True, sums: bool = False,
    norm: Norm | None = None,
) -> Oriented:  # fmt: skip
    """Quantise x [R, C] (float32, bfloat16 or float16) along C (`row`), along R (`col`, transposed), or both.

    `spec` is FP8_1X128 or FP8_128X128, with power-of-two or float32 scales; the bits are those of `quantize(x, spec)`
    and `quantize(x, spec, dim=0)` (a NaN has no sign where the hardware converts). With `norm`, of the normalised x,
    rounded to its dtype. On CUDA or in Triton's interpreter. Raises ValueError or TypeError for what it does not take.
    """
    square = spec.block == (BLOCK, BLOCK)
    if spec.element is not E4M3 or spec.block not in ((1, BLOCK), (BLOCK, BLOCK)) or spec.scale == "e8m0":
        raise ValueError(f"quantize_both takes E4M3 in blocks of 1 x 128 or 128 x 128 with float32 scales, got {spec}")
    if x.ndim != 2:
        raise ValueError(f"quantize_both expects a matrix, got shape {list(x.shape)}")
    if x.dtype not in DTYPES:
        raise TypeError(f"quantize_both reads float32, bfloat16 and float16; got {x.dtype}")
    x = x.detach() if x.stride(1) == 1 else x.detach().contiguous()
    rows, cols = x.shape
    down, across = -(-rows // BLOCK), -(-cols // BLOCK)
    f32, u8 = torch.float32, torch.uint8
    # What is not asked for is written nowhere: any pointer will do.
    data = x.new_empty((rows, _up(cols, 16)), dtype=u8) if row else x
    turned = x.new_empty((cols, _up(rows, 16)), dtype=u8) if col else x
    row_scale = col_scale = partial = x
    if square:
        row_scale = x.new_empty((down, across), dtype=f32)
    elif row:
        row_scale = x.new_empty((across, _up(rows, 4)), dtype=f32)
    if col and not square:
        col_scale = x.new_empty((down, _up(cols, 4)), dtype=f32)
    if sums:
        partial = x.new_empty((down, cols), dtype=f32)
    outputs = (data, row_scale, turned, col_scale, partial, rows, cols)
    strides = (x.stride(0), data.stride(0), row_scale.stride(0), turned.stride(0), col_scale.stride(0))
    by_hardware = hardware(x.device)
    gain, bias, rstd, mean = (x,) * 4 if norm is None else (norm.gain, norm.bias, norm.rstd, norm.mean)
    inputs = (x, x if mean is None else mean, rstd, gain, x if bias is None else bias)
    if by_hardware and spec.scale == "pow2" and (col or square or sums):
        arguments = (*inputs, *outputs, *strides)
        _by_hand(x, arguments, down * across, spec, row=row, col=col, sums=sums, norm=kind(norm))
    else:
        constants, tile = _constants(spec, row=row, col=col, sums=sums, hardware=by_hardware, norm=kind(norm))
        launch(_both, -(-rows // tile.bm) * across, x.device, tile, *inputs, *outputs, *strides, **constants)

    def packed(data: Tensor, scale: Tensor, shape: tuple[int, int]) -> QTensor:
        return QTensor(
            data=data.view(E4M3.dtype)[:, : shape[1]], scale=scale, spec=spec, dim=-1, shape=torch.Size(shape),
            dtype=x.dtype,
        )  # fmt: skip

    return Oriented(
        row=packed(data, row_scale if square else row_scale[:, :rows].t(), (rows, cols)) if row else None,
        col=packed(turned, row_scale.t() if square else col_scale[:, :cols].t(), (cols, rows)) if col else None,
        sums=partial.sum(0) if sums else None,
    )


def _by_hand(
    x: Tensor, arguments: tuple[Any, ...], programs: int, spec: QuantSpec, *, row: bool, col: bool, sums: bool,
    norm: int,
) -> None:  # fmt: skip
    """The same by the Gluon kernel."""
    from gem_lowprec.tiles import both_kernel

    if programs:
        with torch.cuda.device_of(x):
            both_kernel[(programs,)](
                *arguments, THRESHOLD=threshold(E4M3, spec.mode), EMAX=E4M3.emax, ROW=row, COL=col,
                SQUARE=spec.block[0] == BLOCK, SUMS=sums, NORM=norm, num_warps=4, maxnreg=REGISTERS,
            )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """What `compile_check` builds without a GPU."""
    cases = []
    for spec, row, col in ((FP8_1X128, True, True), (FP8_1X128, True, False), (FP8_128X128, True, True)):
        constants, tile = _constants(spec, row=row, col=col, sums=col, hardware=True)
        types = {n: "constexpr" if n in constants else "i32" for n in _both.arg_names}
        types |= {"x_ptr": "*bf16", "row_ptr": "*u8", "col_ptr": "*u8"}
        types |= dict.fromkeys(
            ("gain_ptr", "bias_ptr", "mean_ptr", "rstd_ptr", "row_scale_ptr", "col_scale_ptr", "sum_ptr"), "*fp32"
        )
        cases.append(
            CompileCase(
                name=f"both {spec} row {row} col {col}", kernel=_both, signature=types, constants=constants, tile=tile,
                divisible=tuple(n for n in _both.arg_names if n.endswith(LINES)), arch=(90, 100),
            )
        )  # fmt: skip
    return cases + _cases_by_hand()


def _cases_by_hand() -> list[CompileCase]:
    from triton.experimental.gluon._runtime import GluonASTSource

    from gem_lowprec.tiles import both_kernel

    cases = []
    for square, row, col, sums, norm in (
        (False, True, True, False, 0), (False, True, True, True, 0), (False, False, True, False, 0),
        (False, False, True, False, 2), (True, True, True, False, 0),
    ):  # fmt: skip
        constants = {
            "ROW": row, "COL": col, "SQUARE": square, "SUMS": sums, "NORM": norm, "EMAX": E4M3.emax,
            "THRESHOLD": threshold(E4M3, FP8_1X128.mode),
        }  # fmt: skip
        types = {n: "constexpr" if n in constants else "i32" for n in both_kernel.arg_names}
        types |= {"x_ptr": "*bf16", "row_ptr": "*u8", "col_ptr": "*u8"}
        types |= dict.fromkeys(("gain_ptr", "bias_ptr", "mean_ptr", "rstd_ptr", "row_scale_ptr"), "*fp32")
        types |= dict.fromkeys(("col_scale_ptr", "sum_ptr"), "*fp32")
        name = FP8_128X128 if square else FP8_1X128
        cases.append(
            CompileCase(
                name=f"both by hand {name} row {row} col {col}{' sums' * sums}{' norm' * (norm > 0)}",
                kernel=both_kernel, signature=types, constants=constants, tile=Tile(bm=BLOCK, bn=BLOCK),
                divisible=tuple(n for n in both_kernel.arg_names if n.endswith(LINES)), arch=(90,),
                source=GluonASTSource,
            )
        )  # fmt: skip
    return cases
