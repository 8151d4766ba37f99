"""The norms suite: its cases (`norm_cases`) gated by the reference in float64 and timed beside torch's own operators,
torch.compile, Liger, fbgemm, and a copy of as many bytes.

Runs are captured in CUDA graphs: some take 60 us, which is what calling an operator from Python costs the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from gem_kernels import dispatch, testing
from gem_kernels.bench import timing
from gem_kernels.bench.norm_cases import NAMES, Problem, Run, problem
from gem_kernels.bench.variants import Variant

__all__ = ["NAMES", "Problem", "gate", "measure", "ours", "peers", "problem", "warm"]

TOLERANCE = 1e-2  # relative error of a BF16 result against float64


def gate(p: Problem, run: Run, passes: Iterable[str]) -> dict[str, float]:
    """The largest relative error of a pass's results; a RuntimeError says what is wrong, and nothing is timed then."""
    exact = Variant(functools.partial(p.ours, backend=dispatch.REFERENCE), [x.double() for x in p.inputs])
    errors = {}
    for what in passes:
        with testing.poisoned():
            got = Variant(run, p.inputs).do(what)
        found = [((g.double() - e).norm() / e.norm()).item() for g, e in zip(got, exact.do(what), strict=True)]
        if not all(error < TOLERANCE for error in found):  # also of NaN, which max() may pass over
            raise RuntimeError(f"{p.name}: {p.op} {what} is wrong: relative errors {found}")
        errors[what] = max(found)
        print(f"  {p.name} {what}: relative error {errors[what]:.2e}", flush=True)
    return errors


def peers(p: Problem, names: tuple[str, ...]) -> dict[str, Run]:
    """Those that are named, or all, and can be imported here."""
    found: dict[str, Run] = {"torch": p.eager}
    if p.compiled:
        from torch._functorch import config

        config.donated_buffer = False  # a compiled backward is run many times
        found["torch.compile"] = torch.compile(p.eager)
    for name, make in p.others.items():
        try:
            found[name] = make()
        except ImportError as error:
            print(f"  no {name}: {error}")
    return {name: run for name, run in found.items() if not names or name in names}


def ours(p: Problem, only: str = "", skip: tuple[str, ...] = ()) -> dict[str, Run]:
    """The operator on the first of its backends that runs here, and that backend's variants where variants are asked
    for, if their names contain `only` and nothing of `skip`.
    """
    found: dict[str, Run] = {}
    for backend in p.backends:
        try:
            dispatch.why(p.operator, p.inputs[0], backend)
        except RuntimeError as error:
            print(f"  {backend}: {error}")
            continue
        found[backend] = functools.partial(p.ours, backend=backend)
        if only:
            found |= {f"{backend} {variant}": run for variant, run in p.variants.items()}
        break
    return {n: run for n, run in found.items() if only in n and not any(s in n for s in skip)}


_kept: dict[str, tuple[Problem, dict[str, Run]]] = {}  # of cases with torch.compile: what it built is in the function


def warm(
    name: str, device: torch.device, passes: tuple[str, ...], peer_names: tuple[str, ...],
    only: str = "", skip: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Build what a case needs, on fewer rows where that builds the same."""
    p = problem(name, device)
    found = peers(p, peer_names)
    if "torch.compile" in found:
        _kept[name] = p, found
    else:
        p = problem(name, device, shrink=16)
        found = peers(p, peer_names)
    for run in [*ours(p, only, skip).values(), *found.values()]:
        for what in passes:
            try:
                Variant(run, p.inputs).do(what)
            except Exception as error:  # heard of again when the case is measured
                print(f"  {type(error).__name__}: {str(error)[:200]}")


def measure(
    name: str, device: torch.device, *, passes: tuple[str, ...], peer_names: tuple[str, ...], rounds: int, rep: int,
    ceilings: dict[str, float], gate_only: bool, only: str = "", skip: tuple[str, ...] = (),
) -> list[dict[str, Any]]:  # fmt: skip
    """The rows of one case: the gate, then times beside the peers; rates are GB/s of useful bytes. A backend whose
    results are wrong, and a peer that raises, are said to be and have no time.
    """
    p, others = _kept.pop(name, None) or (problem(name, device), None)
    variants, errors = ours(p, only, skip), {}
    for backend, run in list(variants.items()):
        try:
            errors[backend] = gate(p, run, passes)
        except RuntimeError as error:
            print(f"  {backend}: {error}", flush=True)
            del variants[backend]
    if gate_only:
        return []
    others = others or peers(p, peer_names)
    rows = []
    for what in passes:
        runs: dict[str, timing.Run] = {}
        for label, run in {**variants, **{f"peer {n}": run for n, run in others.items()}}.items():
            try:
                runs[label] = timing.captured(functools.partial(Variant(run, p.inputs).do, what))
            except Exception as error:  # whatever it throws is the finding
                print(f"  {label} {what}: {type(error).__name__}: {str(error)[:200]}")
        moved = p.cost.forward_bytes if what == "forward" else p.cost.backward_bytes
        if not peer_names or "copy" in peer_names:
            runs["peer copy"] = timing.captured(timing.copy_of(moved, device))
        if p.op == "most_recent" and what == "backward" and (not peer_names or "fill" in peer_names):
            into = torch.empty_like(p.inputs[0])  # seven of eight bytes that it moves are written
            runs["peer fill"] = timing.captured(into.zero_)
        times = timing.interleaved(runs, rounds=rounds, rep=rep)
        useful = p.cost.forward_flops if what == "forward" else p.cost.backward_flops
        rates = {n: round(moved / ms / 1e6, 1) for n, ms in times.items()}
        if "peer fill" in times:
            filled = p.inputs[0].numel() * p.inputs[0].element_size()
            rates["peer fill"] = round(filled / times["peer fill"] / 1e6, 1)
        for backend in variants:
            if backend not in times:
                continue
            tflops = round(useful / times[backend] / 1e9, 1) if useful else None
            rows.append({
                "case": p.name, "op": p.op, "variant": backend, "pass": what, "dtype": "bfloat16",
                "head_dim": p.width, "ms": round(times[backend], 4), "tflops": tflops, "gbps": rates[backend],
                "of_gemm": None if tflops is None else round(tflops / ceilings["gemm_bf16_tflops"], 3),
                "of_copy": round(rates[backend] / 1e3 / ceilings["copy_tbps"], 3), "error": errors[backend][what],
                "peers": {n.removeprefix("peer "): r for n, r in rates.items() if n.startswith("peer ")},
                "unit": "gbps",
            })  # fmt: skip
    return rows
