"""What the portable Triton kernels share: tile loads, the ranges of tiles that a mask leaves, and how to launch.

Legend for every kernel: BM query rows and BN key rows in a tile, D head dimension, DP = D rounded up to a power of
two (at least 16), HEADS query heads, GROUP query heads per key head. A position is a query's place on the diagonal, i
+ (Lk - Lq).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels import dispatch, interpreter

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

HALF = (torch.float16, torch.bfloat16)
KERNEL_DTYPES = (*HALF, torch.float32)


@triton.jit
def load_rows(base, rows, inside, stride, D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr):
    """[rows, DP] from rows `stride` apart; 0 outside D, and outside `inside` if MASKED."""
    dim = tl.arange(0, DP)
    at = base + rows.to(tl.int64)[:, None] * stride + dim[None, :]
    if MASKED and D != DP:
        x = tl.load(at, mask=inside[:, None] & (dim < D)[None, :], other=0.0)
    elif MASKED:
        x = tl.load(at, mask=inside[:, None], other=0.0)
    elif D != DP:
        x = tl.load(at, mask=(dim < D)[None, :], other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def store_rows(base, x, rows, inside, stride, D: tl.constexpr, DP: tl.constexpr):
    """Write [rows, D], cast to the target's dtype, where `inside`."""
    dim = tl.arange(0, DP)
    at = base + rows.to(tl.int64)[:, None] * stride + dim[None, :]
    tl.store(at, x.to(base.dtype.element_ty), mask=inside[:, None] & (dim < D)[None, :])


@triton.jit
def span(offsets, b):
    """Where sequence b begins (int64) and how long it is (int32)."""
    start = tl.load(offsets + b).to(tl.int64)
    return start, (tl.load(offsets + b + 1).to(tl.int64) - start).to(tl.int32)


@triton.jit
def hide(s, position, cols, len_k, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, value: tl.constexpr):
    """Put `value` where a query at `position` does not see key `cols`; the two broadcast against each other."""
    s = tl.where(cols < len_k, s, value)
    if LEFT:
        s = tl.where(cols >= position - left, s, value)
    if RIGHT:
        s = tl.where(cols <= position + right, s, value)
    return s


