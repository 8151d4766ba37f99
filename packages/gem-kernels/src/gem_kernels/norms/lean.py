"""The backward pass of a norm once more, with fewer instructions and steps: variants beside `triton`, off by default.

What is different (docs/notes/norms.md, "Counted bounds"):

- Fewer exchanges between the lanes of a row. Of a row of x and of g = dy * weight the sums of (x - mean)^2, g and
  g (x - mean) do not need each other and cross the lanes together: two exchanges one after the other for a LayerNorm
  where there were three, one for an RMSNorm where there were two. A gate needs one more.
- A row lies in as few lanes as leave 16 columns or more for each, a thread has one row, and a pair of bfloat16 becomes
  two float32 by two instructions. The gate's exponent has its factor from the weight.
- `tail`: the last tiles go to a second set of programs, which begin where others have ended. What a program adds up
  is fixed all the same, and so are the bits.
- `ahead`: the next tile is kept in registers in the place of shared memory, where the warps of a program wait for each
  other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_kernels.norms import triton as usual
from gem_kernels.norms.kernels import columns, in_width, store, sum_kernel
from gem_kernels.norms.triton import SUM, Spread, fast_math, rows_with_heads
from gem_kernels.tiling import CompileCase, Tile, launch, signature

__all__ = ["WIDEST", "Way", "backward", "compile_cases", "norm", "ways"]

NLOG2E = tl.constexpr(-1.4426950408889634)
NLN2 = tl.constexpr(-0.6931471805599453)
WIDEST = 512  # columns that the variants are meant for
SMS = 132  # of the card that the programs are counted for: their number depends on the shape alone


@dataclass(frozen=True, kw_only=True)
class Way:
    """Programs of `warps`, of which `resident` warps are on an SM at once. `stages` tiles are in
    shared memory, or with `ahead` the next one in registers. `tail`: the share of the tiles for the second programs.
    """

    warps: int = 4
    resident: int = 16
    stages: int = 3
    ahead: bool = False
    tail: float = 0.0
    registers: int | None = None

    def spread(self, width: int, size: int) -> Spread:
        """How rows lie in a program: a row in the fewest lanes that leave each no more than 24 columns, of 32."""
        lane = 16 // size  # columns that a lane loads at once
        lanes = min(32, max(1, triton.next_power_of_2(triton.cdiv(width, 24))))
        if width % (lanes * lane) and triton.next_power_of_2(width) > lanes * lane:
            lanes = min(32, triton.next_power_of_2(triton.cdiv(width, 16)))
        span = lanes * lane
        return Spread(
            rows=self.warps * 32 // lanes, cuts=triton.next_power_of_2(triton.cdiv(width, span)), span=span,
            warps=self.warps, stages=1 if self.ahead else self.stages, programs=SMS * self.resident // self.warps,
            registers=self.registers,
        )  # fmt: skip


def ways(width: int, *, layer: bool, swish: bool) -> dict[str, Way]:
    """The variants for a width, by the names that the bench has for them; so many warps as their registers allow."""
    resident = 12 if swish or (layer and width == 384) else 16
    registers = 168 if resident == 12 else 128
    found = {
        "lean": Way(resident=resident, registers=registers),
        "lean-tail": Way(resident=resident, registers=registers, tail=0.125),
        "lean-4-stages": Way(resident=resident, registers=registers, stages=4),
        "lean-1-warp": Way(resident=resident, registers=registers, warps=1),
    }
    if not swish and width != 384:  # registers for the next tile
        found["lean-ahead"] = Way(resident=12, registers=168, ahead=True)
    return found


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


@triton.jit(do_not_specialize=["rows", "programs", "many", "few"])
def _backward_kernel(
    x_ptr, dy_ptr, weight_f32, bias_f32, dx_ptr, parts_f32, x_row, dy_row, rows, programs, many, few,
    C: tl.constexpr, BM: tl.constexpr, CUTS: tl.constexpr, SPAN: tl.constexpr, EPS: tl.constexpr,
    LAYER: tl.constexpr, SWISH: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The first `programs` take `many` tiles each, in turns; those after them `few` of what is left."""
    part = tl.program_id(0).to(tl.int64)
    first = part
    apart = programs.to(tl.int64)
    tiles = many
    if part >= programs:
        first = apart * (many - 1) + part  # past apart * many tiles
        apart = tl.num_programs(0) - apart
        tiles = few
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
    row = first * BM + tl.arange(0, BM)
    apart = apart * BM
    if AHEAD:
        x = _load(x_ptr, row * x_row, row < rows, C, CUTS, SPAN)
        dy = _load(dy_ptr, row * dy_row, row < rows, C, CUTS, SPAN)
        for _ in tl.range(0, tiles, 2, num_stages=1):  # in pairs, so that no tile moves from registers to registers
            after = row + apart
            x_after = _load(x_ptr, after * x_row, after < rows, C, CUTS, SPAN)
            dy_after = _load(dy_ptr, after * dy_row, after < rows, C, CUTS, SPAN)
            dx, dweight, dbias = _tile(
                x, dy, weight, bias, dweight, dbias, C, CUTS, SPAN, EPS, LAYER, SWISH, WEIGHT, BIAS, FAST
            )
            store(dx_ptr, dx, row, row < rows, C, CUTS, SPAN)
            row = after + apart
            x = _load(x_ptr, row * x_row, row < rows, C, CUTS, SPAN)
            dy = _load(dy_ptr, row * dy_row, row < rows, C, CUTS, SPAN)
            dx, dweight, dbias = _tile(
                x_after, dy_after, weight, bias, dweight, dbias, C, CUTS, SPAN, EPS, LAYER, SWISH, WEIGHT, BIAS, FAST
            )
            store(dx_ptr, dx, after, after < rows, C, CUTS, SPAN)
    else:
        for _ in tl.range(0, tiles, num_stages=STAGES):
            x = _load(x_ptr, row * x_row, row < rows, C, CUTS, SPAN)
            dy = _load(dy_ptr, row * dy_row, row < rows, C, CUTS, SPAN)
            dx, dweight, dbias = _tile(
                x, dy, weight, bias, dweight, dbias, C, CUTS, SPAN, EPS, LAYER, SWISH, WEIGHT, BIAS, FAST
            )
            store(dx_ptr, dx, row, row < rows, C, CUTS, SPAN)
            row += apart
    column = columns(CUTS, SPAN)
    into = parts_f32 + part * ((WEIGHT + BIAS) * C) + column
    if WEIGHT:
        tl.store(into, tl.sum(dweight, axis=0), mask=column < C)
    if BIAS:
        tl.store(into + C, tl.sum(dbias, axis=0), mask=column < C)


