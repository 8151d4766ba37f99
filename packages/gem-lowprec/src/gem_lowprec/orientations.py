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

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from gem_kernels.checks import dense
from gem_kernels.tiling import CompileCase, Tile, launch
from torch import Tensor

from gem_lowprec import kernels
from gem_lowprec.formats import E4M3
from gem_lowprec.kernels import DTYPES, SCALES, _nearest, _over, _scale_of, hardware, threshold
from gem_lowprec.quantize import FP8_1X128, FP8_128X128, QTensor, QuantSpec

BLOCK = 128
LINES = ("_ptr", "x_row", "row_row", "cols", "col_row")  # multiples of 16
REGISTERS = {4: 168, 8: 80}  # of a thread of the kernel by hand, by its warps: three programs on an SM


@triton.jit
def _scaled(x, scale, code, SCALE: tl.constexpr, HARDWARE: tl.constexpr):
    """x / scale as E4M3 bytes; `scale` and `code` broadcast to x."""
    return _nearest(_over(x, scale, code, SCALE), 3, -6, 0x7E, HARDWARE)


@triton.jit
def normalised(x, mean, rstd, gain, bias, NORM: tl.constexpr):
    """(x - mean) * rstd * gain + bias; NORM: 1 RMS, 2 layer."""
    if NORM == 2:
        return (x - mean) * rstd * gain + bias
    return x * rstd * gain


