"""What is measured of attention: the FP8 forward, with and without quantising its operands, and a whole step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gem_kernels import flops, jagged_attention
from torch import Tensor

from gem_lowprec.attention import launch, low_precision_attention
from gem_lowprec.attention.operands import Operands, quantise
from gem_lowprec.bench.problems import Problem, relative
from gem_lowprec.bench.timing import Run

HEADS = 4
CASES = {
    "full-1024": (256, 1024, False), "half-1024": (256, 1024, True), "full-4096": (64, 4096, False),
    "half-4096": (64, 4096, True),
}  # fmt: skip


def _lengths(batch: int, longest: int, ragged: bool) -> list[int]:
    """Of every sequence; ragged ones are uniform in 1..longest."""
    if not ragged:
        return [longest] * batch
    return torch.randint(1, longest + 1, (batch,), generator=torch.Generator().manual_seed(0)).tolist()


def _inputs(device: torch.device, lengths: list[int], dim: int) -> tuple[list[Tensor], Tensor]:
    tensors = [torch.randn(sum(lengths), HEADS, dim, device=device, dtype=torch.bfloat16) for _ in range(3)]
    return tensors, torch.tensor([0, *lengths], device=device).cumsum(0)


def _exact(tensors: tuple[Tensor, ...], first: int, dim: int) -> Tensor:
    """Attention of the rows from `first` on, one sequence, in float64."""
    q, k, v = (x[first:].double().transpose(0, 1) for x in tensors)
    return ((q @ k.transpose(1, 2) / dim**0.5).softmax(-1) @ v).transpose(0, 1)


def forward(name: str, device: torch.device, lengths: list[int], dim: int) -> Problem:
    """O and LSE: of operands in FP8, as a projection that writes them would leave them, and of BF16."""
    (q, k, v), offsets = _inputs(device, lengths, dim)
    longest, last = max(lengths), sum(lengths[:-1])
    made: Operands = quantise(q, k, v, offsets, offsets, longest, longest)
    exact = _exact(made.dequantize(torch.float32), last, dim)
    scale = dim**-0.5

    def whole() -> Any:
        return launch.forward(quantise(q, k, v, offsets, offsets, longest, longest), scale)

    runs: dict[str, Run] = {"fp8": partial(launch.forward, made, scale), "fp8, quantisation in it": whole}
    cost = flops.attention(lengths, heads=HEADS, head_dim=dim)
    return Problem(
        name=name, op="attention", what="forward", width=dim, runs=runs, flops=cost.forward_flops,
        nbytes=cost.forward_bytes, limit=0.04, check=lambda v: relative(runs[v]()[0][last:], exact),
        peers={"jfa bf16": lambda: jagged_attention(q, k, v, offsets, offsets, longest, longest)},
    )  # fmt: skip


def quantiser(name: str, device: torch.device, lengths: list[int], dim: int) -> Problem:
    """Q, K and V to operands: 2 bytes read and 1 written for each element, V transposed."""
    (q, k, v), offsets = _inputs(device, lengths, dim)
    longest = max(lengths)

    def check(_variant: str) -> float:
        pairs = zip(quantise(q, k, v, offsets, offsets, longest, longest).dequantize(), (q, k, v), strict=True)
        return max(relative(got, x.double()) for got, x in pairs)

    return Problem(
        name=name, op="attention operands", what="forward", width=dim, unit="gbps", nbytes=9 * q.numel(), limit=0.03,
        runs={"to fp8": lambda: quantise(q, k, v, offsets, offsets, longest, longest)}, check=check,
    )  # fmt: skip


def step(name: str, device: torch.device, lengths: list[int], dim: int) -> Problem:
    """Forward and backward, quantisation and dequantisation in it."""
    (q, k, v), offsets = _inputs(device, lengths, dim)
    grad = torch.randn_like(q)
    longest, last = max(lengths), sum(lengths[:-1])
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def run(attend: Callable[..., Any]) -> tuple[Tensor, ...]:
        out = attend(q, k, v, offsets, offsets, longest, longest)
        return (out, *torch.autograd.grad(out, leaves, grad))

    def check(_variant: str) -> float:
        got = run(low_precision_attention)
        small = [x.detach()[last:].double().requires_grad_() for x in leaves]
        out = _exact(tuple(small), 0, dim)
        right = (out, *torch.autograd.grad(out, small, grad[last:].double()))
        return max(relative(g[last:], r.detach()) for g, r in zip(got, right, strict=True))

    cost = flops.attention(lengths, heads=HEADS, head_dim=dim)
    return Problem(
        name=name, op="attention", what="step", width=dim, flops=cost.forward_flops + cost.backward_flops,
        nbytes=cost.forward_bytes + cost.backward_bytes, limit=0.1, check=check,
        runs={"fp8 forward": partial(run, low_precision_attention)}, peers={"jfa bf16": partial(run, jagged_attention)},
    )  # fmt: skip


def cases() -> dict[str, Callable[[torch.device], Problem]]:
    """By name."""
    made: dict[str, Callable[[torch.device], Problem]] = {}

    def add(name: str, make: Callable[..., Problem], case: str) -> None:
        made[name] = lambda device: make(name, device, _lengths(*CASES[case]), 128)

    for case in CASES:
        add(f"attention-{case}", forward, case)
    add("attention-operands-full-1024", quantiser, "full-1024")
    for case in ("full-1024", "full-4096"):
        add(f"attention-step-{case}", step, case)
    return made
