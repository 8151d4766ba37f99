"""The gate of the attention and gdpa suites: what float64 says is wrong is not timed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gem_kernels.bench.problem import Problem, Variant
from gem_kernels.gdpa import ACTIVATIONS

TOLERANCE = 1e-2  # relative error of a BF16 result against float64
SAMPLE = 10  # sequences of a case that the gate compares


def _reference(p: Problem) -> tuple[Tensor, list[tuple[slice, slice]], list[Tensor]]:
    """Float64 O and gradients of some sequences: the shortest, the longest and others from a fixed seed."""
    order = torch.as_tensor(p.case.q + p.case.k).argsort().tolist()
    middle = torch.randperm(len(order), generator=torch.Generator().manual_seed(0))[: SAMPLE - 2].tolist()
    outs, spans, grads = [], [], []
    for b in sorted({order[0], order[-1], *middle}):
        rows = slice(int(p.q_offsets[b]), int(p.q_offsets[b + 1]))
        cols = slice(int(p.k_offsets[b]), int(p.k_offsets[b + 1]))
        q, k, v = (x[s].double().requires_grad_() for x, s in ((p.q, rows), (p.k, cols), (p.v, cols)))
        s = torch.einsum("qhd,khd->hqk", q, k) * p.scale
        if p.bias is not None:
            s = s + p.bias[0, :, : s.shape[1], : s.shape[2]].double()
        unseen = hidden(s, p.case.window)
        if p.act is None:  # a row that sees no key gets 0
            weights = s.masked_fill(unseen, float("-inf")).softmax(-1).masked_fill(unseen, 0.0)
        else:
            weights = ACTIVATIONS[p.act](s).masked_fill(unseen, 0.0)
        out = torch.einsum("hqk,khd->qhd", weights, v)
        grads.append(torch.autograd.grad(out, (q, k, v), p.dout[rows].double()))
        outs.append(out.detach())
        spans.append((rows, cols))
    return torch.cat(outs), spans, [torch.cat(g) for g in zip(*grads, strict=True)]


def hidden(s: Tensor, window: tuple[int, int]) -> Tensor:
    """Which keys a query does not see, [Lq, Lk] for scores [H, Lq, Lk]."""
    rows, cols = s.shape[1:]
    left, right = (side if side >= 0 else rows + cols for side in window)
    distance = torch.arange(cols, device=s.device) - torch.arange(cols - rows, cols, device=s.device)[:, None]
    return (distance < -left) | (distance > right)


def _poison(device: torch.device) -> None:
    """Leave NaN in the memory that the next allocations get."""
    largest = 28 if device.type == "cuda" else 16
    blocks = [torch.full((2**n,), float("nan"), device=device) for n in range(largest, 8, -1)]
    del blocks


def gate(p: Problem, variants: dict[str, Variant], passes: Iterable[str]) -> dict[tuple[str, str], float]:
    """The relative error of every variant and pass that is right. What is wrong, or raises, is named and has none, so
    that it is not timed.
    """
    out, spans, grads = _reference(p)
    errors: dict[tuple[str, str], float] = {}
    for name, variant in variants.items():
        for what in passes:
            if (variant.forward if what == "forward" else variant.backward) is None:
                continue
            print(f"  {p.case.name} {name} {what}: ", end="", flush=True)
            try:
                _poison(p.q.device)
                if what == "forward":
                    assert variant.forward is not None
                    full: tuple[Tensor, ...] = (variant.forward(),)
                    expected, sides = [out], [0]
                else:
                    assert variant.backward is not None
                    full = variant.backward()
                    expected, sides = grads, [0, 1, 1]
                picked = [torch.cat([x[pair[side]] for pair in spans]) for x, side in zip(full, sides, strict=True)]
                errors[name, what] = _checked(full, picked, expected)
                print(f"relative error {errors[name, what]:.2e}", flush=True)
            except Exception as error:  # whatever it throws is the finding
                print(f"NOT TIMED: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return errors


def _checked(full: Iterable[Tensor], got: list[Tensor], expected: list[Tensor]) -> float:
    error = max(((g.double() - e).norm() / e.norm()).item() for g, e in zip(got, expected, strict=True))
    finite = all(bool(x.isfinite().all()) for x in full)
    if not (error < TOLERANCE and finite):
        raise RuntimeError(f"wrong: relative error {error:.3g}, all finite: {finite}")
    return error
