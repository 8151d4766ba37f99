"""Variants of the quantiser of both orientations: tiles asked for early, and column sums in one step."""

import os

import pytest
import torch
from gem_kernels.simulator import language, simulating
from gem_kernels.simulator.values import Value
from gem_kernels.testing import poisoned
from gem_lowprec import FP8_1X128, orientations, quantize
from gem_lowprec.bench import problems

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


def bits(x):
    return x.contiguous().view(torch.uint8)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the bench's gate has it on a card")
def test_no_tile_is_asked_for_outside_of_the_matrix(monkeypatch):
    rows, cols = 300, 144
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(1)).bfloat16()
    asked = []

    def prefetch(at):
        asked.append(at.data.flatten())
        return Value(torch.zeros(at.data.shape, dtype=torch.int32), at.dtype)

    monkeypatch.setattr(orientations, "hardware", lambda _device: True)
    monkeypatch.setattr(orientations, "AHEAD", 2)  # two tiles across: the tile below
    monkeypatch.setitem(language.ASSEMBLY, "prefetch.global.L2 [$1]; mov.u32 $0, 0;", prefetch)
    with simulating(seed=1), poisoned():
        got = orientations.quantize_both(x)
    assert torch.equal(bits(got.row.data), bits(quantize(x, FP8_1X128).data))
    places = torch.cat(asked)
    first = int(places.min()) - 128 * cols * 2  # the second tile of rows is the first one asked for
    places = (places - first) // 2
    assert int(places.max()) <= (rows - 1) * cols + cols - 1
    lines = {(int(p) // cols, int(p) % cols) for p in places}
    assert {(r, c) for r in range(128, 300) for c in (0, 64, 128)} <= lines


@pytest.mark.parametrize(("tiles", "cols"), [(1, 3), (5, 40), (600, 17)])
def test_sums_in_one_step(monkeypatch, tiles, cols):
    monkeypatch.setattr(orientations, "OWN_SUMS", True)
    partial = torch.randn(tiles, cols, device=DEVICE)
    with poisoned():
        got = orientations._total(partial)
    torch.testing.assert_close(got, partial.double().sum(0).float(), rtol=1e-5, atol=1e-5)


def test_options_are_put_back():
    seen = []
    run = problems._with(orientations, lambda: seen.append((orientations.AHEAD, orientations.OWN_SUMS)), AHEAD=7)
    run()
    with pytest.raises(ZeroDivisionError):
        problems._with(orientations, lambda: 1 / 0, AHEAD=7, OWN_SUMS=True)()
    assert seen == [(7, False)]
    assert (orientations.AHEAD, orientations.OWN_SUMS) == (0, False)


@HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols"), [(1, 8), (300, 144), (5000, 2048)])
def test_the_same_bits_on_a_card(monkeypatch, rows, cols):
    x = torch.randn(rows, cols, device="cuda").bfloat16()
    expected = orientations.quantize_both(x, sums=True)
    monkeypatch.setattr(orientations, "AHEAD", 396)
    monkeypatch.setattr(orientations, "OWN_SUMS", True)
    with poisoned():
        got = orientations.quantize_both(x, sums=True)
    for name in ("row", "col"):
        assert torch.equal(bits(getattr(got, name).data), bits(getattr(expected, name).data))
        assert torch.equal(getattr(got, name).scale, getattr(expected, name).scale)
    torch.testing.assert_close(got.sums, expected.sums, rtol=1e-5, atol=1e-4)
