"""What is measured: products, quantisers, norms that quantise, and whole linear layers.

A problem has variants of ours, peers, what they cost, and a check against float64 (or against the reference's bits)
that comes before any time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from gem_kernels.nn import NormLinear
from torch import Tensor, nn
from torch.nn import functional as F

from gem_lowprec import norms, norms_warps
from gem_lowprec.bench.timing import Run
from gem_lowprec.block_gemm import CONFIGS, block_matmul
from gem_lowprec.convert import convert
from gem_lowprec.linear import LowPrecisionLinear
from gem_lowprec.norms import norm_quantize
from gem_lowprec.orientations import quantize_both
from gem_lowprec.products import Products
from gem_lowprec.quantize import (
    FP8_1X128,
    FP8_128X128,
    FP8_ROW,
    MXFP4,
    MXFP8,
    MXFP8_SQUARE,
    QTensor,
    QuantSpec,
    quantize,
)
from gem_lowprec.recipe import Recipe, Rule

TOKENS = 65536
SIZES = (1024, 2048, 4096)
CHECKED = 512  # rows of a large product that are compared with float64


@dataclass(frozen=True, kw_only=True)
class Problem:
    """`runs` of ours and `peers` by name; useful `flops` and `nbytes` of a call; `check` gives the relative error of a
    variant (or the share of wrong bits) and `limit` bounds it. `unit` is what the table compares in.
    """

    name: str
    op: str
    what: str  # "forward" or "step" (forward and backward)
    width: int
    runs: dict[str, Run]
    check: Callable[[str], float]
    limit: float
    flops: int = 0
    nbytes: int = 0
    peers: dict[str, Run] = field(default_factory=dict)
    unit: str = "tflops"


def _normal(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def _row(x: Tensor, spec: QuantSpec = FP8_1X128) -> QTensor:
    q = quantize_both(x, spec, col=False).row
    assert q is not None
    return q


def _turned(x: Tensor, spec: QuantSpec = FP8_1X128) -> QTensor:
    q = quantize_both(x, spec, row=False).col
    assert q is not None
    return q


def relative(got: Tensor, exact: Tensor) -> float:
    """|got - exact| / |exact|."""
    return float((got.detach().double() - exact).norm() / exact.norm())


def _exact(a: QTensor, b: QTensor, rows: slice) -> Tensor:
    """Those rows of the product of the dequantised operands, in float64."""
    part = (a.data[rows].double() * a.scale_values()[rows].double()).contiguous()
    return part @ b.dequantize(torch.float64).t()


def _torch_blockwise(a: QTensor, b: QTensor) -> Run:
    """torch's own block-wise product on the same operands; raises where this torch has none."""
    scaled_mm, kinds = F.scaled_mm, F.ScalingType  # type: ignore[attr-defined]
    scale = b.scale.contiguous()

    def run() -> Any:
        return scaled_mm(
            a.data, b.data.t(), a.scale, kinds.BlockWise1x128, scale.t(), kinds.BlockWise128x128,
            output_dtype=torch.bfloat16,
        )  # fmt: skip

    run()
    return run


def gemm(name: str, device: torch.device, m: int, n: int, k: int) -> Problem:
    """Y = X W^T: X with a scale per 1 x 128, W with one per 128 x 128, BF16 out."""
    x, w = _normal(device, m, k), _normal(device, n, k) / k**0.5
    a, b = _row(x), _row(w, FP8_128X128)
    runs: dict[str, Run] = {
        "block": partial(block_matmul, a, b, torch.bfloat16),
        "block 2x64x256": partial(block_matmul, a, b, torch.bfloat16, config=CONFIGS["2x64x256"]),
    }
    ones = torch.ones(m, 1, device=device), torch.ones(1, n, device=device)
    peers: dict[str, Run] = {
        "cuBLAS bf16": lambda: x @ w.t(),
        "torch row-wise fp8": lambda: torch._scaled_mm(
            a.data, b.data.t(), scale_a=ones[0], scale_b=ones[1], out_dtype=torch.bfloat16
        ),
    }
    try:
        peers["torch block-wise fp8"] = _torch_blockwise(a, b)
    except Exception as error:  # whatever a peer throws is the finding
        print(f"  torch block-wise fp8: {type(error).__name__}: {str(error)[:160]}")
    rows = slice(m - CHECKED, m)
    return Problem(
        name=name, op="gemm", what="forward", width=k, runs=runs, peers=peers, flops=2 * m * n * k,
        nbytes=m * k + n * k + 2 * m * n, limit=3e-3, check=lambda v: relative(runs[v]()[rows], _exact(a, b, rows)),
    )  # fmt: skip


