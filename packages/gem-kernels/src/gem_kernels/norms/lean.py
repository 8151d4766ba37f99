"""The backward pass of a norm once more, with fewer instructions and steps: a variant beside `triton`, off by default.

What is different (docs/notes/norms.md, "Counted bounds"):

- Fewer exchanges between the lanes of a row. Of a row of x and of g = dy * weight the sums of (x - mean)^2, g and
  g (x - mean) do not need each other and cross the lanes together: two exchanges one after the other for a LayerNorm
  where there were three, one for an RMSNorm where there were two. A gate needs one more.
- A pair of bfloat16 becomes two float32 by two instructions. The gate's exponent has its factor from the weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels.norms import triton as usual
from gem_kernels.norms.kernels import columns, in_width, store, sum_kernel
from gem_kernels.norms.triton import fast_math, rows_with_heads
from gem_kernels.tiling import CompileCase, Tile, launch, signature

__all__ = ["backward", "compile_cases"]

NLOG2E = tl.constexpr(-1.4426950408889634)
NLN2 = tl.constexpr(-0.6931471805599453)


@triton.jit
def _row_sum(x):
    """[BM, CUTS, SPAN] -> [BM]; what a thread has first. Sums that do not need each other cross the lanes together."""
    return tl.sum(tl.sum(x, 1), 1)


@triton.jit
def _wide(x, FAST: tl.constexpr):
    """Float32. FAST: of a pair of bfloat16 by a shift and a mask, where the compiler takes three instructions."""
    if FAST and x.dtype == tl.bfloat16:
        bits = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], tl.int32, is_pure=True, pack=2
        )
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _gate(a, FAST: tl.constexpr):
    """1 / (1 + 2^a)."""
    if FAST:
        e = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [a], tl.float32, is_pure=True, pack=1)
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [e + 1.0], tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / (1.0 + tl.exp2(a))


@triton.jit
def _load(base, at, inside, C: tl.constexpr, CUTS: tl.constexpr, SPAN: tl.constexpr):
    """[BM, CUTS, SPAN] of the rows at the element offsets `at`, as they are; 0 outside."""
    where = base + at[:, None, None] + columns(CUTS, SPAN)[None, :, :]
    mask = inside[:, None, None]
    if C != CUTS * SPAN:
        mask = mask & in_width(C, CUTS, SPAN)[None, :, :]
    return tl.load(where, mask=mask, other=0.0)


@triton.jit
def _vector(base, factor, C: tl.constexpr, CUTS: tl.constexpr, SPAN: tl.constexpr, BM: tl.constexpr):
    """[BM, CUTS, SPAN] of a vector times a factor, 0 past its end: every row's threads have what they need of it."""
    column = columns(CUTS, SPAN)[None, :, :] + tl.zeros((BM, 1, 1), tl.int32)
    return tl.load(base + column, mask=column < C, other=0.0).to(tl.float32) * factor


@triton.jit
def _wide_row(x):
    """[BM] -> [BM, 1, 1]."""
    return x[:, None, None]


