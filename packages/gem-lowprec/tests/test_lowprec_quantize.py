"""Quantisers: definitions element by element, geometry, symmetry, quality, and torchao as a peer."""

from __future__ import annotations

import math

import pytest
import torch
from gem_lowprec import (
    E2M1,
    E4M3,
    E5M2,
    FP8_1X128,
    FP8_128X128,
    FP8_ROW,
    FP8_TENSOR,
    MXFP4,
    MXFP8,
    MXFP8_E5M2,
    MXFP8_SQUARE,
    QuantSpec,
    Randoms,
    ScaleMode,
    dequantize,
    quantize,
)
from gem_lowprec.formats import decode, e8m0_decode, encode
from hypothesis import given, settings
from hypothesis import strategies as st

MXFP4_SQUARE = MXFP4.with_(name="mxfp4_square", block=(32, 32))
POW2_1X128 = FP8_1X128.with_(name="pow2_1x128", scale="pow2")
SPECS = [
    MXFP8, MXFP8_E5M2, MXFP8_SQUARE, MXFP4, MXFP4_SQUARE, FP8_1X128, FP8_128X128, POW2_1X128, FP8_ROW, FP8_TENSOR,
]  # fmt: skip
ALL = pytest.mark.parametrize("spec", SPECS, ids=str)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def wide(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values over many binades."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * torch.exp2(torch.randn(*shape, generator=g) * 4)


def by_hand(x: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """x_hat block by block in float64, for a matrix quantised along dim -1."""
    rows, cols = x.shape
    br, bk = spec.block[0] or rows, spec.block[1] or cols
    out = torch.full((rows, cols), math.nan, dtype=torch.float64)
    for i in range(0, rows, br):
        for j in range(0, cols, bk):
            block = x[i : i + br, j : j + bk].double()
            amax = block.abs().max().item()
            if amax == 0:
                out[i : i + br, j : j + bk] = 0
                continue
            if spec.scale == "float32":
                scale = torch.tensor(amax / spec.element.max, dtype=torch.float32).double().item()
            else:
                scale = 2.0 ** math.ceil(math.log2(amax / spec.element.max))
            scaled = (block.float() / scale) if spec.scale == "float32" else (block / scale).float()
            out[i : i + br, j : j + bk] = decode(encode(scaled, spec.element), spec.element).double() * scale
    return out


@ALL
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 140), cols=st.integers(1, 140), seed=st.integers(0, 1000))
def test_blocks_by_hand_on_ragged_shapes(spec, rows, cols, seed):
    x = wide(rows, cols, seed=seed)
    x[seed % rows, : cols // 2] = 0
    q = quantize(x, spec)
    torch.testing.assert_close(q.dequantize(torch.float64), by_hand(x, spec), rtol=2e-7, atol=0)


@ALL
@pytest.mark.parametrize("shape", [(70, 100), (33, 31), (64, 256), (1, 1)])
def test_only_scales_are_rounded_up(spec, shape):
    q = quantize(wide(*shape), spec)
    rows, cols = shape
    br, bk = spec.block[0] or rows, spec.block[1] or cols
    assert q.scale.shape == (math.ceil(rows / br), math.ceil(cols / bk))
    assert q.data.shape == ((rows, math.ceil(cols / 2)) if spec.element is E2M1 else shape)
    assert q.dequantize().shape == shape
    assert q.nbytes == q.data.nbytes + q.scale.nbytes
    assert q.scale.dtype == (torch.float8_e8m0fnu if spec.scale == "e8m0" else torch.float32)


@ALL
def test_the_other_dimension_is_the_transposed_problem(spec):
    x = wide(70, 99)
    along_rows, transposed = quantize(x, spec, 0), quantize(x.t().contiguous(), spec, -1).t()
    assert along_rows.dim == transposed.dim == -2
    assert torch.equal(bits(along_rows.data), bits(transposed.data))
    assert torch.equal(bits(along_rows.scale), bits(transposed.scale))
    assert torch.equal(along_rows.dequantize(), transposed.dequantize())


@pytest.mark.parametrize("spec", [MXFP8_SQUARE, MXFP4_SQUARE, FP8_128X128, FP8_TENSOR], ids=str)
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 140), cols=st.integers(1, 140), seed=st.integers(0, 1000))
def test_squares_commute_with_the_transpose_bit_for_bit(spec, rows, cols, seed):
    assert spec.symmetric
    x = wide(rows, cols, seed=seed)
    a, b = quantize(x.t(), spec), quantize(x, spec).t()
    assert torch.equal(bits(a.values()), bits(b.values()))
    assert torch.equal(bits(a.scale), bits(b.scale))
    if spec.element is not E2M1:  # FP4 packs along the contraction, so the bytes are arranged differently
        assert torch.equal(bits(a.data), bits(b.data))


