"""The parts of packed projections in portable Triton: each number is read once and written once, forward and backward.

The sums of the weights' gradients are made as those of `gem_kernels.norms.triton`: program p adds up every PARTS-th
tile or so, and all of them together walk through memory side by side; then a second kernel adds up the programs.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from gem_kernels import dispatch, tiling
from gem_kernels.norms import placed
from gem_kernels.projections import gates
from gem_kernels.projections.gates import Small, empty_like, shares, sigmoid, sigmoid_backward, sum_up
from gem_kernels.projections.kernels import heads_backward_kernel, heads_kernel
from gem_kernels.tiling import CompileCase, Tile, launch, rows_of, signature

__all__ = [
    "applies",
    "compile_cases",
    "gated",
    "gated_backward",
    "gated_small",
    "gated_small_backward",
    "heads",
    "rotary",
    "rotary_backward",
    "rotary_made",
    "rotary_made_backward",
    "sigmoid",
    "sigmoid_backward",
]

MAX_WIDTH = 8192  # of the heads together


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
    places: Tensor | None, added: int, eps: float, scales: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Every slot [T, H, D] of packed [T, >= slots H D]; the first with `added` rows that are left to the caller. What
    multiplies the heads goes to `scales` [T, slots, H], if given.
    """
    rows = packed.shape[0]
    counts = (rows + added, rows)[: len(weights)]
    outs = [torch.empty(n, heads, dim, dtype=packed.dtype, device=packed.device) for n in counts]
    turned = [p.contiguous() for p in positions] or [packed]
    given = [packed if w is None else w for w in weights]
    t = tile(heads, dim, False)
    launch(
        heads_kernel, triton.cdiv(rows, t.bm) if dim else 0, packed.device, t,
        packed, given[0], given[-1], turned[0], turned[-1], packed if places is None else places.contiguous(),
        outs[0], outs[-1], packed.stride(0), rows, PLACES=places is not None,
        SLOTS=len(weights), **_shape(heads, dim), BM=t.bm, EPS=eps, NORM=weights[0] is not None,
        **_turns(positions, bases), scales_f32=scales,
    )  # fmt: skip
    return outs


def _backward(
    grads: list[Tensor | None], packed: Tensor, dpacked: Tensor, weights: list[Tensor | None], dbias: Tensor | None,
    heads: int, dim: int, positions: list[Tensor], bases: list[float], places: Tensor | None, eps: float,
    scales: Tensor | None = None, made: tuple[Tensor, ...] = (),
) -> list[Tensor]:  # fmt: skip
    """Writes the columns of the slots, and of v if there are its gradients, into dpacked and their sums into dbias.

    `grads` are those of q (None for one slot), of k, and perhaps of v, then of a second reader's k and v. With
    `_forward`'s `scales`, what that `made` is read in the place of packed. Returns the weights' gradients.
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
        heads_backward_kernel, parts, packed.device, t,
        packed, given[0], given[-1], turned[0], turned[-1], packed if places is None else places.contiguous(),
        d0, d1, d1_again, v, v_again, dpacked, sums, totals,
        packed.stride(0), dpacked.stride(0), packed.shape[0], each, PLACES=places is not None,
        SLOTS=slots, VALUES=dv is not None, AGAIN=dk_again is not None, BIAS=dbias is not None, **_shape(heads, dim),
        BM=t.bm, EPS=eps, NORM=norm, **_turns(positions, bases), STAGES=t.stages, scales_f32=scales,
        made0_ptr=made[0] if made else None, made1_ptr=made[1] if len(made) > 1 else None,
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


def gated_small(
    packed: Tensor, weight: Tensor | None, hidden: int, heads: int, eps: float
) -> tuple[Tensor, Tensor, Small, Tensor | None]:  # fmt: skip
    """As `gated`, and what `gated_small_backward` needs beside q: gate and up in E4M3, and what multiplies the heads,
    [T, H] (None without a norm).
    """
    packed = rows_of(packed)
    rows, dim = packed.shape[0], (packed.shape[1] - 2 * hidden) // heads
    small = gates.small_gates(rows, hidden, packed.device)
    h = gates.swiglu(packed, hidden, small)
    scales = None if weight is None else torch.empty(rows, heads, dtype=torch.float32, device=packed.device)
    (q,) = _forward(packed[:, 2 * hidden :], [weight], heads, dim, [], [], None, 0, eps, scales)
    return h, q, small, scales


def gated_small_backward(
    dgated: Tensor, dq: Tensor, q: Tensor, small: Small, scales: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, hidden: int, heads: int, eps: float, again: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `gated_backward`, from what `gated_small` made."""
    rows, dim = q.shape[0], q.shape[2]
    dpacked = torch.empty(rows, 2 * hidden + heads * dim, dtype=q.dtype, device=q.device)
    dbias = empty_like(bias, q)
    in_front, behind = (None, None) if bias is None else (dbias[: 2 * hidden], dbias[2 * hidden :])
    gates.swiglu_backward(rows_of(dgated), small, dpacked, in_front, hidden, again)
    dq_to, made = dpacked[:, 2 * hidden :], () if scales is None else (q,)
    (dweight,) = _backward([None, dq], dq_to, dq_to, [weight], behind, heads, dim, [], [], None, eps, scales, made)
    return dpacked, dweight, dbias


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


def rotary_made(
    packed: Tensor, weights: list[Tensor | None], heads: int, positions: list[Tensor], bases: list[float],
    places: Tensor | None, added: int, eps: float,
) -> tuple[list[Tensor], Tensor | None]:  # fmt: skip
    """Both slots of packed [T, 2 H D], and what multiplies their heads, [T, 2, H] (None without norms)."""
    packed = rows_of(packed)
    scales = None
    if weights[0] is not None:
        scales = torch.empty(packed.shape[0], 2, heads, dtype=torch.float32, device=packed.device)
    dim = packed.shape[1] // (2 * heads)
    return _forward(packed, weights, heads, dim, positions, bases, places, added, eps, scales), scales


def rotary_made_backward(
    grads: list[Tensor | None], made: tuple[Tensor, ...], scales: Tensor | None, weights: list[Tensor | None],
    bias: Tensor | None, positions: list[Tensor], bases: list[float], places: Tensor | None, eps: float,
) -> list[Tensor]:  # fmt: skip
    """As `rotary_backward` of packed [T, 3 H D], from what `rotary_made` made."""
    rows, heads, dim = made[1].shape
    dpacked = made[1].new_empty(rows, 3 * heads * dim)
    dbias = empty_like(bias, dpacked)
    into = None if bias is None else dbias
    made = () if scales is None else made
    dweights = _backward(
        grads, dpacked, dpacked, weights, into, heads, dim, positions, bases, places, eps, scales, made
    )
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
                ("heads", heads_kernel, {}),
                ("heads backward", heads_backward_kernel, {"VALUES": slots == 2, "AGAIN": slots == 2, "BIAS": True}),
            ):
                t = tile(heads, dim, bool(extra))
                stages = {"STAGES": t.stages} if extra else {}
                made: dict[str, object] = {"made0_ptr": None, "made1_ptr": None} if extra else {}
                one: dict[str, object] = {"made1_ptr": None} if extra and slots == 1 else {}
                for more, note in (({"scales_f32": None, **made}, ""), (one, " scales")):
                    constants = {**shared, **extra, **stages, **more, "BM": t.bm}
                    types, divisible = signature(kernel, "bf16", constants)
                    title = f"projections {name}{note} bf16 h{heads} d{dim} slots {slots}"
                    cases.append(CompileCase(title, kernel, types, constants, t, divisible))
    return cases
