"""What is measured of attention: the FP8 forward, with and without quantising its operands, projections that write
them, whole steps, and a module between its projections.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gem_kernels import flops, jagged_attention
from gem_kernels.nn import JaggedAttention
from torch import Tensor

from gem_lowprec.attention import launch, low_precision_attention
from gem_lowprec.attention.layer import LowPrecisionJaggedAttention
from gem_lowprec.attention.operands import Operands, quantise
from gem_lowprec.attention.projection import project
from gem_lowprec.bench.problems import Problem, relative
from gem_lowprec.bench.timing import Run
from gem_lowprec.block_gemm import block_matmul
from gem_lowprec.convert import convert
from gem_lowprec.orientations import quantize_both
from gem_lowprec.quantize import FP8_128X128
from gem_lowprec.recipe import Recipe, Rule

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


def projection(name: str, device: torch.device, lengths: list[int], width: int) -> Problem:
    """Q, K and V in FP8 from FP8 operands of their packed projection, W [3 H 128, width]: as its product is made, or by
    a pass over the product in BF16.
    """
    tokens, longest = sum(lengths), max(lengths)
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    x, w = (torch.randn(n, width, device=device, dtype=torch.bfloat16) for n in (tokens, 3 * HEADS * 128))
    qx, qw = quantize_both(x, col=False).row, quantize_both(w, FP8_128X128, col=False).row
    assert qx is not None
    assert qw is not None

    def fused() -> Operands:
        return project(qx, qw, None, offsets, longest, heads=HEADS, kv_heads=HEADS, dtype=torch.bfloat16)[0]

    def apart() -> Operands:
        parts = block_matmul(qx, qw, torch.bfloat16).unflatten(1, (-1, 128)).split(HEADS, 1)
        q, k, v = parts
        return quantise(q, k, v, offsets, offsets, longest, longest)

    runs: dict[str, Run] = {"operands": fused, "product, then a pass": apart}
    last = tokens - 512

    def check(variant: str) -> float:
        made: Operands = runs[variant]()
        got = torch.cat([part[last:] for part in made.dequantize(torch.float32)], 1).flatten(1)
        exact = (qx.data[last:].double() * qx.scale_values()[last:].double()) @ qw.dequantize(torch.float64).t()
        return relative(got, exact)

    n = w.shape[0]
    return Problem(
        name=name, op="attention projection", what="forward", width=width, runs=runs, flops=2 * tokens * n * width,
        nbytes=tokens * (width + n) + n * width, limit=0.04, check=check,
        peers={
            "fp8 product in bf16": lambda: block_matmul(qx, qw, torch.bfloat16), "cuBLAS bf16": lambda: x @ w.t(),
        },
    )  # fmt: skip


def block(
    name: str, device: torch.device, lengths: list[int], width: int, *, whole: bool, rotary: bool = False
) -> Problem:  # fmt: skip
    """A `JaggedAttention` with its norm and projections, heads of 128. whole: forward and backward. rotary: heads of
    q and k are normed and turned.
    """
    tokens, longest = sum(lengths), max(lengths)
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    torch.manual_seed(0)
    between: dict[str, Any] = {"qk_norm": True, "rope_base": 1e4} if rotary else {}
    plain = JaggedAttention(width, width // 128, pre_norm=True, device=device, **between).bfloat16()
    modules: dict[str, JaggedAttention] = {}
    rules = (Rule(forward="fp8_block", dgrad="fp8_block", wgrad="fp8_block"),)
    modules["fp8"] = copy.deepcopy(plain)
    convert(modules["fp8"], Recipe(name="block", rules=rules, attention="fp8", fuse_norms=True, fallback=False))
    modules["fp8, passes apart"] = copy.deepcopy(modules["fp8"])
    modules["fp8, passes apart"].__class__ = _Apart
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=whole)
    g = torch.randn_like(x)

    def run(module: JaggedAttention) -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(whole):
            y = module(x, offsets, longest)
            return (y, *torch.autograd.grad(y, (x, *module.parameters()), g)) if whole else (y,)

    def check(variant: str) -> float:
        exact = run(plain)
        return max(relative(got, e.detach().double()) for got, e in zip(run(modules[variant]), exact, strict=True))

    heads = width // 128
    cost = flops.attention(lengths, heads=heads, head_dim=128)
    products = 2 * tokens * width * 4 * width
    work = cost.forward_flops + products
    if whole:
        work += cost.backward_flops + 2 * products
    return Problem(
        name=name, op="attention block", what="step" if whole else "forward", width=width, flops=work,
        nbytes=tokens * width * (16 if whole else 6), limit=0.15, check=check, peers={"bf16": partial(run, plain)},
        runs={variant: partial(run, module) for variant, module in modules.items()},
    )  # fmt: skip


class _Apart(LowPrecisionJaggedAttention):
    """Q, K, V and O in 16 bits, each quantised by a pass of its own."""

    def writes_operands(self, x: Tensor) -> bool:
        """Never."""
        return False


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

    def more(name: str, make: Callable[..., Problem], batch: int, longest: int, width: int, **options: Any) -> None:
        made[name] = lambda device: make(name, device, [longest] * batch, width, **options)

    for width in (512, 2048):
        more(f"projection-full-1024-{width}", projection, 256, 1024, width)
    for batch, longest, width in ((128, 1024, 1024), (32, 4096, 1024), (64, 1024, 2048)):
        for what in ("forward", "step"):
            more(f"block-{what}-{longest}-{width}", block, batch, longest, width, whole=what == "step")
    for what in ("forward", "step"):
        more(f"block-{what}-rotary-1024-1024", block, 128, 1024, 1024, whole=what == "step", rotary=True)
    return made