def test_row_blocks_do_not_commute_with_the_transpose():
    x = wide(64, 64)
    assert not MXFP8.symmetric
    assert not torch.equal(quantize(x.t(), FP8_1X128).dequantize(), quantize(x, FP8_1X128).dequantize().t())


@pytest.mark.parametrize("spec", [s for s in SPECS if s is not FP8_TENSOR], ids=str)
@pytest.mark.parametrize("dim", [-1, -2, 1])
def test_batches(spec, dim):
    x = wide(3, 40, 50)
    whole = quantize(x, spec, dim).dequantize()
    for i in range(3):
        assert torch.equal(whole[i], quantize(x[i], spec, dim if dim < 0 else dim - 1).dequantize())


@ALL
@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
def test_empty(spec, shape):
    assert quantize(torch.zeros(shape), spec).dequantize().shape == shape


@ALL
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_makes_its_whole_block_nan_and_no_other(spec, bad):
    x = wide(256, 256)
    x[3, 5] = bad
    expected = torch.zeros(256, 256, dtype=torch.bool)
    br, bk = spec.block[0] or 256, spec.block[1] or 256
    expected[3 // br * br : 3 // br * br + br, 5 // bk * bk : 5 // bk * bk + bk] = True
    assert torch.equal(quantize(x, spec).dequantize().isnan(), expected)


@ALL
@pytest.mark.parametrize("amax", [0.0, 2.0**-149, 2.0**-135, 2.0**-126, 1e-37, 1.0, 2.5e38])
def test_magnitudes_at_both_ends_of_float32(spec, amax):
    x = torch.linspace(-1, 1, 64 * 64).view(64, 64) * amax
    back = quantize(x, spec).dequantize()
    assert back.isfinite().all()
    # One step of the element's coarsest grid at the top, or the smallest product of element and scale at the bottom.
    step = amax * 2.0**-(spec.element.mantissa_bits)
    assert (back - x).abs().max() <= max(step, spec.element.min_subnormal * 2.0**-126)


def test_the_largest_float32_rounds_up_to_infinity_and_not_to_nan():
    q = quantize(torch.full((1, 32), torch.finfo(torch.float32).max), MXFP8)
    assert (q.values() * 2.0**-8).eq(1).all()  # 256 * 2^120: right, but no float32
    assert q.dequantize().isposinf().all()


@pytest.mark.parametrize("mode", [ScaleMode.CEIL, ScaleMode.RCEIL])
@pytest.mark.parametrize("spec", [MXFP8, MXFP8_E5M2, MXFP4], ids=str)
def test_ceiling_modes_never_saturate(spec, mode):
    x = wide(64, 512)
    q = quantize(x, spec.with_(mode=mode))
    assert (x.abs() <= spec.element.max * q.scale_values()).all()


def test_floor_saturates_only_above_the_largest_mantissa():
    x = torch.zeros(2, 32)
    x[0, 0], x[1, 0] = 448.0, 511.0
    q = quantize(x, MXFP8.with_(mode=ScaleMode.FLOOR))
    assert e8m0_decode(q.scale).flatten().tolist() == [1.0, 1.0]
    assert q.dequantize()[:, 0].tolist() == [448.0, 448.0]
    assert quantize(x, MXFP8).dequantize()[:, 0].tolist() == [448.0, 512.0]


@pytest.mark.parametrize(
    ("spec", "least", "most"),
    [
        (MXFP8, 30, 33), (MXFP8_SQUARE, 30, 33), (FP8_1X128, 30, 33), (FP8_128X128, 30, 33), (FP8_ROW, 30, 33),
        (FP8_TENSOR, 30, 33), (MXFP8_E5M2, 24, 27), (MXFP4, 17, 20),
    ],
    ids=str,
)  # fmt: skip
def test_signal_to_noise_of_normal_data(spec, least, most):
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(7))
    sqnr = 10 * math.log10(x.square().mean() / (x - quantize(x, spec).dequantize()).square().mean())
    assert least < sqnr < most


