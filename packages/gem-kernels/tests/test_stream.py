"""A norm that also passes its rows on: against a formula in float64, with every combination of readers."""

import itertools

import pytest
import torch
from gem_kernels import norm_rows, norm_rows_twice
from gem_kernels.norms import placed
from gem_kernels.norms import triton as norm_kernels
from gem_kernels.projections import gates
from gem_kernels.sequences import triton as sequence_kernels
from gem_kernels.testing import offsets_of, poisoned, relative_error
from gem_kernels.tiling import Tile

LENGTHS = [3, 0, 17, 1, 9]
EPS = 1e-3


@pytest.fixture(autouse=True)
def small_launches(monkeypatch, device):
    if device.type == "cpu":
        monkeypatch.setattr(norm_kernels, "PARTS", 3)
        monkeypatch.setattr(gates, "PARTS", 3)
        monkeypatch.setattr(placed, "_tile", lambda width, backward: Tile(bm=4, bn=32))
        monkeypatch.setattr(sequence_kernels, "tile", lambda width: Tile(bm=8, bn=16))


def normal(*shape, seed, dtype, device):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype).requires_grad_()


def formula(x, residual, residual_bias, weight, bias, kind, lengths, recent):
    total = x if residual is None else x + residual
    total = total if residual_bias is None else total + residual_bias - residual_bias.detach()
    centred = total - total.mean(-1, keepdim=True) if kind == "layer" else total
    y = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * weight + (0 if bias is None else bias)
    rows = [torch.cat([s.flip(0)[:recent], s.new_zeros(recent, s.shape[1])])[:recent] for s in total.split(lengths)]
    return y, total, torch.stack(rows) if recent else None


