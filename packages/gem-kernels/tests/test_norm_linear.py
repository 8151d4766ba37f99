"""A projection with a norm before or after it: the reference against a float64 formula, the kernels against both, and
what users pass.
"""

import pytest
import torch
from gem_kernels import dispatch, linear_norm, norm_linear
from gem_kernels.norm_linear import triton
from gem_kernels.testing import poisoned, relative_error
from gem_kernels.tiling import Tile

EPS = 1e-3


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, device):
    """In the interpreter, tiles of which a few rows need several; a GPU runs the real ones."""
    if device.type == "cpu":
        monkeypatch.setattr(triton, "tile", lambda width: Tile(bm=32, bn=32))
        monkeypatch.setattr(triton, "BK", 32)


def operands(rows, k, n, *, bias=True, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(rows)
    shapes = [(*rows, k) if isinstance(rows, tuple) else (rows, k), (k,), (n, k)] + [(n,)] * bias
    x, gain, weight, *rest = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes)
    tensors = [x, 1 + 0.3 * gain, weight / k**0.5, *rest]
    return [t.to(device=device, dtype=dtype).requires_grad_() for t in tensors]


def formula(x, gain, weight, bias=None):
    normal = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * gain
    y = normal @ weight.T
    return y if bias is None else y + bias


def after_formula(x, weight, gain, bias=None):
    z = x @ weight.T if bias is None else x @ weight.T + bias
    return z / (z.square().mean(-1, keepdim=True) + EPS).sqrt() * gain


def after_operands(rows, k, n, **options):
    x, _, weight, *bias = operands(rows, k, n, **options)
    gain = (1 + 0.3 * torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)).to(x)
    return [x, weight, gain.requires_grad_(), *bias]


