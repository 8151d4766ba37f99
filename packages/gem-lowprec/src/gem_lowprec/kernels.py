"""Triton kernels that quantise a matrix in one pass: read x once, write the elements and the scales.

What decides a bit is done on integers or in correctly rounded float32 operations, so that the kernels give the
reference's bits on every GPU and in Triton's interpreter. Two shortcuts keep the bits: dividing by a power of two is
multiplying by its exact reciprocal, and GPUs from compute capability 8.9 on convert to FP8 as the reference rounds (to
nearest even, saturating; a NaN loses its sign).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from gem_kernels.tiling import CompileCase, Tile, launch
from torch import Tensor

from gem_lowprec.formats import E2M1, E4M3, Format, ScaleMode
from gem_lowprec.quantize import FP8_1X128, FP8_128X128, FP8_ROW, MXFP4, MXFP8, MXFP8_E5M2, MXFP8_SQUARE, QuantSpec
from gem_lowprec.rounding import Randoms

INFINITY = tl.constexpr(0x7F800000)  # bits of float32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Whether the quantisers of `tiles`, whose layouts are chosen by hand, replace the portable ones where they can run.
BY_HAND = True
SCALES = {"float32": 0, "pow2": 1, "e8m0": 2}


@triton.jit
def _scale_of(amax, LIMIT: tl.constexpr, THRESHOLD: tl.constexpr, EMAX: tl.constexpr, SCALE: tl.constexpr):
    """(scale as float32, E8M0 code) from the bits of the largest magnitudes; code is -1 for a float32 scale.

    On the bits of non-negative float32, NaN > inf > every number, so a maximum of integers keeps a NaN.
    """
    if SCALE == 0:
        scale = tl.div_rn(amax.to(tl.float32, bitcast=True), tl.full(amax.shape, LIMIT, tl.float32))
        smallest = 0x800000  # 2^-126; the clamp on bits is the clamp on numbers
        bits = tl.maximum(scale.to(tl.int32, bitcast=True), smallest)
        bits = tl.where(amax >= INFINITY, 0x7FC00000, bits)
        code = tl.full(amax.shape, -1, tl.int32)
    else:
        bump = ((amax & 0x7FFFFF) > THRESHOLD).to(tl.int32)
        code = tl.minimum(tl.maximum((amax >> 23) - EMAX + bump, 0), 254)
        code = tl.where(amax >= INFINITY, 255, code)
        bits = tl.where(code == 0, 1 << 22, code << 23)  # 2^-127 is subnormal
        bits = tl.where(code == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True), code


@triton.jit
def _encode(x, MANTISSA: tl.constexpr, EMIN: tl.constexpr, LAST: tl.constexpr):
    """float32 -> code as uint8, to nearest even, saturating at the code LAST; a NaN is 0x7F and keeps its sign."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    drop: tl.constexpr = 23 - MANTISSA
    even = (size >> drop) & 1
    normal = ((size + ((1 << (drop - 1)) - 1) + even) >> drop) - ((EMIN + 126) << MANTISSA)
    # In float32 the sum with 2^k has the quantum of FP8's subnormals, so that the addition does the rounding.
    magic: tl.constexpr = (EMIN - MANTISSA + 23 + 127) << 23
    offset = tl.full(size.shape, magic, tl.int32).to(tl.float32, bitcast=True)
    small = (size.to(tl.float32, bitcast=True) + offset).to(tl.int32, bitcast=True) - magic
    code = tl.where(size < ((EMIN + 127) << 23), small, tl.minimum(normal, LAST))
    code = tl.where(size > INFINITY, 0x7F, code)
    return (code | sign).to(tl.uint8)