@triton.jit
def key_ranges(first, last, len_k, left, right, BN: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """For queries at positions first..last: key tiles run over [lo, hi), and need no mask in [full_lo, full_hi)."""
    lo, full_lo = 0, 0
    hi, full_hi = len_k, len_k
    if LEFT:
        lo = tl.maximum(first - left, 0) // BN * BN
        full_lo = (tl.maximum(last - left, 0) + BN - 1) // BN * BN
    if RIGHT:
        hi = tl.minimum(len_k, tl.maximum(last + right + 1, 0))
        full_hi = tl.minimum(len_k, tl.maximum(first + right + 1, 0))
    end = (hi + BN - 1) // BN * BN
    full_lo = tl.minimum(full_lo, tl.maximum(end, lo))
    full_hi = tl.maximum(full_hi // BN * BN, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def query_ranges(first, last, diag, len_q, left, right, BM: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """For keys first..last: query tiles run over [lo, hi), and need no mask in [full_lo, full_hi); diag = Lk - Lq."""
    lo, full_lo = 0, 0
    hi, full_hi = len_q, len_q
    if RIGHT:
        lo = tl.maximum(first - right - diag, 0) // BM * BM
        full_lo = (tl.maximum(last - right - diag, 0) + BM - 1) // BM * BM
    if LEFT:
        hi = tl.minimum(len_q, tl.maximum(last + left - diag + 1, 0))
        full_hi = tl.minimum(len_q, tl.maximum(first + left - diag + 1, 0))
    end = (hi + BM - 1) // BM * BM
    full_lo = tl.minimum(full_lo, tl.maximum(end, lo))
    full_hi = tl.maximum(full_hi // BM * BM, full_lo)
    return lo, full_lo, full_hi, hi


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One launch configuration. One for each dtype, head dimension and kernel: nothing is tuned at run time."""

    bm: int
    bn: int
    warps: int = 4
    stages: int = 2
    registers: int | None = None  # of a thread at most


def padded_dim(head_dim: int) -> int:
    """DP: a power of two, at least the 16 that a matrix product needs."""
    return max(16, triton.next_power_of_2(head_dim))


def applies(problem: dispatch.Problem) -> tuple[bool, str]:
    """Which problems the portable attention kernels take."""
    if problem.dtype in KERNEL_DTYPES and not 1 <= problem.head_dim <= 256:
        return False, f"the Triton kernels take head dimensions up to 256; got {problem.head_dim}"
    return applies_to_dtype(problem)


def applies_to_dtype(problem: dispatch.Problem) -> tuple[bool, str]:
    """Whether the portable kernels take this dtype on this device, whatever the width."""
    if problem.dtype not in KERNEL_DTYPES:
        return False, f"the Triton kernels take float16, bfloat16 and float32; got {problem.dtype}"
    if problem.dtype == torch.bfloat16 and problem.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(problem.device)
        if torch.version.hip is None and major < 8:
            return False, f"bfloat16 needs compute capability 8.0; {problem.device} has {major}.{minor}"
    return True, "portable Triton kernels"


def rows_of(x: Tensor) -> Tensor:
    """x itself when its last dim is dense, whatever its other strides; else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides(*tensors: Tensor) -> list[int]:
    """The row and head strides of [T, H, D] tensors, one after the other."""
    return [stride for x in tensors for stride in x.stride()[:2]]


def launch(kernel: Any, programs: int, device: torch.device, tile: Tile, *args: Any, **constants: Any) -> None:
    """Run `programs` instances of a kernel on the stream of `device`; nothing happens for none."""
    if programs == 0:
        return
    if device.type == "cpu":
        if not dispatch.interpreting():
            raise RuntimeError("Triton kernels run on CPU tensors only in the interpreter (TRITON_INTERPRET=1)")
        interpreter.install()
        guard: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    elif device.index in (None, torch.cuda.current_device()):  # a guard takes the host as long as half a launch
        guard = contextlib.nullcontext()
    else:
        guard = torch.cuda.device(device)
    with guard:
        kernel[(programs,)](*args, **constants, num_warps=tile.warps, num_stages=tile.stages)


@dataclass(frozen=True)
class CompileCase:
    """A kernel to build without a GPU: argument types by name ("*bf16", "i32", ...), constants and launch options."""

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    tile: Tile
    divisible: tuple[str, ...] = field(default_factory=tuple)  # arguments known to be multiples of 16
    arch: tuple[int, ...] = (80, 90, 100, 120)
    source: Callable[..., Any] | None = None  # the AST source class; None for plain Triton, GluonASTSource for Gluon
    defined: bool = False  # addresses must be made of registers that are written on every way there, see `sass`
    no_special: bool = False  # it must have no special-function instruction (MUFU) in its loops with products


def signature(kernel: Any, dtype: str, constants: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Argument types of one of our kernels by the naming that they all follow, and which arguments are multiples of 16.

    Names ending in `_offsets` are int64 pointers, `_f32` float32 pointers, `_ptr` pointers of the problem's dtype;
    `scale` and `..._scale` are floats; every other argument is an int, and a stride (`_row`, `_head`, `_batch`) is a
    multiple of 16.
    """
    types, divisible = {}, []
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name.endswith(("_offsets", "_f32", "_ptr")):
            types[name] = {"s": "*i64", "2": "*fp32", "r": f"*{dtype}"}[name[-1]]
            divisible.append(name)
        elif name.endswith("scale"):
            types[name] = "fp32"
        else:
            types[name] = "i32"
            if name.endswith(("_row", "_head", "_batch")):
                divisible.append(name)
    return types, tuple(divisible)
