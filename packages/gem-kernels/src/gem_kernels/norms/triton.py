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
from torch import Tensor

from gem_kernels import dispatch, tiling
from gem_kernels.checks import dense
from gem_kernels.norms.kernels import backward_kernel, forward_kernel, sum_kernel
from gem_kernels.tiling import CompileCase, Tile, launch, rows_of, signature, strides

__all__ = [
    "applies",
    "backward",
    "backward_again",
    "backward_with_rows",
    "backward_with_sums",
    "compile_cases",
    "forward",
]

MAX_WIDTH = 8192
PARTS = 512  # programs of a backward pass at most, and rows of the first stage's result: 4 on an SM of 128 and more
ALONE = 1536  # bytes of a LayerNorm's row up to which a backward program is one warp (`alone`)
SUM = Tile(bm=512, bn=8, warps=8, stages=1)  # the second stage: one step for a program, however few columns there are
SUM_MANY = Tile(bm=2048, bn=8, warps=32, stages=1)  # of the sums of programs of one warp


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


def applies(problem: dispatch.Problem) -> tuple[bool, str]:
    """Which problems these kernels take: `head_dim` is the width of a row."""
    if problem.head_dim > MAX_WIDTH:
        return False, f"the Triton norms keep a row in registers, at most {MAX_WIDTH} wide; got {problem.head_dim}"
    return tiling.applies_to_dtype(problem)


def alone(width: int, size: int = 2, *, extra: int = 0, stages: int = 3) -> Spread:
    """Backward: a program is one warp, which waits for no other one.

    A lane has 16 columns of a row, or 24 where that leaves no padding. Of each it keeps about six numbers, and one more
    for each of `extra` operands: so many registers decide how many programs fit on an SM.
    """
    lane = 16 // size  # elements that a thread loads at once
    lanes = min(32, triton.next_power_of_2(triton.cdiv(width, 16)))
    if width == 12 * lanes and lanes > 1:
        lanes //= 2
    span = lanes * lane
    pieces = triton.cdiv(width, span)
    kept = (6 + extra) * pieces * lane
    resident, registers = (16, 128) if kept <= 112 else (12, 168) if kept <= 144 else (8, 255)
    return Spread(
        rows=32 // lanes,
        cuts=triton.next_power_of_2(pieces),
        span=span,
        warps=1,
        stages=stages,
        programs=PARTS * resident // 4,
        registers=registers,
    )