@triton.jit
def _encode_e2m1(x):
    """Finite float32 -> E2M1 code as int32, to nearest even and saturating.

    The quantum is 1/2 below 2, 1 below 4 and 2 above: that of float32 at 2^22, 2^23 and 2^24, where an addition rounds.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    binade = tl.minimum(tl.maximum(size & 0x7F800000, 127 << 23), 129 << 23)
    magic = binade + (22 << 23)
    steps = (size.to(tl.float32, bitcast=True) + magic.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - magic
    return tl.minimum(steps + ((binade - (127 << 23)) >> 22), 7) | ((bits >> 28) & 8)


@triton.jit
def _over(x, scale, code, SCALE: tl.constexpr):
    """x / scale, correctly rounded; `scale` and `code` broadcast to x."""
    if SCALE == 0:
        return tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    bits = tl.where(code == 254, 1 << 22, (254 - code) << 23)  # of 1 / 2^(code - 127); 2^-127 is subnormal
    bits = tl.where(code == 255, 0x7FC00000, bits)
    return x * bits.to(tl.float32, bitcast=True)


@triton.jit
def _nearest(x, MANTISSA: tl.constexpr, EMIN: tl.constexpr, LAST: tl.constexpr, HARDWARE: tl.constexpr):
    """float32 -> FP8 code as uint8, to nearest even and saturating."""
    if HARDWARE:
        if MANTISSA == 3:
            return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return _encode(x, MANTISSA, EMIN, LAST)


@triton.jit
def _encode_stochastic(x, index, seed, step, stream, MANTISSA: tl.constexpr, EMIN: tl.constexpr, LAST: tl.constexpr):
    """float32 -> code, rounded away from zero with the probability of the cut-off fraction.

    Element `index` (int64) uses the word of that index of the Philox sequence, as `rounding.Randoms` counts them.
    """
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    # |x| = m 2^(e - 150); the quantum cuts `cut` bits off m: 23 - MANTISSA of them, more below the smallest normal.
    field = size >> 23
    m = tl.where(field == 0, size, (size & 0x7FFFFF) | 0x800000).to(tl.int64)
    short = tl.maximum(EMIN + 127 - tl.maximum(field, 1), 0)
    cut = (tl.minimum(short, 40) + (23 - MANTISSA)).to(tl.int64)
    fraction = m & ((tl.full(m.shape, 1, tl.int64) << cut) - 1)
    # word / 2^32 < fraction / 2^cut, as integers; beyond 32 bits the right side is rounded up.
    left = fraction << tl.maximum(32 - cut, 0)
    over = tl.maximum(cut - 32, 0)
    # The limit of 40 changes nothing: from cut = 56 on, m < 2^24 gives a bound of 1 (0 for zero).
    bound = (left + (tl.full(m.shape, 1, tl.int64) << over) - 1) >> over

    group = index >> 2
    zero = tl.zeros(index.shape, tl.int32)
    w0, w1, w2, w3 = tl.philox(seed, group.to(tl.int32), (group >> 32).to(tl.int32), zero + step, zero + stream)
    lane = index & 3
    word = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3)).to(tl.uint32).to(tl.int64)

    below = tl.where(short == 0, (size >> (23 - MANTISSA)) - ((EMIN + 126) << MANTISSA), (m >> cut).to(tl.int32))
    code = tl.minimum(below + (word < bound).to(tl.int32), LAST)
    if MANTISSA == 1:  # finite, as `_encode_e2m1` has it
        return code | (sign >> 4)
    else:
        return (tl.where(size > INFINITY, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def _in_pairs(code, TR: tl.constexpr, TK: tl.constexpr):
    """Codes [TR, TK] of E2M1, two to a byte along the row, the first one low."""
    low, high = tl.split(tl.reshape(code, [TR, TK // 2, 2]))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit(do_not_specialize=["seed", "step", "stream", "offset"])
def _blocks(
    x_ptr, data_ptr, scale_ptr, code_ptr, rows, cols, x_row, x_col, seed, step, stream, offset, i_row, i_col,
    scale_cols,
    BR: tl.constexpr, BK: tl.constexpr, TR: tl.constexpr, TK: tl.constexpr,
    LIMIT: tl.constexpr, THRESHOLD: tl.constexpr, EMAX: tl.constexpr, SCALE: tl.constexpr,
    MANTISSA: tl.constexpr, EMIN: tl.constexpr, LAST: tl.constexpr, STOCHASTIC: tl.constexpr,
    HARDWARE: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """One tile [TR, TK] of whole blocks [BR, BK] per program; data [rows, cols] is row-major. PACK: two codes
    a byte.
    """
    across = tl.cdiv(cols, TK)
    tile_row, tile_col = tl.program_id(0) // across, tl.program_id(0) % across
    r = tile_row * TR + tl.arange(0, TR)
    c = tile_col * TK + tl.arange(0, TK)
    inside = (r[:, None] < rows) & (c[None, :] < cols)
    where = r[:, None].to(tl.int64) * x_row + c[None, :].to(tl.int64) * x_col
    x = tl.load(x_ptr + where, mask=inside, other=0.0).to(tl.float32)

    size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(tl.max(tl.reshape(size, [TR // BR, BR, TK // BK, BK]), 3), 1)  # [TR / BR, TK / BK]
    scale, code = _scale_of(amax, LIMIT, THRESHOLD, EMAX, SCALE)
    parts = tl.reshape(x, [TR // BR, BR, TK // BK, BK])
    scaled = _over(parts, scale[:, None, :, None], code[:, None, :, None], SCALE)
    if PACK:  # E2M1 has no NaN
        scaled = tl.where((amax >= INFINITY)[:, None, :, None], 0.0, scaled)
    scaled = tl.reshape(scaled, [TR, TK])
    if STOCHASTIC:
        index = offset.to(tl.int64) + r[:, None].to(tl.int64) * i_row + c[None, :].to(tl.int64) * i_col
        data = _encode_stochastic(scaled, index, seed.to(tl.int64), step, stream, MANTISSA, EMIN, LAST)
    elif PACK:
        data = _encode_e2m1(scaled)
    else:
        data = _nearest(scaled, MANTISSA, EMIN, LAST, HARDWARE)
    if PACK:
        half = tile_col * (TK // 2) + tl.arange(0, TK // 2)
        to = data_ptr + r[:, None].to(tl.int64) * tl.cdiv(cols, 2) + half[None, :]
        tl.store(to, _in_pairs(data, TR, TK), mask=(r[:, None] < rows) & (half[None, :] * 2 < cols))
    else:
        tl.store(data_ptr + r[:, None].to(tl.int64) * cols + c[None, :], data, mask=inside)

    br = tile_row * (TR // BR) + tl.arange(0, TR // BR)
    bc = tile_col * (TK // BK) + tl.arange(0, TK // BK)
    inside_scale = (br[:, None] < tl.cdiv(rows, BR)) & (bc[None, :] < scale_cols)
    to = br[:, None].to(tl.int64) * scale_cols + bc[None, :]
    if SCALE == 2:
        tl.store(code_ptr + to, code.to(tl.uint8), mask=inside_scale)
    else:
        tl.store(scale_ptr + to, scale, mask=inside_scale)


@triton.jit(do_not_specialize=["seed", "step", "stream", "offset"])
def _row_wise(
    x_ptr, data_ptr, scale_ptr, code_ptr, rows, cols, x_row, x_col, seed, step, stream, offset, i_row, i_col,
    TR: tl.constexpr, TK: tl.constexpr,
    LIMIT: tl.constexpr, THRESHOLD: tl.constexpr, EMAX: tl.constexpr, SCALE: tl.constexpr,
    MANTISSA: tl.constexpr, EMIN: tl.constexpr, LAST: tl.constexpr, STOCHASTIC: tl.constexpr,
    HARDWARE: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """One scale per row; a program reads its TR rows twice, the second time from cache where they fit."""
    r = tl.program_id(0) * TR + tl.arange(0, TR)
    x_rows = x_ptr + r[:, None].to(tl.int64) * x_row
    size = tl.zeros([TR, TK], tl.int32)
    for start in range(0, cols, TK):
        c = start + tl.arange(0, TK)
        inside = (r[:, None] < rows) & (c[None, :] < cols)
        x = tl.load(x_rows + c[None, :].to(tl.int64) * x_col, mask=inside, other=0.0).to(tl.float32)
        size = tl.maximum(size, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    scale, code = _scale_of(tl.max(size, 1), LIMIT, THRESHOLD, EMAX, SCALE)
    if SCALE == 2:
        tl.store(code_ptr + r, code.to(tl.uint8), mask=r < rows)
    else:
        tl.store(scale_ptr + r, scale, mask=r < rows)
    for start in range(0, cols, TK):
        c = start + tl.arange(0, TK)
        inside = (r[:, None] < rows) & (c[None, :] < cols)
        x = tl.load(x_rows + c[None, :].to(tl.int64) * x_col, mask=inside, other=0.0).to(tl.float32)
        scaled = _over(x, scale[:, None], code[:, None], SCALE)
        if PACK:
            scaled = tl.where((scale != scale)[:, None], 0.0, scaled)
        if STOCHASTIC:
            index = offset.to(tl.int64) + r[:, None].to(tl.int64) * i_row + c[None, :].to(tl.int64) * i_col
            data = _encode_stochastic(scaled, index, seed.to(tl.int64), step, stream, MANTISSA, EMIN, LAST)
        elif PACK:
            data = _encode_e2m1(scaled)
        else:
            data = _nearest(scaled, MANTISSA, EMIN, LAST, HARDWARE)
        if PACK:
            half = start // 2 + tl.arange(0, TK // 2)
            to = data_ptr + r[:, None].to(tl.int64) * tl.cdiv(cols, 2) + half[None, :]
            tl.store(to, _in_pairs(data, TR, TK), mask=(r[:, None] < rows) & (half[None, :] * 2 < cols))
        else:
            tl.store(data_ptr + r[:, None].to(tl.int64) * cols + c[None, :], data, mask=inside)


@dataclass(frozen=True, kw_only=True)
class _Launch:
    kernel: Any
    tile: Tile
    constants: dict[str, Any]


def applies(x: Tensor, spec: QuantSpec, dim: int, randoms: Randoms | None) -> str | None:
    """Why the kernels cannot quantise `x` so; None if they can. Whether they can run here is up to the launch."""
    if randoms is not None and x.ndim > 2 and dim != -1:
        return f"stochastic rounding of shape {list(x.shape)} along dim {dim}: only dim -1, or a matrix"
    if randoms is not None and randoms.offset + x.numel() > 1 << 62:
        return f"the random numbers reach beyond index 2^62, from offset {randoms.offset}"
    if x.dtype not in DTYPES:
        return f"the Triton kernels read float32, bfloat16 and float16; got {x.dtype}"
    rows, k = spec.block
    if rows is None or (k is None and rows != 1):
        return f"{spec}: blocks that span several rows whole have no Triton kernel"
    if any(b is not None and (b & (b - 1) or b > 128) for b in spec.block):
        return f"{spec}: block sizes must be powers of two up to 128, got {spec.block}"
    if rows != 1 and x.ndim != 2:
        return f"{spec}: the Triton kernels take matrices for two-dimensional blocks, got shape {list(x.shape)}"
    return None


def quantize_rows(
    x: Tensor, spec: QuantSpec, randoms: Randoms | None, index: tuple[int, int]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(data [R, K], scale [R / rows, K / k], sizes rounded up) of a matrix x [R, K] with any strides, cut along K; of
    E2M1 data is [R, K / 2], rounded up.

    Element (r, c) uses the word index[0] r + index[1] c of `randoms`.
    """
    rows, cols = x.shape
    block_rows, block_cols = spec.block
    down = -(-rows // (block_rows or 1))
    across = 1 if block_cols is None else -(-cols // block_cols)
    line = -(-cols // 2) if spec.element is E2M1 else cols
    data = torch.empty(rows, line, dtype=torch.uint8, device=x.device)
    kind = torch.uint8 if spec.scale == "e8m0" else torch.float32
    scale = torch.empty(down, across, dtype=kind, device=x.device)
    plan = _plan(spec, stochastic=randoms is not None, hardware=hardware(x.device))
    words = randoms or Randoms(seed=0)
    if words.offset < 0:
        raise ValueError(f"offset must be non-negative, got {words.offset}")
    numbers = (_signed(words.seed, 64), _signed(words.step, 32), _signed(words.stream, 32), words.offset, *index)
    tile, size = plan.tile, (rows, cols, *x.stride(), *numbers)
    # Whichever kind of scale is not written gets some pointer of its type.
    to = (
        scale if kind == torch.float32 else x.new_empty(1, dtype=torch.float32),
        scale if kind != torch.float32 else data,
    )
    if block_cols is None:
        programs = -(-rows // plan.constants["TR"])
        launch(plan.kernel, programs, x.device, tile, x, data, *to, *size, **plan.constants)
    elif cols:
        programs = -(-rows // plan.constants["TR"]) * -(-cols // plan.constants["TK"])
        launch(plan.kernel, programs, x.device, tile, x, data, *to, *size, across, **plan.constants)
    return data.view(spec.element.dtype), scale.view(torch.float8_e8m0fnu) if spec.scale == "e8m0" else scale


def _signed(n: int, bits: int) -> int:
    """The low bits of `n` as a signed integer of that width."""
    n &= (1 << bits) - 1
    return n - (1 << bits) if n >> (bits - 1) else n


def threshold(element: Format, mode: ScaleMode) -> int:
    """The exponent of a scale is one more where the mantissa of amax exceeds this, as `formats.scale_code` has it."""
    return {
        ScaleMode.FLOOR: 1 << 23,
        ScaleMode.CEIL: 0,
        ScaleMode.EVEN: (1 << 23) - (1 << (22 - element.mantissa_bits)) - 1,
        ScaleMode.RCEIL: int((element.max / 2.0**element.emax - 1.0) * (1 << 23)),
    }[mode]


@functools.cache
def hardware(device: torch.device) -> bool:
    """Whether the device converts float32 to FP8 itself, to nearest even and saturating."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _plan(spec: QuantSpec, *, stochastic: bool, hardware: bool) -> _Launch:
    element, (block_rows, block_cols) = spec.element, spec.block
    p = element.mantissa_bits
    constants: dict[str, Any] = {
        "LIMIT": element.max, "THRESHOLD": threshold(element, spec.mode), "EMAX": element.emax,
        "SCALE": SCALES[spec.scale], "MANTISSA": p,
        "EMIN": element.emin, "LAST": {E4M3: 0x7E, E2M1: 7}.get(element, 0x7B), "STOCHASTIC": stochastic,
        "HARDWARE": hardware and element is not E2M1, "PACK": element is E2M1,
    }  # fmt: skip
    # The random numbers take registers: fewer elements a thread then.
    if block_cols is None:
        width = 512 if stochastic else 1024
        return _Launch(
            kernel=_row_wise, tile=Tile(bm=4, bn=width, warps=8 if stochastic else 4),
            constants={"TR": 4, "TK": width, **constants},
        )  # fmt: skip
    assert block_rows is not None
    height, width = max(block_rows, 16 if stochastic else 32), max(block_cols, 128)
    warps = 16 if height * width > 4096 else 8 if stochastic else 4
    sizes = {"BR": block_rows, "BK": block_cols, "TR": height, "TK": width}
    return _Launch(kernel=_blocks, tile=Tile(bm=height, bn=width, warps=warps), constants={**sizes, **constants})


def compile_cases() -> list[CompileCase]:
    """What `compile_check` builds without a GPU: every built-in format, from BF16."""
    cases = []
    specs = (MXFP8, MXFP8_E5M2, MXFP8_SQUARE, MXFP4, FP8_1X128, FP8_128X128, FP8_ROW)
    for spec, stochastic in [(s, stochastic) for s in specs for stochastic in (False, True)]:
        plan = _plan(spec, stochastic=stochastic, hardware=True)
        types = {name: "constexpr" if name in plan.constants else "i32" for name in plan.kernel.arg_names}
        types |= {"seed": "i64", "offset": "i64"}
        types |= {"x_ptr": "*bf16", "data_ptr": "*u8", "scale_ptr": "*fp32", "code_ptr": "*u8"}
        cases.append(
            CompileCase(
                name=f"quantize {spec}" + (" stochastic" if stochastic else ""),
                kernel=plan.kernel,
                signature=types,
                constants=plan.constants,
                tile=plan.tile,
                divisible=("x_ptr", "data_ptr", "scale_ptr", "x_row"),
                arch=(90, 100),
            )
        )
    return cases
