"""Block attention in portable Triton: one tile per block and key head, with no online softmax, no LSE and no delta
pass.

The rotary embedding is fused: q and k (and v) are turned as they are loaded, and their gradients are turned back in
float32 before the store. Positions that are counted are counted from the block's start: scores depend on differences
alone. Backward recomputes P and is a single kernel, as a block's gradients depend on that block alone. See `tiling`
for the legend.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels.block_attention import blocks as block_list
from gem_kernels.dispatch import Problem
from gem_kernels.gdpa.tile_activations import activate, slope
from gem_kernels.rotary.triton import turn, turns
from gem_kernels.tiling import (
    HALF,
    LOG2E,
    CompileCase,
    Tile,
    launch,
    load_rows,
    padded_dim,
    rows_of,
    signature,
    span,
    store_rows,
    strides,
)
from gem_kernels.tiling import applies as tiling_applies

__all__ = ["applies", "backward", "compile_cases", "forward"]


@triton.jit
def _softmax(s, inside):
    """Softmax of each row of s, in base 2, over the columns inside."""
    s = tl.where(inside[None, :], s * LOG2E, float("-inf"))
    p = tl.exp2(s - tl.max(s, 1)[:, None])
    return p / tl.sum(p, 1)[:, None]


@triton.jit
def _load_turned(
    ptr, rows, inside, stride, cos, sin, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, ROPE: tl.constexpr
):  # fmt: skip
    x = load_rows(ptr, rows, inside, stride, D, DP, True)
    if ROPE:
        x = turn(x.to(tl.float32), cos, sin, BM, DP).to(x.dtype)
    return x


@triton.jit
def _block_turns(
    positions_f32, start, rows, inside,
    D: tl.constexpr, DP: tl.constexpr, ROPE: tl.constexpr, COUNTED: tl.constexpr, LOG2_BASE: tl.constexpr,
):  # fmt: skip
    """cos and sin for the rows of a block."""
    cos, sin = 0.0, 0.0
    if ROPE:
        if COUNTED:
            position = rows.to(tl.float32)
        else:
            position = tl.load(positions_f32 + start + rows, mask=inside, other=0.0)
        cos, sin = turns(position, D, DP, LOG2_BASE)
    return cos, sin


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, blocks_offsets, positions_f32, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
    ACT: tl.constexpr, ROPE: tl.constexpr, COUNTED: tl.constexpr, VALUES: tl.constexpr, LOG2_BASE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    KV_HEADS: tl.constexpr = HEADS // GROUP
    block, hk = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    start, length = span(blocks_offsets, block)
    if length == 0:
        return
    rows = tl.arange(0, BM)
    inside = rows < length
    cos, sin = _block_turns(positions_f32, start, rows, inside, D, DP, ROPE, COUNTED, LOG2_BASE)
    k = _load_turned(k_ptr + start * k_row + hk * k_head, rows, inside, k_row, cos, sin, D, DP, BM, ROPE)
    v = _load_turned(v_ptr + start * v_row + hk * v_head, rows, inside, v_row, cos, sin, D, DP, BM, VALUES)
    for g in range(GROUP):
        h = hk * GROUP + g
        q = _load_turned(q_ptr + start * q_row + h * q_head, rows, inside, q_row, cos, sin, D, DP, BM, ROPE)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if ACT == "softmax":
            p = _softmax(s, inside)
        else:
            p = activate(s, ACT)
        out = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        store_rows(out_ptr + start * out_row + h * out_head, out, rows, inside, out_row, D, DP)


@triton.jit
def _backward_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, dq_ptr, dk_ptr, dv_ptr, blocks_offsets, positions_f32, scale,
    do_row, do_head, q_row, q_head, k_row, k_head, v_row, v_head, dq_row, dq_head, dk_row, dk_head, dv_row, dv_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
    ACT: tl.constexpr, ROPE: tl.constexpr, COUNTED: tl.constexpr, VALUES: tl.constexpr, LOG2_BASE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    KV_HEADS: tl.constexpr = HEADS // GROUP
    block, hk = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    start, length = span(blocks_offsets, block)
    if length == 0:
        return
    rows = tl.arange(0, BM)
    inside = rows < length
    cos, sin = _block_turns(positions_f32, start, rows, inside, D, DP, ROPE, COUNTED, LOG2_BASE)
    k = _load_turned(k_ptr + start * k_row + hk * k_head, rows, inside, k_row, cos, sin, D, DP, BM, ROPE)
    v = _load_turned(v_ptr + start * v_row + hk * v_head, rows, inside, v_row, cos, sin, D, DP, BM, VALUES)
    dk = tl.zeros((BM, DP), tl.float32)
    dv = tl.zeros((BM, DP), tl.float32)
    for g in range(GROUP):
        h = hk * GROUP + g
        q = _load_turned(q_ptr + start * q_row + h * q_head, rows, inside, q_row, cos, sin, D, DP, BM, ROPE)
        do = load_rows(do_ptr + start * do_row + h * do_head, rows, inside, do_row, D, DP, True)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        if ACT == "softmax":
            p = _softmax(s, inside)
            ds = p * (dp - tl.sum(p * dp, 1)[:, None])
        else:
            p = activate(s, ACT)
            ds = slope(s, ACT) * dp
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        ds = ds.to(q.dtype)
        dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)
        dq = tl.dot(ds, k, input_precision=PRECISION) * scale
        if ROPE:
            dq = turn(dq, cos, -sin, BM, DP)
        store_rows(dq_ptr + start * dq_row + h * dq_head, dq, rows, inside, dq_row, D, DP)
    dk = dk * scale
    if ROPE:
        dk = turn(dk, cos, -sin, BM, DP)
    if VALUES:
        dv = turn(dv, cos, -sin, BM, DP)
    store_rows(dk_ptr + start * dk_row + hk * dk_head, dk, rows, inside, dk_row, D, DP)
    store_rows(dv_ptr + start * dv_row + hk * dv_head, dv, rows, inside, dv_row, D, DP)


def applies(problem: Problem) -> tuple[bool, str]:
    """What all portable kernels take, where a block fits in shared memory: backward holds five tiles of it."""
    able, reason = tiling_applies(problem)
    if able and problem.device.type == "cuda":
        block = next((int(f.removeprefix("block:")) for f in problem.features if f.startswith("block:")), 64)
        need = 5 * block * padded_dim(problem.head_dim) * problem.dtype.itemsize
        properties = torch.cuda.get_device_properties(problem.device)
        have = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
        if need > have:
            size = f"block={block} at head dimension {problem.head_dim}"
            return False, f"{size} needs {need} B of shared memory; the device has {have}"
    return able, reason


def tile(dtype: torch.dtype, dim: int, block: int) -> Tile:
    """The fixed configuration: the tile is the block, and the warps follow what it must hold in registers."""
    wide = block * dim > 64 * 64 or dtype not in HALF
    return Tile(bm=block, bn=block, warps=(16 if block * dim > 64 * 128 else 8) if wide else 4, stages=1)


def _constants(
    q: Tensor, k: Tensor, positions: Tensor | None, t: Tile, activation: str | None, base: float | None, values: bool
) -> dict[str, object]:
    return {
        "HEADS": q.shape[1],
        "GROUP": q.shape[1] // k.shape[1],
        "D": q.shape[2],
        "DP": padded_dim(q.shape[2]),
        "BM": t.bm,
        "ACT": activation or "softmax",
        "ROPE": base is not None,
        "COUNTED": positions is None,
        "VALUES": values,
        "LOG2_BASE": math.log2(base or 1.0),
        "PRECISION": "ieee",
    }


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    blocks: Tensor,
    positions: Tensor | None,
    block: int,
    scale: float,
    activation: str | None,
    base: float | None,
    values: bool,
) -> None:
    """Write O [T, H, D]; `blocks` [N + 1] are the offsets of all blocks, see `block_attention`. No base, no rotary
    embedding; no positions, and they are counted.
    """
    q, k, v = rows_of(q), rows_of(k), rows_of(v)
    t = tile(q.dtype, padded_dim(q.shape[2]), block)
    launch(
        _forward_kernel, (blocks.shape[0] - 1) * k.shape[1], q.device, t,
        q, k, v, out, blocks, None if positions is None else positions.float(), scale, *strides(q, k, v, out),
        **_constants(q, k, positions, t, activation, base, values),
    )  # fmt: skip


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    blocks: Tensor,
    positions: Tensor | None,
    block: int,
    scale: float,
    activation: str | None,
    base: float | None,
    values: bool,
) -> None:
    """Write dQ, dK and dV, which may be views of one packed gradient."""
    dout, q, k, v = rows_of(dout), rows_of(q), rows_of(k), rows_of(v)
    t = tile(q.dtype, padded_dim(q.shape[2]), block)
    launch(
        _backward_kernel, (blocks.shape[0] - 1) * k.shape[1], q.device, t,
        dout, q, k, v, dq, dk, dv, blocks, None if positions is None else positions.float(), scale,
        *strides(dout, q, k, v, dq, dk, dv), **_constants(q, k, positions, t, activation, base, values),
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """Both kernels at the head dimensions that matter, with and without the rotary embedding."""
    cases = block_list.compile_cases()
    for phase, kernel in (("forward", _forward_kernel), ("backward", _backward_kernel)):
        for name, dtype, dim, activation, rope in (
            ("bf16", torch.bfloat16, 64, "softmax", False),
            ("bf16", torch.bfloat16, 128, "softmax", True),
            ("bf16", torch.bfloat16, 128, "silu", False),
            ("bf16", torch.bfloat16, 256, "softmax", True),
            ("fp32", torch.float32, 64, "softmax", True),
        ):
            t = tile(dtype, dim, 64)
            constants: dict[str, object] = {
                "HEADS": 4, "GROUP": 1, "D": dim, "DP": dim, "BM": t.bm, "ACT": activation, "ROPE": rope,
                "COUNTED": dim < 256, "VALUES": dim == 256, "LOG2_BASE": math.log2(1e4), "PRECISION": "ieee",
            }  # fmt: skip
            types, divisible = signature(kernel, name, constants)
            arch = (80, 90, 100) if dim > 128 else (80, 90, 100, 120)  # as `applies` says
            label = f"block_attention {phase} {name} d{dim} {activation}{' rope' if rope else ''}"
            cases.append(CompileCase(label, kernel, types, constants, t, divisible, arch))
    return cases
