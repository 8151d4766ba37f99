"""The list of blocks, by one small kernel: `jagged.block_offsets` takes a dozen launches, which is as long as a whole
forward pass over short sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels.tiling import CompileCase, Tile, launch, signature

__all__ = ["compile_cases", "offsets", "records"]

OWN, CHUNK, WIDE = 32, 1024, 32  # sequences of a program, sequences and blocks that it looks at together
TILE = Tile(bm=OWN, bn=WIDE)


@triton.jit
def _counts(row_offsets, first, batch, BLOCK: tl.constexpr, N: tl.constexpr):
    """Where sequences first..first + N begin, and how many blocks they have; nothing from `batch` on."""
    i = first + tl.arange(0, N)
    start = tl.load(row_offsets + i, mask=i < batch, other=0).to(tl.int64)
    end = tl.load(row_offsets + i + 1, mask=i < batch, other=0).to(tl.int64)
    return start, (end - start + (BLOCK - 1)) // BLOCK


@triton.jit(do_not_specialize=["batch", "total", "bound"])
def _list_kernel(
    row_offsets, blocks_offsets, batch, total, bound,
    BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program counts the blocks before its own sequences, then writes theirs; the last one fills up the list."""
    first = tl.program_id(0) * BM
    before = tl.zeros((CHUNK,), tl.int64)
    for c in range(0, first, CHUNK):
        _, n = _counts(row_offsets, c, tl.minimum(first, batch), BLOCK, CHUNK)
        before += n
    begin = tl.sum(before, 0)
    start, count = _counts(row_offsets, first, batch, BLOCK, BM)
    place = begin + tl.cumsum(count, 0) - count
    longest = tl.max(count, 0)
    for j in range(0, longest, BN):
        at = (j + tl.arange(0, BN))[None, :]
        tl.store(blocks_offsets + place[:, None] + at, start[:, None] + at * BLOCK, mask=at < count[:, None])
    if first + BM >= batch:
        end = begin + tl.sum(count, 0)
        for filled in range(0, bound - end, CHUNK):
            i = end + filled + tl.arange(0, CHUNK)
            tl.store(blocks_offsets + i, tl.zeros((CHUNK,), tl.int64) + total, mask=i < bound)


def offsets(sequence_offsets: Tensor, total: int, block: int) -> Tensor:
    """`jagged.block_offsets`: [total // block + B + 1] int64, empty blocks at the end."""
    batch = sequence_offsets.shape[0] - 1
    bound = total // block + batch + 1
    out = torch.empty(bound, dtype=torch.int64, device=sequence_offsets.device)
    launch(
        _list_kernel, max(1, triton.cdiv(batch, OWN)), out.device, TILE,
        sequence_offsets.contiguous(), out, batch, total, bound, BLOCK=block, BM=OWN, BN=WIDE, CHUNK=CHUNK,
    )  # fmt: skip
    return out


FIELDS = 8  # of a record, int32


@triton.jit(do_not_specialize=["batch", "bound"])
def _record_kernel(
    own_offsets, other_offsets, records_ptr, batch, bound,
    BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """As `_list_kernel`, and with what a kernel must know of a block that also looks at another side."""
    first = tl.program_id(0) * BM
    before = tl.zeros((CHUNK,), tl.int64)
    for c in range(0, first, CHUNK):
        _, n = _counts(own_offsets, c, tl.minimum(first, batch), BLOCK, CHUNK)
        before += n
    begin = tl.sum(before, 0)
    start, count = _counts(own_offsets, first, batch, BLOCK, BM)
    i = first + tl.arange(0, BM)
    end = tl.load(own_offsets + i + 1, mask=i < batch, other=0).to(tl.int64)
    other = tl.load(other_offsets + i, mask=i < batch, other=0).to(tl.int64)
    other_len = tl.load(other_offsets + i + 1, mask=i < batch, other=0).to(tl.int64) - other
    place = begin + tl.cumsum(count, 0) - count
    longest = tl.max(count, 0)
    for j in range(0, longest, BN):
        at = (j + tl.arange(0, BN))[None, :]
        mask = at < count[:, None]
        row = start[:, None] + at * BLOCK
        record = records_ptr + (place[:, None] + at) * 8
        tl.store(record, row.to(tl.int32), mask=mask)
        tl.store(record + 1, tl.minimum(end[:, None] - row, BLOCK).to(tl.int32), mask=mask)
        tl.store(record + 2, (row - end[:, None] + other_len[:, None]).to(tl.int32), mask=mask)
        tl.store(record + 3, (other[:, None] + at * 0).to(tl.int32), mask=mask)
        tl.store(record + 4, (other_len[:, None] + at * 0).to(tl.int32), mask=mask)
    if first + BM >= batch:
        full = begin + tl.sum(count, 0)
        for filled in range(0, bound - full, CHUNK):
            at = full + filled + tl.arange(0, CHUNK)
            tl.store(records_ptr + at * 8 + 1, tl.zeros((CHUNK,), tl.int32), mask=at < bound)


def records(own_offsets: Tensor, other_offsets: Tensor, own_total: int, block: int) -> Tensor:
    """The blocks of the own side, [own_total // block + B, 8] int32; empty ones, whose second field is 0, at the end.

    Fields: first row; rows; place of the first row on the diagonal that joins both sequences' last rows; first row of
    the sequence on the other side; its length.
    """
    batch = own_offsets.shape[0] - 1
    bound = own_total // block + batch
    out = torch.empty(bound, FIELDS, dtype=torch.int32, device=own_offsets.device)
    launch(
        _record_kernel, max(1, triton.cdiv(batch, OWN)) if bound else 0, out.device, TILE,
        own_offsets.contiguous(), other_offsets.contiguous(), out, batch, bound,
        BLOCK=block, BM=OWN, BN=WIDE, CHUNK=CHUNK,
    )  # fmt: skip
    return out


def compile_cases() -> list[CompileCase]:
    """Both kernels."""
    constants: dict[str, object] = {"BLOCK": 64, "BM": OWN, "BN": WIDE, "CHUNK": CHUNK}
    cases = []
    for name, kernel in (("list", _list_kernel), ("records", _record_kernel)):
        types, divisible = signature(kernel, "i32", constants)
        cases.append(CompileCase(f"block_attention {name}", kernel, types, constants, TILE, divisible))
    return cases
