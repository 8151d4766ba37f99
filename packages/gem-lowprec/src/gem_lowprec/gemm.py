"""One matrix product in a chosen precision: C[M, N] = A[M, K] B[N, K]^T, accumulated in float32.

Precisions:

- "bf16": nothing is quantised; the product runs in the operands' own dtype (BF16 in a BF16 model or under autocast).
- "mxfp8": E4M3 with one E8M0 scale per 32 elements along K, for both operands (OCP MX). Emulated on every device:
  E4M3 times a power of two is exact in float32, and in BF16 down to 2^-133, so the operands are dequantised without
  error and the product has MXFP8's numerics at the speed of a BF16 (CUDA) or float32 GEMM plus the quantisation.
- "mxfp8_square": the same with one scale per 32 x 32 square, so a matrix has the same values in both orientations.
- "fp8_block": E4M3 with a power of two per 1 x 128 along K for the first operand (an input, or a gradient) and per
  128 x 128 for the second (a weight, or in the weight's gradient the input: a scale for each column of the result
  would take registers that larger tiles need). Runs in our own kernel on Hopper (`gem_lowprec.block_gemm`), else it is
  emulated with the same operands.
- "fp8_row": E4M3 with a power of two per row of A and of B. Runs in torch._scaled_mm on CUDA of compute capability 8.9
  and up, else it is emulated.

Scales are powers of two: E4M3 has as many digits at either end of a binade, so nothing is lost but range, and both the
quantisation and its inverse are exact products. (Hopper's FP8 tensor cores accumulate with fewer bits than float32:
native results differ from the emulation's by about 1e-4 of their norm.)

`engine` says beforehand what a precision runs in on a device, and why; the first emulated product of a kind warns with
the same words.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from gem_lowprec.hadamard import hadamard
from gem_lowprec.quantize import FP8_1X128, FP8_128X128, FP8_ROW, MXFP8, MXFP8_SQUARE, QTensor, QuantSpec, quantize
from gem_lowprec.rounding import Randoms

PRECISIONS = ("bf16", "mxfp8", "mxfp8_square", "fp8_block", "fp8_row")
Observer = Callable[[str, Tensor, QTensor], None]  # role, what was quantised, its quantisation


@dataclass(frozen=True, kw_only=True)
class Operand:
    """An operand [rows, K] of a product and how it is to be quantised."""

    value: Tensor
    role: str  # "input", "weight" or "grad_output"; names the tensor in reports
    randoms: Randoms | None = None  # stochastic rounding if given
    quantized: QTensor | None = None  # set if the operand arrives quantised; `value` is then only its shape


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What runs a product: `name` is "native", "emulated" or "unquantised"; `why` completes the sentence."""

    name: str
    why: str


def spec_for(precision: str, *, second: bool) -> QuantSpec | None:
    """The specification that the first or the second operand of a product is quantised to; None for "bf16"."""
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; expected one of {', '.join(PRECISIONS)}")
    if precision == "fp8_block":
        return FP8_128X128 if second else FP8_1X128
    return {"bf16": None, "mxfp8": MXFP8, "mxfp8_square": MXFP8_SQUARE, "fp8_row": FP8_ROW}[precision]


def engine(precision: str, device: torch.device | str) -> Engine:
    """What `product` runs `precision` in on `device`, and why."""
    device = torch.device(device)
    if spec_for(precision, second=False) is None:
        return Engine(name="unquantised", why="runs in the operands' dtype")
    if precision == "fp8_row":
        missing = _no_scaled_mm(device)
        if missing is None:
            return Engine(name="native", why="torch._scaled_mm, row-wise scales")
        return Engine(name="emulated", why=f"{missing}; exact operands in a float32 GEMM")
    gemm = "BF16" if device.type == "cuda" else "float32"
    if precision == "fp8_block":
        missing = _no_block_kernel(device)
        if missing is None:
            return Engine(name="native", why="Hopper kernel, float32 sums every 128")
        return Engine(name="emulated", why=f"{missing}; exact operands in a {gemm} GEMM")
    return Engine(name="emulated", why=f"no block-scaled kernel yet; exact operands in a {gemm} GEMM")


