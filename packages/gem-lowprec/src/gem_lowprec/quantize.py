"""Quantise a tensor to small elements with shared scales, and back: x ~ data * scale.

A `QuantSpec` says which element format, which block of elements shares a scale and how the scale is stored;
`quantize` works on any shape and device. Blocks are cut along the contraction dimension `dim`, and for
two-dimensional blocks along the other one of the last two dimensions as well. The data always keep the shape of x:
where a size is no multiple of the block, only the last block is short, and only the scale tensor has the rounded-up
size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from gem_lowprec.formats import (
    E2M1,
    E4M3,
    E5M2,
    Format,
    ScaleMode,
    decode,
    e8m0_decode,
    encode,
    pack_fp4,
    scale_code,
    unpack_fp4,
)
from gem_lowprec.rounding import Randoms, stochastic_round

ScaleFormat = Literal["e8m0", "pow2", "float32"]
_SMALLEST_SCALE = 2.0**-126


@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """Element format, block and scale of a quantised tensor.

    `block` = (rows, k): `k` consecutive elements along the contraction and `rows` along the other dimension share a
    scale; None is the whole dimension. (None, None) is one scale for the whole tensor, whatever its number of
    dimensions.

    `scale`: "e8m0" stores a power of two in a byte (OCP MX); "pow2" the same value as float32; "float32" stores
    max(amax / element.max, 2^-126). `mode` chooses the exponent of the power-of-two scales.
    """

    name: str
    element: Format
    block: tuple[int | None, int | None]
    scale: ScaleFormat
    mode: ScaleMode = ScaleMode.RCEIL

    def __post_init__(self) -> None:
        if any(b is not None and b < 1 for b in self.block):
            raise ValueError(f"block sizes must be positive or None, got {self.block}")
        if self.scale not in ("e8m0", "pow2", "float32"):
            raise ValueError(f"scale must be 'e8m0', 'pow2' or 'float32', got {self.scale!r}")

    @property
    def symmetric(self) -> bool:
        """Whether one quantisation serves both orientations: Q(X^T) = Q(X)^T bit for bit."""
        return self.block[0] == self.block[1]

    def with_(self, **changes: object) -> QuantSpec:
        """A copy with some fields changed, e.g. `MXFP8.with_(mode=ScaleMode.FLOOR)`."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return self.name


MXFP8 = QuantSpec(name="mxfp8", element=E4M3, block=(1, 32), scale="e8m0")
MXFP8_E5M2 = QuantSpec(name="mxfp8_e5m2", element=E5M2, block=(1, 32), scale="e8m0")
MXFP8_SQUARE = QuantSpec(name="mxfp8_square", element=E4M3, block=(32, 32), scale="e8m0")
MXFP4 = QuantSpec(name="mxfp4", element=E2M1, block=(1, 32), scale="e8m0")
FP8_1X128 = QuantSpec(name="fp8_1x128", element=E4M3, block=(1, 128), scale="pow2")
FP8_128X128 = QuantSpec(name="fp8_128x128", element=E4M3, block=(128, 128), scale="pow2")
FP8_ROW = QuantSpec(name="fp8_row", element=E4M3, block=(1, None), scale="pow2")
FP8_TENSOR = QuantSpec(name="fp8_tensor", element=E4M3, block=(None, None), scale="float32")


