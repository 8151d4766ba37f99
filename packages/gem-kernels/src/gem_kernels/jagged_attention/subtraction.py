"""The portable forward with subtraction masking: the last tile's missing keys are zeros, and what they add to the sum
is taken off once.

The keys past a sequence's end are loaded as 0, so their scores are 0 and each adds exp(0 - max) to a row's sum; c of
them together c exp(-max), which is known. Their values are 0 too, so P V is right as it is. The mask of the last tile,
a comparison and a selection for every score, becomes one multiply-add for every row.

Where all of a row's true scores are far below 0 the true sum is small beside the surplus, and the subtraction loses
digits: relative error about 2^-24 c / sum exp(s). So a tile uses the mask after all unless every row has a score above
-`limit` (base 2), shown by a key tile before or by a positive score in the last one. That is decided in the kernel.

Selectable for comparison (`forward`) and in the benchmark; without causal masks and windows, whose edges need a mask
anyway. The backward is `triton.backward`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels.jagged_attention.triton import _bias_strides, _constants, tile
from gem_kernels.tiled_attention import forward_range
from gem_kernels.tiling import (
    LN2,
    LOG2E,
    CompileCase,
    launch,
    load_rows,
    padded_dim,
    rows_of,
    signature,
    span,
    store_rows,
    strides,
)

__all__ = ["LIMIT", "compile_cases", "forward"]

LIMIT = 3.0  # at most 2^-24 * 64 * 2^3 = 3e-5 of the sum is lost


@triton.jit(do_not_specialize=["max_q", "max_k", "tiles"])
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr, lse_f32, q_offsets, k_offsets, scale, limit_scale,
    q_row, q_head, k_row, k_head, v_row, v_head, bias_batch, bias_head, max_q, max_k, tiles,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SHARED: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
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
    if BIAS:
        bias_ptr += b.to(tl.int64) * bias_batch + h.to(tl.int64) * bias_head
    acc = tl.zeros((BM, DP), tl.float32)
    m = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    full = len_k // BN * BN
    acc, m, total = forward_range(
        acc, m, total, q, rows, 0, full, k_ptr, v_ptr, bias_ptr, k_row, v_row, len_k, max_q, max_k, 0, scale, -1, -1,
        D, DP, BN, "softmax", BIAS, False, False, False, PRECISION)  # fmt: skip
    if full < len_k:
        cols = full + tl.arange(0, BN)
        k = load_rows(k_ptr, cols, cols < len_k, k_row, D, DP, True)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
        if BIAS:
            at = bias_ptr + rows.to(tl.int64)[:, None] * max_k + cols[None, :]
            seen = (rows < max_q)[:, None] & (cols < len_k)[None, :]
            s += tl.load(at, mask=seen, other=0.0).to(tl.float32) * LOG2E
        safe = (tl.max(s, 1) > 0.0) | (m >= -limit_scale) | (rows >= len_q)
        surplus = (full + BN - len_k).to(tl.float32)
        if tl.min(safe.to(tl.int32), 0) == 0:
            s = tl.where((cols < len_k)[None, :], s, float("-inf"))
            surplus = surplus * 0.0
        m_new = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a bias of -inf
        p = tl.exp2(s - shift[:, None])
        alpha = tl.exp2(m - shift)
        total = total * alpha + (tl.sum(p, 1) - surplus * tl.exp2(-tl.maximum(shift, 0.0)))
        v = load_rows(v_ptr, cols, cols < len_k, v_row, D, DP, True)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    store_rows(out_ptr + (start_o * HEADS + h) * D, out, rows, inside, HEADS * D, D, DP)
    lse = tl.where(total == 0.0, float("-inf"), (m + tl.log2(tl.where(total == 0.0, 1.0, total))) * LN2)
    tl.store(lse_f32 + (start_o + rows) * HEADS + h, lse, mask=inside)


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, bias: Tensor | None,
    max_q: int, max_k: int, scale: float, *, limit: float = LIMIT,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """O [Tq, H, D] and LSE [Tq, H] of `jagged_attention` without causal mask and window.

    limit: a tile subtracts if every row has a score of at least -limit, in base 2 (a natural score times log2 e).
    """
    q, k, v = rows_of(q), rows_of(k), rows_of(v)
    bias = None if bias is None else bias.contiguous()
    batch, heads, dim = k_offsets.shape[0] - 1, q.shape[1], q.shape[2]
    rows = q.shape[0] if q_offsets is not None else batch * max_q
    out = torch.empty(rows, heads, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    t = tile("forward", q.dtype, padded_dim(dim), bias is not None, False)
    tiles = triton.cdiv(max_q, t.bm)
    constants = {n: c for n, c in _constants(q, k, q_offsets, -1, -1).items() if n not in ("LEFT", "RIGHT")}
    launch(
        _forward_kernel, tiles * heads * batch, q.device, t,
        q, k, v, bias, out, lse, q_offsets, k_offsets, scale, limit,
        *strides(q, k, v), *_bias_strides(bias), max_q, max_k, tiles,
        **constants, BM=t.bm, BN=t.bn, BIAS=bias is not None,
    )  # fmt: skip
    return out, lse


def compile_cases() -> list[CompileCase]:
    """The kernel at the head dimensions that matter."""
    cases = []
    for dim in (64, 128):
        t = tile("forward", torch.bfloat16, dim, False, False)
        constants: dict[str, object] = {
            "HEADS": 4, "GROUP": 1, "D": dim, "DP": dim, "BM": t.bm, "BN": t.bn, "SHARED": False, "BIAS": False,
            "PRECISION": "ieee",
        }  # fmt: skip
        types, divisible = signature(_forward_kernel, "bf16", constants)
        label = f"jagged_attention forward bf16 d{dim} subtraction"
        cases.append(CompileCase(label, _forward_kernel, types, constants, t, divisible))
    return cases
