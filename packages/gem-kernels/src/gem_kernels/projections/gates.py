"""Gates of projections in portable Triton, and what all kernels of this folder share.

SwiGLU of [gate || up], a sigmoid beside a token, and their gradients: each number is read once and written once. Sums
for biases are made in two stages of fixed order, as those of `gem_kernels.norms.triton`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels.norms import triton as norms
from gem_kernels.norms.kernels import sum_kernel
from gem_kernels.tiling import CompileCase, Tile, launch, rows_of, signature

COLUMNS = 512  # of a tile of gate and up
ELEMENTS = 2048  # of a tile
PARTS = norms.PARTS
Small = tuple[Tensor, Tensor]  # gate and up [T, 2 hidden] in E4M3, and the powers of two of their parts, int8


@triton.jit
def _shrink(x, small_ptr, powers_ptr, at, where, mask, inside):
    """Rows [BM, BN] of float32 in E4M3, with a power of two each that brings the largest to 128 or a little more."""
    largest = tl.max(tl.abs(x), axis=1)
    power = tl.minimum(tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 127, -100), 127)
    factor = ((134 - power) << 23).to(tl.float32, bitcast=True)  # 2^(7 - power)
    tl.store(small_ptr + at, (x * factor[:, None]).to(tl.float8e4nv), mask=mask)
    tl.store(powers_ptr + where, power.to(tl.int8), mask=inside)


@triton.jit
def _grow(small_ptr, powers_ptr, at, where, mask, inside):
    """The rows again, in float32."""
    power = tl.load(powers_ptr + where, mask=inside, other=0).to(tl.int32)
    factor = ((power + 120) << 23).to(tl.float32, bitcast=True)
    return tl.load(small_ptr + at, mask=mask, other=0.0).to(tl.float32) * factor[:, None]


@triton.jit
def _gate_kernel(
    packed_ptr, h_ptr, packed_row, rows, HIDDEN: tl.constexpr, CHUNKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    small_ptr=None, powers_ptr=None,
):  # fmt: skip
    """With `small_ptr` [rows, 2 HIDDEN] and `powers_ptr` [rows, 2 CHUNKS], gate and up are written there in E4M3."""
    SMALL: tl.constexpr = small_ptr is not None
    program = tl.program_id(0)
    row = (program // CHUNKS).to(tl.int64) * BM + tl.arange(0, BM)
    column = program % CHUNKS * BN + tl.arange(0, BN)
    mask = (row < rows)[:, None] & (column < HIDDEN)[None, :]
    at = row[:, None] * packed_row + column[None, :]
    gate = tl.load(packed_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(packed_ptr + HIDDEN + at, mask=mask, other=0.0).to(tl.float32)
    h = gate * tl.sigmoid(gate) * up
    tl.store(h_ptr + row[:, None] * HIDDEN + column[None, :], h.to(h_ptr.dtype.element_ty), mask=mask)
    if SMALL:
        at = row[:, None] * (2 * HIDDEN) + column[None, :]
        where = row * (2 * CHUNKS) + program % CHUNKS
        _shrink(gate, small_ptr, powers_ptr, at, where, mask, row < rows)
        _shrink(up, small_ptr + HIDDEN, powers_ptr + CHUNKS, at, where, mask, row < rows)


@triton.jit(do_not_specialize=["rows", "tiles"])
def _gate_backward_kernel(
    packed_ptr, dh_ptr, dpacked_ptr, parts_f32, packed_row, dh_row, dpacked_row, rows, tiles,
    HIDDEN: tl.constexpr, CHUNKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr,
    STAGES: tl.constexpr, h_ptr=None, powers_ptr=None,
):  # fmt: skip
    """With `h_ptr` the product of gate and up again. With `powers_ptr`, packed are the forward kernel's E4M3 rows."""
    AGAIN: tl.constexpr = h_ptr is not None
    SMALL: tl.constexpr = powers_ptr is not None
    part = (tl.program_id(0) // CHUNKS).to(tl.int64)
    column = tl.program_id(0) % CHUNKS * BN + tl.arange(0, BN)
    inside = column < HIDDEN
    if BIAS:
        sum_gate = tl.zeros((BM, BN), tl.float32)
        sum_up = tl.zeros((BM, BN), tl.float32)
    for i in tl.range(0, tiles, num_stages=STAGES):
        row = (i * (tl.num_programs(0) // CHUNKS).to(tl.int64) + part) * BM + tl.arange(0, BM)
        mask = (row < rows)[:, None] & inside[None, :]
        at = row[:, None] * packed_row + column[None, :]
        if SMALL:
            where = row * (2 * CHUNKS) + tl.program_id(0) % CHUNKS
            gate = _grow(packed_ptr, powers_ptr, at, where, mask, row < rows)
            up = _grow(packed_ptr + HIDDEN, powers_ptr + CHUNKS, at, where, mask, row < rows)
        else:
            gate = tl.load(packed_ptr + at, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(packed_ptr + HIDDEN + at, mask=mask, other=0.0).to(tl.float32)
        dh = tl.load(dh_ptr + row[:, None] * dh_row + column[None, :], mask=mask, other=0.0).to(tl.float32)
        open_ = tl.sigmoid(gate)
        dup = dh * gate * open_
        dgate = dh * up * open_ * (1.0 + gate * (1.0 - open_))
        if AGAIN:
            h = gate * open_ * up
            to_h = row[:, None] * HIDDEN + column[None, :]
            tl.store(h_ptr + to_h, h.to(h_ptr.dtype.element_ty), mask=mask)
        to = row[:, None] * dpacked_row + column[None, :]
        tl.store(dpacked_ptr + to, dgate.to(dpacked_ptr.dtype.element_ty), mask=mask)
        tl.store(dpacked_ptr + HIDDEN + to, dup.to(dpacked_ptr.dtype.element_ty), mask=mask)
        if BIAS:
            sum_gate += dgate
            sum_up += dup
    if BIAS:
        base = parts_f32 + part * (2 * HIDDEN) + column
        tl.store(base, tl.sum(sum_gate, axis=0), mask=inside)
        tl.store(base + HIDDEN, tl.sum(sum_up, axis=0), mask=inside)


@triton.jit
def _sigmoid_kernel(
    x_ptr, logits_ptr, y_ptr, rows, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // CHUNKS).to(tl.int64) * BM + tl.arange(0, BM)
    column = program % CHUNKS * BN + tl.arange(0, BN)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = row[:, None] * WIDTH + column[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    y = x * tl.sigmoid(tl.load(logits_ptr + at, mask=mask, other=0.0).to(tl.float32))
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "rows", "tiles"])
def _sigmoid_backward_kernel(
    x_ptr, logits_ptr, dy_ptr, dx_ptr, dlogits_ptr, parts_f32, dy_batch, dy_row, tokens, rows, tiles,
    WIDTH: tl.constexpr, CHUNKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dy [B, tokens, WIDTH] may be a part of a wider tensor."""
    part = (tl.program_id(0) // CHUNKS).to(tl.int64)
    column = tl.program_id(0) % CHUNKS * BN + tl.arange(0, BN)
    inside = column < WIDTH
    if BIAS:
        total = tl.zeros((BM, BN), tl.float32)
    for i in tl.range(0, tiles, num_stages=STAGES):
        row = (i * (tl.num_programs(0) // CHUNKS).to(tl.int64) + part) * BM + tl.arange(0, BM)
        mask = (row < rows)[:, None] & inside[None, :]
        at = row[:, None] * WIDTH + column[None, :]
        from_ = (row // tokens * dy_batch + row % tokens * dy_row)[:, None] + column[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + from_, mask=mask, other=0.0).to(tl.float32)
        open_ = tl.sigmoid(tl.load(logits_ptr + at, mask=mask, other=0.0).to(tl.float32))
        dx = dy * open_
        dlogits = dx * x * (1.0 - open_)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(dlogits_ptr + at, dlogits.to(dlogits_ptr.dtype.element_ty), mask=mask)
        if BIAS:
            total += dlogits
    if BIAS:
        tl.store(parts_f32 + part * WIDTH + column, tl.sum(total, axis=0), mask=inside)


def _gate_tile(hidden: int, backward: bool) -> Tile:
    columns = min(COLUMNS, triton.next_power_of_2(hidden))
    return Tile(bm=max(1, ELEMENTS // columns), bn=columns, warps=8 if backward else 4, stages=2)


def shares(rows: int, bm: int, most: int | None = None) -> tuple[int, int]:
    """Programs that share so many rows, `most` of them or `PARTS`, and tiles of each."""
    tiles = triton.cdiv(rows, bm)
    each = triton.cdiv(tiles, most or PARTS)
    return triton.cdiv(tiles, each) if tiles else 0, each


def sum_up(sums: Tensor, parts: int, *into: Tensor) -> None:
    """Add up the programs' sums [parts, columns] into one vector, or two or three of the same length side by side."""
    columns = into[0].shape[0]
    launch(
        sum_kernel, triton.cdiv(len(into) * columns, norms.SUM.bn), sums.device, norms.SUM,
        sums, into[0], into[min(1, len(into) - 1)], parts, C=columns, BIAS=len(into) > 1, BM=norms.SUM.bm,
        BN=norms.SUM.bn, third_f32=into[2] if len(into) == 3 else None,
    )  # fmt: skip


def empty_like(vector: Tensor | None, packed: Tensor) -> Tensor:
    """Memory for a gradient: [0] for that of a vector which there is not."""
    return packed.new_empty(0) if vector is None else torch.empty_like(vector)


def swiglu(packed: Tensor, hidden: int, small: Small | None = None) -> Tensor:
    """silu(gate) * up [T, hidden] of rows that begin with [gate || up], which are written to `small`, too, if given."""
    rows = packed.shape[0]
    data, powers = (None, None) if small is None else small
    h = torch.empty(rows, hidden, dtype=packed.dtype, device=packed.device)
    t = _gate_tile(hidden, False)
    chunks = triton.cdiv(hidden, t.bn)
    launch(
        _gate_kernel, triton.cdiv(rows, t.bm) * chunks, packed.device, t, packed, h, packed.stride(0), rows,
        HIDDEN=hidden, CHUNKS=chunks, BM=t.bm, BN=t.bn, small_ptr=data, powers_ptr=powers,
    )  # fmt: skip
    return h


def small_gates(rows: int, hidden: int, device: torch.device) -> Small:
    """Memory for `swiglu` to write gate and up to."""
    chunks = triton.cdiv(hidden, _gate_tile(hidden, False).bn)
    data = torch.empty(rows, 2 * hidden, dtype=torch.float8_e4m3fn, device=device)
    return data, torch.empty(rows, 2 * chunks, dtype=torch.int8, device=device)


def swiglu_backward(
    dh: Tensor, packed: Tensor | Small, dpacked: Tensor, dbias: Tensor | None, hidden: int, again: Tensor | None = None
) -> None:
    """Writes the gradients of gate and up into dpacked, their columns' sums into dbias [2 hidden], and what `swiglu`
    made into `again` [T, hidden], if given.
    """
    packed, powers = packed if isinstance(packed, tuple) else (packed, None)
    rows, t = packed.shape[0], _gate_tile(hidden, True)
    chunks = triton.cdiv(hidden, t.bn)
    parts, each = shares(rows, t.bm)
    sums = torch.empty(parts * 2 * hidden if dbias is not None else 0, dtype=torch.float32, device=packed.device)
    launch(
        _gate_backward_kernel, parts * chunks, packed.device, t,
        packed, dh, dpacked, sums, packed.stride(0), dh.stride(0), dpacked.stride(0), rows, each,
        HIDDEN=hidden, CHUNKS=chunks, BM=t.bm, BN=t.bn, BIAS=dbias is not None, STAGES=t.stages,
        h_ptr=again, powers_ptr=powers,
    )  # fmt: skip
    if dbias is not None:
        sum_up(sums, parts, dbias)


def sigmoid(x: Tensor, logits: Tensor) -> Tensor:
    """x * sigmoid(logits), [..., C]."""
    x, logits, width = x.contiguous(), logits.contiguous(), x.shape[-1]
    y, rows, t = torch.empty_like(x), x.numel() // width, _gate_tile(width, False)
    chunks = triton.cdiv(width, t.bn)
    launch(
        _sigmoid_kernel, triton.cdiv(rows, t.bm) * chunks, x.device, t, x, logits, y, rows,
        WIDTH=width, CHUNKS=chunks, BM=t.bm, BN=t.bn,
    )  # fmt: skip
    return y


def sigmoid_backward(dy: Tensor, x: Tensor, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, of the logits, and of the bias ([0] without one)."""
    x, logits, width = x.contiguous(), logits.contiguous(), x.shape[-1]
    dy = rows_of(dy) if dy.dim() == 3 else dy.reshape(1, -1, width)
    rows, tokens, t = x.numel() // width, dy.shape[1], _gate_tile(width, True)
    dx, dlogits, dbias = torch.empty_like(x), torch.empty_like(x), empty_like(bias, x)
    chunks = triton.cdiv(width, t.bn)
    parts, each = shares(rows, t.bm)
    sums = torch.empty(parts * width if bias is not None else 0, dtype=torch.float32, device=x.device)
    launch(
        _sigmoid_backward_kernel, parts * chunks, x.device, t,
        x, logits, dy, dx, dlogits, sums, dy.stride(0), dy.stride(1), tokens, rows, each,
        WIDTH=width, CHUNKS=chunks, BM=t.bm, BN=t.bn, BIAS=bias is not None, STAGES=t.stages,
    )  # fmt: skip
    if bias is not None:
        sum_up(sums, parts, dbias)
    return dx, dlogits, dbias


def compile_cases() -> list[CompileCase]:
    """At the shapes of GEM's preset "large", and of a small one with odd sizes."""
    cases = []
    for width, hidden in ((512, 1024), (72, 80)):
        for name, kernel, columns in (
            ("gate", _gate_kernel, hidden), ("gate backward", _gate_backward_kernel, hidden),
            ("sigmoid", _sigmoid_kernel, width), ("sigmoid backward", _sigmoid_backward_kernel, width),
        ):  # fmt: skip
            backward = name.endswith("backward")
            t = _gate_tile(columns, backward)
            constants: dict[str, object] = {
                "WIDTH" if kernel in (_sigmoid_kernel, _sigmoid_backward_kernel) else "HIDDEN": columns,
                "CHUNKS": triton.cdiv(columns, t.bn), "BM": t.bm, "BN": t.bn,
            }  # fmt: skip
            constants |= {"BIAS": True, "STAGES": t.stages} if backward else {}
            none: dict[str, object] = {}
            without = [none]
            if name == "gate":
                without = [{"small_ptr": None, "powers_ptr": None}, none]
            elif name == "gate backward":
                without = [{"h_ptr": None, "powers_ptr": None}, {"powers_ptr": None}, none]
            notes = ("", " again", " again from small") if backward else ("", " and small")
            for nothing, note in zip(without, notes, strict=False):
                types, divisible = signature(kernel, "bf16", constants | nothing)
                if note.endswith("small"):
                    types["packed_ptr" if backward else "small_ptr"] = "*fp8e4nv"
                    types["powers_ptr"] = "*i8"
                title = f"projections {name}{note} bf16 c{columns}"
                cases.append(CompileCase(title, kernel, types, constants | nothing, t, divisible))
    return cases
