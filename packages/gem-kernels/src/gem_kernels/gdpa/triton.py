"""GDPA in portable Triton: split backward, no atomics, so every run gives the same bits.

Nothing is kept from the forward pass. Zero-filled padding needs no mask in either pass, as act(0) = 0 and the padded
rows of V and dO are 0: only the edges of a causal mask or a window do. See `tiling` for the legend.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels.gdpa.tile_activations import activate, slope
from gem_kernels.tiling import (
    HALF,
    CompileCase,
    Tile,
    applies,
    hide,
    key_ranges,
    launch,
    load_rows,
    padded_dim,
    query_ranges,
    rows_of,
    signature,
    span,
    store_rows,
    strides,
)

__all__ = ["applies", "backward", "compile_cases", "forward"]


@triton.jit
def _forward_range(
    acc, q, rows, lo, hi, k_ptr, v_ptr, k_row, v_row, len_k, diag, scale, left, right,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, ACT: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for start in range(lo, hi, BN):
        cols = start + tl.arange(0, BN)
        k = load_rows(k_ptr, cols, cols < len_k, k_row, D, DP, MASKED)
        p = activate(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, ACT)
        if MASKED and (LEFT or RIGHT):
            p = hide(p, (rows + diag)[:, None], cols[None, :], len_k, left, right, LEFT, RIGHT, 0.0)
        v = load_rows(v_ptr, cols, cols < len_k, v_row, D, DP, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["max_q", "tiles", "left", "right"])
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, q_offsets, k_offsets, scale, out_scale,
    q_row, q_head, k_row, k_head, v_row, v_head, max_q, tiles, left, right,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SHARED: tl.constexpr, ACT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, rest = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    h, b = rest % HEADS, rest // HEADS
    if SHARED:
        start_q, len_q, start_o = tl.cast(0, tl.int64), max_q, b.to(tl.int64) * max_q
    else:
        start_q, len_q = span(q_offsets, b)
        start_o = start_q
    if tile * BM >= len_q:
        return
    start_k, len_k = span(k_offsets, b)
    rows = tile * BM + tl.arange(0, BM)
    inside = rows < len_q
    q = load_rows(q_ptr + start_q * q_row + h * q_head, rows, inside, q_row, D, DP, True)
    k_ptr += start_k * k_row + (h // GROUP) * k_head
    v_ptr += start_k * v_row + (h // GROUP) * v_head
    diag = len_k - len_q
    last = tl.minimum(tile * BM + BM, len_q) - 1
    lo, full_lo, full_hi, hi = key_ranges(tile * BM + diag, last + diag, len_k, left, right, BN, LEFT, RIGHT)
    acc = tl.zeros((BM, DP), tl.float32)
    if LEFT:
        acc = _forward_range(
            acc, q, rows, lo, tl.minimum(full_lo, hi), k_ptr, v_ptr, k_row, v_row, len_k, diag, scale, left, right,
            D, DP, BN, ACT, LEFT, RIGHT, True, PRECISION)  # fmt: skip
    acc = _forward_range(
        acc, q, rows, full_lo, full_hi, k_ptr, v_ptr, k_row, v_row, len_k, diag, scale, left, right,
        D, DP, BN, ACT, LEFT, RIGHT, False, PRECISION)  # fmt: skip
    acc = _forward_range(
        acc, q, rows, full_hi, hi, k_ptr, v_ptr, k_row, v_row, len_k, diag, scale, left, right,
        D, DP, BN, ACT, LEFT, RIGHT, True, PRECISION)  # fmt: skip
    store_rows(out_ptr + (start_o * HEADS + h) * D, acc * out_scale, rows, inside, HEADS * D, D, DP)


@triton.jit
def _dq_range(
    dq, q, do, rows, lo, hi, k_ptr, v_ptr, k_row, v_row, len_k, diag, scale, left, right,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, ACT: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for start in range(lo, hi, BN):
        cols = start + tl.arange(0, BN)
        k = load_rows(k_ptr, cols, cols < len_k, k_row, D, DP, MASKED)
        v = load_rows(v_ptr, cols, cols < len_k, v_row, D, DP, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        ds = slope(s, ACT) * tl.dot(do, tl.trans(v), input_precision=PRECISION)
        if MASKED and (LEFT or RIGHT):
            ds = hide(ds, (rows + diag)[:, None], cols[None, :], len_k, left, right, LEFT, RIGHT, 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["max_q", "tiles", "left", "right"])
def _dq_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, dq_ptr, q_offsets, k_offsets, scale, out_scale,
    do_row, do_head, q_row, q_head, k_row, k_head, v_row, v_head, max_q, tiles, left, right,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SHARED: tl.constexpr, ACT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, rest = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    h, b = rest % HEADS, rest // HEADS
    if SHARED:  # dQ of each sample goes to its own rows, and is summed over the batch outside
        start_q, len_q, start_o = tl.cast(0, tl.int64), max_q, b.to(tl.int64) * max_q
    else:
        start_q, len_q = span(q_offsets, b)
        start_o = start_q
    if tile * BM >= len_q:
        return
    start_k, len_k = span(k_offsets, b)
    rows = tile * BM + tl.arange(0, BM)
    inside = rows < len_q
    q = load_rows(q_ptr + start_q * q_row + h * q_head, rows, inside, q_row, D, DP, True)
    do = load_rows(do_ptr + start_o * do_row + h * do_head, rows, inside, do_row, D, DP, True)
    k_ptr += start_k * k_row + (h // GROUP) * k_head
    v_ptr += start_k * v_row + (h // GROUP) * v_head
    diag = len_k - len_q
    last = tl.minimum(tile * BM + BM, len_q) - 1
    lo, full_lo, full_hi, hi = key_ranges(tile * BM + diag, last + diag, len_k, left, right, BN, LEFT, RIGHT)
    dq = tl.zeros((BM, DP), tl.float32)
    if LEFT:
        dq = _dq_range(
            dq, q, do, rows, lo, tl.minimum(full_lo, hi), k_ptr, v_ptr, k_row, v_row, len_k, diag, scale, left, right,
            D, DP, BN, ACT, LEFT, RIGHT, True, PRECISION)  # fmt: skip
    dq = _dq_range(
        dq, q, do, rows, full_lo, full_hi, k_ptr, v_ptr, k_row, v_row, len_k, diag, scale, left, right,
        D, DP, BN, ACT, LEFT, RIGHT, False, PRECISION)  # fmt: skip
    dq = _dq_range(
        dq, q, do, rows, full_hi, hi, k_ptr, v_ptr, k_row, v_row, len_k, diag, scale, left, right,
        D, DP, BN, ACT, LEFT, RIGHT, True, PRECISION)  # fmt: skip
    store_rows(dq_ptr + (start_o * HEADS + h) * D, dq * (scale * out_scale), rows, inside, HEADS * D, D, DP)


@triton.jit
def _dkv_range(
    dk, dv, k, v, cols, lo, hi, q_ptr, do_ptr, q_row, do_row, len_q, len_k, diag, scale, left, right,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, ACT: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for start in range(lo, hi, BM):
        rows = start + tl.arange(0, BM)
        q = load_rows(q_ptr, rows, rows < len_q, q_row, D, DP, MASKED)
        do = load_rows(do_ptr, rows, rows < len_q, do_row, D, DP, MASKED)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale  # transposed, [BN, BM]
        p = activate(s, ACT)
        ds = slope(s, ACT) * tl.dot(v, tl.trans(do), input_precision=PRECISION)
        if MASKED and (LEFT or RIGHT):
            p = hide(p, (rows + diag)[None, :], cols[:, None], len_k, left, right, LEFT, RIGHT, 0.0)
            ds = hide(ds, (rows + diag)[None, :], cols[:, None], len_k, left, right, LEFT, RIGHT, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["max_q", "tiles", "left", "right"])
def _dkv_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, dk_ptr, dv_ptr, q_offsets, k_offsets, scale, out_scale,
    do_row, do_head, q_row, q_head, k_row, k_head, v_row, v_head, max_q, tiles, left, right,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SHARED: tl.constexpr, ACT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    KV_HEADS: tl.constexpr = HEADS // GROUP
    tile, rest = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    hk, b = rest % KV_HEADS, rest // KV_HEADS
    start_k, len_k = span(k_offsets, b)
    if tile * BN >= len_k:
        return
    if SHARED:
        start_q, len_q, start_o = tl.cast(0, tl.int64), max_q, b.to(tl.int64) * max_q
    else:
        start_q, len_q = span(q_offsets, b)
        start_o = start_q
    cols = tile * BN + tl.arange(0, BN)
    inside = cols < len_k
    k = load_rows(k_ptr + start_k * k_row + hk * k_head, cols, inside, k_row, D, DP, True)
    v = load_rows(v_ptr + start_k * v_row + hk * v_head, cols, inside, v_row, D, DP, True)
    diag = len_k - len_q
    last = tl.minimum(tile * BN + BN, len_k) - 1
    lo, full_lo, full_hi, hi = query_ranges(tile * BN, last, diag, len_q, left, right, BM, LEFT, RIGHT)
    dk = tl.zeros((BN, DP), tl.float32)
    dv = tl.zeros((BN, DP), tl.float32)
    for g in range(GROUP):
        q_at = q_ptr + start_q * q_row + (hk * GROUP + g) * q_head
        do_at = do_ptr + start_o * do_row + (hk * GROUP + g) * do_head
        if RIGHT:
            dk, dv = _dkv_range(
                dk, dv, k, v, cols, lo, tl.minimum(full_lo, hi), q_at, do_at, q_row, do_row, len_q, len_k, diag, scale,
                left, right, D, DP, BM, ACT, LEFT, RIGHT, True, PRECISION)  # fmt: skip
        dk, dv = _dkv_range(
            dk, dv, k, v, cols, full_lo, full_hi, q_at, do_at, q_row, do_row, len_q, len_k, diag, scale,
            left, right, D, DP, BM, ACT, LEFT, RIGHT, False, PRECISION)  # fmt: skip
        dk, dv = _dkv_range(
            dk, dv, k, v, cols, full_hi, hi, q_at, do_at, q_row, do_row, len_q, len_k, diag, scale,
            left, right, D, DP, BM, ACT, LEFT, RIGHT, True, PRECISION)  # fmt: skip
    at = (start_k * KV_HEADS + hk) * D
    store_rows(dk_ptr + at, dk * (scale * out_scale), cols, inside, KV_HEADS * D, D, DP)
    store_rows(dv_ptr + at, dv * out_scale, cols, inside, KV_HEADS * D, D, DP)


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
) -> Tensor:
    """O [Tq, H, D]; see `gdpa`."""
    q, k, v = rows_of(q), rows_of(k), rows_of(v)
    batch, heads, dim = k_offsets.shape[0] - 1, q.shape[1], q.shape[2]
    rows = q.shape[0] if q_offsets is not None else batch * max_q
    out = torch.empty(rows, heads, dim, dtype=q.dtype, device=q.device)
    t = tile("forward", q.dtype, padded_dim(dim))
    tiles = triton.cdiv(max_q, t.bm)
    launch(
        _forward_kernel, tiles * heads * batch, q.device, t,
        q, k, v, out, q_offsets, k_offsets, scale, out_scale, *strides(q, k, v), max_q, tiles, left, right,
        **_constants(q, k, q_offsets, activation, left, right), BM=t.bm, BN=t.bn,
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
        _dq_kernel, tiles * heads * batch, q.device, t,
        dout, q, k, v, dq, q_offsets, k_offsets, scale, out_scale, *strides(dout, q, k, v), max_q, tiles, left, right,
        **constants, BM=t.bm, BN=t.bn,
    )  # fmt: skip

    t = tile("dkv", q.dtype, padded_dim(dim))
    tiles = triton.cdiv(max_k, t.bn)
    launch(
        _dkv_kernel, tiles * kv_heads * batch, q.device, t,
        dout, q, k, v, dk, dv, q_offsets, k_offsets, scale, out_scale, *strides(dout, q, k, v),
        max_q, tiles, left, right,
        **constants, BM=t.bm, BN=t.bn,
    )  # fmt: skip
    if shared:
        dq = dq.view(batch, *q.shape).sum(0).to(q.dtype)
    return dq, dk, dv


def compile_cases() -> list[CompileCase]:
    """The kernels at the head dimensions that matter, plain and with a window."""
    cases = []
    kernels = {"forward": _forward_kernel, "dq": _dq_kernel, "dkv": _dkv_kernel}
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
                "PRECISION": "ieee", "ACT": activation, "LEFT": window, "RIGHT": window,
            }  # fmt: skip
            types, divisible = signature(kernel, name, constants)
            label = f"gdpa {phase} {name} d{dim} {activation}{' window' if window else ''}"
            cases.append(CompileCase(label, kernel, types, constants, t, divisible))
    return cases
