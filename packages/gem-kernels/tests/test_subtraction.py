"""The portable forward that subtracts what missing keys add, and masks where that would lose digits."""

import pytest
import torch
from gem_kernels import jagged_attention
from gem_kernels.jagged_attention import subtraction
from gem_kernels.jagged_attention import triton as masked
from gem_kernels.testing import offsets_of, poisoned, random_heads, relative_error
from gem_kernels.tiling import Tile

Q, K = [1, 0, 33, 20, 7, 40], [40, 5, 1, 32, 0, 65]
ALWAYS = float("inf")  # subtract, whatever is lost


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, device):
    if device.type == "cpu":
        monkeypatch.setattr(masked, "tile", lambda *_: Tile(bm=32, bn=32))


def problem(device, *, level=0.0, spread=1.0, heads=2, shared=False, dtype=torch.float32):
    """q, k, v and where they lie. All scores are near `level`: the first dimension of q and k makes it."""
    rows = 5 if shared else sum(Q)
    q, k, v = (random_heads(n, h, 16, dtype=dtype, seed=i, device=device)
               for i, (n, h) in enumerate([(rows, heads), (sum(K), 1), (sum(K), 1)]))  # fmt: skip
    q, k = q * spread, k * spread
    q[..., 0], k[..., 0] = 1.0, level
    offsets = None if shared else offsets_of(Q, device)
    return (q, k, v), (offsets, offsets_of(K, device)), (5 if shared else 42, 70)


def compare(tensors, offsets, sizes, *, bias=None, tolerance=2e-6, **options):
    with poisoned():
        got = subtraction.forward(*tensors, *offsets, bias, *sizes, 1.0, **options)
    wide = [x.double() for x in tensors]
    expected = jagged_attention(*wide, *offsets, *sizes, scale=1.0, bias=bias, return_lse=True, backend="reference")
    errors = []
    for a, b in zip(got, expected, strict=True):
        finite = b.isfinite()
        assert torch.equal(a[~finite].double(), b[~finite].double())
        errors.append(relative_error(a[finite], b[finite]))
    return max(errors) < tolerance, errors


@pytest.mark.parametrize("limit", [subtraction.LIMIT, ALWAYS])
@pytest.mark.parametrize("shared", [False, True])
def test_against_float64(device, shared, limit):
    """Scores around 0: also where every last tile subtracts, the sums are right."""
    right, errors = compare(*problem(device, shared=shared, spread=0.5), limit=limit, tolerance=1e-5)
    assert right, errors


@pytest.mark.parametrize("level", [-300.0, -60.0, -15.0, -4.0, 40.0, 300.0])
def test_extreme_scores(device, level):
    right, errors = compare(*problem(device, level=level, spread=0.3), tolerance=1e-4)  # float32 of scores near 300
    assert right, errors


@pytest.mark.parametrize("level", [-300.0, -40.0])
def test_without_the_guard_they_are_wrong(device, level):
    tensors, offsets, sizes = problem(device, level=level, spread=0.3)
    got, _ = subtraction.forward(*tensors, *offsets, None, *sizes, 1.0, limit=ALWAYS)
    expected = jagged_attention(*(x.double() for x in tensors), *offsets, *sizes, scale=1.0, backend="reference")
    assert not relative_error(got, expected) < 0.01


def test_rows_that_need_the_mask_beside_rows_that_do_not(device):
    tensors, offsets, sizes = problem(device, level=-40.0, spread=0.3)
    tensors[0][::3, :, 0] = -1.0  # every third query has scores near +40
    right, errors = compare(tensors, offsets, sizes, tolerance=1e-5)
    assert right, errors


@pytest.mark.parametrize("level", [0.0, -200.0, 200.0])
def test_a_bias_reads_as_zero_beyond_the_keys(device, level):
    tensors, offsets, sizes = problem(device, spread=0.5)
    bias = torch.randn(1, 2, *sizes, generator=torch.Generator().manual_seed(4)).to(device) + level
    right, errors = compare(tensors, offsets, sizes, bias=bias, tolerance=1e-4)
    assert right, errors


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_the_masked_kernel(device, dtype):
    tensors, offsets, sizes = problem(device, dtype=dtype)
    got = subtraction.forward(*tensors, *offsets, None, *sizes, 1.0)
    expected = masked.forward(*tensors, *offsets, None, *sizes, 1.0, -1, -1)
    for a, b in zip(got, expected, strict=True):
        finite = b.isfinite()
        assert torch.equal(a.isfinite(), finite)
        assert relative_error(a[finite], b[finite].double()) < {torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
