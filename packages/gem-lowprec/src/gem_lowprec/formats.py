"""Number formats: small floating-point elements (E4M3, E5M2, E2M1, BF16) and the E8M0 scale.

Element formats follow the OCP 8-bit Floating Point and OCP Microscaling (MX) v1.0 specifications. A value of a format
with `m` mantissa bits lies on the grid 2^(max(E, emin) - m) for its own exponent E = floor(log2 |v|), up to `max`.

E8M0 is a power of two in a byte: code c in 0..254 means 2^(c - 127), code 255 means NaN; there is no zero, sign or
infinity.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

E8M0_NAN = 255


@dataclass(frozen=True, kw_only=True)
class Format:
    """Facts of a floating-point element format.

    `dtype` is torch's dtype of the encoded data. E2M1 has none with one element per item, so its codes are uint8 in
    0..15 here (sign, two exponent bits, one mantissa bit) and are packed two to a byte by `pack_fp4`.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    emax: int  # exponent of the largest finite value
    emin: int  # exponent of the smallest normal value
    max: float  # largest finite value
    dtype: torch.dtype

    @property
    def bits(self) -> int:
        """Bits of one element, the sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_normal(self) -> float:
        """Smallest positive normal value, 2^emin."""
        return 2.0**self.emin

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value, 2^(emin - mantissa_bits)."""
        return 2.0 ** (self.emin - self.mantissa_bits)

    def __str__(self) -> str:
        return self.name


E4M3 = Format(
    name="E4M3", exponent_bits=4, mantissa_bits=3, emax=8, emin=-6, max=448.0, dtype=torch.float8_e4m3fn
)  # fmt: skip
E5M2 = Format(
    name="E5M2", exponent_bits=5, mantissa_bits=2, emax=15, emin=-14, max=57344.0, dtype=torch.float8_e5m2
)  # fmt: skip
E2M1 = Format(name="E2M1", exponent_bits=2, mantissa_bits=1, emax=2, emin=0, max=6.0, dtype=torch.uint8)
BF16 = Format(
    name="BF16", exponent_bits=8, mantissa_bits=7, emax=127, emin=-126, max=(2 - 2**-7) * 2.0**127, dtype=torch.bfloat16
)


class ScaleMode(Enum):
    """How the exponent e of a power-of-two scale 2^e follows from amax, the largest magnitude of a block.

    With amax = m * 2^E, 1 <= m < 2, an element format of maximum M * 2^emax, 1 <= M < 2, and p mantissa bits:

    - FLOOR: e = floor(log2 amax) - emax = E - emax. OCP MX v1.0, section 6.3. Saturates where m > M.
    - CEIL:  e = ceil(log2 amax) - emax = E - emax + [m > 1]. Never saturates, wastes up to one binade.
    - EVEN:  e = floor(log2 round_p(amax)) - emax = E - emax + [m >= 2 - 2^-(p + 1)], where round_p rounds to nearest
      with p mantissa bits. Saturates where M < m < 2 - 2^-(p + 1).
    - RCEIL: e = ceil(log2(amax / (M * 2^emax))) = E - emax + [m > M]. Smallest scale that never saturates (NVIDIA's
      rule).

    All four are evaluated on the bits of amax as float32, so they are exact. e is then clamped to [-127, 127].
    """

    FLOOR = "floor"
    CEIL = "ceil"
    EVEN = "even"
    RCEIL = "rceil"


def e8m0_decode(code: Tensor) -> Tensor:
    """2^(code - 127) as float32; code 0 gives the subnormal 2^-127 and code 255 gives NaN.

    `code` is uint8 or float8_e8m0fnu, any shape. The value is assembled from bits: no rounding and no flush to zero.
    """
    if code.dtype == torch.float8_e8m0fnu:
        code = code.view(torch.uint8)
    if code.dtype != torch.uint8:
        raise TypeError(f"E8M0 codes are uint8 or float8_e8m0fnu, got {code.dtype}")
    c = code.to(torch.int32)
    bits = torch.where(c == 0, 1 << 22, c << 23)  # 2^-127 = half of the smallest normal
    bits = torch.where(c == E8M0_NAN, 0x7FC00000, bits)
    return bits.view(torch.float32)


