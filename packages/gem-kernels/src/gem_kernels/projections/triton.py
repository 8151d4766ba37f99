"""The parts of packed projections in portable Triton: each number is read once and written once, forward and backward.

HEADS heads of D dims, padded to HP and DP (powers of two), are a tile [BM, HP, DP] of BM rows. A slot is a part that is
normed and turned: q or k; what is behind the slots, v, passes through. The sums of the weights' gradients are made as
those of `gem_kernels.norms.triton`: program p adds up every PARTS-th tile or so, and all of them together
walk through memory side by side; then a second kernel adds up the programs.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels import dispatch, tiling
from gem_kernels.norms import placed
from gem_kernels.projections import gates
from gem_kernels.projections.gates import empty_like, shares, sigmoid, sigmoid_backward, sum_up
from gem_kernels.tiling import CompileCase, Tile, launch, rows_of, signature

__all__ = [
    "applies",
    "compile_cases",
    "gated",
    "gated_backward",
    "heads",
    "rotary",
    "rotary_backward",
    "sigmoid",
    "sigmoid_backward",
]

MAX_WIDTH = 8192  # of the heads together


@triton.jit
def _angles(
    first_f32, second_f32, row, inside, TURNS: tl.constexpr, HEADS: tl.constexpr, HP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, LOG2_FIRST: tl.constexpr, LOG2_SECOND: tl.constexpr,
):  # fmt: skip
    """cos and sin of positions times base^(-2 i / D), [BM, 1 or HP, DP / 2]; float64 keeps the frequencies exact."""
    pair = tl.arange(0, DP // 2).to(tl.float64) * (-2.0 / D)
    place = tl.load(first_f32 + row, mask=inside, other=0).to(tl.float32)
    angle = place[:, None, None] * tl.exp2(pair * LOG2_FIRST).to(tl.float32)[None, None, :]
    if TURNS == 2:
        place = tl.load(second_f32 + row, mask=inside, other=0).to(tl.float32)
        other = place[:, None, None] * tl.exp2(pair * LOG2_SECOND).to(tl.float32)[None, None, :]
        angle = tl.where((tl.arange(0, HP) < HEADS // 2)[None, :, None], angle, other)
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def _turn(x, cos, sin, BM: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr):
    """Rotate interleaved pairs of float32 heads [BM, HP, DP]; -sin turns back."""
    even, odd = tl.split(tl.reshape(x, (BM, HP, DP // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (BM, HP, DP))


@triton.jit
def _scale(x, D: tl.constexpr, EPS: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of heads [BM, HP, DP]: [BM, HP, 1]."""
    return tl.rsqrt(tl.sum(x * x, axis=2) / D + EPS)[:, :, None]


@triton.jit
def _weight(weight_f32, D: tl.constexpr, DP: tl.constexpr):
    dim = tl.arange(0, DP)
    return tl.load(weight_f32 + dim, mask=dim < D, other=0.0).to(tl.float32)[None, None, :]


