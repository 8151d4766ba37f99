"""The block suite: attention that sees little, blocks or windows, and is as fast as its operands can be moved; gated by
float64, timed beside our other kernels and other people's.

Runs are captured in CUDA graphs, as in the norms suite.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from gem_kernels import (
    block_attention,
    block_attention_packed,
    dispatch,
    flops,
    jagged,
    jagged_attention,
    testing,
)
from gem_kernels.bench import cases, timing
from gem_kernels.bench.variants import Outputs, Variant
from gem_kernels.gdpa import ACTIVATIONS

HEADS, BLOCK, BASE = 4, 64, 1e4
TOLERANCE = 1e-2  # relative error of a BF16 result against float64
LONGEST = 4096  # of the sequences that the gate compares: the reference holds all scores

Run = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """`window` None is block attention, else the `window` keys before a query and its own."""

    lengths: Callable[[], cases.Lengths]
    dim: int = 128
    turned: bool = False
    act: str | None = None
    window: int | None = None


def _full() -> cases.Lengths:
    return cases.full(256, 1024)


def _window(window: int, longest: int) -> Case:
    return Case(lengths=functools.partial(cases.half, 2**18 // longest, longest), window=window)


CASES = {  # in this order, so that a run that is cut short has the main ones
    "block-d128-rope": Case(lengths=_full, turned=True),
    "window-64-4096": _window(64, 4096),
    "block-d64-rope": Case(lengths=_full, dim=64, turned=True),
    "window-128-4096": _window(128, 4096),
    "window-256-4096": _window(256, 4096),
    "block-d128": Case(lengths=_full),
    "block-d64": Case(lengths=_full, dim=64),
    "block-half-512-rope": Case(lengths=functools.partial(cases.half, 1152, 512), turned=True),
    "block-d128-silu-rope": Case(lengths=_full, turned=True, act="silu"),
    "block-d64-silu-rope": Case(lengths=_full, dim=64, turned=True, act="silu"),
    "window-64-16384": _window(64, 16384),
    "window-256-16384": _window(256, 16384),
    "window-128-16384": _window(128, 16384),
    "window-64-32768": _window(64, 32768),
}
NAMES = tuple(CASES)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One case on the device."""

    name: str
    case: Case
    lengths: list[int]
    offsets: Tensor
    inputs: list[Tensor]  # q, k, v
    cost: flops.Cost

    @property
    def longest(self) -> int:
        """The longest sequence."""
        return max(self.lengths)


def problem(name: str, device: torch.device, lengths: list[int] | None = None) -> Problem:
    """The case called `name` with fresh BF16 inputs, with other lengths for a trial; ValueError if unknown."""
    if name not in CASES:
        raise ValueError(f"unknown case {name!r}; expected one of {', '.join(CASES)}")
    case = CASES[name]
    lengths = case.lengths().tolist() if lengths is None else lengths
    inputs = [torch.randn(sum(lengths), HEADS, case.dim, device=device, dtype=torch.bfloat16) for _ in range(3)]
    shape: dict[str, Any] = {"heads": HEADS, "head_dim": case.dim}
    if case.window is None:
        cost = flops.block_attention(lengths, block=BLOCK, **shape)
    else:
        cost = flops.attention(lengths, window=(case.window, 0), **shape)
    return Problem(
        name=name, case=case, lengths=lengths, offsets=testing.offsets_of(lengths, device), inputs=inputs, cost=cost
    )


def _attend(*arguments: Any, **options: Any) -> Tensor:
    out = jagged_attention(*arguments, **options)
    assert isinstance(out, Tensor)
    return out


def _windowed(
    q: Tensor, k: Tensor, v: Tensor, *, where: tuple[Any, ...], window: tuple[int, int], backend: str | None
) -> Tensor:
    return _attend(q, k, v, *where, window=window, backend=backend)


def ours(p: Problem, only: str = "", skip: tuple[str, ...] = ()) -> dict[str, tuple[Run, list[Tensor]]]:
    """The operator on every backend that runs it here, with its inputs (packed, q, k, v are in one tensor): those whose
    name contains `only` and nothing of `skip`.
    """
    return {n: x for n, x in _ours(p).items() if only in n and not any(s in n for s in skip)}


