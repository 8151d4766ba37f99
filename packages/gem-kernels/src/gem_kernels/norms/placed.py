"""Norms of x + residual whose residual has its rows elsewhere, in portable Triton: row i of x meets row places[i].

What an operator has made for the rows of x and for others in between need not be sorted out first. As in
`gem_kernels.norms.triton` the statistics are computed anew in the backward pass, and sums over rows are made in two
stages of fixed order. The rows' gradient is written twice, for x and in the places of the residual.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels.checks import dense
from gem_kernels.projections.gates import shares, sum_up
from gem_kernels.tiling import CompileCase, Tile, launch, load_rows, rows_of, signature, store_rows

__all__ = ["backward", "compile_cases", "forward"]

TWICE = 384  # programs of a backward pass of two norms: its registers leave room for three on an SM


@triton.jit
def _vector(base, C: tl.constexpr, CP: tl.constexpr):
    dim = tl.arange(0, CP)
    return tl.load(base + dim, mask=dim < C, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _normal(x, C: tl.constexpr, CP: tl.constexpr, EPS: tl.constexpr, LAYER: tl.constexpr):
    """Float32 rows [BM, CP], zero from C on -> the normed rows, also zero there, and 1 / deviation [BM, 1]."""
    if LAYER:
        mean = tl.sum(x, axis=1) / C
        x = tl.where((tl.arange(0, CP) < C)[None, :], x - mean[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / C + EPS)[:, None]
    return x * inverse, inverse


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    x_ptr, residual_ptr, places_offsets, weight_f32, bias_f32, y_ptr, total_ptr, bare_ptr, x_row, residual_row, rows,
    C: tl.constexpr, CP: tl.constexpr, BM: tl.constexpr, EPS: tl.constexpr, LAYER: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, BARE: tl.constexpr, BARE_EPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < rows
    place = tl.load(places_offsets + row, mask=inside, other=0)
    x = load_rows(x_ptr, row, inside, x_row, C, CP, True).to(tl.float32)
    x += load_rows(residual_ptr, place, inside, residual_row, C, CP, True).to(tl.float32)
    rounded = x.to(total_ptr.dtype.element_ty)  # what is normed is the sum that the caller gets
    store_rows(total_ptr, rounded, row, inside, C, C, CP)
    x = rounded.to(tl.float32)
    if BARE:
        bare, _ = _normal(x, C, CP, BARE_EPS, True)
        store_rows(bare_ptr, bare, row, inside, C, C, CP)
    y, _ = _normal(x, C, CP, EPS, LAYER)
    if WEIGHT:
        y *= _vector(weight_f32, C, CP)
    if BIAS:
        y += _vector(bias_f32, C, CP)
    store_rows(y_ptr, y, row, inside, C, C, CP)


@triton.jit
def _back(dy, normal, inverse, C: tl.constexpr, LAYER: tl.constexpr):
    """The gradient of rows from that of their norm."""
    d = dy - normal * (tl.sum(dy * normal, axis=1)[:, None] / C)
    if LAYER:
        d -= tl.sum(dy, axis=1)[:, None] / C
    return d * inverse


@triton.jit
def _fold(x, BM: tl.constexpr, CP: tl.constexpr, LANES: tl.constexpr):
    """Sums [LANES, CP] of the rows of [BM, CP] that are LANES apart, which are in one thread."""
    if LANES < BM:
        x = tl.sum(tl.reshape(x, (BM // LANES, LANES, CP)), axis=0)
    return x


@triton.jit(do_not_specialize=["rows", "tiles"])
def _backward_kernel(
    x_ptr, dy_ptr, dtotal_ptr, dbare_ptr, places_offsets, weight_f32, dx_ptr, dresidual_ptr, parts_f32,
    dy_row, dtotal_row, dbare_row, rows, tiles,
    C: tl.constexpr, CP: tl.constexpr, BM: tl.constexpr, EPS: tl.constexpr, LAYER: tl.constexpr, DTOTAL: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, SUMS: tl.constexpr, STAGES: tl.constexpr, LANES: tl.constexpr,
    BARE: tl.constexpr, BARE_EPS: tl.constexpr, rows_ptr=None, bias_f32=None,
):  # fmt: skip
    """With `rows_ptr` the norm's result again, for which it needs a bias that there is."""
    ROWS: tl.constexpr = rows_ptr is not None
    part = tl.program_id(0).to(tl.int64)
    if WEIGHT:
        weight = _vector(weight_f32, C, CP)
        dweight = tl.zeros((LANES, CP), tl.float32)
    if BIAS:
        dbias = tl.zeros((LANES, CP), tl.float32)
    if SUMS:
        sums = tl.zeros((LANES, CP), tl.float32)
    for i in tl.range(0, tiles, num_stages=STAGES):
        row = (i * tl.num_programs(0) + part) * BM + tl.arange(0, BM)  # all programs read neighbouring rows at a time
        inside = row < rows
        place = tl.load(places_offsets + row, mask=inside, other=0)
        x = load_rows(x_ptr, row, inside, C, C, CP, True).to(tl.float32)
        dy = load_rows(dy_ptr, row, inside, dy_row, C, CP, True).to(tl.float32)
        normal, inverse = _normal(x, C, CP, EPS, LAYER)
        if ROWS:
            y = normal
            if WEIGHT:
                y = y * weight
            if BIAS:
                y = y + _vector(bias_f32, C, CP)
            store_rows(rows_ptr, y, row, inside, C, C, CP)
        if BIAS:
            dbias += _fold(dy, BM, CP, LANES)
        if WEIGHT:
            dweight += _fold(dy * normal, BM, CP, LANES)
            dy = dy * weight
        d = _back(dy, normal, inverse, C, LAYER)
        if BARE:
            dbare = load_rows(dbare_ptr, row, inside, dbare_row, C, CP, True).to(tl.float32)
            normal, inverse = _normal(x, C, CP, BARE_EPS, True)
            dbare = _back(dbare, normal, inverse, C, True)
            d += tl.where((tl.arange(0, CP) < C)[None, :], dbare, 0.0)
        if DTOTAL:
            d += load_rows(dtotal_ptr, row, inside, dtotal_row, C, CP, True).to(tl.float32)
        store_rows(dx_ptr, d, row, inside, C, C, CP)
        store_rows(dresidual_ptr, d, place, inside, C, C, CP)
        if SUMS:
            sums += _fold(d, BM, CP, LANES)
    dim = tl.arange(0, CP)
    to = parts_f32 + part * ((WEIGHT + BIAS + SUMS) * C) + dim
    if WEIGHT:
        tl.store(to, tl.sum(dweight, axis=0), mask=dim < C)
    if BIAS:
        tl.store(to + WEIGHT * C, tl.sum(dbias, axis=0), mask=dim < C)
    if SUMS:
        tl.store(to + (WEIGHT + BIAS) * C, tl.sum(sums, axis=0), mask=dim < C)


