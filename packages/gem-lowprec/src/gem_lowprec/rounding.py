"""Stochastic rounding with counter-based random numbers.

SR(x) = the grid neighbour below |x| plus one grid step with probability equal to the fraction of the step that |x|
lies above it, with the sign of x; so E[SR(x)] = x inside the format's range. The random numbers are Philox4x32-10
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a pure function of (seed, stream, step, element
index), so a rounding is repeated exactly on any device, in any order of execution and after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gem_lowprec.formats import Format

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


@dataclass(frozen=True, kw_only=True)
class Randoms:
    """A sequence of random words: 64-bit `seed`, 32-bit `stream` (which tensor) and `step`, first index `offset`."""

    seed: int
    stream: int = 0
    step: int = 0
    offset: int = 0

    def words(self, n: int, device: torch.device | str = "cpu") -> Tensor:
        """`n` uniform 32-bit words, as int64 in [0, 2^32), at indices offset .. offset + n - 1 of the sequence."""
        if self.offset < 0 or n < 0:
            raise ValueError(f"offset and n must be non-negative, got offset={self.offset}, n={n}")
        first, skip = divmod(self.offset, 4)
        groups = (skip + n + 3) // 4
        index = first + torch.arange(groups, dtype=torch.int64, device=device)
        counter = (index & _MASK, (index >> 32) & _MASK, torch.full_like(index, self.step & _MASK))
        stream = torch.full_like(index, self.stream & _MASK)
        out = philox4x32((*counter, stream), (self.seed & _MASK, (self.seed >> 32) & _MASK))
        return torch.stack(out, dim=-1).flatten()[skip : skip + n]


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32 with 10 rounds on int64 tensors that hold 32-bit words; four words in, four words out, elementwise."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The int64 product wraps modulo 2^64; its bits are those of the unsigned product, so masking recovers both
        # halves.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def stochastic_round(x: Tensor, fmt: Format, randoms: Randoms) -> Tensor:
    """Round `x` (any shape, read as float32) stochastically onto the grid of `fmt`; returns float32 values on it.

    Element i of the flattened tensor uses word i of `randoms`. Values on the grid are returned unchanged; beyond the
    range they saturate at +-max, where the expectation is of course no longer x; NaN and infinities are returned as
    they are. The probability is resolved to 2^-32 of a grid step.
    """
    if not isinstance(randoms, Randoms):
        raise TypeError(f"randoms must be Randoms, got {randoms!r}")
    value = x.to(torch.float32)
    magnitude = value.abs().double()
    _, exponent = torch.frexp(magnitude)  # magnitude = f * 2^exponent with f in [0.5, 1)
    quantum = (exponent - 1).clamp(min=fmt.emin) - fmt.mantissa_bits
    steps = magnitude * _power_of_two(-quantum)  # exact: float64 has room for every float32 divided by every quantum
    below = steps.floor()
    words = randoms.words(x.numel(), x.device).view(x.shape)
    up = words.double() * 2.0**-32 < steps - below
    rounded = ((below + up) * _power_of_two(quantum)).clamp(max=fmt.max).to(torch.float32)
    return torch.where(torch.isfinite(value), torch.copysign(rounded, value), value)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float64 from its bits; torch.ldexp goes through a float32 power, which overflows at 2^128."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)
