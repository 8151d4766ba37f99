"""The norm that writes FP8 in programs of several warps: in the simulator, and on a card."""

import os

import pytest
import torch
import triton
from gem_kernels.simulator import language, simulating
from gem_kernels.simulator.values import Value
from gem_kernels.testing import poisoned
from gem_lowprec import FP8_1X128, norms, norms_warps, quantize

SIMULATED = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the other test has it on a card")
HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


def bits(x):
    """Codes; a NaN has no sign."""
    codes = x.cpu().contiguous().view(torch.uint8)
    return torch.where(codes == 255, 127, codes)


def check(layer, cols, rows, device, *, norm_dtype, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(rows + cols)
    x = (torch.randn(rows, cols, generator=generator) * 2 + 0.3).to(dtype)
    gain, bias = (torch.randn(cols, generator=generator).to(norm_dtype) for _ in range(2))
    if rows > 3:  # what is not a number, a block of zeros, one of the smallest numbers
        x[0, 7], x[1, 9] = float("inf"), float("nan")
        gain[:128], bias[:128], gain[128:256], bias[128:256] = 0, 0, 2.0**-126, 0
    with poisoned():
        got, found = norms.norm_quantize(*(t.to(device) for t in (x, gain)), bias.to(device) if layer else None)
    y = x.double()
    mean = y.mean(1, keepdim=True) if layer else torch.zeros(rows, 1).double()
    rstd = 1 / ((y - mean).square().mean(1, keepdim=True) + 1e-6).sqrt()
    y = (y - mean) * rstd * gain.double()
    y = y + bias.double() if layer else y
    expected = quantize(y, FP8_1X128)
    assert (bits(got.data) != bits(expected.data)).sum() <= 5e-4 * x.numel()  # ties of float32 and float64
    torch.testing.assert_close(got.scale.cpu(), expected.scale, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found.rstd.cpu(), rstd[:, 0].float(), rtol=1e-5, atol=0, equal_nan=True)
    if layer:
        torch.testing.assert_close(found.mean.cpu(), mean[:, 0].float(), rtol=1e-5, atol=1e-6, equal_nan=True)


def widened(x):
    """What the assembly of `_wide` does to bfloat16: the bits of float32."""
    return Value(x.data.float().view(torch.int32), triton.language.int32)


WAYS = [(*at, name) for at, ways in sorted(norms_warps.WAYS.items()) for name in ways]


@SIMULATED
@pytest.mark.parametrize(("layer", "cols", "name"), WAYS)
def test_simulated(monkeypatch, layer, cols, name):
    monkeypatch.setattr(norms, "hardware", lambda _device: True)
    monkeypatch.setattr(norms, "CHOSEN", {(layer, cols): name})
    for text in ("$2, 16; and.b32 $1, $2, 0xffff0000;", "$2, $4; and.b32 $1, $2, $6;"):
        monkeypatch.setitem(language.ASSEMBLY, f"shl.b32 $0, {text}", widened)
    way = norms_warps.WAYS[layer, cols][name]
    rows = 2 * way.rows * way.warps * way.resident - 3  # two rounds of the programs, the last one not full
    monkeypatch.setitem(language.ASSEMBLY, "xor.b32 $0, $1, $2;", lambda x: x)
    with simulating(seed=7, processors=1):
        check(layer, cols, rows, "cpu", norm_dtype=torch.bfloat16)
        check(layer, cols, 5, "cpu", norm_dtype=torch.float32, dtype=torch.float16)


@HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 1, 5, 9001])
@pytest.mark.parametrize(("layer", "cols", "name"), WAYS)
def test_on_a_card(monkeypatch, layer, cols, name, rows):
    monkeypatch.setattr(norms, "CHOSEN", {(layer, cols): name})
    for norm_dtype, dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)):
        check(layer, cols, rows, "cuda", norm_dtype=norm_dtype, dtype=dtype)
