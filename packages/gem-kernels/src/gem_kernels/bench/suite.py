"""The attention and gdpa suites: every variant of ours that runs here, gated by a float64 reference, then timed
beside its peers and the large matrix product. What fails says why and is stepped over.

`of_gemm` is taken from the product timed in turn with the variants: the card is power-limited, and a product that finds
it cold, as at the start of a run, is up to 15% faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from gem_kernels import dispatch, flops
from gem_kernels.bench import peers, timing
from gem_kernels.bench.cases import HEADS, Case
from gem_kernels.bench.gate import gate
from gem_kernels.bench.problem import BOUND, POLYNOMIAL, Problem, Variant
from gem_kernels.gdpa import gdpa
from gem_kernels.jagged_attention import jagged_attention

WITH_DBIAS = " and dbias"
FORWARD_COMPARED = ("3x128", "3x128-halves", "3x64", "3x64-halves", "3x64-once")
POLYNOMIAL_CASES = ("self-full-1024", "self-half-1024", "self-half-512", "short-kv-256")


def _by_autograd(
    forward: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Iterable[Tensor], dout: Tensor | None
) -> Variant:
    """A variant that torch differentiates: the graph is built once, at the first backward on a stream, since a backward
    runs on the stream of its forward.
    """
    plain = [x.detach() for x in inputs]
    kept: dict[Any, tuple[list[Tensor], Tensor]] = {}

    def backward() -> tuple[Tensor, ...]:
        stream = torch.cuda.current_stream() if plain[0].is_cuda else None
        if stream not in kept:
            built = [x.clone().requires_grad_() for x in plain]
            kept[stream] = built, forward(*built)
        leaves, out = kept[stream]
        return torch.autograd.grad(out, leaves, torch.ones_like(out) if dout is None else dout, retain_graph=True)

    return Variant(lambda: forward(*plain), backward)


def _public(p: Problem, backend: str, act: str | None) -> Variant:
    """The public operator on one backend."""
    options: dict[str, Any] = {"scale": p.scale, "window": p.case.window, "backend": backend}
    if act is not None:
        options |= {"activation": act, "score_bound": BOUND * 1.001 if act in POLYNOMIAL else None}
    else:
        options["bias"] = p.bias

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        operator = jagged_attention if act is None else gdpa
        return cast(Tensor, operator(q, k, v, *p.where, **options))  # type: ignore[operator]

    return _by_autograd(run, (p.q, p.k, p.v), p.dout)


def _hopper(p: Problem) -> Iterator[tuple[str, Variant]]:
    """Every configuration of the Hopper kernels: forward ones with no backward and the reverse."""
    from gem_kernels.hopper import launch, launch_backward

    left, right = p.case.window
    options: dict[str, Any] = {"act": p.act or "softmax", "out_scale": 1.0, "left": left, "right": right}
    kept: list[Tensor] = []

    def forward(config: launch.ForwardConfig) -> Tensor:
        return launch.forward(p.q, p.k, p.v, *p.where, p.scale, config=config, bias=p.bias, **options)[0]

    def backward(name: str) -> tuple[Tensor, ...]:
        if not kept:
            kept.extend(launch.forward(p.q, p.k, p.v, *p.where, p.scale, bias=p.bias, **options))
        out, lse = kept
        config = launch_backward.BACKWARD[name.removesuffix(WITH_DBIAS)]
        dbias = torch.empty_like(p.bias) if p.bias is not None and name.endswith(WITH_DBIAS) else None
        return launch_backward.backward(
            p.dout, None, p.q, p.k, p.v, out, lse, *p.where, p.scale, config=config, bias=p.bias, bias_grad=dbias,
            **options,
        )  # fmt: skip

    forwards, backwards = _hopper_names(p.case, p.act)
    for name in forwards:
        yield f"hopper {name}", Variant(functools.partial(forward, launch.FORWARD[name]), None)
    for name in backwards:
        yield f"hopper {name}", Variant(None, functools.partial(backward, name))


def _hopper_names(case: Case, act: str | None) -> tuple[list[str], list[str]]:
    """The configurations of both passes worth comparing on a case; of the backward with a bias without and with its
    gradient.
    """
    from gem_kernels.hopper import launch, launch_backward

    if case.bias:
        return ["3x64"], ["stream", f"stream{WITH_DBIAS}"]
    fitting = [name for name, way in launch_backward.BACKWARD.items() if way.fits(case.max_q, case.max_k)]
    if max(case.window) >= 0:
        return ["3x128", "3x128-lean"], fitting
    forward = [name for name in FORWARD_COMPARED if launch.FORWARD[name].fits(case.dim, case.max_k)]
    return [name for name in forward if act is None or not launch.FORWARD[name].halves], fitting


def _baseline(p: Problem) -> Variant:
    """The public idea of GDPA in Triton, for comparison: `bench.baseline`."""
    from gem_kernels.bench import baseline

    act = p.act or "identity"
    return Variant(
        lambda: baseline.forward(p.q, p.k, p.v, *p.where, act, p.scale),
        lambda: baseline.backward(p.dout, p.q, p.k, p.v, *p.where, act, p.scale),
    )


def _subtraction(p: Problem) -> Variant:
    """The portable forward that subtracts what missing keys add."""
    from gem_kernels.jagged_attention import subtraction

    return Variant(lambda: subtraction.forward(p.q, p.k, p.v, *p.where[:2], p.bias, *p.where[2:], p.scale)[0], None)


def measures(case: Case, act: str | None) -> bool:
    """Whether a suite has this pair: GDPA takes no bias, and polynomials are compared on a few cases."""
    return (act is None or not case.bias) and (act not in POLYNOMIAL or case.name in POLYNOMIAL_CASES)


def names(case: Case, act: str | None) -> list[str]:
    """What `ours` may hold, known without a device."""
    if act in POLYNOMIAL:
        return ["hopper", "triton", "hopper exact"]
    hopper = ["hopper", *(f"hopper {name}" for both in _hopper_names(case, act) for name in both)]
    other = [] if max(case.window) >= 0 else ["triton subtraction"] if act is None else ["triton baseline"]
    return [*hopper, "triton", *other]


def ours(p: Problem) -> dict[str, Variant]:
    """The public operator on every backend that takes this problem, then the configurations of the Hopper kernels and
    the other generations.
    """
    op = "jagged_attention" if p.act is None else "gdpa"
    found: dict[str, Variant] = {}
    for backend in ("hopper", "triton"):
        try:
            dispatch.why(op, p.q, backend, p.features)
        except RuntimeError as error:
            print(f"  {backend}: {error}")
            continue
        found[backend] = _public(p, backend, p.act)
    masked = max(p.case.window) >= 0
    if p.act in POLYNOMIAL:
        if "hopper" in found:
            found["hopper exact"] = _public(p, "hopper", p.act.removesuffix("_poly"))  # type: ignore[union-attr]
        return found
    if "hopper" in found:
        found.update(_hopper(p))
    if p.act is None and not masked and "triton" in found:
        found["triton subtraction"] = _subtraction(p)
    if p.act is not None and not masked and p.case.dim in (64, 128):
        found["triton baseline"] = _baseline(p)
    return found


def theirs(p: Problem, chosen: tuple[str, ...]) -> dict[str, Variant]:
    """Those of the peers (all softmax) that are named, or by default all for softmax and the fastest for GDPA, and can
    be imported here and do what is asked.
    """
    default = () if p.act in POLYNOMIAL else ("fa3", "fa4") if p.act is not None else (*peers.PEERS, *peers.PADDED)
    found = {}
    for name in chosen or default:
        try:
            if name in peers.PADDED:
                run, dense = peers.padded(name, p.case, p.q, p.k, p.v, p.q_offsets, p.k_offsets, p.bias)
                found[name] = _by_autograd(run, dense, None)
            else:
                run = peers.make(name, p.case, p.q_offsets, p.k_offsets)
                found[name] = _by_autograd(run, (p.q, p.k, p.v), p.dout)
        except Exception as error:  # whatever a peer throws is the finding
            print(f"  no {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    return found


def measure(
    case: Case, act: str | None, device: torch.device, *, passes: tuple[str, ...], only: str, skip: tuple[str, ...],
    peer_names: tuple[str, ...], rounds: int, rep: int, ceilings: dict[str, float], gate_only: bool,
    clock: bool = False, constant: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """The rows of one case: the gate, then times of ours, of the peers and of the large matrix product.

    clock: the SMs' clock under each; constant: inputs of one number.
    """
    if not measures(case, act):
        return []
    p = Problem.make(case, act, device, constant=constant)
    variants = {n: v for n, v in ours(p).items() if only in n and not any(x in n for x in skip)}
    errors = gate(p, variants, passes)
    if gate_only:
        return []
    cost = flops.attention(
        case.q, case.k, heads=HEADS, head_dim=case.dim, softmax=act is None, window=case.window
    )  # fmt: skip
    peer_variants = theirs(p, peer_names)
    rows = []
    for what in passes:
        runs: dict[str, timing.Run] = {}
        for name, variant in [*((f"peer {n}", v) for n, v in peer_variants.items()), *variants.items()]:
            run = variant.forward if what == "forward" else variant.backward
            if run is not None and (name.startswith("peer ") or (name, what) in errors):
                runs[name] = run
        runs = _alive(runs)
        host = {name: timing.host_us(run) for name, run in runs.items() if not name.startswith("peer ")}
        runs = {name: _captured(name, run) for name, run in runs.items()}  # some are shorter than their Python
        runs["gemm"] = timing.gemm(device)
        times = timing.interleaved(runs, rounds=rounds, rep=rep, failed=_say)
        ghz = {name: round(timing.sm_ghz(runs[name], 6 * rep), 3) for name in times} if clock else {}
        product = timing.GEMM_FLOPS / times.pop("gemm") / 1e9
        useful = cost.forward_flops if what == "forward" else cost.backward_flops
        moved = cost.forward_bytes if what == "forward" else cost.backward_bytes
        peer_rates = {
            n.removeprefix("peer "): round(useful / t / 1e9, 1) for n, t in times.items() if n.startswith("peer ")
        }
        for name, ms in times.items():
            if name.startswith("peer "):
                continue
            tflops, gbps = useful / ms / 1e9, moved / ms / 1e6
            rows.append({
                "case": case.name, "op": "jagged_attention" if act is None else f"gdpa:{act}", "variant": name,
                "pass": what,
                "dtype": "bfloat16", "head_dim": case.dim, "ms": round(ms, 4), "tflops": round(tflops, 1),
                "gbps": round(gbps, 1), "of_gemm": round(tflops / product, 3),
                "of_copy": round(gbps / 1e3 / ceilings["copy_tbps"], 3), "error": errors[name, what],
                "host_us": round(host[name], 1), "peers": {**peer_rates, "gemm 8192": round(product, 1)},
                "unit": "tflops",
            })  # fmt: skip
            if clock:
                others = {n.removeprefix("peer "): x for n, x in ghz.items() if n not in variants}
                rows[-1] |= {"ghz": ghz[name], "peers_ghz": others}
    return rows


def _say(name: str, error: Exception) -> None:
    print(f"  {name} NOT TIMED: {type(error).__name__}: {str(error)[:200]}", flush=True)


def _captured(name: str, run: timing.Run) -> timing.Run:
    """`run` as a CUDA graph, or as it is, and that is said, where it cannot be captured."""
    try:
        return timing.captured(run)
    except Exception as error:  # whatever a peer throws is the finding
        torch.cuda.synchronize()
        print(f"  {name} is timed with its Python: {type(error).__name__}: {str(error)[:120]}", flush=True)
        return run


def _alive(runs: dict[str, timing.Run]) -> dict[str, timing.Run]:
    """The runs that do not raise: a peer may refuse a shape, and that is said."""
    kept = {}
    for name, run in runs.items():
        try:
            run()
            torch.cuda.synchronize()
            kept[name] = run
        except Exception as error:  # whatever it throws is the finding
            _say(name, error)
    return kept