@triton.jit
def _tile(
    x, dy, weight, bias, dweight, dbias,
    C: tl.constexpr, CUTS: tl.constexpr, SPAN: tl.constexpr, EPS: tl.constexpr, LAYER: tl.constexpr,
    SWISH: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """dx [BM, CUTS, SPAN] in float32, and the sums for weight and bias with these rows' part. Rows of zeros in dy add
    nothing to them. SWISH: weight and bias have the factor -log2(e).
    """
    x = _wide(x, FAST)
    dy = _wide(dy, FAST)
    d = x
    if LAYER:
        mean = _row_sum(x) * (1.0 / C)
        d = x - _wide_row(mean)
        if C != CUTS * SPAN:
            d = tl.where(in_width(C, CUTS, SPAN)[None, :, :], d, 0.0)
    if SWISH:
        inverse = tl.rsqrt(_row_sum(d * d) * (1.0 / C) + EPS)
        n = d * _wide_row(inverse)
        gate = _gate(n * weight + bias, FAST)
        straight = dy * gate
        dy = straight * x
        dy = dy - dy * gate
        g = dy * weight
        total = _row_sum(g)
        along = _row_sum(g * n)
        slope = inverse * NLN2  # takes the factor of the weight back
        along = along * (1.0 / C)
    else:
        g = dy
        if WEIGHT:
            g = dy * weight
        squares = _row_sum(d * d)
        along = _row_sum(g * d)
        if LAYER:
            total = _row_sum(g)
        inverse = tl.rsqrt(squares * (1.0 / C) + EPS)
        n = d * _wide_row(inverse)
        slope = inverse
        along = along * inverse * (1.0 / C)
    if BIAS:
        dbias += dy
    if WEIGHT:
        dweight += dy * n
    if LAYER:
        dx = n * _wide_row(-along * slope) - _wide_row(total * slope * (1.0 / C))
    else:
        dx = n * _wide_row(-along * slope)
    dx = g * _wide_row(slope) + dx
    if SWISH:
        dx += straight
    return dx, dweight, dbias


@triton.jit(do_not_specialize=["rows", "tiles"])
def _backward_kernel(
    x_ptr, dy_ptr, weight_f32, bias_f32, dx_ptr, parts_f32, x_row, dy_row, rows, tiles,
    C: tl.constexpr, BM: tl.constexpr, CUTS: tl.constexpr, SPAN: tl.constexpr, EPS: tl.constexpr,
    LAYER: tl.constexpr, SWISH: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, STAGES: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """As `kernels.backward_kernel`, of evenly spaced rows without a residual."""
    part = tl.program_id(0).to(tl.int64)
    factor: tl.constexpr = NLOG2E if SWISH else 1.0
    weight = factor
    bias = 0.0
    dweight = 0.0
    dbias = 0.0
    if WEIGHT:
        weight = _vector(weight_f32, factor, C, CUTS, SPAN, BM)
        dweight = tl.zeros((BM, CUTS, SPAN), tl.float32)
    if BIAS:
        bias = _vector(bias_f32, factor, C, CUTS, SPAN, BM)
        dbias = tl.zeros((BM, CUTS, SPAN), tl.float32)
    row = part * BM + tl.arange(0, BM)
    for _ in tl.range(0, tiles, num_stages=STAGES):
        x = _load(x_ptr, row * x_row, row < rows, C, CUTS, SPAN)
        dy = _load(dy_ptr, row * dy_row, row < rows, C, CUTS, SPAN)
        dx, dweight, dbias = _tile(
            x, dy, weight, bias, dweight, dbias, C, CUTS, SPAN, EPS, LAYER, SWISH, WEIGHT, BIAS, FAST
        )
        store(dx_ptr, dx, row, row < rows, C, CUTS, SPAN)
        row += tl.num_programs(0) * BM
    column = columns(CUTS, SPAN)
    into = parts_f32 + part * ((WEIGHT + BIAS) * C) + column
    if WEIGHT:
        tl.store(into, tl.sum(dweight, axis=0), mask=column < C)
    if BIAS:
        tl.store(into + C, tl.sum(dbias, axis=0), mask=column < C)


def _spread(width: int, size: int, swish: bool) -> usual.Spread:
    """A gate takes more registers than in the usual kernel: as one operand more."""
    return usual.alone(width, size, extra=2 * swish)


def _constants(s: usual.Spread, width: int) -> dict[str, int]:
    return {"C": width, "BM": s.rows, "CUTS": s.cuts, "SPAN": s.span, "STAGES": s.stages}


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float, swish: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x [.., C], weight and bias ([0] for what there is not). Rows must be evenly spaced."""
    width, size = x.shape[-1], x.element_size()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (x, dy), heads = rows_with_heads(x, dy)
    assert heads == 1, "heads that are spaced otherwise than their tokens run in `triton`"
    rows = x.shape[0]
    s = _spread(width, size, swish)
    tiles = triton.cdiv(rows, s.rows)
    each = triton.cdiv(tiles, s.programs)
    parts = triton.cdiv(tiles, each) if tiles else 0
    present = {"WEIGHT": weight is not None, "BIAS": bias is not None}
    vectors = sum(present.values())
    sums = torch.empty(parts * vectors * width, dtype=torch.float32, device=x.device)
    fast = fast_math(x.device)
    options = {"maxnreg": s.registers} if fast else {}
    launch(
        _backward_kernel, parts, x.device, Tile(bm=s.rows, bn=width, warps=s.warps, stages=s.stages),
        x, dy, x if weight is None else weight, x if bias is None else bias, dx, sums, x.stride(0), dy.stride(0), rows,
        each, EPS=eps, LAYER=kind == "layer", SWISH=swish, FAST=fast, **present, **_constants(s, width), **options,
    )  # fmt: skip
    gradients = [
        torch.empty(0 if v is None else width, dtype=x.dtype if v is None else v.dtype, device=x.device)
        for v in (weight, bias)
    ]
    if vectors:
        into = [g for g in gradients if g.numel()]
        t = usual.SUM_MANY
        launch(
            sum_kernel, triton.cdiv(vectors * width, t.bn), x.device, t,
            sums, into[0], into[-1], parts, C=width, BIAS=vectors > 1, BM=t.bm, BN=t.bn,
        )  # fmt: skip
    return dx, gradients[0], gradients[1]


def compile_cases() -> list[CompileCase]:
    """The widths that it is for."""
    cases = []
    for width, swish in ((384, False), (512, False), (512, True)):
        s = _spread(width, 2, swish)
        constants: dict[str, object] = {
            "EPS": 1e-6, "LAYER": True, "SWISH": swish, "WEIGHT": True, "BIAS": True, "FAST": True,
            **_constants(s, width),
        }  # fmt: skip
        types, divisible = signature(_backward_kernel, "bf16", constants)
        tile = Tile(bm=s.rows, bn=width, warps=s.warps, stages=s.stages, registers=s.registers)
        title = f"norms layer{' swish' if swish else ''} backward bf16 c{width} lean-1-warp"
        cases.append(CompileCase(title, _backward_kernel, types, constants, tile, divisible, (90,)))
    return cases
