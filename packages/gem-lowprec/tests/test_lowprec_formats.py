"""Element casts against ml_dtypes, scale exponents against exact rational arithmetic."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from gem_lowprec.formats import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    Format,
    ScaleMode,
    decode,
    e8m0_decode,
    e8m0_encode,
    encode,
    pack_fp4,
    scale_code,
    unpack_fp4,
)
from hypothesis import given, settings
from hypothesis import strategies as st

PEERS = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2, E2M1: ml_dtypes.float4_e2m1fn}
ELEMENTS = pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=str)
FLT_MAX = float(np.finfo(np.float32).max)


def codes_of(fmt: Format) -> torch.Tensor:
    raw = torch.arange(2**fmt.bits, dtype=torch.uint8)
    return raw if fmt is E2M1 else raw.view(fmt.dtype)


def peer_values(fmt: Format, codes: torch.Tensor) -> np.ndarray:
    return codes.view(torch.uint8).numpy().view(PEERS[fmt]).astype(np.float32)


def edge_values(fmt: Format) -> np.ndarray:
    """Every value of the format, every midpoint of two neighbours, and both float32 neighbours of each."""
    values = peer_values(fmt, codes_of(fmt))
    values = np.unique(values[np.isfinite(values)])
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    up, down = np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))
    extra = np.array([0.0, -0.0, 1e-45, -1e-45, 1e-38], dtype=np.float32)
    return np.concatenate([points, up, down, extra])


@pytest.mark.parametrize("fmt", [E4M3, E5M2, BF16], ids=str)
def test_facts_agree_with_ml_dtypes(fmt):
    info = ml_dtypes.finfo(PEERS.get(fmt, ml_dtypes.bfloat16))
    assert float(info.max) == fmt.max
    assert float(info.smallest_normal) == fmt.min_normal
    assert float(info.smallest_subnormal) == fmt.min_subnormal
    assert info.bits == fmt.bits
    assert math.floor(math.log2(fmt.max)) == fmt.emax


def test_facts_of_e2m1():
    assert (E2M1.max, E2M1.min_normal, E2M1.min_subnormal, E2M1.bits) == (6.0, 1.0, 0.5, 4)


@ELEMENTS
def test_all_codes_decode_as_in_ml_dtypes(fmt):
    codes = codes_of(fmt)
    np.testing.assert_array_equal(decode(codes, fmt).numpy(), peer_values(fmt, codes))


@ELEMENTS
def test_all_finite_codes_survive_a_round_trip(fmt):
    codes = codes_of(fmt)
    value = decode(codes, fmt)
    again = encode(value, fmt)
    keep = value.isfinite()
    assert torch.equal(again.view(torch.uint8)[keep], codes.view(torch.uint8)[keep])
    assert decode(again, fmt)[value.isnan()].isnan().all()


@ELEMENTS
@pytest.mark.parametrize("seed", [0, 1])
def test_encode_agrees_bit_for_bit_with_ml_dtypes(fmt, seed):
    rng = np.random.default_rng(seed)
    spread = rng.standard_normal(20_000) * 2.0 ** rng.uniform(fmt.emin - fmt.mantissa_bits - 4, fmt.emax + 3, 20_000)
    x = np.concatenate([spread.astype(np.float32), edge_values(fmt)])
    # The peers overflow to NaN or infinity; ours saturate, so the peers are given the clamped values.
    expected = np.clip(x, -fmt.max, fmt.max).astype(PEERS[fmt]).view(np.uint8)
    actual = encode(torch.from_numpy(x), fmt).view(torch.uint8).numpy()
    np.testing.assert_array_equal(actual, expected)


@ELEMENTS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_encode_reads_every_float_dtype(fmt, dtype):
    x = torch.randn(1000, dtype=dtype) * 3
    assert torch.equal(encode(x, fmt).view(torch.uint8), encode(x.float(), fmt).view(torch.uint8))


@ELEMENTS
def test_saturation_and_nan(fmt):
    x = torch.tensor([math.inf, -math.inf, 2 * fmt.max, -FLT_MAX])
    assert decode(encode(x, fmt), fmt).tolist() == [fmt.max, -fmt.max, fmt.max, -fmt.max]
    nan = decode(encode(torch.tensor([math.nan, -math.nan]), fmt), fmt)
    assert (nan == 0).all() if fmt is E2M1 else nan.isnan().all()


def test_decode_refuses_other_dtypes():
    with pytest.raises(TypeError, match=r"E4M3 codes are torch\.float8_e4m3fn, got torch\.uint8"):
        decode(torch.zeros(2, dtype=torch.uint8), E4M3)


@pytest.mark.parametrize("n", [0, 1, 2, 7, 64])
def test_fp4_packing(n):
    codes = torch.randint(0, 16, (3, n), dtype=torch.uint8)
    packed = pack_fp4(codes)
    assert packed.shape == (3, (n + 1) // 2)
    assert torch.equal(unpack_fp4(packed, n), codes)
    if n > 1:
        assert (packed[:, 0] == codes[:, 0] + 16 * codes[:, 1]).all()


def test_e8m0_decodes_as_ml_dtypes_and_torch():
    raw = torch.arange(256, dtype=torch.uint8)
    expected = raw.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(e8m0_decode(raw).numpy(), expected)
    assert e8m0_decode(raw)[0] == 2.0**-127
    torch.testing.assert_close(e8m0_decode(raw.view(torch.float8_e8m0fnu)), e8m0_decode(raw), equal_nan=True)
    with pytest.raises(TypeError, match="int32"):
        e8m0_decode(raw.int())


@pytest.mark.parametrize("up", [False, True])
def test_e8m0_powers_of_two_are_fixed_points(up):
    raw = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(e8m0_encode(e8m0_decode(raw), up=up), raw)


@pytest.mark.parametrize(
    ("x", "down", "up"),
    [
        (0.0, 0, 0),
        (-0.0, 0, 0),
        (2.0**-149, 0, 0),
        (2.0**-127, 0, 0),
        (2.0**-127 + 2.0**-149, 0, 1),
        (2.0**-126 - 2.0**-149, 0, 1),
        (2.0**-126, 1, 1),
        (2.0**-126 + 2.0**-149, 1, 2),
        (1.0, 127, 127),
        (1.5, 127, 128),
        (2.0**127, 254, 254),
        (FLT_MAX, 254, 254),
        (math.inf, 254, 254),
        (math.nan, 255, 255),
        (-1.0, 255, 255),
        (-math.inf, 255, 255),
    ],
)
def test_e8m0_encode_at_the_ends(x, down, up):
    assert e8m0_encode(torch.tensor(x)).item() == down
    assert e8m0_encode(torch.tensor(x), up=True).item() == up


def floor_log2(x: Fraction) -> int:
    k = x.numerator.bit_length() - x.denominator.bit_length()
    return k if Fraction(2) ** k <= x else k - 1


def exact_exponent(amax: float, fmt: Format, mode: ScaleMode) -> int:
    """The definition of each mode in exact rational arithmetic, clamped to what E8M0 can hold."""
    x = Fraction(amax)
    emax = floor_log2(Fraction(fmt.max))
    if mode is ScaleMode.FLOOR:
        e = floor_log2(x) - emax
    elif mode is ScaleMode.CEIL:
        k = floor_log2(x)
        e = (k if Fraction(2) ** k == x else k + 1) - emax
    elif mode is ScaleMode.EVEN:
        ulp = Fraction(2) ** (floor_log2(x) - fmt.mantissa_bits)
        e = floor_log2(round(x / ulp) * ulp) - emax  # Python's round on Fraction is half to even
    else:
        k = floor_log2(x / Fraction(fmt.max))
        e = k if Fraction(2) ** k * Fraction(fmt.max) == x else k + 1
    return min(max(e, -127), 127)


def check_modes(amax: list[float], fmt: Format, mode: ScaleMode) -> None:
    expected = [exact_exponent(a, fmt, mode) + 127 for a in amax]
    assert scale_code(torch.tensor(amax, dtype=torch.float32), fmt, mode).tolist() == expected


MODES = pytest.mark.parametrize("mode", list(ScaleMode), ids=lambda m: m.value)


@ELEMENTS
@MODES
def test_scale_modes_at_their_thresholds(fmt, mode):
    mantissas = [1.0, fmt.max / 2.0**fmt.emax, 2 - 2.0 ** -(fmt.mantissa_bits + 1), 1.5, 2 - 2.0**-23]
    exponents = [-149, -140, -128, -127, -126, -125, -120, -113, -112, -1, 0, 1, 100, 126, 127]
    points = np.array([m * 2.0**e for m in mantissas for e in exponents], dtype=np.float32)
    points = points[(points > 0) & (points < FLT_MAX)]
    points = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(FLT_MAX))])
    check_modes([float(a) for a in points if a > 0] + [FLT_MAX], fmt, mode)


@ELEMENTS
@MODES
@settings(max_examples=200, deadline=None)
@given(bits=st.integers(min_value=1, max_value=0x7F7FFFFF))
def test_scale_modes_on_any_float32(fmt, mode, bits):
    check_modes([struct.unpack("f", struct.pack("I", bits))[0]], fmt, mode)


@ELEMENTS
@MODES
def test_scale_of_zero_and_of_non_finite(fmt, mode):
    amax = torch.tensor([0.0, math.inf, math.nan])
    assert scale_code(amax, fmt, mode).tolist() == [0, 255, 255]


def test_scale_mode_must_be_a_mode():
    with pytest.raises(TypeError, match="'floor'"):
        scale_code(torch.ones(1), E4M3, "floor")