def e8m0_encode(x: Tensor, *, up: bool = False) -> Tensor:
    """E8M0 code (uint8) of the largest power of two <= x, or with `up` of the smallest one >= x.

    `x` is non-negative; it is read as float32. The ends, explicitly: zero and everything below 2^-127 give code 0;
    +inf and, with `up`, anything above 2^127 give code 254 (saturated, still finite); NaN and negative values give
    255 (NaN).
    """
    x = x.to(torch.float32)
    bits = x.view(torch.int32)
    exponent = bits >> 23  # biased; 0 for zero and subnormals
    mantissa = bits & 0x7FFFFF
    normal = exponent + (mantissa != 0).int() if up else exponent
    # Subnormals lie in (0, 2^-126): only [2^-127, 2^-126) or, rounded up, (2^-127, 2^-126) need telling apart.
    subnormal = (mantissa > 1 << 22).int() if up else torch.zeros_like(mantissa)
    code = torch.where(exponent == 0, subnormal, normal).clamp(0, E8M0_NAN - 1)
    code = torch.where(torch.isnan(x) | (x < 0), E8M0_NAN, code)
    return code.to(torch.uint8)


def scale_code(amax: Tensor, fmt: Format, mode: ScaleMode = ScaleMode.RCEIL) -> Tensor:
    """E8M0 code (uint8) of a block's scale from its largest magnitude; the formulas stand in `ScaleMode`.

    The ends, explicitly: amax = 0 and every amax so small that e < -127 give code 0 (2^-127; such blocks use fewer of
    the element's bits); the largest finite float32 gives e = 127 - emax, so code 254 is never exceeded; amax = inf or
    NaN gives code 255, which makes the whole block NaN: a non-finite value is never turned into a finite one.
    """
    amax = amax.to(torch.float32)
    bits = amax.view(torch.int32)
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    if mode is ScaleMode.FLOOR:
        bump = torch.zeros_like(exponent)
    elif mode is ScaleMode.CEIL:
        bump = (mantissa > 0).int()
    elif mode is ScaleMode.EVEN:
        bump = (mantissa >= (1 << 23) - (1 << (22 - fmt.mantissa_bits))).int()
    elif mode is ScaleMode.RCEIL:
        bump = (mantissa > int((fmt.max / 2.0**fmt.emax - 1.0) * (1 << 23))).int()
    else:
        raise TypeError(f"mode must be a ScaleMode, got {mode!r}")
    # A subnormal amax reads exponent 0 whatever its size; since emax > bump, it ends at code 0 as it should.
    code = (exponent - fmt.emax + bump).clamp(0, E8M0_NAN - 1)
    return torch.where(torch.isfinite(amax), code, E8M0_NAN).to(torch.uint8)


def encode(x: Tensor, fmt: Format) -> Tensor:
    """Encode to `fmt.dtype`, round to nearest even, saturating at +-max (infinities too). `x` is read as float32.

    NaN stays NaN except in E2M1, which has none and encodes it as +0: callers mark such blocks in the scale.
    """
    x = x.to(torch.float32)
    if fmt is E2M1:
        return _encode_e2m1(x)
    return x.clamp(-fmt.max, fmt.max).to(fmt.dtype)


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """Exact float32 values of codes made by `encode` (for E2M1: one code per uint8, see `unpack_fp4`)."""
    if codes.dtype != fmt.dtype:
        raise TypeError(f"{fmt} codes are {fmt.dtype}, got {codes.dtype}")
    if fmt is not E2M1:
        return codes.to(torch.float32)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=codes.device)
    magnitude = table[(codes & 7).long()]
    return torch.where(codes & 8 != 0, -magnitude, magnitude)


def _encode_e2m1(x: Tensor) -> Tensor:
    magnitude = x.abs().nan_to_num(nan=0.0).clamp(max=E2M1.max)
    # Code of the magnitude: count the midpoints below it. A midpoint itself goes to the even code, so up at 0.75,
    # 1.75, 3.5.
    code = torch.zeros_like(x, dtype=torch.uint8)
    for midpoint in (0.25, 1.25, 2.5, 5.0):
        code += magnitude > midpoint
    for midpoint in (0.75, 1.75, 3.5):
        code += magnitude >= midpoint
    return torch.where(torch.signbit(x) & ~torch.isnan(x), code | 8, code)


def pack_fp4(codes: Tensor) -> Tensor:
    """Pack E2M1 codes [..., n] two to a byte, [..., ceil(n / 2)]; element 2i is the low nibble. An odd tail is padded
    by 0."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_fp4(packed: Tensor, n: int) -> Tensor:
    """Inverse of `pack_fp4`: bytes [..., ceil(n / 2)] to codes [..., n]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)[..., :n]
