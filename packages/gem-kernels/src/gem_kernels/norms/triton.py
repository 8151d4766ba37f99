"""Norms of rows in portable Triton: one pass over memory forward and one backward.

A program holds whole rows, C columns padded to CP (a power of two), in registers as float32. The backward pass
recomputes the statistics from the rows that it must read anyway, so nothing is saved for it. Gradients of weight and
bias, and the sums for a bias in the residual, are made in two stages of fixed order: program p of P adds up tiles p,
p + P, .., then a second kernel adds up the programs. How many programs there are depends on the shape alone, so that
the bits are the same on every card.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels import dispatch, tiling
from gem_kernels.checks import dense
from gem_kernels.tiling import CompileCase, Tile, launch, rows_of, signature, strides

__all__ = ["applies", "backward", "backward_with_rows", "backward_with_sums", "compile_cases", "forward"]

MAX_WIDTH = 8192
PARTS = 512  # programs of a backward pass at most, and rows of the first stage's result: 4 on an SM of 128 and more
SUM = Tile(bm=512, bn=8, warps=8, stages=1)  # the second stage: one step for a program, however few columns there are


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a program's `rows` lie in its threads: tiles are [rows, cuts, span], a row in pieces of `span` columns.

    Triton lays the lanes of a warp along a span, 16 bytes each, then warps along a longer one, then along the rows. So
    a row cut into pieces of 512 bytes is in one warp: its pieces are in the same threads, and its sums need no barrier.
    A width that is not cuts * span is padded; whole cuts past its end are known to the compiler, which drops them.
    """

    rows: int
    cuts: int
    span: int
    warps: int
    stages: int = 1
    programs: int = PARTS  # backward, at most: as many as are on the card at once
    registers: int | None = None  # of a thread at most

    def constants(self, width: int, size: int) -> dict[str, int]:
        """The kernels', for elements of `size` bytes. TOGETHER: rows that the warps have at once; one that is so far
        from another is in the same thread.
        """
        together = min(self.rows, max(1, self.warps * (32 * 16 // size) // self.span))
        return {"C": width, "BM": self.rows, "CUTS": self.cuts, "SPAN": self.span, "TOGETHER": together}


@triton.jit
def _columns(CUTS: tl.constexpr, SPAN: tl.constexpr):
    """[CUTS, SPAN]."""
    return tl.arange(0, CUTS)[:, None] * SPAN + tl.arange(0, SPAN)[None, :]


@triton.jit
def _within(C: tl.constexpr, CUTS: tl.constexpr, SPAN: tl.constexpr):
    """Which columns there are, as a comparison that is a constant of every register where whole cuts are missing."""
    if C % SPAN == 0:
        return (tl.arange(0, CUTS) * SPAN < C)[:, None]
    else:
        return _columns(CUTS, SPAN) < C


@triton.jit
def _load(base, at, inside, C: tl.constexpr, CUTS: tl.constexpr, SPAN: tl.constexpr):
    """Float32 [BM, CUTS, SPAN] of the rows at the element offsets `at`; 0 outside."""
    where = base + at[:, None, None] + _columns(CUTS, SPAN)[None, :, :]
    mask = inside[:, None, None]
    if C != CUTS * SPAN:
        within = _within(C, CUTS, SPAN)[None, :, :]
        return tl.where(within, tl.load(where, mask=mask & within, other=0.0).to(tl.float32), 0.0)
    else:
        return tl.load(where, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(base, x, row, inside, C: tl.constexpr, CUTS: tl.constexpr, SPAN: tl.constexpr):
    """Into rows C apart."""
    where = base + (row * C)[:, None, None] + _columns(CUTS, SPAN)[None, :, :]
    mask = inside[:, None, None]
    if C != CUTS * SPAN:
        mask = mask & _within(C, CUTS, SPAN)[None, :, :]
    tl.store(where, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _vector(base, C: tl.constexpr, CUTS: tl.constexpr, SPAN: tl.constexpr, BM: tl.constexpr, TOGETHER: tl.constexpr):
    """[1 or BM, CUTS, SPAN] of a vector, 0 past its end. Where a thread has one row it loads what it needs of the
    vector itself, and no warp hands it to another.
    """
    column = _columns(CUTS, SPAN)
    if TOGETHER == BM:
        column = column[None, :, :] + tl.zeros((BM, 1, 1), tl.int32)
        x = tl.load(base + column, mask=column < C, other=0.0).to(tl.float32)
    else:
        x = tl.load(base + column, mask=column < C, other=0.0).to(tl.float32)[None, :, :]
    return tl.where(_within(C, CUTS, SPAN)[None, :, :], x, 0.0)


@triton.jit
def _row_sum(x):
    """[BM, CUTS, SPAN] -> [BM, 1, 1]; what a thread has first."""
    return tl.sum(tl.sum(x, axis=1), axis=1)[:, None, None]


@triton.jit
def _at(rows, row, head, HEADS: tl.constexpr):
    """Element offsets of rows t * HEADS + h in a [T, H, C] tensor."""
    return rows // HEADS * row + rows % HEADS * head


@triton.jit
def _normalise(
    x, C: tl.constexpr, CUTS: tl.constexpr, SPAN: tl.constexpr,
    EPS: tl.constexpr, LAYER: tl.constexpr,
):  # fmt: skip
    """Float32 rows, zero from C on -> the normalised rows, also zero there, and 1 / deviation [BM, 1, 1]."""
    if LAYER:
        x -= _row_sum(x) / C
        if C != CUTS * SPAN:
            x = tl.where(_within(C, CUTS, SPAN)[None, :, :], x, 0.0)
    inverse = tl.rsqrt(_row_sum(x * x) / C + EPS)
    return x * inverse, inverse


@triton.jit
def _sigmoid(x, FAST: tl.constexpr):
    """1 / (1 + e^-x). FAST: two special-function instructions of the card, right to 3e-7, where a division of float32
    takes ten instructions.
    """
    if FAST:
        e = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], tl.float32, is_pure=True, pack=1
        )
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [e + 1.0], tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.sigmoid(x)


@triton.jit(do_not_specialize=["rows", "tiles"])
def _forward_kernel(
    x_ptr, residual_ptr, weight_f32, bias_f32, y_ptr, total_ptr,
    x_row, x_head, residual_row, residual_head, rows, tiles,
    HEADS: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, CUTS: tl.constexpr, SPAN: tl.constexpr,
    EPS: tl.constexpr, LAYER: tl.constexpr, SWISH: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, FAST: tl.constexpr, STAGES: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """STAGES 1: a program has one tile. More: it has several, of which so many are on their way or in use."""
    if WEIGHT:  # asked for before the rows, so that no row waits for it
        weight = _vector(weight_f32, C, CUTS, SPAN, BM, TOGETHER)
    else:
        weight = 1.0
    if BIAS:
        bias = _vector(bias_f32, C, CUTS, SPAN, BM, TOGETHER)
    else:
        bias = 0.0
    if STAGES == 1:
        tiles = 1
    for i in tl.range(0, tiles, num_stages=STAGES):
        row = (i * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * BM + tl.arange(0, BM)
        inside = row < rows
        x = _load(x_ptr, _at(row, x_row, x_head, HEADS), inside, C, CUTS, SPAN)
        if RESIDUAL:
            x += _load(residual_ptr, _at(row, residual_row, residual_head, HEADS), inside, C, CUTS, SPAN)
            rounded = x.to(total_ptr.dtype.element_ty)  # what is normalised is the sum that the caller gets
            _store(total_ptr, rounded, row, inside, C, CUTS, SPAN)
            x = rounded.to(tl.float32)
        y, _ = _normalise(x, C, CUTS, SPAN, EPS, LAYER)
        if WEIGHT:
            y *= weight
        if BIAS:
            y += bias
        if SWISH:
            y = x * _sigmoid(y, FAST)
        _store(y_ptr, y, row, inside, C, CUTS, SPAN)


@triton.jit
def _fold(x, TOGETHER: tl.constexpr):
    """Sums [TOGETHER, CUTS, SPAN] of the rows that are TOGETHER apart, which are in one thread."""
    apart: tl.constexpr = x.shape[0] // TOGETHER
    if apart > 1:
        x = tl.sum(tl.reshape(x, (apart, TOGETHER, x.shape[1], x.shape[2])), axis=0)
    return x


@triton.jit(do_not_specialize=["rows", "tiles"])
def _backward_kernel(
    x_ptr, dy_ptr, dtotal_ptr, weight_f32, bias_f32, dx_ptr, rows_ptr, parts_f32,
    x_row, x_head, dy_row, dy_head, dtotal_row, dtotal_head, rows, tiles,
    HEADS: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, CUTS: tl.constexpr, SPAN: tl.constexpr,
    EPS: tl.constexpr, LAYER: tl.constexpr, SWISH: tl.constexpr, DTOTAL: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, TOGETHER: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    if WEIGHT:
        weight = _vector(weight_f32, C, CUTS, SPAN, BM, TOGETHER)
        dweight = tl.zeros((TOGETHER, CUTS, SPAN), tl.float32)
    if BIAS:
        bias = _vector(bias_f32, C, CUTS, SPAN, BM, TOGETHER)
        dbias = tl.zeros((TOGETHER, CUTS, SPAN), tl.float32)
    if SUMS:
        sums = tl.zeros((TOGETHER, CUTS, SPAN), tl.float32)
    for i in tl.range(0, tiles, num_stages=STAGES):
        row = (i * tl.num_programs(0) + part) * BM + tl.arange(0, BM)  # all programs read neighbouring rows at a time
        inside = row < rows
        x = _load(x_ptr, _at(row, x_row, x_head, HEADS), inside, C, CUTS, SPAN)
        dy = _load(dy_ptr, _at(row, dy_row, dy_head, HEADS), inside, C, CUTS, SPAN)
        normal, inverse = _normalise(x, C, CUTS, SPAN, EPS, LAYER)
        if ROWS:  # what the forward pass made, for a caller who did not keep it
            _store(rows_ptr, normal * weight if WEIGHT else normal, row, inside, C, CUTS, SPAN)
        if SWISH:  # y = x sigmoid(a): x is a factor itself, and a carries the rest
            a = normal
            if WEIGHT:
                a = a * weight
            if BIAS:
                a = a + bias
            gate = _sigmoid(a, FAST)
            straight = dy * gate
            dy = straight * x
            dy -= dy * gate
        if BIAS:
            dbias += _fold(dy, TOGETHER)
        if WEIGHT:
            dweight += _fold(dy * normal, TOGETHER)
            dy *= weight
        along = _row_sum(dy * normal) / C
        if LAYER:
            dy -= _row_sum(dy) / C
        dx = (dy - normal * along) * inverse
        if SWISH:
            dx += straight
        if DTOTAL:
            dx += _load(dtotal_ptr, _at(row, dtotal_row, dtotal_head, HEADS), inside, C, CUTS, SPAN)
        _store(dx_ptr, dx, row, inside, C, CUTS, SPAN)
        if SUMS:
            sums += _fold(dx, TOGETHER)
    column = _columns(CUTS, SPAN)
    within = column < C
    into = parts_f32 + part * ((WEIGHT + BIAS + SUMS) * C) + column
    if WEIGHT:
        tl.store(into, tl.sum(dweight, axis=0), mask=within)
    if BIAS:
        tl.store(into + C, tl.sum(dbias, axis=0), mask=within)
    if SUMS:
        tl.store(into + (WEIGHT + BIAS) * C, tl.sum(sums, axis=0), mask=within)


@triton.jit(do_not_specialize=["parts"])
def _sum_kernel(
    parts_f32, first_f32, second_f32, parts, C: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    third_f32=None,
):  # fmt: skip
    """The second stage: column sums of [parts, vectors, C], one for each vector: one, two (BIAS) or three of them."""
    THIRD: tl.constexpr = third_f32 is not None
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    columns: tl.constexpr = (1 + BIAS + THIRD) * C
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, parts, BM):
        part = first + tl.arange(0, BM)
        mask = (part < parts)[:, None] & (column < columns)[None, :]
        total += tl.load(parts_f32 + part.to(tl.int64)[:, None] * columns + column[None, :], mask=mask, other=0.0)
    summed = tl.sum(total, axis=0)
    tl.store(first_f32 + column, summed.to(first_f32.dtype.element_ty), mask=column < C)
    if BIAS:
        mask = (column >= C) & (column < 2 * C)
        tl.store(second_f32 + column - C, summed.to(second_f32.dtype.element_ty), mask=mask)
    if THIRD:
        mask = (column >= 2 * C) & (column < columns)
        tl.store(third_f32 + column - 2 * C, summed.to(third_f32.dtype.element_ty), mask=mask)


def applies(problem: dispatch.Problem) -> tuple[bool, str]:
    """Which problems these kernels take: `head_dim` is the width of a row."""
    if problem.head_dim > MAX_WIDTH:
        return False, f"the Triton norms keep a row in registers, at most {MAX_WIDTH} wide; got {problem.head_dim}"
    return tiling.applies_to_dtype(problem)


def spread(width: int, backward: bool, size: int = 2, *, layer: bool = True) -> Spread:
    """How rows of `width` elements of `size` bytes lie in a program; `layer`: of a LayerNorm.

    A row of up to 1024 bytes (forward 2048) is in one warp; a thread has 16 elements of a wider one. Spans are as long
    as the threads of a row load at once, or half of that where it leaves less padding. Backward, the loads of two more
    tiles are on their way while one is computed: without them a program spends half of its time with none
    (docs/notes/norms.md).
    """
    lane = 16 // size  # elements that a thread loads at once
    columns = triton.next_power_of_2(width)
    one_warp = columns * size <= (1024 if backward else 2048)
    if backward and not layer and width * size == 1024:
        one_warp = False  # an RMSNorm has two sums, not four, and is 3% faster so
    warps = max(2 if columns * size == 512 or not backward else 4, min(8, columns // 512))
    elements, programs, registers = 16, PARTS, None
    if warps == 2:  # six on an SM
        programs = 792
    if backward and columns == 4096:  # 32 warps on an SM, as 8 elements of a thread leave room for
        warps, elements, programs, registers = 16, 8, 264, 64
    threads = 32 if one_warp else 32 * warps if columns >= 4096 else max(64, columns // 16)
    span = min(columns, threads * lane)
    if 32 * lane < columns <= 2048 and -width % span >= span // 2 and width <= 2 * span:
        span //= 2
    cuts = triton.next_power_of_2(triton.cdiv(width, span))
    rows = max(1, 32 * warps * lane // span, 32 * warps * elements // (cuts * span))
    if rows * cuts * span > 512 * warps:  # more than 16 elements of a thread leave room for three programs on an SM
        programs = PARTS * 3 // 4 if columns < 8192 else 132
    return Spread(
        rows=rows,
        cuts=cuts,
        span=span,
        warps=warps,
        stages=3 if backward else 1,
        programs=programs,
        registers=registers,
    )


def _fast(device: torch.device) -> bool:
    """Whether the card has PTX's approximations."""
    return device.type == "cuda" and torch.version.hip is None


def _launch(kernel: Any, programs: int, device: torch.device, s: Spread, *args: Any, **constants: Any) -> None:
    tile = Tile(bm=s.rows, bn=s.cuts * s.span, warps=s.warps, stages=s.stages)
    options = {} if s.registers is None or not _fast(device) else {"maxnreg": s.registers}
    launch(kernel, programs, device, tile, *args, FAST=_fast(device), **constants, **options)


def _rows(*tensors: Tensor) -> tuple[list[Tensor], int]:
    """Views [T, H, C] of equally shaped [..., C] tensors, H = 1 where all of them have evenly spaced rows; and H."""
    width = tensors[0].shape[-1]
    views = []
    for x in tensors:
        x = x if x.dim() > 2 else x.reshape(-1, 1, width)
        views.append(rows_of(x.flatten(0, -3)))
    heads = views[0].shape[1]
    if heads > 1 and all(x.stride(0) == heads * x.stride(1) for x in views):
        views = [x.flatten(0, 1).unsqueeze(1) for x in views]
    return views, max(1, views[0].shape[1])


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    eps: float,
    swish: bool,
) -> tuple[Tensor, Tensor]:
    """y like x, and x + residual (nothing, [0], without a residual)."""
    width = x.shape[-1]
    weight, bias = dense(weight, bias)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape if residual is not None else (0,), dtype=x.dtype, device=x.device)
    views, heads = _rows(x) if residual is None else _rows(x, residual)
    rows = x.numel() // width
    s = spread(width, False, x.element_size())
    tiles = triton.cdiv(rows, s.rows)
    each = 1 if s.stages == 1 else triton.cdiv(tiles, s.programs)
    _launch(
        _forward_kernel, triton.cdiv(tiles, each) if tiles else 0, x.device, s,
        views[0], views[-1], x if weight is None else weight, x if bias is None else bias, y, total,
        *strides(views[0], views[-1]), rows, each,
        HEADS=heads, EPS=eps, LAYER=kind == "layer", SWISH=swish,
        RESIDUAL=residual is not None, WEIGHT=weight is not None, BIAS=bias is not None,
        STAGES=s.stages, **s.constants(width, x.element_size()),
    )  # fmt: skip
    return y, total


def backward(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    eps: float,
    swish: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the sum, of weight and of bias ([0] for what there is not)."""
    return _run(dy, dtotal, total, weight, bias, None, None, kind, eps, swish)[:3]


def backward_with_rows(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x and of the weight of an RMSNorm, and its result again."""
    rows = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dx, dweight, _, _ = _run(dy, None, x, weight, None, None, rows, "rms", eps, False)
    return dx, dweight, rows


def backward_with_sums(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual_bias: Tensor | None,
    kind: str,
    eps: float,
    swish: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `backward`, and the column sums of the sum's gradient, like `residual_bias` ([0] without one)."""
    return _run(dy, dtotal, total, weight, bias, residual_bias, None, kind, eps, swish)


def _run(
    dy: Tensor, dtotal: Tensor | None, total: Tensor, weight: Tensor | None, bias: Tensor | None,
    residual_bias: Tensor | None, result: Tensor | None, kind: str, eps: float, swish: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`result`: what the forward pass made is written there."""
    width = total.shape[-1]
    weight, bias = dense(weight, bias)
    dx = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    views, heads = _rows(total, dy) if dtotal is None else _rows(total, dy, dtotal)
    rows = total.numel() // width
    s = spread(width, True, total.element_size(), layer=kind == "layer")
    tiles = triton.cdiv(rows, s.rows)
    programs = min(s.programs, PARTS * 3 // 4) if swish and dtotal is not None else s.programs  # registers for three
    each = triton.cdiv(tiles, programs)
    parts = triton.cdiv(tiles, each) if tiles else 0
    present = {"WEIGHT": weight is not None, "BIAS": bias is not None, "SUMS": residual_bias is not None}
    vectors = sum(present.values())
    sums = torch.empty(parts * vectors * width, dtype=torch.float32, device=total.device)
    _launch(
        _backward_kernel, parts, total.device, s,
        views[0], views[1], views[-1], total if weight is None else weight, total if bias is None else bias, dx,
        dx if result is None else result, sums,
        *strides(views[0], views[1], views[-1]), rows, each,
        HEADS=heads, EPS=eps, LAYER=kind == "layer", SWISH=swish, DTOTAL=dtotal is not None,
        ROWS=result is not None, **present, **s.constants(width, total.element_size()),
        STAGES=s.stages,
    )  # fmt: skip
    gradients = [
        torch.empty(0 if v is None else width, dtype=total.dtype if v is None else v.dtype, device=total.device)
        for v in (weight, bias, residual_bias)
    ]
    if vectors:
        into = [g for g in gradients if g.numel()]
        launch(
            _sum_kernel, triton.cdiv(vectors * width, SUM.bn), total.device, SUM,
            sums, into[0], into[min(1, vectors - 1)], parts, C=width, BIAS=vectors > 1, BM=SUM.bm, BN=SUM.bn,
            third_f32=into[2] if vectors == 3 else None,
        )  # fmt: skip
    return dx, gradients[0], gradients[1], gradients[2]


def compile_cases() -> list[CompileCase]:
    """Both passes at a head's width, a usual width, one that is no power of two, and the widest."""
    cases = []
    for kind, width, swish in (
        ("rms", 128, False), ("rms", 512, False), ("layer", 384, True), ("layer", 512, False), ("layer", 8192, False),
    ):  # fmt: skip
        layer = kind == "layer"
        shared = {"HEADS": 1, "EPS": 1e-6, "LAYER": layer, "SWISH": swish, "WEIGHT": True, "BIAS": layer}
        for name, kernel, extra in (
            ("forward", _forward_kernel, {"RESIDUAL": True}),
            ("backward", _backward_kernel, {"DTOTAL": True, "SUMS": layer, "ROWS": not layer}),
        ):
            how = spread(width, name == "backward", layer=layer)
            constants: dict[str, object] = {
                **shared,
                **extra,
                **how.constants(width, 2),
                "STAGES": how.stages,
                "FAST": True,
            }
            types, divisible = signature(kernel, "bf16", constants)
            t = Tile(bm=how.rows, bn=width, warps=how.warps, stages=how.stages, registers=how.registers)
            title = f"norms {kind}{' swish' if swish else ''} {name} bf16 c{width}"
            cases.append(CompileCase(title, kernel, types, constants, t, divisible))
    constants = {"C": 512, "BIAS": True, "BM": SUM.bm, "BN": SUM.bn}
    types, divisible = signature(_sum_kernel, "bf16", constants)
    cases.append(CompileCase("norms sums c512", _sum_kernel, types, constants, SUM, divisible))
    return cases