def _ours(p: Problem) -> dict[str, tuple[Run, list[Tensor]]]:
    case, offsets = p.case, p.offsets
    op, feature = ("block_attention", f"block:{BLOCK}") if case.window is None else ("jagged_attention", "window")
    options: dict[str, Any] = {"block": BLOCK, "activation": case.act, "rope": BASE if case.turned else None}
    found: dict[str, tuple[Run, list[Tensor]]] = {}
    for backend in ("hopper", "triton"):
        try:
            dispatch.why(op, p.inputs[0], backend, (feature,))
        except RuntimeError as error:
            print(f"  {backend}: {error}")
            continue
        if case.window is not None:
            where = offsets, offsets, p.longest, p.longest
            run = functools.partial(_windowed, where=where, window=(case.window, 0), backend=backend)
            found[backend] = run, p.inputs
            continue
        found[backend] = functools.partial(block_attention, offsets=offsets, backend=backend, **options), p.inputs
        if backend == "hopper":
            packed = functools.partial(block_attention_packed, offsets=offsets, backend=backend, **options)
            found["hopper packed"] = packed, [torch.cat(p.inputs, 1)]
    return found


def others(p: Problem, names: tuple[str, ...]) -> dict[str, Run]:
    """Peers by name, without a rotary embedding (they have none): our window kernel and our full attention, which
    compute something else and are here for their time; FA3 and torch over blocks as sequences, or with the window.
    """
    case, offsets, longest = p.case, p.offsets, p.longest
    if case.window is None:
        cut = jagged.block_offsets(offsets, p.inputs[0].shape[0], BLOCK)
        cut = cut[: int((cut < cut[-1]).sum()) + 1].int()  # the count waits for the device, which no timed run does
        most, sides = BLOCK, (-1, -1)
    else:
        cut, most, sides = offsets.int(), longest, (case.window, 0)

    def fa3() -> Run:
        from fa3 import fa3_varlen

        return lambda q, k, v: fa3_varlen(q, k, v, cut, cut, most, most, causal=False, window=sides)

    def varlen() -> Run:
        from torch.nn.attention.varlen import varlen_attn

        return lambda q, k, v: cast(Tensor, varlen_attn(q, k, v, cut, cut, most, most, window_size=sides))

    def whole(window: tuple[int, int] | None) -> Run:
        return lambda q, k, v: _attend(q, k, v, offsets, offsets, longest, longest, window=window)

    makers: dict[str, Callable[[], Run]] = {"fa3": fa3, "torch-varlen": varlen}
    if case.window is None:
        makers["our window 64"] = lambda: whole((BLOCK, 0))
    else:
        makers["our full attention"] = lambda: whole(None)
    found = {}
    for name, make in makers.items():
        if not names or name in names:
            try:
                found[name] = make()
            except ImportError as error:
                print(f"  no {name}: {error}")
    return found


def _reference(p: Problem, dout: Tensor) -> tuple[list[slice], list[Tensor]]:
    """Float64 O, dQ, dK and dV of some sequences: the shortest, and others from a fixed seed that are not too long."""
    short = sorted((b for b, n in enumerate(p.lengths) if n <= LONGEST), key=lambda b: p.lengths[b])
    middle = torch.randperm(len(short), generator=torch.Generator().manual_seed(0))[:3].tolist()
    starts = [0, *torch.as_tensor(p.lengths).cumsum(0).tolist()]
    spans, results = [], []
    for b in sorted({short[i] for i in (0, *middle)}):
        rows = slice(starts[b], starts[b + 1])
        leaves = [x[rows].double().requires_grad_() for x in p.inputs]
        q, k, v = leaves
        place = torch.arange(p.lengths[b], device=q.device)
        if p.case.turned:
            q, k = (testing.loop_rope(x, place, BASE) for x in (q, k))
        distance = place[:, None] - place[None, :]
        if p.case.window is None:
            seen = place[:, None] // BLOCK == place[None, :] // BLOCK
        else:
            seen = (distance >= 0) & (distance <= p.case.window)
        s = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(p.case.dim)
        if p.case.act is None:
            weights = s.masked_fill(~seen, -math.inf).softmax(-1)
        else:
            weights = ACTIVATIONS[p.case.act](s) * seen
        out = torch.einsum("hqk,khd->qhd", weights, v)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, dout[rows].double())])
        spans.append(rows)
    return spans, [torch.cat(x) for x in zip(*results, strict=True)]


