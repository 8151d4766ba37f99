"""A baseline for GDPA: the flash loop with the activation in place of the softmax, as public Triton kernels have it.

A dense grid over (row tile, head, sequence) with early return, a mask on every tile, the exact sigmoid, and a backward
in one kernel by key tiles that adds dQ up in float32 with atomics. Nothing here is used outside of the benchmark.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels.gdpa.tile_activations import activate, slope


@triton.jit
def _forward_kernel(
    q, k, v, o, q_offsets, k_offsets, scale,
    H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    tile, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q0, k0 = tl.load(q_offsets + b), tl.load(k_offsets + b)
    rows_q, rows_k = tl.load(q_offsets + b + 1) - q0, tl.load(k_offsets + b + 1) - k0
    if tile * BM >= rows_q:
        return
    d = tl.arange(0, D)
    r = tile * BM + tl.arange(0, BM)
    at = ((q0 + r) * H + h)[:, None] * D + d[None, :]
    x = tl.load(q + at, mask=(r < rows_q)[:, None], other=0.0)
    acc = tl.zeros([BM, D], tl.float32)
    for start in range(0, rows_k, BN):
        c = start + tl.arange(0, BN)
        kv = ((k0 + c) * H + h)[:, None] * D + d[None, :]
        y = tl.load(k + kv, mask=(c < rows_k)[:, None], other=0.0)
        z = tl.load(v + kv, mask=(c < rows_k)[:, None], other=0.0)
        p = activate(tl.dot(x, tl.trans(y)) * scale, ACT)
        p = tl.where((c < rows_k)[None, :], p, 0.0)
        acc = tl.dot(p.to(z.dtype), z, acc)
    tl.store(o + at, acc.to(o.dtype.element_ty), mask=(r < rows_q)[:, None])


@triton.jit
def _backward_kernel(
    do, q, k, v, dq, dk, dv, q_offsets, k_offsets, scale,
    H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    tile, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q0, k0 = tl.load(q_offsets + b), tl.load(k_offsets + b)
    rows_q, rows_k = tl.load(q_offsets + b + 1) - q0, tl.load(k_offsets + b + 1) - k0
    if tile * BN >= rows_k:
        return
    d = tl.arange(0, D)
    c = tile * BN + tl.arange(0, BN)
    kv = ((k0 + c) * H + h)[:, None] * D + d[None, :]
    inside = (c < rows_k)[:, None]
    y, z = tl.load(k + kv, mask=inside, other=0.0), tl.load(v + kv, mask=inside, other=0.0)
    acc_k, acc_v = tl.zeros([BN, D], tl.float32), tl.zeros([BN, D], tl.float32)
    for start in range(0, rows_q, BM):
        r = start + tl.arange(0, BM)
        at = ((q0 + r) * H + h)[:, None] * D + d[None, :]
        mask = (r < rows_q)[:, None]
        x, g = tl.load(q + at, mask=mask, other=0.0), tl.load(do + at, mask=mask, other=0.0)
        s = tl.dot(y, tl.trans(x)) * scale
        acc_v = tl.dot(activate(s, ACT).to(g.dtype), g, acc_v)
        ds = (slope(s, ACT) * tl.dot(z, tl.trans(g))).to(x.dtype)
        acc_k = tl.dot(ds, x, acc_k)
        tl.atomic_add(dq + at, tl.dot(tl.trans(ds), y) * scale, mask=mask, sem="relaxed")
    tl.store(dk + kv, (acc_k * scale).to(dk.dtype.element_ty), mask=inside)
    tl.store(dv + kv, acc_v.to(dv.dtype.element_ty), mask=inside)


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int, act: str,
    scale: float,
) -> Tensor:  # fmt: skip
    """O [Tq, H, D] of contiguous q, k, v."""
    _, heads, dim = q.shape
    out = torch.empty_like(q)
    _forward_kernel[(triton.cdiv(max_q, 128), heads, k_offsets.shape[0] - 1)](
        q, k, v, out, q_offsets, k_offsets, scale, H=heads, D=dim, BM=128, BN=64, ACT=act, num_warps=8, num_stages=2
    )
    return out


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int,
    act: str, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV of contiguous inputs."""
    _, heads, dim = q.shape
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    _backward_kernel[(triton.cdiv(max_k, 64), heads, k_offsets.shape[0] - 1)](
        dout, q, k, v, dq, dk, dv, q_offsets, k_offsets, scale,
        H=heads, D=dim, BM=64, BN=64, ACT=act, num_warps=8, num_stages=1,
    )  # fmt: skip
    return dq.to(q.dtype), dk, dv