@dataclass(frozen=True, kw_only=True)
class QTensor:
    """A quantised tensor: x ~ decode(data) * scale, each scale spread over its block.

    data:  the shape of x in `spec.element.dtype`; for E2M1 uint8 with two codes a byte along `dim`, so ceil(n / 2)
           there.
    scale: one entry per block (float8_e8m0fnu for "e8m0", else float32); its size is ceil(n / block) along `dim` and,
           for two-dimensional blocks, along the other of the last two dims; 1 along a dim that a block spans.
    dim:   the contraction dimension, counted from the end (negative). shape, dtype: those of x.
    """

    data: Tensor
    scale: Tensor
    spec: QuantSpec
    dim: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return self.data.nbytes + self.scale.nbytes

    def t(self) -> QTensor:
        """The transpose of a matrix, without any new rounding: data, scales and the contraction dimension are
        swapped."""
        if len(self.shape) != 2:
            raise ValueError(f"t() needs a matrix, got shape {list(self.shape)}")
        shape = torch.Size((self.shape[1], self.shape[0]))
        return replace(self, data=self.data.t(), scale=self.scale.t(), dim=-3 - self.dim, shape=shape)

    def values(self) -> Tensor:
        """Element values before scaling, float32, in the shape of x."""
        if self.spec.element is not E2M1:
            return decode(self.data, self.spec.element)
        codes = unpack_fp4(self.data.movedim(self.dim, -1), self.shape[self.dim]).movedim(-1, self.dim)
        return decode(codes, E2M1)

    def scale_values(self) -> Tensor:
        """Scales as float32, in the shape of x: each entry repeated over its block."""
        scale = e8m0_decode(self.scale) if self.spec.scale == "e8m0" else self.scale
        for dim, block in _blocks(self.spec, self.dim, len(self.shape)):
            n = self.shape[dim]
            if block is None:
                scale = scale.expand(*(n if d == dim % scale.ndim else s for d, s in enumerate(scale.shape)))
            elif block > 1:
                sizes = list(scale.shape)
                sizes.insert(len(sizes) + 1 + dim, block)
                scale = scale.unsqueeze(dim).expand(sizes).flatten(dim - 1, dim).narrow(dim, 0, n)
        return scale

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """decode(data) * scale, computed in float32 and returned as `dtype` (default: the dtype of x)."""
        return (self.values() * self.scale_values()).to(dtype or self.dtype)


def quantize(
    x: Tensor, spec: QuantSpec, dim: int = -1, *, randoms: Randoms | None = None, backend: str | None = None
) -> QTensor:  # fmt: skip
    """Quantise `x` (any floating dtype, read as float32) along the contraction dimension `dim`.

    amax = max |x| of the block; the scale follows `spec`; data = round(x / scale) to the element format, to nearest
    even and saturating, or stochastically with `randoms` given. A block that holds an infinity or NaN gets the scale
    NaN; an all-zero block keeps zeros (E8M0 code 0, or 2^-126).

    `backend`: "reference" is plain PyTorch; "triton" is one kernel with the same bits (but for the sign of a NaN), on
    CUDA or in Triton's interpreter, for elements in blocks of powers of two up to 128 or in whole rows. None takes
    the kernel on CUDA for what it does, and the reference elsewhere.

    Raises TypeError for integers and for arguments of other types, ValueError for shapes the block does not fit, for an
    unknown backend and for what the Triton kernels do not do.
    """
    if backend not in (None, "reference", "triton"):
        raise ValueError(f"backend must be None, 'reference' or 'triton', got {backend!r}")
    if not isinstance(x, Tensor):
        raise TypeError(f"quantize expects a tensor, got {type(x).__name__}")
    if not isinstance(spec, QuantSpec):
        raise TypeError(f"spec must be a QuantSpec such as MXFP8, got {spec!r}")
    if randoms is not None and not isinstance(randoms, Randoms):
        raise TypeError(f"randoms must be Randoms or None, got {randoms!r}")
    if not x.is_floating_point():
        raise TypeError(f"quantize expects a floating-point tensor, got {x.dtype}")
    if x.ndim == 0 or not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must name a dimension of a tensor of shape {list(x.shape)}, got {dim}")
    dim = dim if dim < 0 else dim - x.ndim
    blocks = _blocks(spec, dim, x.ndim)
    if backend == "triton" or (backend is None and x.is_cuda and _kernel_why_not(x, spec, dim, randoms) is None):
        return _quantize_triton(x, spec, dim, randoms)
    value = x.to(torch.float32)
    amax = _block_amax(value.abs(), blocks)
    if spec.scale == "float32":
        # By a tensor: CUDA turns a division by a Python number into a product with its rounded reciprocal.
        scale = (amax / torch.full_like(amax, spec.element.max)).clamp(min=_SMALLEST_SCALE)
        scale = torch.where(torch.isfinite(amax), scale, torch.nan)
    else:
        code = scale_code(amax, spec.element, spec.mode)
        scale = code.view(torch.float8_e8m0fnu) if spec.scale == "e8m0" else e8m0_decode(code)
    q = QTensor(data=value, scale=scale, spec=spec, dim=dim, shape=x.shape, dtype=x.dtype)
    scaled = value / q.scale_values()
    if randoms is not None:
        scaled = stochastic_round(scaled, spec.element, randoms)
    data = encode(scaled, spec.element)
    if spec.element is E2M1:
        data = pack_fp4(data.movedim(dim, -1)).movedim(-1, dim)
    return replace(q, data=data)


