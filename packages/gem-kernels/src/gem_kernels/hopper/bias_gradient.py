"""The gradient of a bias from dS, as `backward` left it in its workspace: a kernel that memory bounds."""

from __future__ import annotations

import triton
import triton.language as tl

AHEAD = 4  # sequences whose blocks are under way at once


@triton.jit(
    do_not_specialize=[
        "batch", "max_q", "max_k", "tiles", "first", "last", "window_blocks", "key_blocks", "left", "right"
    ]
)  # fmt: skip
def bias_gradient_kernel(
    ds_ptr, out_ptr, q_offsets, k_offsets, batch, max_q, max_k, tiles,
    first, last, window_blocks, key_blocks, left, right,
    HEADS: tl.constexpr, ALL_BATCH: tl.constexpr, ALL_HEADS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    ADD: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """dBias [B or 1, H or 1, max_q, max_k] of 64 x 64 places: dS summed in float32 over the heads (ALL_HEADS) and, head
    by head, over the sequences (ALL_BATCH) that share it, in their order; 0 where no sequence reaches.

    ds_ptr: blocks of 64 keys x 64 queries of the sequences whose first block lies in the window first .. last - 1, see
    `backward`. ADD: to what `out_ptr` holds of earlier windows. A bias of each sequence's own is written by its window.
    """
    cols = tl.cdiv(max_k, 64)
    tile, rest = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    i, j = tile // cols, tile % cols
    first_h, last_h = 0, HEADS
    first_b, last_b = 0, batch
    if not ALL_HEADS:
        first_h = rest % HEADS
        last_h = first_h + 1
        rest = rest // HEADS
    if not ALL_BATCH:
        first_b = rest
        last_b = first_b + 1
        number = tl.load(q_offsets + first_b).to(tl.int32) // 64 + first_b
        if (number < first) | (number >= last):
            return
    key, query = tl.arange(0, 64), tl.arange(0, 64)
    at_batch, at_head, own_heads = 0, 0, 1
    if not ALL_BATCH:
        at_batch = first_b
    if not ALL_HEADS:
        at_head, own_heads = first_h, HEADS
    place = out_ptr + tl.cast(at_batch * own_heads + at_head, tl.int64) * max_q * max_k
    place += ((i * 64 + query).to(tl.int64) * max_k)[None, :] + (j * 64 + key)[:, None]
    inside = (i * 64 + query < max_q)[None, :] & (j * 64 + key < max_k)[:, None]
    acc = tl.zeros([64, 64], tl.float32)
    if ADD:
        acc = tl.load(place, mask=inside, other=0.0)
    at = key[:, None] * 64 + query[None, :]
    for h in range(first_h, last_h):
        for start in range(first_b, last_b, AHEAD):
            for ahead in tl.static_range(AHEAD if ALL_BATCH else 1):
                b = start + ahead
                there = b < last_b
                q_row = tl.load(q_offsets + b, mask=there, other=0).to(tl.int32)
                q_len = tl.load(q_offsets + b + 1, mask=there, other=0).to(tl.int32) - q_row
                k_row = tl.load(k_offsets + b, mask=there, other=0).to(tl.int32)
                k_len = tl.load(k_offsets + b + 1, mask=there, other=0).to(tl.int32) - k_row
                number = q_row // 64 + b
                there = there & (number >= first) & (number < last) & (i * 64 < q_len) & (j * 64 < k_len)
                d = i * 64 + k_len - q_len - j * 64  # where the block's first query stands from its first key
                if RIGHT:
                    there = there & (d + 63 + right >= 0)
                if LEFT:
                    there = there & (d - left <= 63)
                block = tl.cast(h * window_blocks + number + i - first, tl.int64) * key_blocks + j % key_blocks
                x = tl.load(ds_ptr + block * 4096 + at, mask=(key >= 0)[:, None] & there, other=0.0)
                acc += x.to(tl.float32)
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=inside)
