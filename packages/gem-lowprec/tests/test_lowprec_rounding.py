"""Philox against published vectors; stochastic rounding against its definition and its statistics."""

from __future__ import annotations

import math

import pytest
import torch
from gem_lowprec import BF16, E2M1, E4M3, E5M2, Randoms, stochastic_round
from gem_lowprec.formats import decode, encode
from gem_lowprec.rounding import philox4x32


def nearest(x: torch.Tensor, fmt) -> torch.Tensor:
    return x.bfloat16().float() if fmt is BF16 else decode(encode(x, fmt), fmt)


def values_of(fmt) -> torch.Tensor:
    codes = torch.arange(1 << fmt.bits, dtype=torch.int32)
    if fmt is BF16:
        return codes.to(torch.int16).view(torch.bfloat16).float()
    return decode(codes.to(torch.uint8).view(fmt.dtype), fmt)


FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1, BF16], ids=str)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    out = philox4x32(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(w.item() for w in out) == expected


@pytest.mark.parametrize("offset", [0, 1, 3, 4, 1001, (1 << 34) + 2])
def test_words_are_a_function_of_their_index(offset):
    key = {"seed": (5 << 40) + 3, "stream": 2, "step": 9}
    whole = Randoms(**key, offset=offset - offset % 4).words(64)
    assert torch.equal(Randoms(**key, offset=offset).words(20), whole[offset % 4 : offset % 4 + 20])
    assert whole.min() >= 0
    assert whole.max() < 1 << 32


def test_words_differ_by_every_part_of_the_key():
    base = {"seed": 1, "stream": 1, "step": 1}
    words = [Randoms(**base).words(64)]
    words += [Randoms(**{**base, name: value}).words(64) for name in base for value in (2, 1 + (1 << 31))]
    words.append(Randoms(seed=1 + (1 << 40), stream=1, step=1).words(64))
    assert all((a == b).float().mean() < 0.1 for i, a in enumerate(words) for b in words[:i])
    with pytest.raises(ValueError, match="offset=-1"):
        Randoms(seed=0, offset=-1).words(1)


def test_words_are_uniform():
    u = Randoms(seed=11).words(1 << 16).double() / 2**32
    assert abs(u.mean().item() - 0.5) < 4.5 * math.sqrt(1 / 12 / u.numel())
    counts = torch.bincount((u * 64).long(), minlength=64).double()
    chi2 = ((counts - 1024) ** 2 / 1024).sum().item()
    assert chi2 < 63 + 4.5 * math.sqrt(2 * 63)


@FORMATS
def test_values_of_the_grid_stay(fmt):
    values = values_of(fmt)
    rounded = stochastic_round(values, fmt, Randoms(seed=0))
    torch.testing.assert_close(rounded, values, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(rounded), torch.signbit(values))


@FORMATS
def test_results_are_the_two_neighbours_with_the_right_frequency(fmt):
    n = 4000
    g = torch.Generator().manual_seed(1)
    scale = torch.exp2(torch.rand(60, generator=g) * 12 - 8).clamp(max=fmt.max / 8)
    x = torch.randn(60, generator=g) * scale
    x = torch.cat([x, torch.tensor([fmt.min_subnormal * 0.3, fmt.min_normal * 0.77, -fmt.max * 0.9])])
    grid = values_of(fmt)
    grid = grid[grid.isfinite()].double().unique()  # sorted
    x = x.double()
    below = torch.searchsorted(grid, x, right=True) - 1
    low = grid[below]
    high = torch.where(low == x, low, grid[(below + 1).clamp(max=len(grid) - 1)])
    samples = stochastic_round(x.float()[:, None].expand(-1, n), fmt, Randoms(seed=2)).double()
    assert ((samples == low[:, None]) | (samples == high[:, None])).all()
    p = (x - low) / (high - low).clamp(min=1e-300)
    error = samples.mean(1) - x
    sigma = (high - low) * (p * (1 - p) / n).sqrt()
    # Where fewer than a few roundings up are expected the count is no longer Gaussian: allow a few steps on top.
    assert (error.abs() <= 4.8 * sigma + 8 / n * (high - low)).all()


@FORMATS
def test_mean_error_over_many_values_is_zero_where_nearest_is_biased(fmt):
    grid = 1.0 + 2.0**-fmt.mantissa_bits * 0.3
    x = torch.full((1 << 16,), grid)
    error = (stochastic_round(x, fmt, Randoms(seed=4)) - x).double()
    sigma = 2.0**-fmt.mantissa_bits * math.sqrt(0.3 * 0.7 / x.numel())
    assert abs(error.mean().item()) < 4.5 * sigma
    assert abs((nearest(x, fmt) - x).double().mean().item()) > 50 * sigma


def test_reproducible_and_in_pieces():
    x = torch.randn(1000)
    key = {"seed": 8, "step": 3}
    whole = stochastic_round(x, E4M3, Randoms(**key))
    assert torch.equal(whole, stochastic_round(x, E4M3, Randoms(**key)))
    pieces = [stochastic_round(x[i : i + 250], E4M3, Randoms(**key, offset=i)) for i in range(0, 1000, 250)]
    assert torch.equal(whole, torch.cat(pieces))
    assert not torch.equal(whole, stochastic_round(x, E4M3, Randoms(seed=8, step=4)))


@FORMATS
def test_ends(fmt):
    x = torch.tensor(
        [torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max, math.inf, -math.inf, math.nan, 0.0]
    )
    out = stochastic_round(x, fmt, Randoms(seed=0))
    assert out[:4].tolist() == [fmt.max, -fmt.max, math.inf, -math.inf]
    assert out[4].isnan()
    assert out[5] == 0
    tiny = stochastic_round(torch.full((4000,), 2.0**-149), fmt, Randoms(seed=0))
    assert set(tiny.tolist()) <= {0.0, fmt.min_subnormal}