def check(run, tensors, formula, dtype, worst=None):
    """Result and gradients of `run` against a float64 formula, over poisoned memory."""
    exact = [t.detach().double().requires_grad_() for t in tensors]
    with poisoned():
        got = run(*tensors)
    expected = formula(*exact)
    tolerance = 2e-3 if dtype == torch.float16 else 1e-2
    assert got.dtype == dtype
    assert relative_error(got, expected) < (worst or tolerance)
    dy = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(got.device)
    with poisoned():
        gradients = torch.autograd.grad(got, tensors, dy.to(dtype))
    for a, b in zip(gradients, torch.autograd.grad(expected, exact, dy.to(dtype).double()), strict=True):
        assert a.dtype == dtype
        assert relative_error(a, b) < 2 * tolerance


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "k", "n"), [(70, 72, 40), (1, 32, 8), (33, 64, 96), (0, 8, 8)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_kernel(device, rows, k, n, bias, dtype):
    tensors = operands(rows, k, n, bias=bias, dtype=dtype, device=device)
    check(lambda *t: norm_linear(*t, eps=EPS, backend="triton"), tensors, formula, dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "k", "n"), [(70, 72, 24), (1, 32, 8), (33, 64, 32), (0, 8, 8)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_after(device, rows, k, n, bias, dtype):
    tensors = after_operands(rows, k, n, bias=bias, dtype=dtype, device=device)
    check(lambda *t: linear_norm(*t, eps=EPS, backend="triton"), tensors, after_formula, dtype)


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
class TestHopper:
    @pytest.mark.parametrize("backend", ["hopper", "triton"])
    @pytest.mark.parametrize(
        ("rows", "k", "n"),
        [
            (70, 72, 40),
            (1, 8, 8),
            (0, 8, 8),
            (129, 512, 264),
            (40_000, 1024, 512),
            (40_001, 256, 1024),
            (40_000, 256, 1024),
            (70, 256, 520),
        ],
    )
    def test_before(self, rows, k, n, backend):
        """Also many tiles of a program that share rows: what overwrites a tile too early shows there."""
        tensors = operands(rows, k, n, bias=rows % 2 == 1, dtype=torch.bfloat16, device="cuda")
        run = lambda *t: norm_linear(*t, eps=EPS, backend=backend)  # noqa: E731
        check(run, tensors, formula, torch.bfloat16, worst=3e-3)
        assert torch.equal(run(*tensors), run(*tensors))

    @pytest.mark.parametrize(("rows", "k", "n"), [(70, 200, 40), (1, 256, 8), (40_001, 256, 1024), (40_000, 250, 304)])
    def test_a_weight_that_stays(self, rows, k, n):
        from gem_kernels.norm_linear import hopper

        bias = rows % 2 == 1
        x, gain, weight, *rest = operands(rows, 256, n, bias=bias, dtype=torch.bfloat16, device="cuda")
        x, gain, weight = (t.detach()[..., :k].contiguous() for t in (x, gain, weight))
        x, gain, weight = (torch.nn.functional.pad(t, (0, -k % 8)) for t in (x, gain, weight))
        rest = [t.detach() for t in rest] or [None]
        with poisoned():
            runs = [hopper.forward(x, gain, weight, *rest, EPS, config=hopper.RESIDENT[4]) for _ in range(2)]
        exact = formula(*(None if t is None else t.double() for t in (x, gain, weight, *rest)))
        assert relative_error(runs[0], exact) < 3e-3
        assert torch.equal(*runs)
        if n <= 256:
            gain = torch.linspace(0.5, 1.5, n, device="cuda").bfloat16()
            got = hopper.forward_after(x, weight, gain, *rest, EPS, config=hopper.RESIDENT[4])
            exact = after_formula(*(None if t is None else t.double() for t in (x, weight, gain, *rest)))
            assert relative_error(got, exact) < 3e-3

    @pytest.mark.parametrize("n", [256, 512, 1024])
    def test_a_weight_that_stays_many_times(self, n):
        """Loads that come late are rare: the bits are the same every time, the rows not in any cache."""
        from gem_kernels.norm_linear import hopper

        x, gain, weight = (t.detach() for t in operands(2**18, 256, n, bias=False, dtype=torch.bfloat16, device="cuda"))
        first = hopper.forward(x, gain, weight, None, EPS, config=hopper.RESIDENT[4])
        assert relative_error(first[:999], formula(x[:999].double(), gain.double(), weight.double())) < 3e-3
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(500):
            wrong += (hopper.forward(x, gain, weight, None, EPS, config=hopper.RESIDENT[4]) != first).any()
        assert not wrong

    @pytest.mark.parametrize("backend", ["hopper", "triton"])
    @pytest.mark.parametrize(("rows", "k", "n"), [(70, 72, 40), (1, 8, 8), (0, 8, 8), (40_001, 1024, 256)])
    def test_after(self, rows, k, n, backend):
        tensors = after_operands(rows, k, n, bias=rows % 2 == 1, dtype=torch.bfloat16, device="cuda")
        run = lambda *t: linear_norm(*t, eps=EPS, backend=backend)  # noqa: E731
        check(run, tensors, after_formula, torch.bfloat16, worst=3e-3)
        assert torch.equal(run(*tensors), run(*tensors))


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 5])
def test_a_consumer_sees_every_phase_of_its_barriers(slots):
    """A wait by parity passes at once when the phase before is not complete either: nobody may leave out a phase."""
    from gem_kernels.norm_linear.hopper_resident import NC, full_at
    from triton.language import constexpr

    consumers = NC.value
    phases, owner = {}, {}
    for step in range(6 * consumers * slots):  # as the loader fills them; consumer W takes steps W, W + NC, ..
        which, parity = (x.value for x in full_at.fn(constexpr(step), constexpr(slots)))
        assert parity == phases.get(which, 0) % 2
        phases[which] = phases.get(which, 0) + 1
        assert owner.setdefault(which, step % consumers) == step % consumers
    assert sorted(phases) == list(range(consumers * slots))


def test_where_the_weight_stays():
    from gem_kernels.norm_linear import hopper

    for inputs in (64, 256, 512):
        for outputs in (8, 128, 136, 256, 504, 512, 1024, 4096, 4104):
            usual = hopper.SLIM if outputs <= 128 else hopper.WIDE
            stays = inputs == 256 and 512 <= outputs <= 4096
            assert hopper.choose(inputs, outputs) is (hopper.RESIDENT[4] if stays else usual)
            assert hopper.choose(inputs, outputs, bias=True) is usual


def test_wide_rows_after_a_product_are_its_parts(device):
    tensors = after_operands(5, 16, 512, dtype=torch.float64)
    assert relative_error(linear_norm(*tensors, eps=EPS), after_formula(*tensors)) < 1e-14
    tensors = after_operands(5, 16, 512, dtype=torch.bfloat16, device=device)
    with pytest.raises(RuntimeError, match=r"at most 256 wide; got 512"):
        linear_norm(*tensors, eps=EPS, backend="triton")


