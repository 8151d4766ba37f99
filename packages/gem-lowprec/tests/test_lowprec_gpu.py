"""A CUDA device gives the numbers of the CPU: quantised tensors bit for bit, products up to accumulation order."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from gem_kernels.nn import NormLinear
from gem_kernels.testing import poisoned
from gem_lowprec import (
    FP8_1X128,
    FP8_128X128,
    FP8_ROW,
    FP8_TENSOR,
    MXFP4,
    MXFP8,
    MXFP8_E5M2,
    MXFP8_SQUARE,
    LowPrecisionLinear,
    Products,
    QuantSpec,
    Randoms,
    Recipe,
    Rule,
    block_matmul,
    convert,
    engine,
    low_precision_linear,
    mx_matmul,
    norms,
    quantize,
    quantize_both,
)
from gem_lowprec.block_gemm import CONFIGS
from gem_lowprec.norm_linear import LowPrecisionNormLinear
from gem_lowprec.weight import QuantizedWeight
from torch import nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SPECS = [MXFP8, MXFP8_E5M2, MXFP8_SQUARE, MXFP4, FP8_1X128, FP8_128X128, FP8_ROW, FP8_TENSOR]


HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.cpu().contiguous().flatten().view(torch.uint8)


def exact(t: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """What the reference quantiser makes of t, dequantised in float64."""
    return quantize(t.detach(), spec, backend="reference").dequantize(torch.float64)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.detach().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("randoms", [None, Randoms(seed=3, step=1, offset=5)], ids=["nearest", "stochastic"])
def test_quantisation_is_the_same_bit_for_bit(spec, randoms):
    x = torch.randn(300, 333) * torch.exp2(torch.randn(300, 333) * 4)
    x[0, :40] = 0
    x[9] *= 1e-38
    cpu, cuda = quantize(x, spec, randoms=randoms), quantize(x.cuda(), spec, randoms=randoms)
    assert torch.equal(bits(cpu.data), bits(cuda.data))
    assert torch.equal(bits(cpu.scale), bits(cuda.scale))
    assert torch.equal(cpu.dequantize(), cuda.dequantize().cpu())


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_non_finite_blocks_are_nan(spec):
    x = torch.randn(64, 64)
    x[3, 5], x[40, 50] = math.inf, math.nan
    cpu, cuda = quantize(x, spec).dequantize(), quantize(x.cuda(), spec).dequantize().cpu()
    assert torch.equal(cpu.isnan(), cuda.isnan())
    assert cpu.isnan().any()


@pytest.mark.parametrize("extra", [{}, {"hadamard": 32, "stochastic": True}], ids=["plain", "hadamard-stochastic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", ["mxfp8", "mxfp8_square", "fp8_block", "fp8_row"])
@pytest.mark.parametrize(("tokens", "k", "n"), [(256, 512, 384), (131, 150, 70)])
def test_products(precision, dtype, extra, tokens, k, n):
    x = torch.randn(tokens, k, dtype=dtype)
    w = torch.randn(n, k, dtype=dtype) * 0.1
    g = torch.randn(tokens, n, dtype=dtype)
    products = Products(forward=precision, dgrad=precision, wgrad=precision, **extra)
    results = []
    for device in ("cpu", "cuda"):
        xd, wd = (t.clone().to(device).requires_grad_() for t in (x, w))
        y = low_precision_linear(xd, wd, products=products)
        y.backward(g.to(device))
        results.append([t.detach().cpu().double() for t in (y, xd.grad, wd.grad)])
    for cpu, cuda in zip(*results, strict=True):
        error = (cpu - cuda).norm() / cpu.norm()
        # A BF16 result may round the other way; the Hadamard transform may move a value across a rounding boundary.
        # Hopper's FP8 tensor cores accumulate with fewer bits than float32: 1.3e-4 on an H200.
        exact = dtype == torch.float32 and not extra
        # A BF16 output and another order of sums: 2.5e-3.
        limit = 3e-3 if not exact else 1e-3 if engine(precision, "cuda").name == "native" else 1e-5
        assert error < limit, f"relative difference {error:.1e}"


def test_row_wise_runs_natively_from_ada_on():
    native = torch.cuda.get_device_capability() >= (8, 9)
    assert engine("fp8_row", "cuda").name == ("native" if native else "emulated")


@HOPPER
@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
@pytest.mark.parametrize(
    ("m", "n", "k"), [(256, 256, 256), (197, 313, 270), (1, 8, 16), (65, 128, 128), (500, 520, 4096)]
)
def test_block_matmul(config, m, n, k):
    a = quantize_both(torch.randn(m, k, device="cuda").bfloat16(), col=False).row
    b = quantize_both(torch.randn(n, k, device="cuda").bfloat16(), FP8_128X128, col=False).row
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    expected = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    for splits in (1, 3):
        for dtype, limit in ((torch.bfloat16, 5e-3), (torch.float32, 5e-4)):
            with poisoned():
                got = block_matmul(a, b, dtype, config=config, splits=splits)
                with_bias = block_matmul(a, b, dtype, bias, config=config, splits=splits)
            assert relative(got, expected) < limit
            assert relative(with_bias, expected + bias.double()) < limit
            assert torch.equal(got, block_matmul(a, b, dtype, config=config, splits=splits))


@HOPPER
@pytest.mark.parametrize(("m", "n", "k"), [(256, 256, 256), (197, 313, 270), (128, 64, 5000)])
def test_block_matmul_with_a_scale_for_every_row_of_both(m, n, k):
    a, b = (quantize(torch.randn(rows, k, device="cuda"), FP8_1X128) for rows in (m, n))
    expected = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    for splits in (None, 1, 2):
        with poisoned():
            assert relative(block_matmul(a, b, torch.float32, splits=splits), expected) < 5e-4


@HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "k", "n"), [(1000, 528, 272), (131, 150, 70), (4096, 1024, 512)])
def test_a_block_wise_layer_runs_natively(dtype, tokens, k, n):
    products = Products(forward="fp8_block", dgrad="fp8_block", wgrad="fp8_block")
    layer = LowPrecisionLinear(k, n, products=products, device="cuda", dtype=dtype)
    x = torch.randn(tokens, k, device="cuda", dtype=dtype, requires_grad=True)
    g = torch.randn(tokens, n, device="cuda", dtype=dtype) * 1e-3
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for run, guard in ((layer, poisoned()), (compiled, nullcontext())):
        with guard:
            y = run(x)
            found = (y, *torch.autograd.grad(y, (x, layer.weight, layer.bias), g))
        w = layer.weight
        expected = (
            exact(x, FP8_1X128) @ exact(w, FP8_128X128).t() + layer.bias.detach().double(),
            exact(g, FP8_1X128) @ exact(w.t(), FP8_128X128).t(),
            exact(g.t(), FP8_1X128) @ exact(x.t(), FP8_128X128).t(),
            g.double().sum(0),
        )
        for got, right in zip(found, expected, strict=True):
            assert got.dtype == dtype
            assert relative(got, right) < (4e-3 if dtype == torch.bfloat16 else 5e-4)


@HOPPER
@pytest.mark.parametrize("wgrad", ["fp8_block", "bf16"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_norm_that_writes_fp8_trains_like_the_norm_and_the_layer(norm, wgrad):
    torch.manual_seed(0)
    model = nn.Sequential(NormLinear(256, 384, norm=norm, device="cuda")).bfloat16()
    for p in model[0].norm.parameters():
        nn.init.normal_(p, mean=1.0, std=0.3)
    keys = list(model.state_dict())
    rule = Rule(forward="fp8_block", dgrad="fp8_block", wgrad=wgrad)
    convert(model, Recipe(name="block", rules=(rule,), fallback=False, fuse_norms=True))
    fused = model[0]
    assert type(fused) is LowPrecisionNormLinear
    assert list(model.state_dict()) == keys
    results = []
    for run in (fused, lambda x: fused.linear(fused.norm(x))):
        x = torch.randn(700, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
        x.requires_grad_()
        y = run(x)
        g = torch.randn(y.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(2)).bfloat16()
        results.append((y, *torch.autograd.grad(y, (x, *fused.parameters()), g)))
    for got, right in zip(*results, strict=True):
        # The norm apart is rounded to BF16, which sends a few in a hundred to the neighbouring E4M3 number.
        assert relative(got, right.detach().double()) < 3e-2


@HOPPER
@pytest.mark.parametrize("rows", [1, 5, 1000])
@pytest.mark.parametrize(("layer", "cols"), sorted({*norms.BY_HAND, *norms.CHOSEN}))
def test_a_norm_by_hand_writes_what_the_portable_one_writes(layer, cols, rows, monkeypatch):
    x = (torch.randn(rows, cols, device="cuda") * 2 + 0.3).bfloat16()
    gain = torch.rand(cols, device="cuda") + 0.5
    bias = torch.randn(cols, device="cuda") if layer else None
    with poisoned():
        got, found = norms.norm_quantize(x, gain, bias)
    for table in ("BY_HAND", "CHOSEN"):
        monkeypatch.setattr(norms, table, {})
    expected, right = norms.norm_quantize(x, gain, bias)
    assert (bits(got.data) != bits(expected.data)).double().mean() < 1e-4  # sums in another order
    assert torch.equal(got.scale, expected.scale)
    if layer:
        assert relative(found.mean, right.mean.double()) < 1e-6
    assert relative(found.rstd, right.rstd.double()) < 1e-6


@HOPPER
@pytest.mark.parametrize(("m", "n", "k"), [(256, 128, 256), (131, 70, 160), (5, 300, 1024)])
def test_mx_matmul(m, n, k):
    a, b = (quantize(torch.randn(rows, k, device="cuda"), MXFP8) for rows in (m, n))
    expected = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    with poisoned():
        assert relative(mx_matmul(a, b, torch.float32), expected) < 1e-5


@HOPPER
def test_a_layer_whose_weight_arrives_quantised():
    """As an FSDP gather in FP8 leaves it: the same bits as with the weight itself, in all three products."""
    torch.manual_seed(3)
    x = torch.randn(300, 384, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(256, 384, device="cuda", dtype=torch.bfloat16)
    g = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16)
    products = Products(forward="fp8_block", dgrad="fp8_block", wgrad="fp8_block")
    found = []
    for weight in (w, QuantizedWeight(quantize(w, FP8_128X128))):
        leaves = x.clone().requires_grad_(), weight.requires_grad_()
        y = low_precision_linear(*leaves, products=products)
        found.append((y, *torch.autograd.grad(y, leaves, g)))
    for plain, gathered in zip(*found, strict=True):
        assert torch.equal(plain, gathered)
