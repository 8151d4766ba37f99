"""Norms: the reference against formulas in float64, the Triton kernels against both, and what users pass."""

import dataclasses
import functools
import itertools

import pytest
import torch
from gem_kernels import dispatch
from gem_kernels.norms import layer_norm, qk_norm, rms_norm, triton
from gem_kernels.testing import poisoned, relative_error
from gem_kernels.tiling import Tile

EPS = 1e-3
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
WIDTHS = [1, 3, 16, 100, 384, 512]


@pytest.fixture(autouse=True)
def small_launches(monkeypatch, device):
    """In the interpreter, few rows span several tiles, and several tiles a program; a GPU runs the real launches."""
    if device.type == "cpu":
        real = triton.spread
        monkeypatch.setattr(
            triton, "spread", lambda *given, **options: dataclasses.replace(real(*given, **options), rows=4)
        )
        monkeypatch.setattr(triton, "PARTS", 3)
        monkeypatch.setattr(triton, "SUM", Tile(bm=2, bn=16))
        monkeypatch.setattr(triton, "SUM_MANY", Tile(bm=4, bn=16))


def normal(*shape, seed=0, dtype=torch.float64, device="cpu", grad=False):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype)
    return x.requires_grad_(grad)


def formula(x, residual, weight, bias, kind, swish):
    """Row by row from the definition."""
    h = x if residual is None else x + residual
    n = h - h.mean(-1, keepdim=True) if kind == "layer" else h
    n = n / (n.square().mean(-1, keepdim=True) + EPS).sqrt()
    n = n if weight is None else n * weight
    n = n if bias is None else n + bias
    return (h / (1 + torch.exp(-n)) if swish else n), h


def call(x, residual, weight, bias, kind, swish, backend):
    options = {"residual": residual, "swish": swish, "eps": EPS, "backend": backend}
    out = layer_norm(x, weight, bias, **options) if kind == "layer" else rms_norm(x, weight, **options)
    return out if residual is not None else (out, x)


def operands(shape, kind, residual, affine, device, dtype, weight_dtype=None):
    weight_dtype = weight_dtype or dtype
    x = normal(*shape, seed=1, dtype=dtype, device=device, grad=True)
    r = normal(*shape, seed=2, dtype=dtype, device=device, grad=True) if residual else None
    w = normal(shape[-1], seed=3, dtype=weight_dtype, device=device, grad=True) if affine else None
    b = normal(shape[-1], seed=4, dtype=weight_dtype, device=device, grad=True) if affine and kind == "layer" else None
    return x, r, w, b


def compare(given, kind, swish, backend, tolerance):
    """Outputs and gradients on poisoned memory against the formula in float64."""
    doubles = [None if x is None else x.detach().double().requires_grad_() for x in given]
    with poisoned():
        got = call(*given, kind, swish, backend)
    expected = formula(*doubles, kind, swish)
    assert got[0].dtype == given[0].dtype
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) < tolerance
    cotangents = [normal(*got[0].shape, seed=5 + i, device=got[0].device, dtype=got[0].dtype) for i in range(2)]
    outs = 2 if given[1] is not None else 1
    leaves, wide = [x for x in given if x is not None], [x for x in doubles if x is not None]
    with poisoned():
        gradients = torch.autograd.grad(got[:outs], leaves, cotangents[:outs])
    references = torch.autograd.grad(expected[:outs], wide, [c.double() for c in cotangents[:outs]])
    for x, a, b in zip(leaves, gradients, references, strict=True):
        assert a.dtype == x.dtype
        assert relative_error(a, b) < 3 * tolerance


KINDS = [("rms", False), ("rms", True), ("layer", False), ("layer", True)]


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("kind", "swish"), KINDS)
def test_every_option(device, kind, swish, residual, backend):
    for affine in (False, True):
        given = operands((27, 24), kind, residual, affine, device, torch.float32)
        compare(given, kind, swish, backend, TOLERANCE[torch.float32])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_widths(device, kind, width):
    tolerance = (
        4e-6 if width > 3 else 5e-5
    )  # the norm of one or two numbers is a sign: its gradient is a rounding error
    compare(operands((9, width), kind, True, True, device, torch.float32), kind, True, "triton", tolerance)


