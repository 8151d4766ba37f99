"""The quantiser of both orientations with column sums: in one step, and beside scales made in another way."""

import os

import pytest
import torch
from gem_kernels.simulator import simulating
from gem_kernels.testing import poisoned
from gem_lowprec import norms, orientations
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
        seen.append(norms.CHOSEN)

    before = norms.CHOSEN
    problems._with(norms, look, CHOSEN=7)()
    with pytest.raises(ZeroDivisionError):
        problems._with(norms, lambda: 1 / 0, CHOSEN=7)()
    assert seen == [7]
    assert before is norms.CHOSEN


def same(x):
    """With sums scales are made by other instructions than without."""
    with poisoned():
        expected, got = (orientations.quantize_both(x, sums=sums) for sums in (True, False))
    for name in ("row", "col"):
        assert torch.equal(bits(getattr(got, name).data), bits(getattr(expected, name).data))
        torch.testing.assert_close(
            getattr(got, name).scale, getattr(expected, name).scale, rtol=0, atol=0, equal_nan=True
        )
    torch.testing.assert_close(expected.sums, x.double().sum(0).float(), rtol=1e-3, atol=1e-3, equal_nan=True)


def special(rows, cols):
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[0], x[rows // 2, cols // 2], x[:, -1] = 2.0**-120, float("inf"), 0
    return x


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the other test has it on a card")
@pytest.mark.parametrize(("rows", "cols"), [(300, 256), (140, 144)])
def test_the_same_bits_in_the_simulator(monkeypatch, rows, cols):
    monkeypatch.setattr(orientations, "hardware", lambda _device: True)
    with simulating(seed=1):
        same(special(rows, cols))


@HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols"), [(2, 8), (300, 144), (5000, 2048), (1024, 256)])
def test_the_same_bits_on_a_card(rows, cols):
    same(special(rows, cols).cuda())