def check_gradients(got, expected, leaves, wide, tolerance):
    """Whichever readers send something back, the leaves' gradients are the formula's; all that were found."""
    roots = [t for t in wide if t is not None]
    every = []
    for used in itertools.product((False, True), repeat=len(got)):
        if not any(used):
            continue
        ours, theirs = ([t for t, u in zip(made, used, strict=True) if u] for made in (got, expected))
        probes = [normal(*t.shape, seed=9 + i, dtype=t.dtype, device=t.device).detach() for i, t in enumerate(ours)]
        options = {"retain_graph": True, "allow_unused": True}
        with poisoned():
            found = torch.autograd.grad(ours, leaves, probes, **options)
        wanted = torch.autograd.grad(theirs, roots, [p.double() for p in probes], **options)
        for leaf, a, b in zip(leaves, found, wanted, strict=True):
            if b is None:
                assert a is None or not a.any()
            else:
                assert a.dtype == leaf.dtype
                assert relative_error(a, b) < 3 * tolerance
        every.append(found)
    return every


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recent", [0, 4])
@pytest.mark.parametrize("sums", ["alone", "residual", "residual with bias"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_rows_and_their_readers_are_the_formula(kind, sums, recent, dtype, backend, device):
    rows, tolerance = sum(LENGTHS), 3e-6 if dtype == torch.float32 else 8e-3
    x = normal(rows, 24, seed=1, dtype=dtype, device=device)
    residual = None if sums == "alone" else normal(rows, 24, seed=2, dtype=dtype, device=device)
    residual_bias, weight, bias = (normal(24, seed=s, dtype=torch.float32, device=device) for s in (3, 4, 5))
    residual_bias = residual_bias if sums == "residual with bias" else None
    given = [x, residual, residual_bias, weight, bias if kind == "layer" else None]
    leaves = [t for t in given if t is not None]
    wide = [None if t is None else t.detach().double().requires_grad_() for t in given]
    expected = formula(*wide, kind, LENGTHS, recent)
    offsets = offsets_of(LENGTHS, device)
    with poisoned():
        got = norm_rows(
            x, weight, given[4], kind=kind, eps=EPS, residual=residual, residual_bias=residual_bias, offsets=offsets,
            recent=recent, backend=backend,
        )  # fmt: skip
    readers = 3 if recent else 2
    assert (got[2] is None) == (recent == 0)
    for a, b in zip(got[:readers], expected, strict=False):
        assert a.dtype == dtype
        assert relative_error(a, b) < tolerance
    check_gradients(got[:readers], expected[:readers], leaves, wide, tolerance)


@pytest.mark.parametrize(("backend", "twice"), [("reference", False), ("triton", False), ("triton", True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recent", [0, 4])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_rows_among_others_in_the_residual_are_the_formula(kind, biased, recent, dtype, backend, twice, device):
    """Two rows that are nobody's before each sequence: what the residual's gradient has there is zero."""
    rows, others, tolerance = sum(LENGTHS), 2 * len(LENGTHS), 3e-6 if dtype == torch.float32 else 8e-3
    ahead = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)) + 1
    places = (torch.arange(rows) + 2 * ahead).to(device)
    nobody = torch.tensor(sorted(set(range(rows + others)) - set(places.tolist())), device=device)
    x = normal(rows, 24, seed=1, dtype=dtype, device=device)
    residual = normal(rows + others, 24, seed=2, dtype=dtype, device=device)
    residual_bias, weight, bias = (normal(24, seed=s, dtype=torch.float32, device=device) for s in (3, 4, 5))
    given = [x, residual, residual_bias if biased else None, weight, bias if kind == "layer" else None]
    leaves = [t for t in given if t is not None]
    wide = [None if t is None else t.detach().double().requires_grad_() for t in given]
    expected = formula(wide[0], wide[1][places], *wide[2:], kind, LENGTHS, recent)
    offsets = offsets_of(LENGTHS, device)
    options = {
        "kind": kind, "eps": EPS, "residual": residual, "residual_bias": given[2], "places": places, "others": nobody,
        "offsets": offsets, "recent": recent, "backend": backend,
    }  # fmt: skip
    with poisoned():
        if twice:
            got = norm_rows_twice(x, weight, given[4], bare_eps=0.02, **options)
            centred = expected[1] - expected[1].mean(-1, keepdim=True)
            bare = centred / (centred.square().mean(-1, keepdim=True) + 0.02).sqrt()
            got, expected = (got[3], *got[:3]), (bare, *expected)
        else:
            got = norm_rows(x, weight, given[4], **options)
    readers = 2 + bool(recent) + twice
    for a, b in zip(got[:readers], expected, strict=False):
        assert a.dtype == dtype
        assert relative_error(a, b) < tolerance
    for found in check_gradients(got[:readers], expected[:readers], leaves, wide, tolerance):
        assert not found[1][nobody].any()


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_no_rows(lengths, device):
    x = normal(0, 8, seed=1, dtype=torch.float32, device=device)
    offsets = offsets_of(lengths, device)
    y, total, latest = norm_rows(x, kind="rms", eps=EPS, offsets=offsets, recent=2, backend="triton")
    assert (y.shape, total.shape, latest.shape) == ((0, 8), (0, 8), (len(lengths), 2, 8))
    assert (latest == 0).all()
    (y.sum() + latest.sum()).backward()
    assert x.grad.shape == (0, 8)


def test_the_gradient_of_one_reader_is_left_as_it_was(device):
    """What comes back for the rows may belong to somebody else: only memory of this operator's own is added to."""
    x = normal(sum(LENGTHS), 8, seed=1, dtype=torch.float32, device=device)
    _, total, latest = norm_rows(
        x, kind="rms", eps=EPS, offsets=offsets_of(LENGTHS, device), recent=3, backend="triton"
    )
    upstream = torch.ones_like(total)
    torch.autograd.grad((total, latest), x, (upstream, torch.ones_like(latest)))
    assert (upstream == 1).all()


def test_mistakes_are_named(device):
    x, index = torch.zeros(3, 8, device=device), torch.arange(3, device=device)
    for call, says in (
        (lambda: norm_rows(x, kind="batch", eps=1.0), "'rms' or 'layer'"),
        (lambda: norm_rows(x[None], kind="rms", eps=1.0), r"must be \[T, C\]"),
        (lambda: norm_rows(x, kind="rms", eps=1.0, recent=2), "need offsets"),
        (lambda: norm_rows(x, kind="rms", eps=0.0), "eps must be positive"),
        (lambda: norm_rows(x, kind="rms", eps=1.0, places=index), "need the others"),
        (lambda: norm_rows(x, kind="rms", eps=1.0, residual=x, places=index, others=index[:1]), r"\(4, 8\)"),
        (lambda: norm_rows(x, kind="rms", eps=1.0, residual=x, places=index.int(), others=index[:0]), "int64"),
    ):
        with pytest.raises(ValueError, match=says):
            call()
