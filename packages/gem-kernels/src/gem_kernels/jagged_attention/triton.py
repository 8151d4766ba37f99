"""Jagged softmax attention in portable Triton: the kernels of `tiled_attention` with softmax, and one more for the
bias's gradient. See `tiling` for the legend.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels.tiled_attention import dkv_kernel, dq_kernel, forward_kernel, scores
from gem_kernels.tiling import (
    HALF,
    LOG2E,
    CompileCase,
    Tile,
    applies,
    launch,
    load_rows,
    padded_dim,
    rows_of,
    signature,
    span,
    strides,
)

__all__ = ["applies", "backward", "compile_cases", "forward"]


@triton.jit(do_not_specialize=["batch", "max_q", "max_k", "tiles", "left", "right"])
def _dbias_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, bias_ptr, lse_f32, delta_f32, dbias_ptr, q_offsets, k_offsets, scale,
    do_row, do_head, q_row, q_head, k_row, k_head, v_row, v_head, bias_batch, bias_head,
    batch, max_q, max_k, tiles, left, right,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SHARED: tl.constexpr, ALL_BATCH: tl.constexpr, ALL_HEADS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the bias's gradient: dS, summed over the samples and heads that share it in a fixed order."""
    col_tiles = tl.cdiv(max_k, BN)
    tile, rest = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    first_h, first_b = 0, 0
    last_h, last_b = HEADS, batch
    if not ALL_HEADS:
        first_h = rest % HEADS
        last_h = first_h + 1
        rest = rest // HEADS
    if not ALL_BATCH:
        first_b = rest
        last_b = first_b + 1
    rows = (tile // col_tiles) * BM + tl.arange(0, BM)
    cols = (tile % col_tiles) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for b in range(first_b, last_b):
        b64 = tl.cast(b, tl.int64)
        if SHARED:
            start_q, len_q, start_o = tl.cast(0, tl.int64), max_q, b64 * max_q
        else:
            start_q, len_q = span(q_offsets, b64)
            start_o = start_q
        start_k, len_k = span(k_offsets, b64)
        if ((tile // col_tiles) * BM < len_q) & ((tile % col_tiles) * BN < len_k):
            for h in range(first_h, last_h):
                h64 = tl.cast(h, tl.int64)
                row_ok, col_ok = rows < len_q, cols < len_k
                q = load_rows(q_ptr + start_q * q_row + h64 * q_head, rows, row_ok, q_row, D, DP, True)
                do = load_rows(do_ptr + start_o * do_row + h64 * do_head, rows, row_ok, do_row, D, DP, True)
                k = load_rows(k_ptr + start_k * k_row + h64 // GROUP * k_head, cols, col_ok, k_row, D, DP, True)
                v = load_rows(v_ptr + start_k * v_row + h64 // GROUP * v_head, cols, col_ok, v_row, D, DP, True)
                at = (start_o + rows) * HEADS + h64
                lse = tl.load(lse_f32 + at, mask=row_ok, other=0.0)
                delta = tl.load(delta_f32 + at, mask=row_ok, other=0.0)
                lse2 = tl.where(lse == float("-inf"), 0.0, lse * LOG2E)
                bias_at = bias_ptr + b64 * bias_batch + h64 * bias_head
                s = scores(q, tl.trans(k), rows[:, None], cols[None, :], len_k, max_q, max_k, len_k - len_q, scale,
                           bias_at, left, right, "softmax", True, LEFT, RIGHT, True, PRECISION)  # fmt: skip
                dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
                ds = tl.exp2(s - lse2[:, None]) * (dp - delta[:, None])
                acc += tl.where(row_ok[:, None], ds, 0.0)
    out = dbias_ptr
    if not ALL_BATCH:
        out += tl.cast(first_b, tl.int64) * bias_batch
    if not ALL_HEADS:
        out += tl.cast(first_h, tl.int64) * bias_head
    at = rows.to(tl.int64)[:, None] * max_k + cols[None, :]
    inside = (rows < max_q)[:, None] & (cols < max_k)[None, :]
    tl.store(out + at, acc.to(dbias_ptr.dtype.element_ty), mask=inside)


def narrow(left: int, right: int) -> bool:
    """Whether a window spans so few tiles that one masked loop beats three."""
    return left >= 0 and right >= 0 and left + right < 512


def tile(phase: str, dtype: torch.dtype, dim: int, bias: bool = False, narrow: bool = False) -> Tile:
    """The fixed configuration of a kernel ("forward", "dq", "dkv", "dbias"); 99 KB of shared memory suffice."""
    if dtype not in HALF:  # float32 products run on the vector units: small tiles keep them in registers
        return Tile(bm=32, bn=32, warps=8, stages=1) if dim <= 128 else Tile(bm=16, bn=16, warps=4, stages=1)
    if narrow and not bias and dim <= 128:
        return {
            "forward": Tile(bm=64, bn=32, warps=4, stages=3),
            "dq": Tile(bm=64, bn=32, warps=4, stages=2),
            "dkv": Tile(bm=32, bn=64, warps=4, stages=2),
        }[phase]
    if phase == "forward" and dim <= 128:
        if bias:
            return Tile(bm=64, bn=64, warps=8, stages=2)
        return Tile(bm=128, bn=64, warps=4, stages=3) if dim <= 64 else Tile(bm=128, bn=64, warps=8, stages=2)
    if phase == "forward":
        return Tile(bm=64, bn=32, warps=4, stages=2)
    stages = 1 if bias or dim > 128 else 2
    if dim <= 128:
        return Tile(bm=64, bn=64, warps=4 if dim <= 64 else 8, stages=stages)
    return Tile(bm=32, bn=32, warps=4, stages=stages)


def _bias_strides(bias: Tensor | None) -> tuple[int, int]:
    if bias is None:
        return 0, 0
    return (bias.stride(0) if bias.shape[0] > 1 else 0), (bias.stride(1) if bias.shape[1] > 1 else 0)


def _constants(q: Tensor, k: Tensor, q_offsets: Tensor | None, left: int, right: int) -> dict[str, object]:
    return {
        "HEADS": q.shape[1],
        "GROUP": q.shape[1] // k.shape[1],
        "D": q.shape[2],
        "DP": padded_dim(q.shape[2]),
        "SHARED": q_offsets is None,
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
    bias: Tensor | None,
    max_q: int,
    max_k: int,
    scale: float,
    left: int,
    right: int,
    *,
    subtract: float | None = None,
) -> tuple[Tensor, Tensor]:
    """O [Tq, H, D] and LSE [Tq, H]; see `jagged_attention`. subtract: the limit of `subtraction.forward`."""
    q, k, v = rows_of(q), rows_of(k), rows_of(v)
    bias = None if bias is None else bias.contiguous()
    batch, heads, dim = k_offsets.shape[0] - 1, q.shape[1], q.shape[2]
    rows = q.shape[0] if q_offsets is not None else batch * max_q
    out = torch.empty(rows, heads, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    t = tile("forward", q.dtype, padded_dim(dim), bias is not None, narrow(left, right))
    tiles = triton.cdiv(max_q, t.bm)
    launch(
        forward_kernel, tiles * heads * batch, q.device, t,
        q, k, v, bias, out, lse, q_offsets, k_offsets, scale, 1.0,
        *strides(q, k, v), *_bias_strides(bias), max_q, max_k, tiles, left, right,
        **_constants(q, k, q_offsets, left, right), ACT="softmax", BM=t.bm, BN=t.bn, BIAS=bias is not None,
        NARROW=narrow(left, right), SUBTRACT=subtract,
    )  # fmt: skip
    return out, lse


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    bias: Tensor | None,
    bias_grad: bool,
    max_q: int,
    max_k: int,
    scale: float,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dQ, dK, dV and dBias (empty unless `bias_grad`)."""
    dout, q, k, v = rows_of(dout), rows_of(q), rows_of(k), rows_of(v)
    out, lse = out.contiguous(), lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    bias = None if bias is None else bias.contiguous()
    batch, heads, kv_heads, dim = k_offsets.shape[0] - 1, q.shape[1], k.shape[1], q.shape[2]
    shared = q_offsets is None
    constants = _constants(q, k, q_offsets, left, right)
    steps = (*strides(dout, q, k, v), *_bias_strides(bias))
    dq = torch.empty(out.shape, dtype=torch.float32 if shared else q.dtype, device=q.device)
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    delta = torch.empty_like(lse)

    t = tile("dq", q.dtype, padded_dim(dim), bias is not None, narrow(left, right))
    tiles = triton.cdiv(max_q, t.bm)
    launch(
        dq_kernel, tiles * heads * batch, q.device, t,
        dout, q, k, v, bias, out, lse, dlse, delta, dq, q_offsets, k_offsets, scale, 1.0,
        *steps, max_q, max_k, tiles, left, right,
        **constants, ACT="softmax", BM=t.bm, BN=t.bn, BIAS=bias is not None, DLSE=dlse is not None,
        NARROW=narrow(left, right),
    )  # fmt: skip

    t = tile("dkv", q.dtype, padded_dim(dim), bias is not None, narrow(left, right))
    tiles = triton.cdiv(max_k, t.bn)
    launch(
        dkv_kernel, tiles * kv_heads * batch, q.device, t,
        dout, q, k, v, bias, lse, delta, dk, dv, q_offsets, k_offsets, scale, 1.0,
        *steps, max_q, max_k, tiles, left, right,
        **constants, ACT="softmax", BM=t.bm, BN=t.bn, BIAS=bias is not None, NARROW=narrow(left, right),
    )  # fmt: skip

    dbias = torch.empty(0, dtype=q.dtype, device=q.device)
    if bias_grad:
        assert bias is not None
        dbias = torch.empty(bias.shape, dtype=bias.dtype, device=q.device)
        t = tile("dbias", q.dtype, padded_dim(dim), True)
        tiles = triton.cdiv(max_q, t.bm) * triton.cdiv(max_k, t.bn)
        all_batch, all_heads = bias.shape[0] == 1, bias.shape[1] == 1
        launch(
            _dbias_kernel, tiles * bias.shape[0] * bias.shape[1], q.device, t,
            dout, q, k, v, bias, lse, delta, dbias, q_offsets, k_offsets, scale,
            *steps, batch, max_q, max_k, tiles, left, right,
            **constants, BM=t.bm, BN=t.bn, ALL_BATCH=all_batch, ALL_HEADS=all_heads,
        )  # fmt: skip
    if shared:
        dq = dq.view(batch, *q.shape).sum(0).to(q.dtype)
    return dq, dk, dv, dbias


def compile_cases() -> list[CompileCase]:
    """The kernels at the head dimensions that matter, plain and with everything that adds code."""
    cases = []
    kernels = {"forward": forward_kernel, "dq": dq_kernel, "dkv": dkv_kernel, "dbias": _dbias_kernel}
    problems = [
        ("bf16", torch.bfloat16, 64, False, False),
        ("bf16", torch.bfloat16, 128, False, False),
        ("bf16", torch.bfloat16, 128, False, True),
        ("bf16", torch.bfloat16, 128, True, False),
        ("bf16", torch.bfloat16, 256, False, False),
        ("fp32", torch.float32, 64, True, False),
    ]
    for phase, kernel in kernels.items():
        for name, dtype, dim, everything, slim in problems:
            if phase == "dbias" and not everything:
                continue
            t = tile(phase, dtype, dim, everything, slim)
            constants: dict[str, object] = {
                "HEADS": 4, "GROUP": 1, "D": dim, "DP": dim, "BM": t.bm, "BN": t.bn, "SHARED": False,
                "PRECISION": "ieee", "LEFT": everything or slim, "RIGHT": everything or slim,
            }  # fmt: skip
            extra: dict[str, object] = {
                "ACT": "softmax",
                "BIAS": everything,
                "NARROW": slim,
                "DLSE": False,
                "ALL_BATCH": False,
                "ALL_HEADS": False,
                "SUBTRACT": None,
            }
            constants |= {key: value for key, value in extra.items() if key in kernel.arg_names}
            types, divisible = signature(kernel, name, constants)
            what = " window bias" if everything else " narrow window" if slim else ""
            label = f"jagged_attention {phase} {name} d{dim}{what}"
            cases.append(CompileCase(label, kernel, types, constants, t, divisible))
    from gem_kernels.jagged_attention import subtraction  # it builds on this module

    return cases + subtraction.compile_cases()
