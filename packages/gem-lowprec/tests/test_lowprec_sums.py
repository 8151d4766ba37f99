"""Variants of the quantiser of both orientations: column sums in one step, and fewer instructions."""

import os

import pytest
import torch
from gem_kernels.simulator import simulating
from gem_kernels.testing import poisoned
from gem_lowprec import orientations
from gem_lowprec.bench import problems

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


def bits(x):
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize(("tiles", "cols"), [(1, 3), (5, 40), (600, 17)])
def test_sums_in_one_step(monkeypatch, tiles, cols):
    partial = torch.randn(tiles, cols, device=DEVICE)
    with poisoned():
        got = orientations._total(partial)
    torch.testing.assert_close(got, partial.double().sum(0).float(), rtol=1e-5, atol=1e-5)


def test_options_are_put_back():
    seen = []

    def look():
        seen.append(orientations.LEAN)

    before = orientations.LEAN
    problems._with(orientations, look, LEAN=7)()
    with pytest.raises(ZeroDivisionError):
        problems._with(orientations, lambda: 1 / 0, LEAN=7)()
    assert seen == [7]
    assert before == orientations.LEAN


def same(monkeypatch, x):
    expected = orientations.quantize_both(x, sums=True)
    monkeypatch.setattr(orientations, "LEAN", 2)
    with poisoned():
        got = orientations.quantize_both(x, sums=True)
    for name in ("row", "col"):
        assert torch.equal(bits(getattr(got, name).data), bits(getattr(expected, name).data))
        torch.testing.assert_close(
            getattr(got, name).scale, getattr(expected, name).scale, rtol=0, atol=0, equal_nan=True
        )
    assert torch.equal(bits(got.sums), bits(expected.sums))


def special(rows, cols):
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[0], x[rows // 2, cols // 2], x[:, -1] = 2.0**-120, float("inf"), 0
    return x


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the other test has it on a card")
@pytest.mark.parametrize(("rows", "cols"), [(300, 256), (140, 144)])
def test_the_same_bits_in_the_simulator(monkeypatch, rows, cols):
    monkeypatch.setattr(orientations, "hardware", lambda _device: True)
    with simulating(seed=1):
        same(monkeypatch, special(rows, cols))


@HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols"), [(2, 8), (300, 144), (5000, 2048), (1024, 256)])
def test_the_same_bits_on_a_card(monkeypatch, rows, cols):
    same(monkeypatch, special(rows, cols).cuda())