@triton.jit
def _places(row, row_stride, inside, HEADS: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Element offsets of a tile of heads, and which of them there are."""
    head, dim = tl.arange(0, HP), tl.arange(0, DP)
    at = row[:, None, None] * row_stride + (head * D)[None, :, None] + dim[None, None, :]
    return at, inside[:, None, None] & (head < HEADS)[None, :, None] & (dim < D)[None, None, :]


@triton.jit
def _slot(
    source, target, weight_f32, at, to, mask, cos, sin,
    D: tl.constexpr, DP: tl.constexpr, HP: tl.constexpr, BM: tl.constexpr, EPS: tl.constexpr, NORM: tl.constexpr,
    TURNS: tl.constexpr,
):  # fmt: skip
    x = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        x = x * _scale(x, D, EPS) * _weight(weight_f32, D, DP)
    if TURNS:
        x = _turn(x, cos, sin, BM, HP, DP)
    tl.store(target + to, x.to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _heads_kernel(
    packed_ptr, weight0_f32, weight1_f32, first_f32, second_f32, places_offsets, out0_ptr, out1_ptr, packed_row, rows,
    PLACES: tl.constexpr, SLOTS: tl.constexpr, HEADS: tl.constexpr, HP: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, BM: tl.constexpr,
    EPS: tl.constexpr, NORM: tl.constexpr, TURNS: tl.constexpr, LOG2_FIRST: tl.constexpr, LOG2_SECOND: tl.constexpr,
):  # fmt: skip
    """PLACES: row i of the first slot goes to row places[i]."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < rows
    at, mask = _places(row, packed_row, inside, HEADS, HP, D, DP)
    to, _ = _places(row, HEADS * D, inside, HEADS, HP, D, DP)
    cos, sin = 0.0, 0.0
    if TURNS:
        cos, sin = _angles(first_f32, second_f32, row, inside, TURNS, HEADS, HP, D, DP, LOG2_FIRST, LOG2_SECOND)
    first_to = to
    if PLACES:
        place = tl.load(places_offsets + row, mask=inside, other=0)
        first_to, _ = _places(place, HEADS * D, inside, HEADS, HP, D, DP)
    _slot(packed_ptr, out0_ptr, weight0_f32, at, first_to, mask, cos, sin, D, DP, HP, BM, EPS, NORM, TURNS)
    if SLOTS == 2:
        source = packed_ptr + HEADS * D
        _slot(source, out1_ptr, weight1_f32, at, to, mask, cos, sin, D, DP, HP, BM, EPS, NORM, TURNS)


@triton.jit
def _slot_backward(
    source, target, grad, again, weight_f32, at, to, from_, mask, cos, sin,
    D: tl.constexpr, DP: tl.constexpr, HP: tl.constexpr, BM: tl.constexpr, EPS: tl.constexpr, NORM: tl.constexpr,
    TURNS: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of a slot; returns what to sum up for that of the weight, and itself, [BM, HP, DP] each."""
    d = tl.load(grad + from_, mask=mask, other=0.0).to(tl.float32)
    if AGAIN:
        d += tl.load(again + from_, mask=mask, other=0.0).to(tl.float32)
    if TURNS:
        d = _turn(d, cos, -sin, BM, HP, DP)
    dweight = d
    if NORM:
        x = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
        scale = _scale(x, D, EPS)
        normal = x * scale
        dweight = d * normal
        d = d * _weight(weight_f32, D, DP)
        along = (tl.sum(d * normal, axis=2) / D)[:, :, None]
        d = (d - normal * along) * scale
    tl.store(target + to, d.to(target.dtype.element_ty), mask=mask)
    return dweight, d


@triton.jit
def _store_heads(parts_f32, total, HEADS: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Column sums of [BM, HP, DP] to [HEADS * D]."""
    head, dim = tl.arange(0, HP), tl.arange(0, DP)
    mask = (head < HEADS)[:, None] & (dim < D)[None, :]
    tl.store(parts_f32 + (head * D)[:, None] + dim[None, :], tl.sum(total, axis=0), mask=mask)


@triton.jit(do_not_specialize=["rows", "tiles"])
def _heads_backward_kernel(
    packed_ptr, weight0_f32, weight1_f32, first_f32, second_f32, places_offsets, d0_ptr, d1_ptr, d1_again_ptr, dv_ptr,
    dv_again_ptr, dpacked_ptr, parts_f32, sums_f32, packed_row, dpacked_row, rows, tiles,
    PLACES: tl.constexpr, SLOTS: tl.constexpr, VALUES: tl.constexpr, AGAIN: tl.constexpr, BIAS: tl.constexpr,
    HEADS: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, EPS: tl.constexpr,
    NORM: tl.constexpr, TURNS: tl.constexpr, LOG2_FIRST: tl.constexpr, LOG2_SECOND: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """d0 is of the first slot and d1 of the second; of one slot alone, d1 and its second reader's. PLACES: above."""
    part = tl.program_id(0).to(tl.int64)
    if NORM:
        dweight0 = tl.zeros((BM, HP, DP), tl.float32)
        if SLOTS == 2:
            dweight1 = tl.zeros((BM, HP, DP), tl.float32)
    if BIAS:
        sum0 = tl.zeros((BM, HP, DP), tl.float32)
        if SLOTS == 2:
            sum1 = tl.zeros((BM, HP, DP), tl.float32)
        if VALUES:
            sum_v = tl.zeros((BM, HP, DP), tl.float32)
    for i in tl.range(0, tiles, num_stages=STAGES):
        row = (i * tl.num_programs(0).to(tl.int64) + part) * BM + tl.arange(0, BM)
        inside = row < rows
        at, mask = _places(row, packed_row, inside, HEADS, HP, D, DP)
        to, _ = _places(row, dpacked_row, inside, HEADS, HP, D, DP)
        from_, _ = _places(row, HEADS * D, inside, HEADS, HP, D, DP)
        cos, sin = 0.0, 0.0
        if TURNS:
            cos, sin = _angles(first_f32, second_f32, row, inside, TURNS, HEADS, HP, D, DP, LOG2_FIRST, LOG2_SECOND)
        if SLOTS == 2:
            first_from = from_
            if PLACES:
                place = tl.load(places_offsets + row, mask=inside, other=0)
                first_from, _ = _places(place, HEADS * D, inside, HEADS, HP, D, DP)
            dw, d = _slot_backward(
                packed_ptr, dpacked_ptr, d0_ptr, d0_ptr, weight0_f32, at, to, first_from, mask, cos, sin,
                D, DP, HP, BM, EPS, NORM, TURNS, False,
            )  # fmt: skip
            if NORM:
                dweight0 += dw
            if BIAS:
                sum0 += d
            dw, d = _slot_backward(
                packed_ptr + HEADS * D, dpacked_ptr + HEADS * D, d1_ptr, d1_again_ptr, weight1_f32, at, to, from_, mask,
                cos, sin, D, DP, HP, BM, EPS, NORM, TURNS, AGAIN,
            )  # fmt: skip
            if NORM:
                dweight1 += dw
            if BIAS:
                sum1 += d
        else:
            dw, d = _slot_backward(
                packed_ptr, dpacked_ptr, d1_ptr, d1_again_ptr, weight0_f32, at, to, from_, mask, cos, sin,
                D, DP, HP, BM, EPS, NORM, TURNS, AGAIN,
            )  # fmt: skip
            if NORM:
                dweight0 += dw
            if BIAS:
                sum0 += d
        if VALUES:
            dv = tl.load(dv_ptr + from_, mask=mask, other=0.0).to(tl.float32)
            if AGAIN:
                dv += tl.load(dv_again_ptr + from_, mask=mask, other=0.0).to(tl.float32)
            tl.store(dpacked_ptr + SLOTS * HEADS * D + to, dv.to(dpacked_ptr.dtype.element_ty), mask=mask)
            if BIAS:
                sum_v += dv
    if NORM:
        dim = tl.arange(0, DP)
        tl.store(parts_f32 + part * (SLOTS * D) + dim, tl.sum(tl.sum(dweight0, axis=0), axis=0), mask=dim < D)
        if SLOTS == 2:
            tl.store(parts_f32 + part * (SLOTS * D) + D + dim, tl.sum(tl.sum(dweight1, axis=0), axis=0), mask=dim < D)
    if BIAS:
        base = sums_f32 + part * ((SLOTS + VALUES) * HEADS * D)
        _store_heads(base, sum0, HEADS, HP, D, DP)
        if SLOTS == 2:
            _store_heads(base + HEADS * D, sum1, HEADS, HP, D, DP)
        if VALUES:
            _store_heads(base + SLOTS * HEADS * D, sum_v, HEADS, HP, D, DP)


def applies(problem: dispatch.Problem) -> tuple[bool, str]:
    """Which problems these kernels take: `head_dim` is the width of a row of the packed matrix."""
    if problem.head_dim > 4 * MAX_WIDTH:
        return False, f"the Triton kernels take packed rows up to {4 * MAX_WIDTH} wide; got {problem.head_dim}"
    return tiling.applies_to_dtype(problem)


def tile(heads: int, dim: int, backward: bool) -> Tile:
    """`gates.ELEMENTS` elements of whole rows; backward, the next tile is loaded while one is computed."""
    width = triton.next_power_of_2(heads) * max(2, triton.next_power_of_2(dim))
    warps = max(8 if backward else 4, min(16, width // 512))  # backward, sums of the columns fill registers
    return Tile(bm=max(1, gates.ELEMENTS // width), bn=width, warps=warps, stages=2 if backward else 1)


def _shape(heads: int, dim: int) -> dict[str, int]:
    return {"HEADS": heads, "HP": triton.next_power_of_2(heads), "D": dim, "DP": max(2, triton.next_power_of_2(dim))}


def _turns(positions: list[Tensor], bases: list[float]) -> dict[str, object]:
    logs = [math.log2(b) for b in bases] + [0.0, 0.0]
    return {"TURNS": len(positions), "LOG2_FIRST": logs[0], "LOG2_SECOND": logs[1]}


def _forward(
    packed: Tensor, weights: list[Tensor | None], heads: int, dim: int, positions: list[Tensor], bases: list[float],
    places: Tensor | None, added: int, eps: float,
) -> list[Tensor]:  # fmt: skip
    """Every slot [T, H, D] of packed [T, >= slots H D]; the first with `added` rows that are left to the caller."""
    rows = packed.shape[0]
    counts = (rows + added, rows)[: len(weights)]
    outs = [torch.empty(n, heads, dim, dtype=packed.dtype, device=packed.device) for n in counts]
    turned = [p.contiguous() for p in positions] or [packed]
    given = [packed if w is None else w for w in weights]
    t = tile(heads, dim, False)
    launch(
        _heads_kernel, triton.cdiv(rows, t.bm) if dim else 0, packed.device, t,
        packed, given[0], given[-1], turned[0], turned[-1], packed if places is None else places.contiguous(),
        outs[0], outs[-1], packed.stride(0), rows, PLACES=places is not None,
        SLOTS=len(weights), **_shape(heads, dim), BM=t.bm, EPS=eps, NORM=weights[0] is not None,
        **_turns(positions, bases),
    )  # fmt: skip
    return outs


def _backward(
    grads: list[Tensor | None], packed: Tensor, dpacked: Tensor, weights: list[Tensor | None], dbias: Tensor | None,
    heads: int, dim: int, positions: list[Tensor], bases: list[float], places: Tensor | None, eps: float,
) -> list[Tensor]:  # fmt: skip
    """Writes the columns of the slots, and of v if there are its gradients, into dpacked and their sums into dbias.

    `grads` are those of q (None for one slot), of k, and perhaps of v, then of a second reader's k and v. Returns the
    weights' gradients.
    """
    slots, norm = len(weights), weights[0] is not None
    dq, dk, *others = grads
    assert dk is not None
    dv, dk_again, dv_again = (*others, None, None, None)[:3]
    d0, d1, d1_again, v, v_again = (dk if x is None else x.contiguous() for x in (dq, dk, dk_again, dv, dv_again))
    turned = [p.contiguous() for p in positions] or [packed]
    given = [packed if w is None else w for w in weights]
    t = tile(heads, dim, True)
    parts, each = shares(packed.shape[0] if dim else 0, t.bm)
    sums, totals = (
        torch.empty(parts * n, dtype=torch.float32, device=packed.device)
        for n in (slots * dim if norm else 0, 0 if dbias is None else dbias.shape[0])
    )
    launch(
        _heads_backward_kernel, parts, packed.device, t,
        packed, given[0], given[-1], turned[0], turned[-1], packed if places is None else places.contiguous(),
        d0, d1, d1_again, v, v_again, dpacked, sums, totals,
        packed.stride(0), dpacked.stride(0), packed.shape[0], each, PLACES=places is not None,
        SLOTS=slots, VALUES=dv is not None, AGAIN=dk_again is not None, BIAS=dbias is not None, **_shape(heads, dim),
        BM=t.bm, EPS=eps, NORM=norm, **_turns(positions, bases), STAGES=t.stages,
    )  # fmt: skip
    dweights = [
        torch.empty(0 if w is None else dim, dtype=packed.dtype if w is None else w.dtype, device=packed.device)
        for w in weights
    ]
    if norm:
        sum_up(sums, parts, *dweights)
    if dbias is not None and dbias.shape[0]:
        sum_up(totals, parts, dbias)
    return dweights


def gated(packed: Tensor, weight: Tensor | None, hidden: int, heads: int, eps: float) -> tuple[Tensor, Tensor]:
    """silu(gate) * up [T, hidden], and the heads behind them."""
    packed = rows_of(packed)
    dim = (packed.shape[1] - 2 * hidden) // heads
    h = gates.swiglu(packed, hidden)
    return h, _forward(packed[:, 2 * hidden :], [weight], heads, dim, [], [], None, 0, eps)[0]


def heads(packed: Tensor, weight: Tensor | None, heads: int, eps: float) -> Tensor:
    """The heads of a packed projection of nothing else, [T, H D]."""
    return _forward(rows_of(packed), [weight], heads, packed.shape[1] // heads, [], [], None, 0, eps)[0]


def gated_backward(
    dgated: Tensor, dq: Tensor, packed: Tensor, weight: Tensor | None, bias: Tensor | None, hidden: int, heads: int,
    eps: float, again: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of packed, of the weight and of the bias ([0] for what there is not); into `again` [T, hidden], if
    given, silu(gate) * up.
    """
    packed = rows_of(packed)
    dim = (packed.shape[1] - 2 * hidden) // heads
    dpacked = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
    dbias = empty_like(bias, packed)
    behind = None if bias is None else dbias[2 * hidden :]
    in_front = None if bias is None else dbias[: 2 * hidden]
    gates.swiglu_backward(rows_of(dgated), packed, dpacked, in_front, hidden, again)
    q, dq_to = packed[:, 2 * hidden :], dpacked[:, 2 * hidden :]
    (dweight,) = _backward([None, dq], q, dq_to, [weight], behind, heads, dim, [], [], None, eps)
    return dpacked, dweight, dbias


def rotary(
    packed: Tensor, weights: list[Tensor | None], heads: int, positions: list[Tensor], bases: list[float],
    places: Tensor | None, added: int, eps: float,
) -> list[Tensor]:  # fmt: skip
    """The slots before v."""
    packed = rows_of(packed)
    dim = packed.shape[1] // ((len(weights) + 1) * heads)
    return _forward(packed, weights, heads, dim, positions, bases, places, added, eps)


def rotary_backward(
    grads: list[Tensor | None], packed: Tensor, weights: list[Tensor | None], bias: Tensor | None, heads: int,
    positions: list[Tensor], bases: list[float], places: Tensor | None, eps: float,
) -> list[Tensor]:  # fmt: skip
    """The gradients of packed, of the bias and of each weight ([0] for what there is not)."""
    packed = rows_of(packed)
    dim = packed.shape[1] // ((len(weights) + 1) * heads)
    dpacked = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
    dbias = empty_like(bias, packed)
    into = None if bias is None else dbias
    dweights = _backward(grads, packed, dpacked, weights, into, heads, dim, positions, bases, places, eps)
    return [dpacked, dbias, *dweights]


def compile_cases() -> list[CompileCase]:
    """Every kernel at the shapes of GEM's preset "large", and of a small one with odd sizes."""
    cases = gates.compile_cases() + placed.compile_cases()  # of all passes between projections
    for heads, dim, turns in ((4, 128, 1), (3, 24, 2)):
        for slots in (1, 2):
            shared: dict[str, object] = {
                "PLACES": slots == 2, "SLOTS": slots, **_shape(heads, dim), "EPS": 1e-6, "NORM": True,
                "TURNS": turns if slots == 2 else 0,
                "LOG2_FIRST": math.log2(1e4), "LOG2_SECOND": math.log2(1e2),
            }  # fmt: skip
            for name, kernel, extra in (
                ("heads", _heads_kernel, {}),
                ("heads backward", _heads_backward_kernel, {"VALUES": slots == 2, "AGAIN": slots == 2, "BIAS": True}),
            ):
                t = tile(heads, dim, bool(extra))
                stages = {"STAGES": t.stages} if extra else {}
                constants = {**shared, **extra, **stages, "BM": t.bm}
                types, divisible = signature(kernel, "bf16", constants)
                title = f"projections {name} bf16 h{heads} d{dim} slots {slots}"
                cases.append(CompileCase(title, kernel, types, constants, t, divisible))
    return cases