@pytest.mark.parametrize("width", [5000, 8192])
def test_wide_rows(device, width):
    compare(operands((5, width), "layer", False, True, device, torch.float32), "layer", False, "triton", 4e-6)


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 11, 12, 13, 50])
def test_rows_around_the_tiles(device, rows):
    given = operands((rows, 8), "layer", True, True, device, torch.float32)
    compare(given, "layer", False, "triton", TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, None])
def test_half_precision(device, dtype, weight_dtype):
    given = operands((27, 48), "rms", False, True, device, dtype, weight_dtype)
    compare(given, "rms", False, "triton", TOLERANCE[dtype])
    compare(given, "rms", True, "reference", TOLERANCE[dtype])


def test_what_is_normalised_is_the_sum_that_is_returned(device):
    """A sum rounded to bfloat16, exactly: the two backends agree on its bits."""
    x, r = (normal(40, 64, seed=s, dtype=torch.bfloat16, device=device) for s in (1, 2))
    y, total = rms_norm(x, residual=r, backend="triton")
    assert torch.equal(total, x + r)
    assert relative_error(y, rms_norm(total, backend="triton")) == 0.0


@pytest.mark.parametrize("shape", [(24,), (3, 5, 24), (2, 3, 5, 24), (0, 3, 24), (2, 0, 3, 24)])
def test_any_number_of_dims(device, shape):
    compare(operands(shape, "rms", True, True, device, torch.float32), "rms", False, "triton", 2e-6)


def test_strided_views_are_read_as_they_are(device):
    """Heads of a packed projection, rows of a wider tensor, every other row, expanded gradients."""
    packed = normal(13, 6, 21, dtype=torch.float32, device=device, grad=True)
    weight = normal(20, seed=3, dtype=torch.float32, device=device, grad=True)
    for view in (
        lambda p: p[:, 1:4, :20],
        lambda p: p[:, 2, :20],
        lambda p: p[::2, :, 1:],
        lambda p: p[:, :, :20].transpose(0, 1),
        lambda p: p.flatten(0, 1)[:, :20],
    ):
        results = []
        for backend in ("triton", "reference"):
            out, total = layer_norm(view(packed), weight, residual=view(packed).cos(), eps=EPS, backend=backend)
            wide = torch.linspace(-1, 2, out.numel() * 2, device=device).view(*out.shape[:-1], -1)[..., 3:23]
            loss = (out * wide).sum() + total.sum()
            strided = torch.autograd.grad(out, (packed, weight), wide, retain_graph=True)
            results.append([out, total, *torch.autograd.grad(loss, (packed, weight)), *strided])
        for a, b in zip(*results, strict=True):
            assert relative_error(a, b) < 1e-5


def test_qk_norm(device):
    packed = normal(11, 4 + 2 + 2, 16, dtype=torch.float32, device=device, grad=True)
    weights = [normal(16, seed=s, dtype=torch.float32, device=device, grad=True) for s in (1, 2)]
    results = []
    for backend, x in (("triton", packed), ("reference", packed)):
        q, k, _ = x.split([4, 2, 2], dim=1)
        out = qk_norm(q, k, *weights, eps=EPS, backend=backend)
        loss = out[0].cos().sum() + out[1].sin().sum()
        results.append([*out, *torch.autograd.grad(loss, (packed, *weights))])
    for a, b in zip(*results, strict=True):
        assert relative_error(a, b) < 1e-5
    q, k, _ = packed.detach().split([4, 2, 2], dim=1)
    assert relative_error(results[0][0], formula(q, None, weights[0], None, "rms", False)[0]) < 2e-6
    with pytest.raises(ValueError, match=r"k must be \[T, H, D\]"):
        qk_norm(q, k[0])


def test_a_result_that_is_not_used(device):
    """Only y, or only the sum, takes part in the loss."""
    x, r, w, _ = operands((9, 16), "rms", True, True, device, torch.float32)
    for pick in (0, 1):
        grads = []
        for backend in ("triton", "reference"):
            out = rms_norm(x, w, residual=r, backend=backend)[pick]
            grads.append(torch.autograd.grad(out.square().sum(), (x, r, w), allow_unused=True, materialize_grads=True))
        for a, b in zip(*grads, strict=True):
            assert relative_error(a, b) < 1e-5


