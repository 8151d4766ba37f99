"""One pass for both orientations, with and without a norm before, against the reference quantiser."""

from __future__ import annotations

import math

import pytest
import torch
from gem_kernels.testing import poisoned
from gem_lowprec import FP8_1X128, FP8_128X128, FP8_ROW, MXFP8, QTensor, norm_quantize, quantize, quantize_both

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECS = [spec.with_(scale=scale) for spec in (FP8_1X128, FP8_128X128) for scale in ("pow2", "float32")]


def values(rows: int, cols: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(rows + cols)
    x = torch.randn(rows, cols, generator=g) * torch.exp2(torch.randn(rows, cols, generator=g) * 6)
    x[0, :9] = 0
    return x.to(DEVICE)


def codes(q: QTensor) -> torch.Tensor:
    """Bytes of the elements, NaN without a sign."""
    return torch.where(q.data.float().isnan(), 0x7F, q.data.contiguous().view(torch.uint8)).cpu()


def same(a: QTensor, b: QTensor) -> bool:
    scales = (a.scale.nan_to_num(nan=-1).cpu(), b.scale.nan_to_num(nan=-1).cpu())
    return (
        (a.shape, a.dim, a.spec) == (b.shape, b.dim, b.spec)
        and torch.equal(*scales)
        and torch.equal(codes(a), codes(b))
    )


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s}-{s.scale}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "cols"), [(256, 128), (130, 200), (1, 16), (17, 3)])
def test_the_references_bits_along_both_dimensions(spec, dtype, rows, cols):
    x = values(rows, cols).to(dtype)
    with poisoned():
        both = quantize_both(x, spec, sums=True)
    assert same(both.row, quantize(x, spec, backend="reference"))
    assert same(both.col, quantize(x, spec, dim=0, backend="reference").t())
    total = x.double().sum(0)
    assert (both.sums.double() - total).norm() <= 1e-6 * x.double().abs().sum(0).norm()


def test_non_finite_blocks_and_what_was_not_asked_for():
    x = values(140, 300)
    x[3, 5], x[139, 299] = math.nan, -math.inf
    for spec in (FP8_1X128, FP8_128X128):
        row = quantize_both(x, spec, col=False)
        col = quantize_both(x, spec, row=False)
        assert (row.col, row.sums, col.row, col.sums) == (None, None, None, None)
        assert same(row.row, quantize(x, spec, backend="reference"))
        assert same(col.col, quantize(x, spec, dim=0, backend="reference").t())


@pytest.mark.parametrize(("rows", "cols"), [(256, 128), (130, 200)])
def test_the_transposed_copy_may_have_square_blocks(rows, cols):
    x = values(rows, cols).bfloat16()
    with poisoned():
        both = quantize_both(x, FP8_1X128, col_spec=FP8_128X128)
        alone = quantize_both(x, FP8_128X128, row=False)
    assert same(both.row, quantize(x, FP8_1X128, backend="reference"))
    assert same(both.col, quantize(x, FP8_128X128, dim=0, backend="reference").t())
    assert same(alone.col, both.col)
    with pytest.raises(ValueError, match="same kind of scales"):
        quantize_both(x, FP8_1X128, col_spec=FP8_128X128.with_(scale="float32"))


def test_views_and_empty_tensors():
    x = values(64, 256)[:, 32:232]
    both = quantize_both(x)
    assert same(both.row, quantize(x, FP8_1X128, backend="reference"))
    turned = quantize_both(x.t())
    assert same(turned.row, quantize(x.t(), FP8_1X128, backend="reference"))
    empty = quantize_both(x[:0], sums=True)
    assert (empty.row.shape, empty.col.shape) == ((0, 200), (200, 0))
    assert (empty.sums == 0).all()


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize(("rows", "cols"), [(40, 256), (13, 200), (3, 1024), (5, 7)])
def test_norm_to_fp8(layer, rows, cols):
    x = (torch.randn(rows, cols) * 3 + 1).bfloat16().to(DEVICE)
    gain = torch.randn(cols, device=DEVICE)
    bias = torch.randn(cols, device=DEVICE) if layer else None
    with poisoned():
        q, norm = norm_quantize(x, gain, bias, eps=1e-5)
    exact = x.double()
    centred = exact - exact.mean(1, keepdim=True) if layer else exact
    variance = centred.square().mean(1, keepdim=True)
    y = centred / (variance + 1e-5).sqrt() * gain.double() + (0 if bias is None else bias.double())
    torch.testing.assert_close(norm.rstd.double(), (variance[:, 0] + 1e-5).rsqrt(), rtol=1e-5, atol=0)
    expected = quantize(y, FP8_1X128, backend="reference")
    assert (q.data.float() != expected.data.float()).double().mean() < 1e-3  # float32 is near a boundary now and then
    assert (q.dequantize(torch.float64) - y).norm() < 0.04 * y.norm()
    both = quantize_both(x, norm=norm)
    assert same(both.row, q)
    assert (both.col.dequantize(torch.float64) - y.t()).norm() < 0.04 * y.norm()


def test_errors():
    x = torch.randn(4, 32, device=DEVICE)
    for spec in (MXFP8, FP8_ROW):
        with pytest.raises(ValueError, match=str(spec)):
            quantize_both(x, spec)
    with pytest.raises(ValueError, match=r"\[2, 4, 4\]"):
        quantize_both(x.new_zeros(2, 4, 4))
    with pytest.raises(TypeError, match="float64"):
        quantize_both(x.double())
    gain = torch.ones(32, device=DEVICE)
    with pytest.raises(ValueError, match=r"\[32\], got \[\[31\]\]"):
        norm_quantize(x, gain[:31])
    with pytest.raises(ValueError, match="eps"):
        norm_quantize(x, gain, eps=0.0)
    with pytest.raises(ValueError, match="8192"):
        norm_quantize(x.new_zeros(2, 8193), x.new_ones(8193))
    with pytest.raises(ValueError, match="1 x 128"):
        norm_quantize(x, gain, spec=FP8_128X128)
    with pytest.raises(TypeError, match="float64"):
        norm_quantize(x.double(), gain)
