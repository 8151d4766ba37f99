"""The variants of the norms' backward pass against a formula in float64."""

import pytest
import torch
from gem_kernels.norms import lean
from gem_kernels.testing import poisoned, relative_error
from gem_kernels.tiling import Tile

EPS = 1e-3
KINDS = [("rms", False), ("layer", False), ("rms", True), ("layer", True)]
WAYS = {
    "lean": lean.Way(),
    "tail": lean.Way(tail=0.3),
    "one warp": lean.Way(warps=1, resident=4, tail=0.125),
    "ahead": lean.Way(ahead=True, tail=0.3),
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch, device):
    """In the interpreter, several tiles for a program; a GPU runs the real launches."""
    if device.type == "cpu":
        monkeypatch.setattr(lean, "SMS", 1)
        monkeypatch.setattr(lean, "SUM", Tile(bm=2, bn=16))


def formula(x, weight, bias, kind, swish):
    n = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    n = n / (n.square().mean(-1, keepdim=True) + EPS).sqrt()
    n = n if weight is None else n * weight
    n = n if bias is None else n + bias
    return x / (1 + torch.exp(-n)) if swish else n


def check(rows, width, kind, swish, way, device, *, affine=True, dtype=torch.float32, around=0.0, worst=3e-6):
    generator = torch.Generator().manual_seed(rows + width)
    shapes = [(rows, width)] + [(width,)] * affine + [(width,)] * (affine and kind == "layer")
    exact = [torch.randn(s, generator=generator, dtype=torch.float64) + around * (i == 0) for i, s in enumerate(shapes)]
    dy = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype).to(device)
    got = [t.to(device, dtype).requires_grad_() for t in exact]
    exact = [t.detach().double().requires_grad_() for t in got]
    operands = lambda t: [*t, None, None][:3]  # noqa: E731
    with poisoned():
        y = lean.norm(*operands(got), kind=kind, eps=EPS, swish=swish, way=way)
        grads = torch.autograd.grad(y, got, dy)
    expected = torch.autograd.grad(formula(*operands(exact), kind, swish), exact, dy.double())
    for g, e in zip(grads, expected, strict=True):
        assert g.shape == e.shape
        assert g.dtype == dtype
        if rows:
            assert relative_error(g, e) < worst
        else:
            assert not g.any()
    return grads


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "swish"), KINDS)
def test_every_kind(kind, swish, way, device):
    check(37, 48, kind, swish, WAYS[way], device)


@pytest.mark.parametrize(("width", "affine"), [(1, True), (100, True), (100, False), (384, True)])
def test_widths(width, affine, device):
    check(9, width, "layer", False, WAYS["tail"], device, affine=affine)
    check(9, width, "rms", True, WAYS["lean"], device, affine=affine)


@pytest.mark.parametrize("way", ["tail", "ahead"])
@pytest.mark.parametrize("rows", [0, 1, 31, 100])
def test_rows_around_the_tiles(rows, way, device):
    check(rows, 16, "layer", False, WAYS[way], device)


@pytest.mark.parametrize(("kind", "swish"), KINDS)
def test_bfloat16(kind, swish, device):
    check(33, 96, kind, swish, WAYS["tail"], device, dtype=torch.bfloat16, worst=8e-3)


def test_rows_far_from_zero(device):
    """The mean is taken off before anything is squared."""
    check(9, 48, "layer", False, WAYS["lean"], device, around=300.0, worst=3e-4)


def test_strided_rows_and_the_same_bits(device):
    x = torch.randn(70, 3, 64, device=device)[:, 1].requires_grad_()
    weight, bias = (torch.randn(64, device=device) for _ in range(2))
    dy = torch.randn(70, 128, device=device)[:, 64:]
    run = lambda: lean.backward(dy, x.detach(), weight, bias, "layer", EPS, True, WAYS["tail"])  # noqa: E731
    got, again = run(), run()
    exact = x.detach().double().requires_grad_()
    y = formula(exact, weight.double(), bias.double(), "layer", True)
    assert relative_error(got[0], torch.autograd.grad(y, exact, dy.double())[0]) < 3e-6
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize("tail", [0.0, 0.125, 0.9])
@pytest.mark.parametrize("programs", [1, 7, 528])
@pytest.mark.parametrize("tiles", [0, 1, 6, 100, 65536])
def test_every_tile_has_one_program(tiles, programs, tail):
    first, many, second, few = lean.shares(tiles, programs, tail)
    assert first <= programs
    assert second <= programs
    assert first * many + second * few >= tiles
    if second:  # none of the second programs is without a tile, and the first have no more than there are
        assert first * many + (second - 1) < tiles
        assert first == programs
    elif tiles:
        assert first * many - tiles < first


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("kind", "swish", "width"), [("rms", False, 256), ("layer", False, 384), ("layer", True, 512)])
def test_many_tiles(kind, swish, width):
    for way in lean.ways(width, layer=kind == "layer", swish=swish).values():
        check(2**16 + 5, width, kind, swish, way, torch.device("cuda"), dtype=torch.bfloat16, worst=8e-3)