@triton.jit(do_not_specialize=["count"])
def _clear_kernel(
    out_ptr, others_offsets, count, C: tl.constexpr, CP: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """Zeros in the rows `others` [count] of [., C]."""
    i = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    row = tl.load(others_offsets + i, mask=i < count, other=0)
    store_rows(out_ptr, tl.zeros((BM, CP), tl.float32), row, i < count, C, C, CP)


def _tile(width: int, backward: bool) -> Tile:
    """At least 2048 elements; backward, two more tiles are on their way while one is computed."""
    columns = max(16, triton.next_power_of_2(width))
    warps = (4 if columns < 4096 else 8) if backward else max(2, columns // 1024)
    return Tile(bm=max(1, 2048 // columns), bn=columns, warps=warps, stages=3 if backward else 1)


def _lanes(t: Tile, size: int) -> int:
    """How many rows of a tile the warps load at once, elements of `size` bytes."""
    return min(t.bm, max(1, t.warps * (32 * 16 // size) // t.bn))


def forward(
    x: Tensor, residual: Tensor, places: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float,
    bare_eps: float | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """y and x + residual[places], [T, C] each; with `bare_eps`, also LayerNorm of that sum without weight and bias."""
    x, residual, (rows, width) = rows_of(x), rows_of(residual), x.shape
    weight, bias = dense(weight, bias)
    y, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    bare = None if bare_eps is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    t = _tile(width, False)
    launch(
        _forward_kernel, triton.cdiv(rows, t.bm), x.device, t,
        x, residual, places, x if weight is None else weight, x if bias is None else bias, y, total,
        y if bare is None else bare, x.stride(0), residual.stride(0), rows,
        C=width, CP=t.bn, BM=t.bm, EPS=eps, LAYER=kind == "layer", WEIGHT=weight is not None, BIAS=bias is not None,
        BARE=bare is not None, BARE_EPS=bare_eps or 1.0,
    )  # fmt: skip
    return y, total, bare


def backward(
    dy: Tensor, dtotal: Tensor | None, total: Tensor, places: Tensor, others: Tensor, weight: Tensor | None,
    bias: Tensor | None, residual_bias: Tensor | None, kind: str, eps: float, dbare: Tensor | None = None,
    bare_eps: float | None = None, again: Tensor | None = None,
) -> tuple[Tensor, Tensor, list[Tensor | None]]:  # fmt: skip
    """The sum's gradient, for x [T, C] and in the places of the residual [T + N, C], whose `others` are zero; those of
    weight, bias and residual_bias. Into `again` [T, C], if given, goes the norm's result once more.
    """
    rows, width = total.shape
    weight, bias = dense(weight, bias)
    dx = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    dresidual = torch.empty(rows + others.shape[0], width, dtype=total.dtype, device=total.device)
    clear = _tile(width, False)
    launch(
        _clear_kernel, triton.cdiv(others.shape[0], clear.bm), total.device, clear, dresidual, others, others.shape[0],
        C=width, CP=clear.bn, BM=clear.bm,
    )  # fmt: skip
    dy = rows_of(dy)
    dtotal, dbare = (None if d is None else rows_of(d) for d in (dtotal, dbare))
    t = _tile(width, True)
    parts, each = shares(rows, t.bm, TWICE if dbare is not None else None)  # all on the card at once
    vectors = (weight, bias, residual_bias)
    gradients = [None if v is None else torch.zeros_like(v) for v in vectors]
    into = [g for g in gradients if g is not None]
    sums = torch.empty(parts * len(into) * width, dtype=torch.float32, device=total.device)
    strides = [dy.stride(0) if d is None else d.stride(0) for d in (dy, dtotal, dbare)]
    launch(
        _backward_kernel, parts, total.device, t,
        total, dy, dy if dtotal is None else dtotal, dy if dbare is None else dbare, places,
        total if weight is None else weight, dx, dresidual, sums, *strides, rows, each,
        C=width, CP=t.bn, BM=t.bm, EPS=eps, LAYER=kind == "layer", DTOTAL=dtotal is not None,
        WEIGHT=weight is not None, BIAS=bias is not None, SUMS=residual_bias is not None, STAGES=t.stages,
        LANES=_lanes(t, total.element_size()), BARE=dbare is not None, BARE_EPS=bare_eps or 1.0, rows_ptr=again,
        bias_f32=None if again is None else bias,
    )  # fmt: skip
    if into and parts:
        sum_up(sums, parts, *into)
    return dx, dresidual, gradients


def compile_cases() -> list[CompileCase]:
    """At the preset "large", and at a width that is no power of two."""
    cases = []
    for kind, width, bare in (("rms", 512, True), ("rms", 512, False), ("layer", 72, True)):
        layer = kind == "layer"
        shared: dict[str, object] = {"C": width, "EPS": 1e-6, "LAYER": layer, "WEIGHT": True, "BIAS": layer}
        shared |= {"BARE": bare, "BARE_EPS": 1e-6}
        for name, kernel in (("forward", _forward_kernel), ("backward", _backward_kernel)):
            t = _tile(width, name == "backward")
            constants = {**shared, "CP": t.bn, "BM": t.bm}
            without: list[dict[str, object]] = [{}]  # arguments that are not there
            if name == "backward":
                constants |= {"DTOTAL": True, "SUMS": True, "STAGES": t.stages, "LANES": _lanes(t, 2)}
                without = [{"rows_ptr": None, "bias_f32": None}, {} if layer else {"bias_f32": None}]
            for nothing, note in zip(without, ("", " rows"), strict=False):
                types, divisible = signature(kernel, "bf16", constants | nothing)
                title = f"norms placed {kind}{' bare' if bare else ''} {name}{note} bf16 c{width}"
                cases.append(CompileCase(title, kernel, types, constants | nothing, t, divisible))
    t = _tile(512, False)
    constants = {"C": 512, "CP": t.bn, "BM": t.bm}
    types, divisible = signature(_clear_kernel, "bf16", constants)
    return [*cases, CompileCase("norms placed clear bf16 c512", _clear_kernel, types, constants, t, divisible)]