def test_zero_and_huge_rows(device):
    x = torch.zeros(6, 16, device=device)
    x[1] = 1e15  # its square fits float32
    x[2] = 1e-20
    x.requires_grad_()
    y = rms_norm(x, backend="triton")
    assert torch.equal(y[0], torch.zeros(16, device=device))
    assert relative_error(y[1], torch.ones(16)) < 1e-6
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_runs_are_equal_bit_by_bit(device, kind):
    given = operands((50, 40), kind, True, True, device, torch.bfloat16)
    leaves = [x for x in given if x is not None]
    runs = []
    for _ in range(2):
        out = call(*given, kind, True, "triton")
        runs.append([*out, *torch.autograd.grad(out[0].sum() + out[1].sum(), leaves)])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("swish", [False, True])
def test_programs_of_one_warp(device, swish, residual, monkeypatch):
    """The backward pass with a warp for a program: on few rows, and where the real launches run on many."""
    monkeypatch.setattr(triton, "ALONE", 4096)
    monkeypatch.setattr(triton, "PARTS", 4 if device.type == "cpu" else 512)
    given = operands((50, 72), "layer", residual, True, device, torch.float32)
    compare(given, "layer", swish, "triton", TOLERANCE[torch.float32])
    if device.type == "cuda":
        for rows, width in ((2**16 + 5, 512), (2**16 + 7, 384), (40_001, 256), (20_003, 1024)):
            given = operands((rows, width), "layer", residual, True, device, torch.bfloat16)
            compare(given, "layer", swish, "triton", TOLERANCE[torch.bfloat16])


def test_programs_of_one_warp_fit_on_an_sm(monkeypatch):
    """Of a LayerNorm up to ALONE bytes a row; registers for as many as there are, in numbers of the shape alone."""
    monkeypatch.undo()
    for width, size, extra in itertools.product((1, 12, 64, 100, 256, 320, 384, 512, 768, 1024), (2, 4), (0, 1, 2)):
        s = triton.alone(width, size, extra=extra)
        assert s.warps == 1
        assert s.cuts * s.span >= width
        assert s.span * size <= 512  # a row's pieces are in the same lanes
        assert s.rows * s.span * size == 32 * 16  # every lane has something to load, 16 bytes at once
        assert s.programs * s.registers <= 128 * 2**11  # 65,536 registers of 128 SMs and more, 32 threads
        assert s.constants(width, size)["TOGETHER"] == s.rows
    assert triton.alone(512).programs == 2048
    assert triton.alone(512, extra=2).programs == triton.alone(384).programs == 1536
    monkeypatch.setattr(triton, "ALONE", 1024)
    assert triton.spread(512, True) == triton.alone(512)
    assert triton.spread(256, True, 4, extra=1) == triton.alone(256, 4, extra=1)
    for other in (triton.spread(512, False), triton.spread(1024, True), triton.spread(512, True, layer=False)):
        assert other.warps > 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_programs_with_many_tiles(kind, device):
    """As many rows as give every program of the backward pass several tiles, whose loads overlap, and a last one that
    is not full.
    """
    compare(operands((40_000, 128), kind, True, True, device, torch.float32), kind, False, "triton", 5e-6)
    for rows, width in ((40_003, 256), (20_001, 384), (10_001, 1024), (2_001, 8192)):
        given = operands((rows, width), kind, False, True, device, torch.bfloat16)
        compare(given, kind, width == 384, "triton", TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(("kind", "swish"), KINDS)
def test_the_gradient_of_a_bias_in_the_residual_is_summed(kind, swish, backend, device):
    x, r, w, b = operands((13, 20), kind, True, True, device, torch.float32)
    bias = normal(20, seed=9, dtype=torch.float32, device=device, grad=True)
    affine = (w, b) if kind == "layer" else (w,)
    norm = functools.partial(layer_norm if kind == "layer" else rms_norm, swish=swish, eps=EPS, backend=backend)
    leaves = [t for t in (x, r, bias, w, b) if t is not None]
    with poisoned():
        got = norm(x, *affine, residual=r + bias.detach(), residual_bias=bias)
    expected = norm(x, *affine, residual=r + bias)
    weights = [normal(13, 20, seed=20 + i, dtype=torch.float32, device=device) for i in range(2)]
    ours = torch.autograd.grad(got, leaves, weights, retain_graph=True)
    theirs = torch.autograd.grad(expected, leaves, weights)
    for a, c in zip((*got, *ours), (*expected, *theirs), strict=True):
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "swish"), KINDS)
def test_gradients_of_the_reference(kind, swish):
    x, r, w, b = operands((3, 5), kind, True, True, "cpu", torch.float64)
    leaves = [t for t in (x, r, w, b) if t is not None]

    def op(x, r, w, b=None):
        return call(x, r, w, b, kind, swish, "reference")

    assert torch.autograd.gradcheck(op, leaves)
    assert torch.autograd.gradgradcheck(op, leaves)