def gate(
    p: Problem, name: str, variant: Variant, dout: Tensor, passes: tuple[str, ...],
    reference: tuple[list[slice], list[Tensor]] | None = None,
) -> dict[str, float]:  # fmt: skip
    """The relative error of a variant's passes; a RuntimeError says what is wrong, and nothing is timed then."""
    spans, (out, *grads) = reference or _reference(p, dout)
    errors = {}
    for what in passes:
        with testing.poisoned():
            got = variant.do(what)
        if what == "backward" and len(got) == 1:
            got = tuple(got[0].chunk(3, 1))
        found = []
        for x, exact in zip(got, [out] if what == "forward" else grads, strict=True):
            mine = torch.cat([x[rows] for rows in spans]).double()
            found.append(((mine - exact).norm() / exact.norm()).item() if x.isfinite().all() else math.nan)
        if not all(error < TOLERANCE for error in found):
            raise RuntimeError(f"{p.name}: {name} {what} is wrong: relative errors {found}")
        errors[what] = max(found)
        print(f"  {p.name} {name} {what}: relative error {errors[what]:.2e}", flush=True)
    return errors


class _Given(Variant):
    """A variant whose gradients are those of a given dO."""

    def __init__(self, run: Run, inputs: list[Tensor], dout: Tensor) -> None:
        super().__init__(run, inputs)
        self.dout = dout

    def cotangents(self, outputs: Outputs) -> Outputs:
        """dO."""
        return (self.dout,)


def warm(
    name: str, device: torch.device, passes: tuple[str, ...], peer_names: tuple[str, ...],
    only: str = "", skip: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Build what a case needs: everything runs once, on a few sequences."""
    p = problem(name, device, [300, 100])
    dout = torch.randn_like(p.inputs[0])
    for run, inputs in [*ours(p, only, skip).values(), *((run, p.inputs) for run in others(p, peer_names).values())]:
        for what in passes:
            try:
                _Given(run, inputs, dout).do(what)
            except Exception as error:  # heard of again when the case is measured
                print(f"  {type(error).__name__}: {str(error)[:200]}")


def measure(
    name: str, device: torch.device, *, passes: tuple[str, ...], only: str, skip: tuple[str, ...],
    peer_names: tuple[str, ...], rounds: int, rep: int, ceilings: dict[str, float], gate_only: bool,
) -> list[dict[str, Any]]:  # fmt: skip
    """The rows of one case: the gate, then times of ours and of the peers; rates are GB/s of useful bytes. A variant
    whose results are wrong, and a peer that raises, are said to be and have no time.
    """
    p = problem(name, device)
    dout = torch.randn_like(p.inputs[0])
    variants = {n: _Given(run, inputs, dout) for n, (run, inputs) in ours(p, only, skip).items()}
    errors, reference = {}, _reference(p, dout)
    for n, variant in list(variants.items()):
        try:
            errors[n] = gate(p, n, variant, dout, passes, reference)
        except RuntimeError as error:
            print(f"  {error}", flush=True)
            del variants[n]
    if gate_only:
        return []
    del reference
    peers = {f"peer {n}": _Given(run, p.inputs, dout) for n, run in others(p, peer_names).items()}
    rows = []
    for what in passes:
        runs: dict[str, timing.Run] = {}
        for n, variant in {**variants, **peers}.items():
            try:
                runs[n] = timing.captured(functools.partial(variant.do, what))
            except Exception as error:  # whatever it throws is the finding
                print(f"  {n} {what}: {type(error).__name__}: {str(error)[:200]}")
        moved = p.cost.forward_bytes if what == "forward" else p.cost.backward_bytes
        if not peer_names or "copy" in peer_names:
            runs["peer copy"] = timing.captured(timing.copy_of(moved, device))
        times = timing.interleaved(runs, rounds=rounds, rep=rep)
        useful = p.cost.forward_flops if what == "forward" else p.cost.backward_flops
        rates = {
            n.removeprefix("peer "): round(moved / ms / 1e6, 1) for n, ms in times.items() if n.startswith("peer ")
        }
        for n in variants:
            if n not in times:
                continue
            gbps, tflops = moved / times[n] / 1e6, useful / times[n] / 1e9
            rows.append({
                "case": name, "op": "block_attention" if p.case.window is None else "jagged_attention", "variant": n,
                "pass": what, "dtype": "bfloat16", "head_dim": p.case.dim, "ms": round(times[n], 4),
                "tflops": round(tflops, 1), "gbps": round(gbps, 1),
                "of_gemm": round(tflops / ceilings["gemm_bf16_tflops"], 3),
                "of_copy": round(gbps / 1e3 / ceilings["copy_tbps"], 3), "error": errors[n][what], "peers": rates,
                "unit": "gbps",
            })  # fmt: skip
    return rows