@triton.jit(do_not_specialize=["rows", "row_pitch", "col_pitch"])
def _both(
    x_ptr, mean_ptr, rstd_ptr, gain_ptr, bias_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, sum_ptr,
    rows, cols, x_row, row_row, row_pitch, col_row, col_pitch,
    B: tl.constexpr, TR: tl.constexpr, LIMIT: tl.constexpr, THRESHOLD: tl.constexpr, EMAX: tl.constexpr,
    SCALE: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, SUMS: tl.constexpr, NORM: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """One tile [TR, B] per program; TR = B unless only rows are quantised. ROW, COL: see `_way`."""
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
        x = tl.where(inside, normalised(x, mean, rstd, gain, bias, NORM), 0.0)
    # Whole lines are stored, the zeros at their ends too: they are known to be multiples of 16, so the stores are wide.
    to_row = row_ptr + r64[:, None] * row_row + c[None, :]
    in_row = (r[:, None] < rows) & (c[None, :] < row_row)
    to_col = col_ptr + c.to(tl.int64)[:, None] * col_row + r[None, :]
    in_col = (c[:, None] < cols) & (r[None, :] < col_row)
    size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if SUMS:
        tl.store(sum_ptr + tile_row.to(tl.int64) * cols + c, tl.sum(x, 0), mask=c < cols)
    if ROW == 2 or COL == 2:
        amax = tl.max(tl.max(size, 1), 0)
        whole, whole_code = _scale_of(amax + tl.zeros([1, 1], tl.int32), LIMIT, THRESHOLD, EMAX, SCALE)
        one = tl.arange(0, 1)
        at = one[:, None] + one[None, :]
    if ROW:
        if ROW == 2:
            data = _scaled(x, whole, whole_code, SCALE, HARDWARE)
            tl.store(row_scale_ptr + tile_row * row_pitch + tile_col + at, whole)
        else:
            scale, code = _scale_of(tl.max(size, 1), LIMIT, THRESHOLD, EMAX, SCALE)
            data = _scaled(x, scale[:, None], code[:, None], SCALE, HARDWARE)
            tl.store(row_scale_ptr + tile_col.to(tl.int64) * row_pitch + r, scale, mask=r < rows)
        tl.store(to_row, data, mask=in_row)
    if COL:
        if COL == 2:
            data = _scaled(x, whole, whole_code, SCALE, HARDWARE)
            if ROW != 2:
                tl.store(col_scale_ptr + tile_row * col_pitch + tile_col + at, whole)
        else:
            scale, code = _scale_of(tl.max(size, 0), LIMIT, THRESHOLD, EMAX, SCALE)
            data = _scaled(x, scale[None, :], code[None, :], SCALE, HARDWARE)
            tl.store(col_scale_ptr + tile_row.to(tl.int64) * col_pitch + c, scale, mask=c < cols)
        tl.store(to_col, tl.trans(data), mask=in_col)


@triton.jit(do_not_specialize=["parts"])
def _add_up(part_ptr, sum_ptr, parts, cols, BM: tl.constexpr, BN: tl.constexpr):
    """Sums of BN columns of [parts, cols] for a program: 32 bytes of a line."""
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros([BM, BN], tl.float32)
    for first in range(0, parts, BM):
        r = first + tl.arange(0, BM)
        inside = (r < parts)[:, None] & (c < cols)[None, :]
        total += tl.load(part_ptr + r.to(tl.int64)[:, None] * cols + c[None, :], mask=inside, other=0.0)
    tl.store(sum_ptr + c, tl.sum(total, 0), mask=c < cols)


def _total(partial: Tensor) -> Tensor:
    """Column sums of [tiles, C] float32."""
    parts, cols = partial.shape
    total = partial.new_empty(cols)
    tile = Tile(bm=512, bn=8, warps=8, stages=1)
    launch(_add_up, -(-cols // tile.bn), partial.device, tile, partial, total, parts, cols, BM=tile.bm, BN=tile.bn)
    return total


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


def _way(spec: QuantSpec | None) -> int:
    """0 for nothing, 1 for blocks of 1 x 128, 2 for those of 128 x 128."""
    return 0 if spec is None else 2 if spec.block[0] == BLOCK else 1


def _constants(
    row: QuantSpec | None, col: QuantSpec | None, *, sums: bool, hardware: bool, norm: int = 0
) -> tuple[dict[str, Any], Tile]:  # fmt: skip
    ways = {"ROW": _way(row), "COL": _way(col)}
    spec = row or col or FP8_1X128
    height = BLOCK if col or sums or 2 in ways.values() else 64
    constants = {
        "B": BLOCK, "TR": height, **scale_constants(spec), **ways, "SUMS": sums, "NORM": norm, "HARDWARE": hardware,
    }  # fmt: skip
    return constants, Tile(bm=height, bn=BLOCK, warps=8 if height == BLOCK else 4)


def quantize_both(
    x: Tensor, spec: QuantSpec = FP8_1X128, *, row: bool = True, col: bool = True, col_spec: QuantSpec | None = None,
    sums: bool = False, norm: Norm | None = None,
) -> Oriented:  # fmt: skip
    """Quantise x [R, C] (float32, bfloat16 or float16) along C (`row`), along R (`col`, transposed), or both.

    `spec` is FP8_1X128 or FP8_128X128, with power-of-two or float32 scales, and so is `col_spec`, that of the
    transposed copy (by default the same); the bits are those of `quantize(x, spec)` and `quantize(x, col_spec, dim=0)`
    (a NaN has no sign where the hardware converts). With `norm`, of the normalised x in float32. On CUDA or in Triton's
    interpreter. Raises ValueError or TypeError for what it does not take.
    """
    ways = (spec if row else None, (col_spec or spec) if col else None)
    for way in (spec, col_spec or spec):
        if way.element is not E4M3 or way.block not in ((1, BLOCK), (BLOCK, BLOCK)) or way.scale == "e8m0":
            raise ValueError(
                f"quantize_both takes E4M3 in blocks of 1 x 128 or 128 x 128 with float32 scales, got {way}"
            )
    if (spec.scale, spec.mode) != ((col_spec or spec).scale, (col_spec or spec).mode):
        raise ValueError(f"both orientations must have the same kind of scales, got {spec} and {col_spec}")
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
    if row:
        row_scale = x.new_empty((down, across) if _way(ways[0]) == 2 else (across, _up(rows, 4)), dtype=f32)
    if col and _way(ways[1]) == 2:
        col_scale = row_scale if _way(ways[0]) == 2 else x.new_empty((down, across), dtype=f32)
    elif col:
        col_scale = x.new_empty((down, _up(cols, 4)), dtype=f32)
    if sums:
        partial = x.new_empty((down, cols), dtype=f32)
    gain, bias, rstd, mean = (x,) * 4 if norm is None else dense(norm.gain, norm.bias, norm.rstd, norm.mean)
    arguments = (
        x, x if mean is None else mean, rstd, gain, x if bias is None else bias,
        data, row_scale, turned, col_scale, partial, rows, cols,
        x.stride(0), data.stride(0), row_scale.stride(0), turned.stride(0), col_scale.stride(0),
    )  # fmt: skip
    halves = x.element_size() == 2  # what the kernel by hand has been seen right with
    if (
        kernels.BY_HAND
        and halves
        and hardware(x.device)
        and spec.scale == "pow2"
        and (col or sums or _way(ways[0]) == 2)
    ):
        _by_hand(x, arguments, down * across, *ways, sums=sums, norm=kind(norm))
    else:
        constants, tile = _constants(*ways, sums=sums, hardware=hardware(x.device), norm=kind(norm))
        launch(_both, -(-rows // tile.bm) * across, x.device, tile, *arguments, **constants)

    def packed(data: Tensor, scale: Tensor, shape: tuple[int, int], spec: QuantSpec) -> QTensor:
        return QTensor(
            data=data.view(E4M3.dtype)[:, : shape[1]], scale=scale, spec=spec, dim=-1, shape=torch.Size(shape),
            dtype=x.dtype,
        )  # fmt: skip

    found = Oriented(row=None, col=None, sums=_total(partial) if sums else None)
    if row:
        scale = row_scale if _way(ways[0]) == 2 else row_scale[:, :rows].t()
        found = replace(found, row=packed(data, scale, (rows, cols), spec))
    if col:
        scale = col_scale.t() if _way(ways[1]) == 2 else col_scale[:, :cols].t()
        found = replace(found, col=packed(turned, scale, (cols, rows), col_spec or spec))
    return found


def _hand_constants(row: QuantSpec | None, col: QuantSpec | None, *, sums: bool, norm: int) -> dict[str, Any]:
    spec = row or col or FP8_1X128
    return {
        "ROW": _way(row), "COL": _way(col), "SUMS": sums, "NORM": norm, "THRESHOLD": threshold(E4M3, spec.mode),
        "EMAX": E4M3.emax, "WARPS": 8 if row and col else 4,  # docs/notes/lowprec.md, "Quantisers"
    }  # fmt: skip


def _by_hand(
    x: Tensor, arguments: tuple[Any, ...], programs: int, row: QuantSpec | None, col: QuantSpec | None, *, sums: bool,
    norm: int,
) -> None:  # fmt: skip
    """The same by the Gluon kernel."""
    from gem_lowprec.tiles import both_kernel

    if programs:
        with torch.cuda.device_of(x):
            constants = _hand_constants(row, col, sums=sums, norm=norm)
            warps = constants["WARPS"]
            both_kernel[(programs,)](*arguments, **constants, num_warps=warps, maxnreg=REGISTERS[warps])


def compile_cases() -> list[CompileCase]:
    """What `compile_check` builds without a GPU: the portable kernel and the Gluon kernel."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from gem_lowprec.tiles import both_kernel

    cases = []
    for name, row, col, sums, norm in (
        ("rows", FP8_1X128, None, False, 0), ("gradient", FP8_1X128, FP8_1X128, True, 0),
        ("input", FP8_1X128, FP8_128X128, False, 0), ("weight", FP8_128X128, FP8_128X128, False, 0),
        ("normalised input", None, FP8_128X128, False, 2),
    ):  # fmt: skip
        constants, tile = _constants(row, col, sums=sums, hardware=True, norm=norm)
        by_hand = _hand_constants(row, col, sums=sums, norm=norm)
        warps = by_hand["WARPS"]
        ours = Tile(bm=BLOCK, bn=BLOCK, warps=warps, registers=REGISTERS[warps])
        for kernel, values, source in ((_both, constants, None), (both_kernel, by_hand, GluonASTSource)):
            types = {n: "constexpr" if n in values else "i32" for n in kernel.arg_names}
            types |= {"x_ptr": "*bf16", "row_ptr": "*u8", "col_ptr": "*u8"}
            floats = ("mean_ptr", "rstd_ptr", "gain_ptr", "bias_ptr", "row_scale_ptr", "col_scale_ptr", "sum_ptr")
            types |= dict.fromkeys(floats, "*fp32")
            cases.append(
                CompileCase(
                    name=f"both orientations: {name}{' by hand' if source else ''}", kernel=kernel, signature=types,
                    constants=values, divisible=tuple(n for n in kernel.arg_names if n.endswith(LINES)), arch=(90,),
                    tile=ours if source else tile, source=source,
                )
            )  # fmt: skip
    return cases
