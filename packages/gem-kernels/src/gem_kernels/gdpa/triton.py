"""GDPA in portable Triton: the kernels of `tiled_attention` with an activation. Nothing is kept from the forward pass.
See `tiling` for the legend.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gem_kernels.tiled_attention import dkv_kernel, dq_kernel, forward_kernel
from gem_kernels.tiling import (
    HALF,
    CompileCase,
    Tile,
    applies,
    launch,
    padded_dim,
    rows_of,
    signature,
    strides,
)

__all__ = ["applies", "backward", "compile_cases", "forward"]


def tile(phase: str, dtype: torch.dtype, dim: int) -> Tile:
    """The fixed configuration of a kernel: "forward", "dq" or "dkv". Fits the 99 KB of shared memory of every card."""
    if dtype not in HALF:  # float32 products run on the vector units: small tiles keep them in registers
        return Tile(bm=32, bn=32, warps=8, stages=1) if dim <= 128 else Tile(bm=16, bn=16, warps=4, stages=1)
    if phase == "forward":
        if dim <= 64:
            return Tile(bm=128, bn=64, warps=4, stages=3)
        return Tile(bm=128, bn=64, warps=8, stages=2) if dim <= 128 else Tile(bm=64, bn=32, warps=4, stages=2)
    if dim <= 64:
        return Tile(bm=64, bn=64, warps=4, stages=2)
    return Tile(bm=64, bn=64, warps=8, stages=2) if dim <= 128 else Tile(bm=32, bn=32, warps=4, stages=1)


def _constants(
    q: Tensor, k: Tensor, q_offsets: Tensor | None, activation: str, left: int, right: int
) -> dict[str, object]:
    return {
        "HEADS": q.shape[1],
        "GROUP": q.shape[1] // k.shape[1],
        "D": q.shape[2],
        "DP": padded_dim(q.shape[2]),
        "SHARED": q_offsets is None,
        "ACT": activation,
        "BIAS": False,
        "NARROW": False,
        "LEFT": left >= 0,
        "RIGHT": right >= 0,
        "PRECISION": "ieee",
    }


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    activation: str,
    scale: float,
    out_scale: float,
    left: int,
    right: int,
    residual: Tensor | None = None,
) -> Tensor:
    """O [Tq, H, D]; see `gdpa`."""
    q, k, v = rows_of(q), rows_of(k), rows_of(v)
    batch, heads, dim = k_offsets.shape[0] - 1, q.shape[1], q.shape[2]
    rows = q.shape[0] if q_offsets is not None else batch * max_q
    out = torch.empty(rows, heads, dim, dtype=q.dtype, device=q.device)
    t = tile("forward", q.dtype, padded_dim(dim))
    tiles = triton.cdiv(max_q, t.bm)
    launch(
        forward_kernel, tiles * heads * batch, q.device, t,
        q, k, v, None, out, None, q_offsets, k_offsets, scale, out_scale,
        *strides(q, k, v), 0, 0, max_q, max_k, tiles, left, right,
        **_constants(q, k, q_offsets, activation, left, right), BM=t.bm, BN=t.bn,
        residual_ptr=None if residual is None else residual.contiguous(),
    )  # fmt: skip
    return out


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    activation: str,
    scale: float,
    out_scale: float,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV."""
    dout, q, k, v = rows_of(dout), rows_of(q), rows_of(k), rows_of(v)
    batch, heads, kv_heads, dim = k_offsets.shape[0] - 1, q.shape[1], k.shape[1], q.shape[2]
    shared = q_offsets is None
    constants = _constants(q, k, q_offsets, activation, left, right)
    dq = torch.empty(dout.shape, dtype=torch.float32 if shared else q.dtype, device=q.device)
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)

    t = tile("dq", q.dtype, padded_dim(dim))
    tiles = triton.cdiv(max_q, t.bm)
    launch(
        dq_kernel, tiles * heads * batch, q.device, t,
        dout, q, k, v, None, None, None, None, None, dq, q_offsets, k_offsets, scale, out_scale,
        *strides(dout, q, k, v), 0, 0, max_q, max_k, tiles, left, right,
        **constants, BM=t.bm, BN=t.bn, DLSE=False,
    )  # fmt: skip

    t = tile("dkv", q.dtype, padded_dim(dim))
    tiles = triton.cdiv(max_k, t.bn)
    launch(
        dkv_kernel, tiles * kv_heads * batch, q.device, t,
        dout, q, k, v, None, None, None, dk, dv, q_offsets, k_offsets, scale, out_scale,
        *strides(dout, q, k, v), 0, 0, max_q, max_k, tiles, left, right,
        **constants, BM=t.bm, BN=t.bn,
    )  # fmt: skip
    if shared:
        dq = dq.view(batch, *q.shape).sum(0).to(q.dtype)
    return dq, dk, dv


def compile_cases() -> list[CompileCase]:
    """The kernels at the head dimensions that matter, plain and with a window."""
    cases = []
    kernels = {"forward": forward_kernel, "dq": dq_kernel, "dkv": dkv_kernel}
    problems = [
        ("bf16", torch.bfloat16, 64, "silu", False),
        ("bf16", torch.bfloat16, 128, "gelu_poly4", False),
        ("bf16", torch.bfloat16, 128, "gelu", True),
        ("bf16", torch.bfloat16, 256, "silu", False),
        ("fp32", torch.float32, 64, "silu", True),
    ]
    for phase, kernel in kernels.items():
        for name, dtype, dim, activation, window in problems:
            t = tile(phase, dtype, dim)
            constants: dict[str, object] = {
                "HEADS": 4, "GROUP": 1, "D": dim, "DP": dim, "BM": t.bm, "BN": t.bn, "SHARED": False,
                "PRECISION": "ieee", "ACT": activation, "LEFT": window, "RIGHT": window, "BIAS": False, "NARROW": False,
            }  # fmt: skip
            if phase == "dq":
                constants["DLSE"] = False
            absent = ("bias_ptr", "residual_ptr", "SUBTRACT")
            constants |= {n: None for n in kernel.arg_names if n in absent or n.endswith("_f32")}
            types, divisible = signature(kernel, name, constants)
            label = f"gdpa {phase} {name} d{dim} {activation}{' window' if window else ''}"
            cases.append(CompileCase(label, kernel, types, constants, t, divisible))
    return cases