def _constants(s: Spread, way: Way, width: int) -> dict[str, Any]:
    return {"C": width, "BM": s.rows, "CUTS": s.cuts, "SPAN": s.span, "STAGES": s.stages, "AHEAD": way.ahead}


def shares(tiles: int, programs: int, tail: float) -> tuple[int, int, int, int]:
    """(programs, tiles of each) of the first set, then of the second; their products are `tiles` or a few more."""
    many = int(tiles * (1 - tail)) // programs
    if not tail or many == 0:
        each = max(1, triton.cdiv(tiles, programs))
        return triton.cdiv(tiles, each), each, 0, 0
    few = triton.cdiv(tiles - programs * many, programs)
    return programs, many, triton.cdiv(tiles - programs * many, few), few


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float, swish: bool, way: Way
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x [.., C], weight and bias ([0] for what there is not). Rows must be evenly spaced."""
    width, size = x.shape[-1], x.element_size()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (x, dy), heads = rows_with_heads(x, dy)
    assert heads == 1, "heads that are spaced otherwise than their tokens run in `triton`"
    rows = x.shape[0]
    s = way.spread(width, size)
    tiles = triton.cdiv(rows, s.rows)
    programs, many, others, few = shares(tiles, s.programs, way.tail)
    parts = programs + others
    present = {"WEIGHT": weight is not None, "BIAS": bias is not None}
    vectors = sum(present.values())
    sums = torch.empty(parts * vectors * width, dtype=torch.float32, device=x.device)
    fast = fast_math(x.device)
    options = {} if s.registers is None or not fast else {"maxnreg": s.registers}
    launch(
        _backward_kernel, parts, x.device, Tile(bm=s.rows, bn=width, warps=s.warps, stages=s.stages),
        x, dy, x if weight is None else weight, x if bias is None else bias, dx, sums, x.stride(0), dy.stride(0), rows,
        programs, many, few, EPS=eps, LAYER=kind == "layer", SWISH=swish, FAST=fast, **present,
        **_constants(s, way, width), **options,
    )  # fmt: skip
    gradients = [
        torch.empty(0 if v is None else width, dtype=x.dtype if v is None else v.dtype, device=x.device)
        for v in (weight, bias)
    ]
    if vectors:
        into = [g for g in gradients if g.numel()]
        launch(
            sum_kernel, triton.cdiv(vectors * width, SUM.bn), x.device, SUM,
            sums, into[0], into[-1], parts, C=width, BIAS=vectors > 1, BM=SUM.bm, BN=SUM.bn,
        )  # fmt: skip
    return dx, gradients[0], gradients[1]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float, swish: bool, way: Way
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.rest = kind, eps, swish, way
        return usual.forward(x, None, weight, bias, kind, eps, swish)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight, bias = ctx.saved_tensors
        dx, dweight, dbias = backward(dy, x, weight, bias, *ctx.rest)
        return dx, None if weight is None else dweight, None if bias is None else dbias, *(None,) * 4


def norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, kind: str, eps: float, swish: bool = False,
    way: Way,
) -> Tensor:  # fmt: skip
    """`rms_norm` or `layer_norm` with its usual forward pass and a variant's backward pass."""
    return _Norm.apply(x, weight, bias, kind, eps, swish, way)  # type: ignore[no-any-return]


def compile_cases() -> list[CompileCase]:
    """Every variant of the widths that they are for."""
    cases = []
    for kind, width, swish in (("rms", 256, False), ("layer", 384, False), ("layer", 512, False), ("layer", 512, True)):
        layer = kind == "layer"
        for name, way in ways(width, layer=layer, swish=swish).items():
            s = way.spread(width, 2)
            constants: dict[str, object] = {
                "EPS": 1e-6, "LAYER": layer, "SWISH": swish, "WEIGHT": True, "BIAS": layer, "FAST": True,
                **_constants(s, way, width),
            }  # fmt: skip
            types, divisible = signature(_backward_kernel, "bf16", constants)
            tile = Tile(bm=s.rows, bn=width, warps=s.warps, stages=s.stages, registers=s.registers)
            title = f"norms {kind}{' swish' if swish else ''} backward bf16 c{width} {name}"
            cases.append(CompileCase(title, _backward_kernel, types, constants, tile, divisible, (90,)))
    return cases