def test_opcheck(device):
    x, r, w, b = operands((6, 12), "layer", True, True, device, torch.float32)
    ops = torch.ops.gem_kernels
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    still = [t.detach() for t in (x, r, w, b)]
    for op, arguments in (
        (ops.norm, (x, r, w, b, "layer", EPS, True, "triton")),
        (ops.norm, (x, None, w, None, "rms", EPS, False, "triton")),
        (ops.norm, (x, None, None, None, "rms", EPS, False, "triton")),
        (ops.norm_backward, (*still, still[3].clone(), "layer", EPS, True, "triton")),
        (ops.norm_backward, (still[0], None, still[1], None, None, "rms", EPS, False, "triton")),
    ):
        torch.library.opcheck(op, arguments, test_utils=checks)


def test_compiles_without_a_graph_break(device):
    def model(x, r, w):
        y, total = rms_norm(x, w, residual=r, backend="triton")
        return layer_norm(y * 2, w, swish=True, backend="triton") + total

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (7, 12):
        x, r, w, _ = operands((rows, 16), "rms", True, True, device, torch.float32)
        got, expected = compiled(x, r, w), model(x, r, w)
        assert torch.equal(got, expected)
        grads = [torch.autograd.grad(out.square().sum(), (x, r, w)) for out in (got, expected)]
        for a, b in zip(*grads, strict=True):
            assert relative_error(a, b) < 1e-6


def test_launches_depend_on_the_shape_alone(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(triton, "ALONE", 0)
    for width in (1, 64, 100, 384, 512, 1024, 4096, 8192):
        for backward, size in itertools.product((False, True), (2, 4)):
            s = triton.spread(width, backward, size)
            threads, together = 32 * s.warps, s.constants(width, size)["TOGETHER"]
            assert s.cuts * s.span >= width
            assert width * size > 1024 or s.span * size <= 512  # a row's sums need no barrier
            assert s.rows % together == 0
            assert together * s.span * size <= threads * 16 or together == 1
            assert 8 <= s.rows * s.cuts * s.span / threads <= 32  # elements of a thread
    assert triton.PARTS == 512


def test_widths_that_are_no_power_of_two_waste_little(monkeypatch):
    """Whole cuts past the end cost nothing; what is left is padding."""
    monkeypatch.undo()
    for width in (384, 640, 768, 896, 1536):
        for backward in (False, True):
            assert -width % triton.spread(width, backward).span <= width // 4


def test_errors():
    x, w = torch.ones(3, 8), torch.ones(8)
    for match, error, make in (
        (r"weight must be \[8\], as wide as x; got \(7,\)", ValueError, lambda: rms_norm(x, w[:7])),
        (r"bias must be \[8\]", ValueError, lambda: layer_norm(x, w, w[:1])),
        ("a bias needs a weight", ValueError, lambda: layer_norm(x, None, w)),
        ("eps must be positive; got 0", ValueError, lambda: rms_norm(x, eps=0)),
        ("residual must be like x", ValueError, lambda: rms_norm(x, residual=x.double())),
        ("residual must be like x", ValueError, lambda: rms_norm(x, residual=x[:2])),
        ("x must be float16", TypeError, lambda: rms_norm(x.int())),
        ("weight must be float16", TypeError, lambda: rms_norm(x, w.int())),
        ("x must be a tensor; got list", TypeError, lambda: rms_norm([1.0])),
        (r"C at least 1; got \(3, 0\)", ValueError, lambda: rms_norm(x[:, :0])),
    ):
        with pytest.raises(error, match=match):
            make()


def test_rows_too_wide_for_a_program_say_so(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="at most 8192 wide; got 8193"):
        dispatch.why("norms", torch.ones(1, 8193), "triton")
    assert dispatch.why("norms", torch.ones(1, 8193)).backend == "reference"
