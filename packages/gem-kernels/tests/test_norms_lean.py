"""A variant of the norms' backward pass, off by default, against a formula in float64."""

import pytest
import torch
from gem_kernels.norms import lean, triton
from gem_kernels.testing import poisoned, relative_error
from gem_kernels.tiling import Tile

EPS = 1e-3
KINDS = [("rms", False), ("layer", False), ("rms", True), ("layer", True)]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch, device):
    """In the interpreter, several tiles for a program; a GPU runs the real launches."""
    if device.type == "cpu":
        monkeypatch.setattr(triton, "PARTS", 4)
        monkeypatch.setattr(triton, "SUM_MANY", Tile(bm=2, bn=16))


def formula(x, weight, bias, kind, swish):
    n = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    n = n / (n.square().mean(-1, keepdim=True) + EPS).sqrt()
    n = n if weight is None else n * weight
    n = n if bias is None else n + bias
    return x / (1 + torch.exp(-n)) if swish else n


def check(rows, width, kind, swish, device, *, affine=True, dtype=torch.float32, around=0.0, worst=3e-6):
    generator = torch.Generator().manual_seed(rows + width)
    shapes = [(rows, width)] + [(width,)] * affine + [(width,)] * (affine and kind == "layer")
    given = [torch.randn(s, generator=generator, dtype=torch.float64) + around * (i == 0) for i, s in enumerate(shapes)]
    dy = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(device, dtype)
    x, weight, bias = [*(t.to(device, dtype) for t in given), None, None][:3]
    with poisoned():
        got = lean.backward(dy, x, weight, bias, kind, EPS, swish)
    exact = [t.double().requires_grad_() for t in (x, weight, bias) if t is not None]
    expected = torch.autograd.grad(formula(*[*exact, None, None][:3], kind, swish), exact, dy.double())
    for g, e in zip(got, expected, strict=False):
        assert g.shape == e.shape
        assert g.dtype == dtype
        assert relative_error(g, e) < worst if rows else not g.any()
    assert not any(g.numel() for g in got[len(expected) :])


@pytest.mark.parametrize(("kind", "swish"), KINDS)
def test_every_kind(kind, swish, device):
    check(150, 48, kind, swish, device)


@pytest.mark.parametrize(("width", "affine"), [(1, True), (100, True), (100, False), (384, True)])
def test_widths(width, affine, device):
    check(9, width, "layer", False, device, affine=affine)
    check(9, width, "rms", True, device, affine=affine)


@pytest.mark.parametrize("rows", [0, 1, 31, 100])
def test_rows_around_the_tiles(rows, device):
    check(rows, 16, "layer", False, device)


@pytest.mark.parametrize(("kind", "swish"), KINDS)
def test_bfloat16(kind, swish, device):
    check(33, 96, kind, swish, device, dtype=torch.bfloat16, worst=8e-3)


def test_rows_far_from_zero(device):
    """The mean is taken off before anything is squared."""
    check(9, 48, "layer", False, device, around=300.0, worst=3e-4)


def test_strided_rows_and_the_same_bits(device):
    x = torch.randn(70, 3, 64, device=device)[:, 1]
    weight, bias = (torch.randn(64, device=device) for _ in range(2))
    dy = torch.randn(70, 128, device=device)[:, 64:]
    run = lambda: lean.backward(dy, x, weight, bias, "layer", EPS, True)  # noqa: E731
    got, again = run(), run()
    exact = x.double().requires_grad_()
    y = formula(exact, weight.double(), bias.double(), "layer", True)
    assert relative_error(got[0], torch.autograd.grad(y, exact, dy.double())[0]) < 3e-6
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("kind", "swish", "width"), [("rms", False, 256), ("layer", False, 384), ("layer", True, 512)])
def test_many_tiles(kind, swish, width):
    check(2**16 + 5, width, kind, swish, torch.device("cuda"), dtype=torch.bfloat16, worst=8e-3)