def wgrad(name: str, device: torch.device, m: int, n: int, k: int) -> Problem:
    """dW[N, K] = dY[T, N]^T X[T, K], float32 out; X^T with a scale per 1 x 128 or per 128 x 128."""
    dy, x = _normal(device, m, n), _normal(device, m, k)
    a = _turned(dy)
    operands = {"128x128": _turned(x, FP8_128X128), "1x128": _turned(x)}
    runs: dict[str, Run] = {
        f"block {block}": partial(block_matmul, a, b, torch.float32) for block, b in operands.items()
    }
    rows = slice(0, CHECKED)
    return Problem(
        name=name, op="wgrad", what="backward", width=m, runs=runs, peers={"cuBLAS bf16": lambda: dy.t() @ x},
        flops=2 * m * n * k, nbytes=m * (n + k) + 4 * n * k, limit=4e-4,
        check=lambda v: relative(runs[v]()[rows], _exact(a, operands[v.removeprefix("block ")], rows)),
    )  # fmt: skip


def _codes(q: QTensor) -> Tensor:
    return q.data.contiguous().view(torch.uint8)


def _wrong(got: QTensor, expected: QTensor) -> float:
    """Share of elements whose bits differ; 1 if a scale does."""
    if not torch.equal(got.scale.float(), expected.scale.float()):
        return 1.0
    return float((_codes(got) != _codes(expected)).double().mean())


def _with(module: ModuleType, run: Run, **options: Any) -> Run:
    """`run` under other values of a module's options: those of variants that are off."""

    def changed() -> Any:
        before = {option: getattr(module, option) for option in options}
        try:
            for option, value in options.items():
                setattr(module, option, value)
            return run()
        finally:
            for option, value in before.items():
                setattr(module, option, value)

    return changed


def quantiser(name: str, device: torch.device, rows: int, cols: int) -> Problem:
    """One pass over [rows, cols] in BF16."""
    x = _normal(device, rows, cols)
    specs = {"row-wise": FP8_ROW, "mxfp8": MXFP8, "mxfp8 square": MXFP8_SQUARE, "mxfp4": MXFP4}
    both: dict[str, dict[str, Any]] = {
        "1x128": {"col": False}, "1x128 both": {}, "1x128 both, sums": {"sums": True},
        "1x128 transposed": {"row": False},
        "1x128 both, 128x128 transposed": {"col_spec": FP8_128X128}, "128x128 both": {"spec": FP8_128X128},
    }  # fmt: skip
    runs: dict[str, Run] = {v: partial(quantize_both, x, **o) for v, o in both.items()}
    runs |= {v: partial(quantize, x, s) for v, s in specs.items()}

    def check(variant: str) -> float:
        if variant in specs:
            return _wrong(runs[variant](), quantize(x, specs[variant], backend="reference"))
        found, spec = runs[variant](), both[variant].get("spec", FP8_1X128)
        errors = []
        if found.row is not None:
            errors.append(_wrong(found.row, quantize(x, spec, backend="reference")))
        if found.col is not None:
            turned = both[variant].get("col_spec", spec)
            errors.append(_wrong(found.col, quantize(x, turned, dim=0, backend="reference").t()))
        if found.sums is not None:
            total = x.double().sum(0)
            errors.append(float((found.sums.double() - total).norm() / total.norm() > 1e-5))
        return max(errors)

    return Problem(
        name=name, op="quantize", what="forward", width=cols, runs=runs, unit="gbps", limit=0.0, nbytes=3 * rows * cols,
        check=check, peers={"torch copy": lambda: x.clone()},
    )  # fmt: skip