def _kernel_why_not(x: Tensor, spec: QuantSpec, dim: int, randoms: Randoms | None) -> str | None:
    from gem_lowprec import kernels  # imports Triton

    return kernels.applies(x, spec, dim, randoms)


def _quantize_triton(x: Tensor, spec: QuantSpec, dim: int, randoms: Randoms | None) -> QTensor:
    from gem_lowprec import kernels

    why_not = kernels.applies(x, spec, dim, randoms)
    if why_not is not None:
        raise ValueError(f"backend 'triton' cannot do this: {why_not}")
    moved = x.detach().movedim(dim, -1)  # the contraction last; strides instead of a copy for a matrix
    matrix = moved if moved.ndim == 2 else moved.reshape(-1, moved.shape[-1])
    # The random numbers are counted through x as it is given.
    index = (matrix.shape[1], 1) if dim == -1 else (1, matrix.shape[0])
    data, scale = kernels.quantize_rows(matrix, spec, randoms, index)
    if moved.ndim != 2:
        data, scale = data.view(*moved.shape[:-1], data.shape[-1]), scale.view(*moved.shape[:-1], scale.shape[-1])
    data, scale = data.movedim(-1, dim), scale.movedim(-1, dim)
    return QTensor(data=data, scale=scale, spec=spec, dim=dim, shape=x.shape, dtype=x.dtype)


def dequantize(q: QTensor, dtype: torch.dtype | None = None) -> Tensor:
    """`q.dequantize(dtype)`: the float tensor that `q` stands for. Raises TypeError for what is not quantised."""
    if not isinstance(q, QTensor):
        raise TypeError(f"dequantize expects a QTensor, got {type(q).__name__}")
    return q.dequantize(dtype)


def _blocks(spec: QuantSpec, dim: int, ndim: int) -> list[tuple[int, int | None]]:
    """(dimension, block size) for every dimension that a block extends over; all dimensions are negative."""
    rows, k = spec.block
    if rows is None and k is None:
        return [(d - ndim, None) for d in range(ndim)]
    if rows == 1:
        return [(dim, k)]
    if ndim < 2 or dim < -2:
        raise ValueError(
            f"{spec}: two-dimensional blocks need dim to be one of the last two dimensions, got dim {dim} of {ndim}"
        )
    return [(dim, k), (-3 - dim, rows)]


def _block_amax(magnitude: Tensor, blocks: list[tuple[int, int | None]]) -> Tensor:
    """Largest magnitude of each block. NaN wins. The sizes of the blocked dimensions become numbers of blocks."""
    for dim, block in blocks:
        n = magnitude.shape[dim]
        if n == 0:
            shape = list(magnitude.shape)
            shape[dim] = 1 if block is None else 0
            magnitude = magnitude.new_zeros(shape)
        elif block is None:
            magnitude = magnitude.amax(dim, keepdim=True)
        elif block > 1:
            short = -n % block
            if short:
                magnitude = pad(magnitude.movedim(dim, -1), (0, short)).movedim(-1, dim)
            magnitude = magnitude.unflatten(dim, (-1, block)).amax(
                dim
            )  # counted from the end, so `dim` is now the block
    return magnitude
