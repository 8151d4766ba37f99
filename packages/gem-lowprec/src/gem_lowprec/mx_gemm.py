"""C[M, N] = A[M, K] B[N, K]^T of MXFP8 operands by the block-scaled matrix instruction: native from compute capability
10 on (`tcgen05.mma ... block_scale`), where every 32 of K are scaled inside the tensor cores.

Older GPUs have no such instruction: Triton dequantises in the kernel there, with the same numbers and no gain in speed.
The layers do not use it by themselves: it was built for compute capability 10 and inspected, and has not run there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gem_kernels.tiling import CompileCase, Tile, launch
from torch import Tensor

from gem_lowprec.formats import E4M3
from gem_lowprec.quantize import QTensor

BLOCK = 32
TILE = Tile(bm=128, bn=128, warps=4, stages=3)
DEPTH = 128


@triton.jit
def _mx_gemm(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr, M, N, K, a_row, a_scale_row, b_row, b_scale_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of C per program; data and scales are row-major, scales E8M0 bytes."""
    across = tl.cdiv(N, BN)
    m = (tl.program_id(0) // across) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    s = tl.arange(0, BK // 32)
    m64, n64 = m.to(tl.int64), n.to(tl.int64)
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        in_k = start + k < K
        in_s = start // 32 + s < tl.cdiv(K, 32)
        a = tl.load(
            a_ptr + m64[:, None] * a_row + (start + k)[None, :], mask=(m < M)[:, None] & in_k[None, :], other=0.0
        )
        b = tl.load(
            b_ptr + n64[None, :] * b_row + (start + k)[:, None], mask=(n < N)[None, :] & in_k[:, None], other=0.0
        )
        to_a = a_scale_ptr + m64[:, None] * a_scale_row + (start // 32 + s)[None, :]
        to_b = b_scale_ptr + n64[:, None] * b_scale_row + (start // 32 + s)[None, :]
        a_scale = tl.load(to_a, mask=(m < M)[:, None] & in_s[None, :], other=127)  # 127 is a scale of 1
        b_scale = tl.load(to_b, mask=(n < N)[:, None] & in_s[None, :], other=127)
        acc = tl.dot_scaled(a, a_scale, "e4m3", b, b_scale, "e4m3", acc)
    to = c_ptr + m64[:, None] * N + n[None, :]
    tl.store(to, acc.to(c_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def mx_matmul(a: QTensor, b: QTensor, dtype: torch.dtype) -> Tensor:
    """C[M, N] = A[M, K] B[N, K]^T as `dtype` (bfloat16, float16 or float32), accumulated in float32.

    Both operands are E4M3 with one E8M0 scale per 32 of K (MXFP8), on CUDA. Raises TypeError or ValueError for others.
    """
    for name, q in (("a", a), ("b", b)):
        if not isinstance(q, QTensor):
            raise TypeError(f"{name} must be a QTensor, got {type(q).__name__}")
        if q.spec.element is not E4M3 or q.spec.block != (1, BLOCK) or q.spec.scale != "e8m0" or q.dim != -1:
            raise ValueError(f"{name} must be MXFP8 along its last dim, got {q.spec} along {q.dim}")
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"expected [M, K] and [N, K], got {list(a.shape)} and {list(b.shape)}")
    if a.data.device != b.data.device:
        raise ValueError(f"a and b must be on one device, got {a.data.device} and {b.data.device}")
    (m, k), n = a.shape, b.shape[0]
    out = torch.empty(m, n, dtype=dtype, device=a.data.device)
    data = [q.data.contiguous() for q in (a, b)]
    scales = [q.scale.contiguous().view(torch.uint8) for q in (a, b)]
    programs = -(-m // TILE.bm) * -(-n // TILE.bn)
    launch(
        _mx_gemm, programs, out.device, TILE, data[0], scales[0], data[1], scales[1], out, m, n, k,
        k, scales[0].shape[1], k, scales[1].shape[1], BM=TILE.bm, BN=TILE.bn, BK=DEPTH,
    )  # fmt: skip
    return out


def compile_cases() -> list[CompileCase]:
    """What `compile_check` builds without a GPU."""
    constants = {"BM": TILE.bm, "BN": TILE.bn, "BK": DEPTH}
    types = {name: "constexpr" if name in constants else "i32" for name in _mx_gemm.arg_names}
    types |= dict.fromkeys(("a_ptr", "b_ptr"), "*fp8e4nv") | dict.fromkeys(("a_scale_ptr", "b_scale_ptr"), "*u8")
    types["c_ptr"] = "*bf16"
    divisible = tuple(name for name in _mx_gemm.arg_names if name in ("N", "K") or name.endswith(("_ptr", "_row")))
    return [
        CompileCase(
            name="mxfp8 gemm", kernel=_mx_gemm, signature=types, constants=constants, tile=TILE, divisible=divisible,
            arch=(90, 100),
        )
    ]  # fmt: skip