def test_rows_that_the_norm_cannot_hold(device):
    x, gain, weight = operands(2, 8200, 8, bias=False, dtype=torch.bfloat16, device=device)
    with pytest.raises(RuntimeError, match="rows of at most 8192; got 8200"):
        norm_linear(x, gain, weight, backend="triton")
    assert relative_error(norm_linear(x, gain, weight, eps=EPS), formula(x, gain, weight)) < 1e-2


def test_the_reference():
    x, gain, weight, bias = operands(6, 5, 3)
    expected = formula(x, gain, weight, bias)
    assert relative_error(norm_linear(x, gain, weight, bias, eps=EPS), expected) < 1e-14
    batched = norm_linear(x.unflatten(0, (2, 3)), gain, weight, eps=EPS)
    assert relative_error(batched.flatten(0, 1) + bias, expected) < 1e-14
    assert torch.autograd.gradcheck(lambda *t: norm_linear(*t, eps=EPS), (x, gain, weight, bias))
    after = after_operands(6, 5, 3)
    assert relative_error(linear_norm(*after, eps=EPS), after_formula(*after)) < 1e-14
    assert torch.autograd.gradcheck(lambda *t: linear_norm(*t, eps=EPS), after)


def test_strided_rows_and_float32_gain(device):
    x, gain, weight = operands(20, 64, 48, bias=False, dtype=torch.bfloat16, device=device)
    wide = torch.randn(20, 80, device=device).to(torch.bfloat16)
    wide[:, :64] = x.detach()
    got = norm_linear(wide[:, :64], gain.detach().float(), weight.detach(), eps=EPS, backend="triton")
    assert torch.equal(got, norm_linear(x, gain, weight, eps=EPS, backend="triton"))


def test_runs_are_equal_bit_by_bit(device):
    tensors = operands(90, 64, 72, dtype=torch.bfloat16, device=device)
    runs = []
    for _ in range(2):
        y = norm_linear(*tensors, eps=EPS, backend="triton")
        runs.append((y, *torch.autograd.grad(y.square().sum(), tensors)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_opcheck(device):
    x, gain, weight, bias = operands(9, 32, 16, dtype=torch.bfloat16, device=device)
    op = torch.ops.gem_kernels.norm_linear
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op, (x, gain, weight, bias, EPS, "triton"), test_utils=checks)
    x, weight, gain, bias = after_operands(9, 32, 16, dtype=torch.bfloat16, device=device)
    op = torch.ops.gem_kernels.linear_norm
    torch.library.opcheck(op, (x, weight, gain, bias, EPS, "triton"), test_utils=checks)


def test_compiles_without_a_graph_break(device):
    compiled = torch.compile(
        lambda *t: norm_linear(*t, eps=EPS, backend="triton") * 2, backend="aot_eager", fullgraph=True, dynamic=True
    )
    for rows in (7, 40):
        tensors = operands(rows, 32, 24, dtype=torch.bfloat16, device=device)
        assert torch.equal(compiled(*tensors), norm_linear(*tensors, eps=EPS, backend="triton") * 2)


def test_errors(monkeypatch):
    x, gain, weight = torch.ones(3, 8), torch.ones(8), torch.ones(4, 8)
    for match, error, make in (
        (r"weight must be \[N, 8\]; got \(4, 7\)", ValueError, lambda: norm_linear(x, gain, weight[:, :7])),
        (r"gain must be \[8\]", ValueError, lambda: norm_linear(x, gain[:7], weight)),
        (r"gain must be \[4\], as wide as the result", ValueError, lambda: linear_norm(x, weight, gain)),
        (r"bias must be \[4\]", ValueError, lambda: norm_linear(x, gain, weight, gain)),
        ("weight must be of x's dtype", TypeError, lambda: norm_linear(x, gain, weight.double())),
        ("x must be float16", TypeError, lambda: norm_linear(x.int(), gain, weight)),
        ("gain must be floating", TypeError, lambda: norm_linear(x, gain.int(), weight)),
        ("eps must be positive; got 0", ValueError, lambda: norm_linear(x, gain, weight, eps=0)),
    ):
        with pytest.raises(error, match=match):
            make()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match=r"float16 and bfloat16; got torch\.float32"):
        norm_linear(x, gain, weight, backend="triton")
    with pytest.raises(RuntimeError, match="multiples of 8; got 8 and 4"):
        norm_linear(x.half(), gain, weight.half(), backend="triton")
    assert dispatch.why("norm_linear", x).backend == "reference"