def bytes_of(problem: Problem, run: str) -> int:
    """Bytes that a run reads and writes; a quantiser of both orientations writes twice, a copy writes BF16, MXFP4 half
    a byte.
    """
    if run == "mxfp4":
        return problem.nbytes // 6 * 5
    if problem.op == "quantize" and ("both" in run or run == "torch copy"):
        return problem.nbytes // 3 * 4
    return problem.nbytes


def norm(name: str, device: torch.device, rows: int, cols: int, *, layer: bool) -> Problem:
    """RMSNorm or LayerNorm to E4M3 and scales, against the norm of torch followed by the quantiser."""
    x, gain = _normal(device, rows, cols), 1 + 0.1 * _normal(device, cols)
    bias = 0.1 * _normal(device, cols) if layer else None

    def apart() -> Tensor:
        if layer:
            return F.layer_norm(x, (cols,), gain, bias, 1e-6)
        return F.rms_norm(x, (cols,), gain, 1e-6)

    def run() -> QTensor:
        return norm_quantize(x, gain, bias, eps=1e-6)[0]

    runs: dict[str, Run] = {"norm to fp8": run}
    for way in norms_warps.WAYS.get((layer, cols), ()):
        if way != norms.CHOSEN.get((layer, cols)):
            runs[way] = _with(norms, run, CHOSEN={(layer, cols): way})

    def check(variant: str) -> float:
        part = x[:CHECKED].double()
        part = part - part.mean(1, keepdim=True) if layer else part
        y = part / (part.square().mean(1, keepdim=True) + 1e-6).sqrt() * gain.double()
        y = y if bias is None else y + bias.double()
        expected = quantize(y, FP8_1X128, backend="reference")
        return float((runs[variant]().data[:CHECKED].float() != expected.data.float()).double().mean())

    return Problem(
        name=name, op="layer_norm" if layer else "rms_norm", what="forward", width=cols, runs=runs,
        peers={"torch norm, then ours": lambda: _row(apart()), "torch norm alone": apart}, unit="gbps",
        nbytes=rows * (3 * cols + 4 * cols // 128 + 4 * (1 + layer)), limit=2e-3, check=check,
    )  # fmt: skip


def layer(name: str, device: torch.device, m: int, n: int, k: int) -> Problem:
    """A linear layer with bias, forward and all three gradients, quantisation included; weights and tokens in BF16."""
    x, g = _normal(device, m, k).requires_grad_(), _normal(device, m, n)
    plain = nn.Linear(k, n, device=device, dtype=torch.bfloat16)
    block, row = (Products(forward=p, dgrad=p) for p in ("fp8_block", "fp8_row"))
    recipes = {
        "fp8_block": replace(block, wgrad="fp8_block"),
        "fp8_block, wgrad bf16": block,
        "fp8_row, wgrad bf16": row,
    }
    layers = {v: LowPrecisionLinear.from_linear(plain, p) for v, p in recipes.items()}

    def run(module: nn.Linear) -> tuple[Tensor, ...]:
        y = module(x)
        assert module.bias is not None
        return (y, *torch.autograd.grad(y, (x, module.weight, module.bias), g))

    def check(variant: str) -> float:
        got = run(layers[variant])
        rows, weight = slice(0, CHECKED), plain.weight.detach().double()
        exact = (
            x.detach()[rows].double() @ weight.t() + plain.bias.detach().double(),
            g[rows].double() @ weight,
            g.t()[:64].double() @ x.detach().double(),
            g.double().sum(0),
        )
        parts = (got[0][rows], got[1][rows], got[2][:64], got[3])
        return max(relative(p, e) for p, e in zip(parts, exact, strict=True))

    return Problem(
        name=name, op="linear", what="step", width=k, flops=6 * m * n * k, check=check, limit=0.06,
        nbytes=2 * (3 * m * k + 3 * m * n), peers={"bf16": partial(run, plain)},
        runs={v: partial(run, module) for v, module in layers.items()},
    )  # fmt: skip


def normed_layer(name: str, device: torch.device, m: int, n: int, k: int) -> Problem:
    """LayerNorm and a projection, forward and all gradients: the norm writing FP8, or BF16 that is quantised then."""
    x, g = _normal(device, m, k).requires_grad_(), _normal(device, m, n)
    plain = NormLinear(k, n, norm="layer", device=device).bfloat16()
    rule = Rule(forward="fp8_block", dgrad="fp8_block", wgrad="fp8_block")
    modules: dict[str, nn.Module] = {}
    for variant, fuse in (("norm to fp8", True), ("norm, then fp8", False)):
        holder = nn.Sequential(copy.deepcopy(plain))
        convert(holder, Recipe(name="bench", rules=(rule,), fallback=False, fuse_norms=fuse))
        modules[variant] = holder[0]

    def run(module: nn.Module) -> tuple[Tensor, ...]:
        y = module(x)
        return (y, *torch.autograd.grad(y, (x, *module.parameters()), g))

    def check(variant: str) -> float:
        exact = run(plain)
        return max(relative(got, e.detach().double()) for got, e in zip(run(modules[variant]), exact, strict=True))

    return Problem(
        name=name, op="norm + linear", what="step", width=k, flops=6 * m * n * k, check=check, limit=0.06,
        nbytes=2 * (5 * m * k + 3 * m * n), peers={"bf16": partial(run, plain)},
        runs={v: partial(run, module) for v, module in modules.items()},
    )  # fmt: skip


def names() -> dict[str, Callable[[torch.device], Problem]]:
    """Every case by name, the main ones first, so that a run that is cut short has them."""
    from gem_lowprec.bench import attention

    made = attention.cases()

    def add(name: str, make: Callable[..., Problem], *sizes: int, **options: Any) -> None:
        def problem(device: torch.device) -> Problem:
            return make(name, device, *sizes, **options)

        made[name] = problem

    for k, n in ((2048, 2048), (4096, 4096), (2048, 4096), (4096, 2048), (1024, 1024), (512, 2048), (512, 512)):
        add(f"linear-{TOKENS}-{k}-{n}", layer, TOKENS, n, k)
    for k, n in ((2048, 2048), (1024, 2048)):
        add(f"norm-linear-{TOKENS}-{k}-{n}", normed_layer, TOKENS, n, k)
    for rows, cols in ((TOKENS, 2048), (2 * TOKENS, 1024)):
        add(f"quantize-{rows}-{cols}", quantiser, rows, cols)
    for cols, is_layer in (
        (512, True),
        (1024, False),
        (1024, True),
        (2048, True),
        (4096, False),
        (2048, False),
        (4096, True),
    ):
        rows = 2**27 // cols
        add(f"{'layer' if is_layer else 'rms'}-norm-{rows}-{cols}", norm, rows, cols, layer=is_layer)
    for n in SIZES:
        for k in SIZES:
            add(f"gemm-{TOKENS}-{n}-{k}", gemm, TOKENS, n, k)
    for n in SIZES:
        for k in SIZES:
            add(f"wgrad-{TOKENS}-{n}-{k}", wgrad, TOKENS, n, k)
    for n in SIZES:
        for k in SIZES:
            add(f"gemm-{4 * TOKENS}-{n}-{k}", gemm, 4 * TOKENS, n, k)
    return made
