"""The forward pass of self-attention through a narrow window over the past on Hopper, with softmax or an activation of
GDPA, in which no tile waits for its beginning.

A warp of its own asks for queries, keys and values as soon as there is room, queries have two buffers, and a step's
scores are multiplied while the one before becomes weights. With ACROSS that goes on over the end of a tile: its last
step multiplies the first scores of the next one, and what follows (weights, the last product, O on its way out) runs
beside that, which is worth it where tiles have few steps. Two programs share an SM.

Every query sees a key, its own, so that every tile has a step.
Shapes: Q, K, V, O as descriptors of [T, H * D] in tiles of 64 rows of a head; LSE [T, H] float32, for softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.block_attention import blocks
from gem_kernels.gdpa.activations import POLYNOMIALS
from gem_kernels.hopper.exchange import unpack
from gem_kernels.hopper.launch import LOG2E, programs
from gem_kernels.hopper.softmax import partial, weights
from gem_kernels.jagged_attention import window
from gem_kernels.jagged_attention.window_tiles import LN2, ROWS, barriers, edge, limits_of, masked, put, steps_of
from gem_kernels.tiling import CompileCase

__all__ = ["compile_cases", "forward", "takes"]

FIELDS = gl.constexpr(8)
SLOTS = 2  # of the rings of keys and values
REGISTERS = 128  # of a thread at the start: the loader leaves the consumer 232
SOFTMAX = {128: 65}  # keys before a query from which softmax runs here, by head dimension: else by `window_forward`
ACROSS = {64: -1, 128: 64}  # keys before a query up to which it pays, by head dimension


@gluon.jit
def _record(records_ptr, tile, tiles, HEADS: gl.constexpr, L: gl.constexpr):
    """The record of a tile's block (`block_attention.blocks.records`), in every thread; zeros behind the last tile."""
    i = gl.arange(0, FIELDS, L)
    return gl.load(records_ptr + (tile // HEADS) * FIELDS + i, mask=(i >= 0) & (tile < tiles), other=0)


@gluon.jit
def _fill(desc, buf, full, empty, n, row, column, SLOTS: gl.constexpr):
    """The n-th tile of rows that goes through a ring."""
    slot = n % SLOTS
    mbarrier.wait(empty.index(slot), ((n // SLOTS) & 1) ^ 1)
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [row, column], full.index(slot), buf.index(slot))


@gluon.jit
def _await(full, n, SLOTS: gl.constexpr):
    mbarrier.wait(full.index(n % SLOTS), (n // SLOTS) & 1)


@gluon.jit
def _load(
    descs, bufs, bars, records_ptr, tiles, left, right,
    D: gl.constexpr, HEADS: gl.constexpr, SLOTS: gl.constexpr, ACROSS: gl.constexpr,
):  # fmt: skip
    """Asks for what `_consume` needs, in its order. With ACROSS, behind the last tile once more for queries and keys:
    so the consumer multiplies scores of a next tile whether or not there is one.
    """
    q_desc, k_desc, v_desc = descs
    q_buf, k_buf, v_buf = bufs
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    L: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [1], [0])
    step = 0
    visit = 0
    tile = gl.program_id(0)
    x = _record(records_ptr, tile, tiles, HEADS, L)
    _row, rows, _place, _other, _len, _f, _g, _h = unpack(x, L)
    while rows > 0:
        column = (tile % HEADS) * D
        after = _record(records_ptr, tile + gl.num_programs(0), tiles, HEADS, L)
        row, own, place, other, other_len, _f, _g, _h = unpack(x, L)
        _fill(q_desc, q_buf, q_full, q_empty, visit, row, column, 2)
        lo, n = steps_of(place, own, other_len, left, right)
        for j in range(n):
            _fill(k_desc, k_buf, k_full, k_empty, step + j, other + lo + j * ROWS, column, SLOTS)
            _fill(v_desc, v_buf, v_full, v_empty, step + j, other + lo + j * ROWS, column, SLOTS)
        step += n
        visit += 1
        tile += gl.num_programs(0)
        x = after
        _row, rows, _place, _other, _len, _f, _g, _h = unpack(x, L)
    if ACROSS and visit > 0:
        _fill(q_desc, q_buf, q_full, q_empty, visit, 0, 0, 2)
        _fill(k_desc, k_buf, k_full, k_empty, step, 0, 0, SLOTS)


@gluon.jit
def _scores(q_buf, k_buf, visit, step, SL: gl.constexpr, SLOTS: gl.constexpr):
    """The scores of a step, issued and not waited for."""
    none = gl.zeros([ROWS, ROWS], gl.float32, SL)
    k = k_buf.index(step % SLOTS).permute((1, 0))
    return warpgroup_mma(q_buf.index(visit % 2), k, none, use_acc=False, is_async=True)


@gluon.jit
def _weights(
    S, acc, m, total, key, place, other_len, limits, left, right, scale,
    SL: gl.constexpr, AL: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """Weights of the keys key.., as the left operand of a product; O so far; the rows' maxima and sums."""
    if edge(key, place, other_len, left, right):
        S = masked(S, key, limits, float("-inf") if ACT == "softmax" else 0.0, SL)
    return weights(S, acc, m, total, scale, SL, AL, ACT, True, True)


@gluon.jit
def _consume(
    bufs, bars, o_desc, o_ptr, o_row, lse_ptr, records_ptr, tiles, left, right, scale, out_scale,
    D: gl.constexpr, HEADS: gl.constexpr, SLOTS: gl.constexpr, ACT: gl.constexpr, ACROSS: gl.constexpr,
):  # fmt: skip
    """Tile after tile; a buffer of queries is free with a tile's last scores, keys with a step's, values after it."""
    q_buf, k_buf, v_buf, o_buf = bufs
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    L: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    ML: gl.constexpr = gl.SliceLayout(1, AL)
    dtype: gl.constexpr = o_ptr.dtype.element_ty
    step = 0
    visit = 0
    tile = gl.program_id(0)
    x = _record(records_ptr, tile, tiles, HEADS, L)
    _row, rows, _place, _other, _len, _f, _g, _h = unpack(x, L)
    S = gl.zeros([ROWS, ROWS], gl.float32, SL)
    if ACROSS and rows > 0:
        _await(q_full, 0, 2)
        _await(k_full, 0, SLOTS)
        S = warpgroup_mma_wait(0, deps=(_scores(q_buf, k_buf, 0, 0, SL, SLOTS),))
        mbarrier.arrive(k_empty.index(0), count=1)
    while rows > 0:
        head = tile % HEADS
        after = _record(records_ptr, tile + gl.num_programs(0), tiles, HEADS, L)
        row, own, place, _other, other_len, _f, _g, _h = unpack(x, L)
        lo, n = steps_of(place, own, other_len, left, right)
        limits = limits_of(place + gl.arange(0, ROWS, gl.SliceLayout(1, SL)), other_len, left, right)
        acc = gl.zeros([ROWS, D], gl.float32, AL)
        m = gl.full([ROWS], float("-inf"), gl.float32, ML)
        total = partial(acc)  # zeros
        if not ACROSS:
            _await(q_full, visit, 2)
            _await(k_full, step, SLOTS)
            S = warpgroup_mma_wait(0, deps=(_scores(q_buf, k_buf, visit, step, SL, SLOTS),))
            mbarrier.arrive(k_empty.index(step % SLOTS), count=1)
        for j in range(n - 1):
            _await(k_full, step + j + 1, SLOTS)
            S1 = _scores(q_buf, k_buf, visit, step + j + 1, SL, SLOTS)
            p, acc, m, total = _weights(
                S, acc, m, total, lo + j * ROWS, place, other_len, limits, left, right, scale, SL, AL, ACT
            )
            P = gl.convert_layout(p.to(dtype), PL)
            _await(v_full, step + j, SLOTS)
            acc = warpgroup_mma(P, v_buf.index((step + j) % SLOTS), acc, is_async=True)
            S, acc, P = warpgroup_mma_wait(0, deps=(S1, acc, P))
            mbarrier.arrive(k_empty.index((step + j + 1) % SLOTS), count=1)
            mbarrier.arrive(v_empty.index((step + j) % SLOTS), count=1)
        mbarrier.arrive(q_empty.index(visit % 2), count=1)  # all of the tile's scores are there
        last = step + n - 1
        if ACROSS:
            _await(q_full, visit + 1, 2)
            _await(k_full, last + 1, SLOTS)
            S1 = _scores(q_buf, k_buf, visit + 1, last + 1, SL, SLOTS)
        p, acc, m, total = _weights(
            S, acc, m, total, lo + (n - 1) * ROWS, place, other_len, limits, left, right, scale, SL, AL, ACT
        )
        P = gl.convert_layout(p.to(dtype), PL)
        _await(v_full, last, SLOTS)
        acc = warpgroup_mma(P, v_buf.index(last % SLOTS), acc, is_async=True)
        if ACROSS:
            S, acc, P = warpgroup_mma_wait(0, deps=(S1, acc, P))
            mbarrier.arrive(k_empty.index((last + 1) % SLOTS), count=1)
        else:
            acc, P = warpgroup_mma_wait(0, deps=(acc, P))
        mbarrier.arrive(v_empty.index(last % SLOTS), count=1)
        if ACT == "softmax":  # every row has seen a key; those past the sequence's end as its last one
            sums = gl.convert_layout(gl.sum(total, 1), ML, True)
            acc = acc * gl.convert_layout(1.0 / sums, gl.SliceLayout(1, AL))[:, None]
        else:
            acc = acc * out_scale
        tma.store_wait(0)
        put(acc, o_desc, o_ptr, o_row, o_buf.index(0), row, own, head * D, D, AL)
        if ACT == "softmax":  # last: a fence waits for the global stores before it
            r = gl.arange(0, ROWS, ML)
            gl.store(lse_ptr + (row + r).to(gl.int64) * HEADS + head, (m + gl.log2(sums)) * LN2, mask=r < own)
        step += n
        visit += 1
        tile += gl.num_programs(0)
        x = after
        _row, rows, _place, _other, _len, _f, _g, _h = unpack(x, L)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "left", "right"])
def past_kernel(
    q_desc, k_desc, v_desc, o_desc, o_ptr, o_row, lse_ptr, records_ptr, tiles, left, right, scale, out_scale,
    D: gl.constexpr, HEADS: gl.constexpr, SLOTS: gl.constexpr, ACT: gl.constexpr, ACROSS: gl.constexpr,
):  # fmt: skip
    """O = softmax(scale Q K^T) V and LSE, `scale` with log2(e) as a factor, or out_scale * act(scale Q K^T) V, over the
    keys p - left .. p + right of the query at p.
    """
    q_buf = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, D], q_desc.layout)
    k_buf = gl.allocate_shared_memory(k_desc.dtype, [SLOTS, ROWS, D], k_desc.layout)
    v_buf = gl.allocate_shared_memory(v_desc.dtype, [SLOTS, ROWS, D], v_desc.layout)
    o_buf = gl.allocate_shared_memory(o_desc.dtype, [1, ROWS, D], o_desc.layout)
    bars = (barriers(2), barriers(2), barriers(SLOTS), barriers(SLOTS), barriers(SLOTS), barriers(SLOTS))
    gl.warp_specialize(
        [
            (_consume, ((q_buf, k_buf, v_buf, o_buf), bars, o_desc, o_ptr, o_row, lse_ptr, records_ptr, tiles,
                        left, right, scale, out_scale, D, HEADS, SLOTS, ACT, ACROSS)),
            (_load, ((q_desc, k_desc, v_desc), (q_buf, k_buf, v_buf), bars, records_ptr, tiles, left, right,
                     D, HEADS, SLOTS, ACROSS)),
        ],
        [1],
        [24],
    )  # fmt: skip


def takes(
    q: Tensor, k: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, left: int, right: int, act: str
) -> bool:  # fmt: skip
    """Whether a problem that Hopper kernels may run is one for this unasked: of those that `window.takes`, what is
    self-attention over the past.
    """
    if not window.takes(q, k, q_offsets, left, right):
        return False
    if act == "softmax" and left < SOFTMAX.get(q.shape[2], left + 1):
        return False
    assert q_offsets is not None
    return q.shape == k.shape and window.of_the_past(q_offsets, k_offsets, right)


def forward(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, scale: float, left: int,
    *, act: str, out_scale: float = 1.0, across: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """O [T, H, D] and LSE [T, H] (empty unless `act` is "softmax") of self-attention in which a query sees `left` keys
    before it and its own, D 64 or 128; the scale must be positive for softmax. `across`: see ACROSS; None for what
    `left` says.
    """
    assert q.shape == k.shape == v.shape
    assert q.shape[2] in (64, 128)
    assert left >= 0
    total, heads, dim = q.shape
    softmax = act == "softmax"
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(total if softmax else 0, heads, dtype=torch.float32, device=q.device)
    if total == 0:
        return out, lse
    q, k, v = (window.addressable(x) for x in (q, k, v))
    with torch.cuda.device_of(q):
        records = blocks.records(offsets, offsets, total, ROWS.value)
        tiles = records.shape[0] * heads
        past_kernel[(min(tiles, 2 * programs(q.device)),)](
            *(window.descriptor(x) for x in (q, k, v, out)), out, out.stride(0), lse, records, tiles, left, 0,
            scale * LOG2E if softmax else scale, out_scale,
            **_constants(dim, heads, act, left <= ACROSS[dim] if across is None else across),
            num_warps=4, maxnreg=REGISTERS,
        )  # fmt: skip
    return out, lse


def _constants(dim: int, heads: int, act: str, across: bool) -> dict[str, Any]:
    return {"D": dim, "HEADS": heads, "SLOTS": SLOTS, "ACT": act, "ACROSS": across}


def compile_cases(act: str) -> list[CompileCase]:
    """Both forms at both head dimensions, for one activation ("softmax" for jagged attention)."""
    return [
        window.kernel_case(
            f"window over the past {act} d{dim}{' across' if across else ''}", past_kernel, dim,
            _constants(dim, 4, act, across), REGISTERS, defined=True, no_special=act in POLYNOMIALS,
        )
        for dim in (64, 128) for across in (True, False)
    ]  # fmt: skip
