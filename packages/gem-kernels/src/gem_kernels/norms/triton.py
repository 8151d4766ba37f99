"""Norms of rows in portable Triton: one pass over memory forward and one backward.

A program holds whole rows, C columns padded to CP (a power of two), in registers as float32. The backward pass
recomputes the statistics from the rows that it must read anyway, so nothing is saved for it. Gradients of weight and
bias, and the sums for a bias in the residual, are made in two stages of fixed order: program p of P adds up tiles p,
p + P, .., then a second kernel adds up the programs. How many programs there are depends on the shape alone, so that
the bits are the same on every card.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gem_kernels import dispatch, tiling
from gem_kernels.tiling import CompileCase, Tile, launch, load_rows, rows_of, signature, store_rows, strides

__all__ = ["applies", "backward", "backward_with_rows", "backward_with_sums", "compile_cases", "forward"]

MAX_WIDTH = 8192
PARTS = 512  # programs of a backward pass at most, and rows of the first stage's result: 4 on an SM of 128 and more
SUM = Tile(bm=512, bn=8, warps=8, stages=1)  # the second stage: one step for a program, however few columns there are


@triton.jit
def _at(rows, row, head, HEADS: tl.constexpr):
    """Element offsets of rows t * HEADS + h in a [T, H, C] tensor."""
    return rows // HEADS * row + rows % HEADS * head


@triton.jit
def _vector(base, C: tl.constexpr, CP: tl.constexpr):
    dim = tl.arange(0, CP)
    return tl.load(base + dim, mask=dim < C, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _normalise(x, C: tl.constexpr, CP: tl.constexpr, EPS: tl.constexpr, LAYER: tl.constexpr):
    """Float32 rows [BM, CP], zero from C on -> the normalised rows, also zero there, and 1 / deviation [BM, 1]."""
    if LAYER:
        mean = tl.sum(x, axis=1) / C
        x = tl.where((tl.arange(0, CP) < C)[None, :], x - mean[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / C + EPS)[:, None]
    return x * inverse, inverse


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    x_ptr, residual_ptr, weight_f32, bias_f32, y_ptr, total_ptr,
    x_row, x_head, residual_row, residual_head, rows,
    HEADS: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, BM: tl.constexpr, EPS: tl.constexpr, LAYER: tl.constexpr,
    SWISH: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < rows
    x = load_rows(x_ptr, _at(row, x_row, x_head, HEADS), inside, 1, C, CP, True).to(tl.float32)
    if RESIDUAL:
        at = _at(row, residual_row, residual_head, HEADS)
        x += load_rows(residual_ptr, at, inside, 1, C, CP, True).to(tl.float32)
        rounded = x.to(total_ptr.dtype.element_ty)  # what is normalised is the sum that the caller gets
        store_rows(total_ptr, rounded, row, inside, C, C, CP)
        x = rounded.to(tl.float32)
    y, _ = _normalise(x, C, CP, EPS, LAYER)
    if WEIGHT:
        y *= _vector(weight_f32, C, CP)
    if BIAS:
        y += _vector(bias_f32, C, CP)
    if SWISH:
        y = x * tl.sigmoid(y)
    store_rows(y_ptr, y, row, inside, C, C, CP)


@triton.jit
def _fold(x, BM: tl.constexpr, CP: tl.constexpr, LANES: tl.constexpr):
    """Sums [LANES, CP] of the rows of [BM, CP] that are LANES apart, which are in one thread."""
    if LANES < BM:
        x = tl.sum(tl.reshape(x, (BM // LANES, LANES, CP)), axis=0)
    return x


@triton.jit(do_not_specialize=["rows", "tiles"])
def _backward_kernel(
    x_ptr, dy_ptr, dtotal_ptr, weight_f32, bias_f32, dx_ptr, rows_ptr, parts_f32,
    x_row, x_head, dy_row, dy_head, dtotal_row, dtotal_head, rows, tiles,
    HEADS: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, BM: tl.constexpr, EPS: tl.constexpr, LAYER: tl.constexpr,
    SWISH: tl.constexpr, DTOTAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, SUMS: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, LANES: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()  # what follows may come onto the card, where it waits
    part = tl.program_id(0).to(tl.int64)
    if WEIGHT:
        weight = _vector(weight_f32, C, CP)
        dweight = tl.zeros((LANES, CP), tl.float32)
    if BIAS:
        bias = _vector(bias_f32, C, CP)
        dbias = tl.zeros((LANES, CP), tl.float32)
    if SUMS:
        sums = tl.zeros((LANES, CP), tl.float32)
    for i in tl.range(0, tiles, num_stages=STAGES):
        row = (i * tl.num_programs(0) + part) * BM + tl.arange(0, BM)  # all programs read neighbouring rows at a time
        inside = row < rows
        x = load_rows(x_ptr, _at(row, x_row, x_head, HEADS), inside, 1, C, CP, True).to(tl.float32)
        dy = load_rows(dy_ptr, _at(row, dy_row, dy_head, HEADS), inside, 1, C, CP, True).to(tl.float32)
        normal, inverse = _normalise(x, C, CP, EPS, LAYER)
        dx = tl.zeros((BM, CP), tl.float32)
        if DTOTAL:
            at = _at(row, dtotal_row, dtotal_head, HEADS)
            dx += load_rows(dtotal_ptr, at, inside, 1, C, CP, True).to(tl.float32)
        if ROWS:  # what the forward pass made, for a caller who did not keep it
            store_rows(rows_ptr, normal * weight if WEIGHT else normal, row, inside, C, C, CP)
        if SWISH:  # y = x sigmoid(a): x is a factor itself, and a carries the rest
            a = normal
            if WEIGHT:
                a = a * weight
            if BIAS:
                a = a + bias
            open_ = tl.sigmoid(a)
            dx += dy * open_
            dy = dy * x * open_ * (1.0 - open_)
        if BIAS:
            dbias += _fold(dy, BM, CP, LANES)
        if WEIGHT:
            dweight += _fold(dy * normal, BM, CP, LANES)
            dy = dy * weight
        along = tl.sum(dy * normal, axis=1)[:, None] / C
        d = dy - normal * along
        if LAYER:
            d -= tl.sum(dy, axis=1)[:, None] / C
        dx += d * inverse
        store_rows(dx_ptr, dx, row, inside, C, C, CP)
        if SUMS:
            sums += _fold(dx, BM, CP, LANES)
    dim = tl.arange(0, CP)
    row = parts_f32 + part * ((WEIGHT + BIAS + SUMS) * C)
    if WEIGHT:
        tl.store(row + dim, tl.sum(dweight, axis=0), mask=dim < C)
    if BIAS:
        tl.store(row + C + dim, tl.sum(dbias, axis=0), mask=dim < C)
    if SUMS:
        tl.store(row + (WEIGHT + BIAS) * C + dim, tl.sum(sums, axis=0), mask=dim < C)


@triton.jit(do_not_specialize=["parts"])
def _sum_kernel(
    parts_f32, first_f32, second_f32, parts, C: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    third_f32=None, EARLY: tl.constexpr = False,
):  # fmt: skip
    """The second stage: column sums of [parts, vectors, C], one for each vector: one, two (BIAS) or three of them.
    EARLY: it is launched while the first stage runs, and waits for its end here.
    """
    if EARLY:
        gdc_wait()
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


def tile(width: int, backward: bool) -> Tile:
    """Rows of a program and its warps: at least 2048 elements, 16 (forward 32) of them for a thread up to 4096 columns.

    Backward, the loads of two more tiles are on their way while one is computed: without them a program spends half
    of its time with none (docs/notes/norms.md).
    """
    columns = max(16, triton.next_power_of_2(width))
    rows = max(1, 2048 // columns)
    if backward:
        return Tile(bm=rows, bn=columns, warps=4 if columns < 4096 else 8, stages=3)
    return Tile(bm=rows, bn=columns, warps=max(2, columns // 1024), stages=1)


def lanes(t: Tile, size: int) -> int:
    """How many rows of a tile the warps of a program load at once, elements of `size` bytes: a row that is so far from
    another is in the same thread.
    """
    return min(t.bm, max(1, t.warps * (32 * 16 // size) // t.bn))


@functools.cache
def _early(device: torch.device) -> bool:
    """Whether a kernel may be launched while the one before it runs ("programmatic dependent launch")."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


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
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape if residual is not None else (0,), dtype=x.dtype, device=x.device)
    views, heads = _rows(x) if residual is None else _rows(x, residual)
    rows = x.numel() // width
    t = tile(width, False)
    launch(
        _forward_kernel, triton.cdiv(rows, t.bm), x.device, t,
        views[0], views[-1], x if weight is None else weight, x if bias is None else bias, y, total,
        *strides(views[0], views[-1]), rows,
        HEADS=heads, C=width, CP=t.bn, BM=t.bm, EPS=eps, LAYER=kind == "layer", SWISH=swish,
        RESIDUAL=residual is not None, WEIGHT=weight is not None, BIAS=bias is not None,
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
    dx = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    views, heads = _rows(total, dy) if dtotal is None else _rows(total, dy, dtotal)
    rows = total.numel() // width
    t = tile(width, True)
    tiles = triton.cdiv(rows, t.bm)
    # All programs should be on the card at once: a gated LayerNorm of 512 columns leaves room for three on an SM.
    each = triton.cdiv(tiles, PARTS * 3 // 4 if swish and kind == "layer" and t.bn == 512 else PARTS)
    parts = triton.cdiv(tiles, each) if tiles else 0
    early = {"EARLY": True} if _early(total.device) else {}
    present = {"WEIGHT": weight is not None, "BIAS": bias is not None, "SUMS": residual_bias is not None}
    vectors = sum(present.values())
    sums = torch.empty(parts * vectors * width, dtype=torch.float32, device=total.device)
    launch(
        _backward_kernel, parts, total.device, t,
        views[0], views[1], views[-1], total if weight is None else weight, total if bias is None else bias, dx,
        dx if result is None else result, sums,
        *strides(views[0], views[1], views[-1]), rows, each,
        HEADS=heads, C=width, CP=t.bn, BM=t.bm, EPS=eps, LAYER=kind == "layer", SWISH=swish, DTOTAL=dtotal is not None,
        ROWS=result is not None, STAGES=t.stages, LANES=lanes(t, total.element_size()), **present,
        **early,
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
            third_f32=into[2] if vectors == 3 else None, **early, **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return dx, gradients[0], gradients[1], gradients[2]


def compile_cases() -> list[CompileCase]:
    """Both passes at a head's width, a usual width, one that is no power of two, and the widest."""
    cases = []
    for kind, width, swish in (
        ("rms", 128, False), ("rms", 512, False), ("layer", 384, True), ("layer", 512, False), ("layer", 8192, False),
    ):  # fmt: skip
        layer = kind == "layer"
        shared = {"HEADS": 1, "C": width, "EPS": 1e-6, "LAYER": layer, "SWISH": swish, "WEIGHT": True, "BIAS": layer}
        for name, kernel, extra in (
            ("forward", _forward_kernel, {"RESIDUAL": True}),
            ("backward", _backward_kernel, {"DTOTAL": True, "SUMS": layer, "ROWS": not layer}),
        ):
            t = tile(width, name == "backward")
            constants: dict[str, object] = {**shared, **extra, "CP": t.bn, "BM": t.bm}
            if name == "backward":
                constants |= {"STAGES": t.stages, "LANES": lanes(t, 2), "EARLY": False}
            types, divisible = signature(kernel, "bf16", constants)
            title = f"norms {kind}{' swish' if swish else ''} {name} bf16 c{width}"
            cases.append(CompileCase(title, kernel, types, constants, t, divisible))
    for early, arch in ((False, (80, 90)), (True, (90, 100, 120))):
        constants = {"C": 512, "BIAS": True, "BM": SUM.bm, "BN": SUM.bn, "EARLY": early}
        types, divisible = signature(_sum_kernel, "bf16", constants)
        name = f"norms sums c512{' early' if early else ''}"
        cases.append(CompileCase(name, _sum_kernel, types, constants, SUM, divisible, arch))
    return cases
