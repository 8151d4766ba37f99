"""The way of operands through a natively block-wise layer, without a GPU: quantisers run in Triton's interpreter,
and the product is made of the dequantised operands in float64. Which operand is transposed, kept or quantised once for
two products must change nothing.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from gem_kernels.nn import NormLinear
from gem_lowprec import LowPrecisionLinear, Products, block_gemm, gemm, products
from gem_lowprec.norm_linear import LowPrecisionNormLinear, _NormLinear

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="test_lowprec_gpu.py has it on a card"
)
BLOCK = Products(forward="fp8_block", dgrad="fp8_block", wgrad="fp8_block")


@pytest.fixture
def native(monkeypatch):
    """Block-wise products are native from here on."""

    def exact(a: Any, b: Any, dtype: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert a.spec.block == (1, 128)
        assert b.spec.block == (128, 128)
        y = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
        return (y if bias is None else y + bias.double()).to(dtype)

    def start() -> None:
        runs = gemm.Engine(name="native", why="a test")
        for module in (gemm, products):
            monkeypatch.setattr(module, "engine", lambda precision, device: runs)
        monkeypatch.setattr(gemm, "_no_block_kernel", lambda device: None)
        monkeypatch.setattr(block_gemm, "block_matmul", exact)

    return start


def step(layer: torch.nn.Module, x: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    return [y.detach(), *torch.autograd.grad(y, (leaf, *layer.parameters()), g)]


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("wgrad", ["fp8_block", "bf16", "skip"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_gives_what_the_emulation_gives(native, bias, wgrad, stochastic):
    torch.manual_seed(0)
    chosen = Products(forward="fp8_block", dgrad="fp8_block", wgrad=wgrad, stochastic=stochastic)
    layer = LowPrecisionLinear(200, 72, bias, products=chosen)
    if wgrad == "skip":
        layer.weight.requires_grad_(False)
        layer.parameters = lambda: [layer.bias] if bias else []  # type: ignore[method-assign,assignment]
    x, g = torch.randn(130, 200), torch.randn(130, 72)
    expected = step(layer, x, g)
    native()
    for got, right in zip(step(layer, x, g), expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)


def test_what_is_kept_for_backward_is_one_byte_an_element(native):
    layer = LowPrecisionLinear(256, 64, products=BLOCK)
    native()
    x = torch.randn(128, 256, requires_grad=True)
    kept: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x).sum().backward()
    assert [t.dtype for t in kept] == [torch.uint8, torch.int32, torch.float32]
    assert kept[0].shape == (256, 128)
    assert kept[2] is layer.weight or kept[2].shape == layer.weight.shape


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_norm_that_writes_fp8_against_the_norm_and_the_layer(native, norm):
    torch.manual_seed(0)
    module = NormLinear(200, 72, norm=norm)
    for p in module.norm.parameters():
        torch.nn.init.normal_(p, mean=1.0, std=0.3)
    module.linear = LowPrecisionLinear.from_linear(module.linear, BLOCK)
    fused = LowPrecisionNormLinear.from_norm_linear(module)
    x, g = torch.randn(130, 200), torch.randn(130, 72)
    expected = step(fused, x, g)  # on a CPU: the norm, then the layer
    native()
    leaf = x.clone().requires_grad_()
    gain, shift = fused.norm.weight, getattr(fused.norm, "bias", None)
    inputs = (leaf, gain, shift, fused.linear.weight, fused.linear.bias)
    y = _NormLinear.apply(*inputs, fused.norm.eps, fused.linear.plan(x), None)
    found = [y, *torch.autograd.grad(y, [t for t in inputs if t is not None], g)]
    for got, right in zip(found, expected, strict=True):
        # The two norms differ in the last bit of float32 now and then, and E4M3 then by a step.
        assert (got - right).norm() < 5e-3 * right.norm()