def test_an_outlier_spoils_only_its_block():
    x = torch.randn(128, 512)
    x[0, 0] = 3e5
    clean = torch.ones(128, 512, dtype=torch.bool)
    clean[0, :32] = False

    def sqnr(spec: QuantSpec) -> float:
        error = (x - quantize(x, spec).dequantize())[clean]
        return 10 * math.log10(x[clean].square().mean() / error.square().mean())

    assert sqnr(MXFP8) > 30
    assert sqnr(FP8_TENSOR) < 15


@ALL
def test_stochastic_quantisation_is_unbiased_and_reproducible(spec):
    x = wide(64, 64)
    draws = [quantize(x, spec, randoms=Randoms(seed=3, step=s)).dequantize() for s in range(200)]
    again = quantize(x, spec, randoms=Randoms(seed=3, step=5)).dequantize()
    assert torch.equal(draws[5], again)
    assert not torch.equal(draws[5], draws[6])
    samples = torch.stack(draws).double()
    error = samples.mean(0) - x.double()
    sigma = samples.std(0) / math.sqrt(len(draws))
    inside = x.abs() <= spec.element.max * quantize(x, spec).scale_values()  # beyond the range rounding must saturate
    z = (error[inside].sum() / sigma[inside].square().sum().sqrt()).item()
    assert abs(z) < 4.5


def test_dtypes():
    x = torch.randn(32, 32, dtype=torch.bfloat16)
    q = quantize(x, MXFP8)
    assert q.dequantize().dtype == torch.bfloat16
    assert dequantize(q, torch.float32).dtype == torch.float32
    assert torch.equal(bits(q.data), bits(quantize(x.double(), MXFP8).data))


def test_e4m3_times_a_power_of_two_is_exact_in_bf16():
    q = quantize(wide(128, 128), MXFP8)
    assert torch.equal(q.dequantize(torch.bfloat16).float(), q.dequantize(torch.float32))


def test_errors():
    with pytest.raises(TypeError, match=r"torch\.int64"):
        quantize(torch.arange(4), MXFP8)
    with pytest.raises(ValueError, match="got 2"):
        quantize(torch.ones(4, 4), MXFP8, 2)
    with pytest.raises(ValueError, match="last two"):
        quantize(torch.ones(4, 4, 4), MXFP8_SQUARE, 0)
    with pytest.raises(ValueError, match="last two"):
        quantize(torch.ones(4), MXFP8_SQUARE)
    with pytest.raises(ValueError, match="needs a matrix"):
        quantize(torch.ones(4, 4, 4), MXFP8).t()
    with pytest.raises(ValueError, match="int8"):
        MXFP8.with_(scale="int8")
    with pytest.raises(ValueError, match="positive"):
        MXFP8.with_(block=(1, 0))


@pytest.mark.parametrize("mode", list(ScaleMode), ids=lambda m: m.value)
@pytest.mark.parametrize("spec", [MXFP8, MXFP8_E5M2, MXFP4], ids=str)
def test_agrees_bit_for_bit_with_torchao(spec, mode):
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    x = wide(64, 256)
    x[0, :32] = 0
    dtype = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2, E2M1: torch.float4_e2m1fn_x2}[spec.element]
    scale, data = to_mx(x, dtype, 32, ScaleCalculationMode[mode.name])
    q = quantize(x, spec.with_(mode=mode))
    assert torch.equal(bits(q.scale), bits(scale))
    assert torch.equal(bits(q.data), bits(data))