def product(
    a: Operand, b: Operand, precision: str, dtype: torch.dtype, *, signs: Tensor | None = None, block: int = 32,
    observe: Observer | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """C[M, N] = A[M, K] B[N, K]^T + bias[N] in `precision`, as `dtype`.

    With `signs` [K], both operands go through the block random Hadamard transform along K before they are quantised.
    `observe` is called with (role, the tensor that is quantised, its quantisation) for each operand. An operand that
    arrives quantised as `precision` asks is used as it is and not observed; otherwise its dequantised values are used.
    """
    if bias is not None and not _adds_bias(precision, a.value.device, dtype, bias):
        out = product(a, b, precision, dtype, signs=signs, block=block, observe=observe)
        return out + bias.to(out.dtype)
    a, b = _open(a, precision, signs, second=False), _open(b, precision, signs, second=True)
    spec_a, spec_b = spec_for(precision, second=False), spec_for(precision, second=True)
    # Autocast is off inside, as it would round the operands of a float32 GEMM to BF16.
    with torch.autocast(a.value.device.type, enabled=False):
        if spec_a is None or spec_b is None:
            return a.value.to(dtype) @ b.value.to(dtype).t()
        if 0 in (*a.value.shape, b.value.shape[0]):  # an empty jagged batch
            empty = torch.zeros(a.value.shape[0], b.value.shape[0], dtype=dtype, device=a.value.device)
            return empty if bias is None else empty + bias.to(dtype)
        qa = _quantize(a, spec_a, signs, block, observe)
        qb = _quantize(b, spec_b, signs, block, observe)
        runs = engine(precision, a.value.device)
        if runs.name == "emulated" and not torch.compiler.is_compiling():
            _announce(f"{precision} is emulated on {a.value.device.type}: {runs.why}")
        if precision == "fp8_block" and runs.name == "native":
            from gem_lowprec.block_gemm import OUTPUTS, block_matmul  # imports Triton

            return block_matmul(qa, qb, dtype if dtype in OUTPUTS else torch.float32, bias).to(dtype)
        if precision == "fp8_row":
            native = runs.name == "native"
            return _row_wise_native(qa, qb, dtype, bias) if native else _row_wise_emulated(qa, qb, dtype)
        exact_in_bf16 = spec_a.scale != "float32" and a.value.is_cuda
        return _matmul(qa, qb, torch.bfloat16 if exact_in_bf16 else torch.float32, dtype)


def _adds_bias(precision: str, device: torch.device, dtype: torch.dtype, bias: Tensor) -> bool:
    """Whether the kernel of that precision adds a bias itself."""
    if precision == "fp8_row":
        return _no_scaled_mm(device) is None and dtype == bias.dtype == torch.bfloat16
    return precision == "fp8_block" and _no_block_kernel(device) is None


def _open(operand: Operand, precision: str, signs: Tensor | None, *, second: bool) -> Operand:
    """The operand, dequantised unless its quantisation is the one that is asked for."""
    q = operand.quantized
    if q is None:
        return operand
    # Square blocks are the same along either dimension.
    if signs is None and q.spec == spec_for(precision, second=second) and (q.dim == -1 or q.spec.symmetric):
        return operand
    return replace(operand, value=q.dequantize(), quantized=None)


def _quantize(
    operand: Operand, spec: QuantSpec, signs: Tensor | None, block: int, observe: Observer | None
) -> QTensor:  # fmt: skip
    value = operand.value
    if operand.quantized is not None:
        return operand.quantized
    if signs is not None:
        value = hadamard(value.to(torch.float32), signs, block=block)
    q = quantize(value, spec, randoms=operand.randoms)
    if observe is not None:
        observe(operand.role, value, q)
    return q


def _matmul(qa: QTensor, qb: QTensor, operand: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Product of dequantised operands with a float32 result, whatever the operands' dtype."""
    a, b = qa.dequantize(operand), qb.dequantize(operand)
    if operand == torch.float32:
        return (a @ b.t()).to(dtype)
    return torch.mm(a, b.t(), out_dtype=torch.float32).to(dtype)


def _row_wise_emulated(qa: QTensor, qb: QTensor, dtype: torch.dtype) -> Tensor:
    """(data_a data_b^T) * scale_a[m] * scale_b[n], scaled after the sum as the kernel does."""
    return ((qa.values() @ qb.values().t()) * qa.scale * qb.scale.t()).to(dtype)


def _row_wise_native(qa: QTensor, qb: QTensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """The same by torch._scaled_mm on CUDA."""
    n = qb.shape[0]
    # The kernel wants K and N in multiples of 16; zeros change nothing along K and are cut off along N.
    a, b = _pad16(qa.data, rows=False), _pad16(qb.data, rows=True)
    scale_a, scale_b = qa.scale, pad(qb.scale.t(), (0, -n % 16), value=1.0).contiguous()
    if dtype == torch.bfloat16:
        bias = None if bias is None else pad(bias, (0, -n % 16))
        return torch._scaled_mm(a, b.t(), bias=bias, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype)[:, :n]
    # The row-wise kernel returns BF16 alone; with unit scales the float32 sum comes out whole and is scaled here.
    one = torch.ones((), device=a.device)
    out = torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    return (out * scale_a * scale_b)[:, :n].to(dtype)


def _pad16(data: Tensor, *, rows: bool) -> Tensor:
    """Zero-pad the columns (and rows) of FP8 data to multiples of 16; always row-major."""
    widths = (0, -data.shape[1] % 16, 0, -data.shape[0] % 16 if rows else 0)
    return pad(data.contiguous().view(torch.uint8), widths).view(data.dtype)


def _no_block_kernel(device: torch.device) -> str | None:
    """Why the block-wise kernel is not used on `device`; None if it is."""
    if device.type != "cuda":
        return f"no block-wise FP8 kernel on {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major == 9 else f"the block-wise kernel is for compute capability 9, not {major}.{minor}"


def _no_scaled_mm(device: torch.device) -> str | None:
    """Why the row-wise torch._scaled_mm is not used on `device`; None if it is.

    On a CPU only new versions of torch have it (2.11 is tensor-wise alone), and it is no faster than a float32 GEMM.
    """
    if device.type != "cuda":
        return f"no row-wise FP8 kernel on {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    return None if (major, minor) >= (8, 9) else f"compute capability {major}.{minor} has no FP8 tensor cores"


@functools.cache
def _announce(message: str) -> None:
    warnings.warn(message, stacklevel=2)