def spread(width: int, backward: bool, size: int = 2, *, layer: bool = True, extra: int = 0) -> Spread:
    """How rows of `width` elements of `size` bytes lie in a program; `layer`: of a LayerNorm. `extra`: operands of the
    backward pass besides the rows and their gradients, a gate and a residual's gradient.

    A row of up to 1024 bytes (forward 2048) is in one warp; a thread has 16 elements of a wider one. Spans are as long
    as the threads of a row load at once, or half of that where it leaves less padding. Backward, the loads of two more
    tiles are on their way while one is computed: without them a program spends half of its time with none
    (docs/notes/norms.md).
    """
    if backward and layer and width * size <= ALONE:
        return alone(width, size, extra=extra)
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
    if extra == 2:
        programs = min(programs, PARTS * 3 // 4)  # registers for three on an SM
    return Spread(
        rows=rows,
        cuts=cuts,
        span=span,
        warps=warps,
        stages=3 if backward else 1,
        programs=programs,
        registers=registers,
    )


def fast_math(device: torch.device) -> bool:
    """Whether the card has PTX's approximations."""
    return device.type == "cuda" and torch.version.hip is None


def _launch(kernel: Any, programs: int, device: torch.device, s: Spread, *args: Any, **constants: Any) -> None:
    tile = Tile(bm=s.rows, bn=s.cuts * s.span, warps=s.warps, stages=s.stages)
    options = {} if s.registers is None or not fast_math(device) else {"maxnreg": s.registers}
    launch(kernel, programs, device, tile, *args, FAST=fast_math(device), **constants, **options)


def rows_with_heads(*tensors: Tensor) -> tuple[list[Tensor], int]:
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
    views, heads = rows_with_heads(x) if residual is None else rows_with_heads(x, residual)
    rows = x.numel() // width
    s = spread(width, False, x.element_size())
    tiles = triton.cdiv(rows, s.rows)
    each = 1 if s.stages == 1 else triton.cdiv(tiles, s.programs)
    _launch(
        forward_kernel, triton.cdiv(tiles, each) if tiles else 0, x.device, s,
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
    how: Spread | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the sum, of weight and of bias ([0] for what there is not). `how`: in the place of `spread`'s."""
    return _run(dy, dtotal, total, weight, bias, None, None, kind, eps, swish, how)[:3]


def backward_with_rows(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x and of the weight of an RMSNorm, and its result again."""
    rows = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dx, dweight, _, _ = _run(dy, None, x, weight, None, None, rows, "rms", eps, False)
    return dx, dweight, rows


def backward_again(
    dy: Tensor, dtotal: Tensor | None, total: Tensor, weight: Tensor | None, bias: Tensor | None,
    residual_bias: Tensor | None, kind: str, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `backward_with_sums`, and the norm's result again."""
    rows = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    return *_run(dy, dtotal, total, weight, bias, residual_bias, rows, kind, eps, False), rows


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
    residual_bias: Tensor | None, result: Tensor | None, kind: str, eps: float, swish: bool, how: Spread | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`result`: what the forward pass made is written there."""
    width = total.shape[-1]
    weight, bias = dense(weight, bias)
    dx = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    views, heads = rows_with_heads(total, dy) if dtotal is None else rows_with_heads(total, dy, dtotal)
    rows = total.numel() // width
    extra = swish + (dtotal is not None)
    s = how or spread(width, True, total.element_size(), layer=kind == "layer", extra=extra)
    tiles = triton.cdiv(rows, s.rows)
    each = triton.cdiv(tiles, s.programs)
    parts = triton.cdiv(tiles, each) if tiles else 0
    present = {"WEIGHT": weight is not None, "BIAS": bias is not None, "SUMS": residual_bias is not None}
    vectors = sum(present.values())
    sums = torch.empty(parts * vectors * width, dtype=torch.float32, device=total.device)
    _launch(
        backward_kernel, parts, total.device, s,
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
        t = SUM if parts <= 2 * SUM.bm else SUM_MANY
        launch(
            sum_kernel, triton.cdiv(vectors * width, t.bn), total.device, t,
            sums, into[0], into[min(1, vectors - 1)], parts, C=width, BIAS=vectors > 1, BM=t.bm, BN=t.bn,
            third_f32=into[2] if vectors == 3 else None,
        )  # fmt: skip
    return dx, gradients[0], gradients[1], gradients[2]


def _compile_case(
    kind: str, width: int, swish: bool, how: Spread, *, name: str, note: str = "", rows: bool = False
) -> CompileCase:  # fmt: skip
    """One pass, `name`, with what it may have besides: a residual, sums for its bias, or the forward pass's rows."""
    layer = kind == "layer"
    kernel = forward_kernel if name == "forward" else backward_kernel
    extra = {"RESIDUAL": True}
    if name != "forward":
        extra = {"DTOTAL": True, "SUMS": layer, "ROWS": rows or not layer}
    constants: dict[str, object] = {
        "HEADS": 1, "EPS": 1e-6, "LAYER": layer, "SWISH": swish, "WEIGHT": True, "BIAS": layer, **extra,
        **how.constants(width, 2), "STAGES": how.stages, "FAST": True,
    }  # fmt: skip
    types, divisible = signature(kernel, "bf16", constants)
    t = Tile(bm=how.rows, bn=width, warps=how.warps, stages=how.stages, registers=how.registers)
    title = f"norms {kind}{' swish' if swish else ''} {name} bf16 c{width}{note}"
    return CompileCase(title, kernel, types, constants, t, divisible)


def compile_cases() -> list[CompileCase]:
    """Both passes at a head's width, a usual width, one that is no power of two, and the widest; then programs of one
    warp.
    """
    cases = []
    for kind, width, swish in (
        ("rms", 128, False), ("rms", 512, False), ("layer", 384, True), ("layer", 512, False), ("layer", 8192, False),
    ):  # fmt: skip
        for name in ("forward", "backward"):
            how = spread(width, name == "backward", layer=kind == "layer")
            cases.append(_compile_case(kind, width, swish, how, name=name))
    for width, swish in ((512, False), (512, True), (384, False)):
        how = alone(width, extra=1 + swish)
        cases.append(_compile_case("layer", width, swish, how, name="backward", note=" 1-warp"))
    how = spread(512, True, extra=1)
    cases.append(_compile_case("layer", 512, False, how, name="backward", note=" rows", rows=True))
    for t, note in ((SUM, ""), (SUM_MANY, " many")):
        constants = {"C": 512, "BIAS": True, "BM": t.bm, "BN": t.bn}
        types, divisible = signature(sum_kernel, "bf16", constants)
        cases.append(CompileCase(f"norms sums c512{note}", sum_kernel, types, constants, t, divisible))
    return cases
