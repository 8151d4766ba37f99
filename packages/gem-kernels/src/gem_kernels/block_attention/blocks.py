"""The list of blocks, by one small kernel: `jagged.block_offsets` takes a dozen launches, which is as long as a whole
forward pass over short sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels.tiling import CompileCase, Tile, launch, signature

__all__ = ["compile_cases", "named_offsets", "offsets"]

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
    row_offsets, blocks_offsets, sequence_offsets, batch, total, bound,
    BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr, NAMED: tl.constexpr,
):  # fmt: skip
    """A program counts the blocks before its own sequences, then writes theirs; the last one fills up the list.
    NAMED: and which sequence each block is of.
    """
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
        if NAMED:
            name = (first + tl.arange(0, BM)).to(tl.int64)[:, None] + at * 0
            tl.store(sequence_offsets + place[:, None] + at, name, mask=at < count[:, None])
    if first + BM >= batch:
        end = begin + tl.sum(count, 0)
        for filled in range(0, bound - end, CHUNK):
            i = end + filled + tl.arange(0, CHUNK)
            tl.store(blocks_offsets + i, tl.zeros((CHUNK,), tl.int64) + total, mask=i < bound)


def offsets(sequence_offsets: Tensor, total: int, block: int) -> Tensor:
    """`jagged.block_offsets`: [total // block + B + 1] int64, empty blocks at the end."""
    return _build(sequence_offsets, total, block, False)[0]


def named_offsets(sequence_offsets: Tensor, total: int, block: int) -> tuple[Tensor, Tensor]:
    """`offsets`, and the sequence of every block that is not empty, int64 (anything for an empty one)."""
    return _build(sequence_offsets, total, block, True)


def _build(sequence_offsets: Tensor, total: int, block: int, named: bool) -> tuple[Tensor, Tensor]:
    batch = sequence_offsets.shape[0] - 1
    bound = total // block + batch + 1
    out = torch.empty(bound, dtype=torch.int64, device=sequence_offsets.device)
    names = torch.empty_like(out) if named else out
    launch(
        _list_kernel, max(1, triton.cdiv(batch, OWN)), out.device, TILE,
        sequence_offsets.contiguous(), out, names, batch, total, bound,
        BLOCK=block, BM=OWN, BN=WIDE, CHUNK=CHUNK, NAMED=named,
    )  # fmt: skip
    return out, names


def compile_cases() -> list[CompileCase]:
    """The kernel."""
    constants: dict[str, object] = {"BLOCK": 64, "BM": OWN, "BN": WIDE, "CHUNK": CHUNK, "NAMED": True}
    types, divisible = signature(_list_kernel, "bf16", constants)
    return [CompileCase("block_attention list", _list_kernel, types, constants, TILE, divisible)]
