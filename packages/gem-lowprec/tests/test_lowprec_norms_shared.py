"""The norm that writes FP8 with gain and bias in shared memory: in the simulator, and on a card."""

import os

import pytest
import torch
import triton
from gem_kernels.simulator import language, simulating
from gem_kernels.simulator.values import Value
from gem_kernels.testing import poisoned
from gem_lowprec import FP8_1X128, norms, norms_shared, quantize

SIMULATED = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the other test has it on a card")
HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


def bits(x):
    return x.contiguous().view(torch.uint8)


def check(layer, cols, rows, device, *, norm_dtype):
    generator = torch.Generator().manual_seed(rows + cols)
    x = (torch.randn(rows, cols, generator=generator) * 2 + 0.3).bfloat16()
    gain, bias = (torch.randn(cols, generator=generator).to(norm_dtype) for _ in range(2))
    with poisoned():
        got, found = norms.norm_quantize(*(t.to(device) for t in (x, gain)), bias.to(device) if layer else None)
    y = x.double()
    mean = y.mean(1, keepdim=True) if layer else torch.zeros(rows, 1).double()
    rstd = 1 / ((y - mean).square().mean(1, keepdim=True) + 1e-6).sqrt()
    y = (y - mean) * rstd * gain.double() + (bias.double() if layer else 0)
    expected = quantize(y, FP8_1X128)
    assert (bits(got.data.cpu()) != bits(expected.data)).double().mean() < 5e-4  # ties of float32 and float64
    assert torch.equal(got.scale.cpu(), expected.scale)
    torch.testing.assert_close(found.rstd.cpu(), rstd[:, 0].float(), rtol=1e-5, atol=0)
    if layer:
        torch.testing.assert_close(found.mean.cpu(), mean[:, 0].float(), rtol=1e-5, atol=1e-6)


def widened(x):
    """What the assembly of `_wide` does to bfloat16: the bits of float32."""
    return Value(x.data.float().view(torch.int32), triton.language.int32)


@SIMULATED
@pytest.mark.parametrize(("layer", "cols"), sorted(norms_shared.WAYS))
def test_simulated(monkeypatch, layer, cols):
    monkeypatch.setattr(norms, "hardware", lambda _device: True)
    monkeypatch.setattr(norms, "SHARED", True)
    monkeypatch.setattr(norms_shared, "SLOTS", 1)
    monkeypatch.setitem(language.ASSEMBLY, "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", widened)
    rows = 16 if cols == 2048 else 37  # several steps of a program, and a last one that is not full
    with simulating(seed=7):
        check(layer, cols, rows, "cpu", norm_dtype=torch.bfloat16)


@HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 1, 5, 70_001])
@pytest.mark.parametrize(("layer", "cols"), sorted(norms_shared.WAYS))
def test_on_a_card(monkeypatch, layer, cols, rows):
    monkeypatch.setattr(norms, "SHARED", True)
    for dtype in (torch.float32, torch.bfloat16):
        check(layer, cols, rows, "cuda", norm_dtype=dtype)
