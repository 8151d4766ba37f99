"""Variants of the quantiser of both orientations: column sums in one step, and another order of tiles."""

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
    run = problems._with(orientations, lambda: seen.append((orientations.GROUP, orientations.OWN_SUMS)), GROUP=7)
    before = (orientations.GROUP, orientations.OWN_SUMS)
    run()
    with pytest.raises(ZeroDivisionError):
        problems._with(orientations, lambda: 1 / 0, GROUP=7, OWN_SUMS=False)()
    assert seen == [(7, True)]
    assert before == (orientations.GROUP, orientations.OWN_SUMS)


def same(monkeypatch, x, group):
    expected = orientations.quantize_both(x, sums=True)
    monkeypatch.setattr(orientations, "GROUP", group)
    monkeypatch.setattr(orientations, "OWN_SUMS", False)
    with poisoned():
        got = orientations.quantize_both(x, sums=True)
    for name in ("row", "col"):
        assert torch.equal(bits(getattr(got, name).data), bits(getattr(expected, name).data))
        assert torch.equal(getattr(got, name).scale, getattr(expected, name).scale)
    torch.testing.assert_close(got.sums, expected.sums, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the other test has it on a card")
def test_the_same_bits_in_the_simulator(monkeypatch):
    monkeypatch.setattr(orientations, "hardware", lambda _device: True)
    x = torch.randn(700, 144, generator=torch.Generator().manual_seed(1)).bfloat16()
    with simulating(seed=1):
        same(monkeypatch, x, 4)  # six tiles of rows: a group of four and one of two


@HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols"), [(1, 8), (300, 144), (5000, 2048)])
def test_the_same_bits_on_a_card(monkeypatch, rows, cols):
    same(monkeypatch, torch.randn(rows, cols, device="cuda").bfloat16(), 4)
