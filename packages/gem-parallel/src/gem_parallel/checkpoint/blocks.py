"""Tensors of any kind as blocks: what a checkpoint writes, what it reads, and moments between table layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from gem_parallel.checkpoint.errors import CheckpointError
from gem_parallel.shards import global_shape, local_shards

Block = tuple[torch.Tensor, tuple[int, ...]]  # a part of a tensor, and its corner in the whole

_MOMENT = ".momentum1"


@dataclass(frozen=True)
class Blocks:
    """This rank's parts of a tensor of global shape `size`."""

    size: tuple[int, ...]
    parts: list[Block]


def is_distributed(tensor: Any) -> bool:
    """Whether every rank holds another part."""
    return isinstance(tensor, ShardedTensor | DTensor)


def take(tensors: Mapping[str, Any], plain: set[str], *, copy: bool) -> dict[str, Blocks]:
    """The blocks that this rank has to write; of plain tensors, which are the same everywhere, those in `plain`.

    With `copy` they are copies in host memory, so that training may go on.
    """
    taken = {}
    for name, tensor in tensors.items():
        parts = list(local_shards(tensor)) if name in plain or is_distributed(tensor) else []
        if copy:
            parts = [(block.detach().to("cpu", copy=True), offset) for block, offset in parts]
        taken[name] = Blocks(global_shape(tensor), parts)
    return taken


class BlockWriter(DefaultSavePlanner):
    """Writes `Blocks`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """Every block is a write; blocks that several ranks hold are written once."""
        items = [
            WriteItem(
                index=MetadataIndex(name, torch.Size(offset)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size(offset), sizes=block.size()),
                    properties=TensorProperties.create_from_tensor(block),
                    size=torch.Size(blocks.size),
                ),
            )
            for name, blocks in self.state_dict.items()
            for block, offset in blocks.parts
        ]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """The block at an index."""
        assert index.offset is not None
        for block, offset in self.state_dict[index.fqn].parts:
            if tuple(offset) == tuple(index.offset):
                found: torch.Tensor = block.detach()
                return found
        raise AssertionError(f"no block of {index.fqn} at {tuple(index.offset)}")


class BlockReader(DefaultLoadPlanner):
    """Reads what given blocks and the saved tensors have in common; torch's planner insists on equal shapes."""

    def __init__(self, wanted: Mapping[str, list[Block]]) -> None:
        super().__init__()
        self._wanted = wanted

    def create_local_plan(self) -> LoadPlan:
        """Read the overlap of every block with every saved block."""
        assert self.metadata is not None
        items = []
        for name, blocks in self._wanted.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            chunks = [ChunkStorageMetadata(offsets=torch.Size(o), sizes=block.size()) for block, o in blocks]
            items += create_read_items_for_chunk_list(name, saved, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The block at an index."""
        assert index.offset is not None
        for block, offset in self._wanted[index.fqn]:
            if tuple(offset) == tuple(index.offset):
                return block.detach()
        raise AssertionError(f"no block of {index.fqn} at {tuple(index.offset)}")


def is_table(tensor: Any) -> bool:
    """Whether this is a table, or a table's moments, in TorchRec's representation."""
    return isinstance(tensor, ShardedTensor) or (
        isinstance(tensor, DTensor) and hasattr(tensor.to_local(), "local_shards")
    )


@dataclass(frozen=True)
class MomentChange:
    """Moments saved for one cut of the columns, wanted for another.

    A table of R rows whose columns are cut at `saved` (edges 0, ..., D) has one moment per row and block, block after
    block. A wanted block takes the mean of the saved ones that it overlaps, weighted by the overlap: fewer blocks are
    exact (the moment is a mean of squares), more blocks start from their row's mean.
    """

    rows: int
    saved: tuple[int, ...]
    wanted: tuple[int, ...]

    def weights(self, block: int) -> list[tuple[int, float]]:
        """(saved block, weight) of a wanted block."""
        low, high = self.wanted[block], self.wanted[block + 1]
        found = []
        for index, (begin, end) in enumerate(zip(self.saved, self.saved[1:], strict=False)):
            overlap = min(high, end) - max(low, begin)
            if overlap > 0:
                found.append((index, overlap / (high - low)))
        return found


def moment_change(name: str, moments: Any, saved: Metadata) -> MomentChange | None:
    """How to convert the saved moments called `name` into `moments`, or None when they are no moments of one table.

    The cut of the columns is read from the blocks of the table itself; where there are as many moments as rows, a row
    has one.
    """
    table = name.rsplit("/", 1)[-1]
    if not table.endswith(_MOMENT) or not is_table(moments):
        return None
    table = table.removesuffix(_MOMENT)
    weights = [
        value
        for key, value in saved.state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata) and key.rsplit("/", 1)[-1] == table
    ]
    theirs = saved.state_dict_metadata[name]
    if len(weights) != 1 or not isinstance(theirs, TensorStorageMetadata) or len(weights[0].size) != 2:
        return None
    rows, dim = weights[0].size
    edges = tuple(sorted({0, dim, *(chunk.offsets[1] for chunk in weights[0].chunks)}))
    have, want = theirs.size[0], global_shape(moments)[0]
    if have == rows:
        edges = (0, dim)
    if have != rows * (len(edges) - 1) or want % rows or dim % (want // rows):
        return None
    blocks = want // rows
    return MomentChange(rows, edges, tuple(dim // blocks * i for i in range(blocks + 1)))


class ChangedMoments:
    """Temporary blocks to read saved moments into, and their conversion."""

    def __init__(self, changes: Mapping[str, tuple[Any, MomentChange]]) -> None:
        self.wanted: dict[str, list[Block]] = {}
        self._work: list[tuple[torch.Tensor, list[tuple[torch.Tensor, float]]]] = []
        for name, (moments, change) in changes.items():
            for block, (offset,) in local_shards(moments):
                begin = 0
                while begin < len(block):  # a wanted part may span several blocks of columns
                    index, row = divmod(offset + begin, change.rows)
                    length = min(len(block) - begin, change.rows - row)
                    parts = []
                    for saved, weight in change.weights(index):
                        part = self._part(name, saved * change.rows + row, length)
                        parts.append((part, weight))
                    self._work.append((block[begin : begin + length], parts))
                    begin += length

    def _part(self, name: str, begin: int, length: int) -> torch.Tensor:
        known = self.wanted.setdefault(name, [])
        for block, (offset,) in known:
            if offset == begin and len(block) == length:
                return block
        assert all(offset != begin for _, (offset,) in known), "blocks of one table have equal rows"
        block = torch.full((length,), math.nan)
        known.append((block, (begin,)))
        return block

    @torch.no_grad()
    def finish(self) -> None:
        """Write the converted moments, after the blocks were read."""
        for target, parts in self._work:
            total = sum((part.double() * weight for part, weight in parts), torch.zeros(len(target)).double())
            target.detach().copy_(total)


def _cut_by_columns(name: str, saved: Metadata) -> bool:
    """Whether these are moments of several blocks of columns, whose rows cannot be told apart by position alone."""
    table = name.rsplit("/", 1)[-1]
    if not table.endswith(_MOMENT):
        return False
    table = table.removesuffix(_MOMENT)
    rows = [v.size[0] for k, v in saved.state_dict_metadata.items() if k.rsplit("/", 1)[-1] == table]  # type: ignore[union-attr]
    return rows != [saved.state_dict_metadata[name].size[0]]  # type: ignore[union-attr]


def compare(
    reader: FileSystemReader,
    tensors: Mapping[str, Any],
    wanted: set[str],
    state: Mapping[Any, Any],
    *,
    resize: bool,
    warn: Callable[[str], None],
) -> tuple[list[str], dict[str, MomentChange]]:
    """Tables to be resized, moments to be converted; anything else that does not fit is an error.

    Args:
        reader: of the checkpoint.
        tensors: what this rank asks for.
        wanted: the names of what any rank asks for.
        state: whose top-level keys say what is asked for.
        resize: whether tables may have other rows.
        warn: is told what is resized or left unread.

    Raises:
        CheckpointError: what does not fit.
    """
    resized: list[str] = []
    changed: dict[str, MomentChange] = {}
    unfit = []
    metadata = reader.read_metadata()
    saved = metadata.state_dict_metadata
    missing = sorted(tensors.keys() - saved.keys())
    if missing:
        raise CheckpointError(f"{reader.path}: holds no tensor {', '.join(missing)}")
    for name, tensor in tensors.items():
        have, want = tuple(getattr(saved[name], "size", ())), global_shape(tensor)
        if have == want:
            continue
        change = moment_change(name, tensor, metadata)
        if change is not None:
            changed[name] = change
            continue
        cut = _cut_by_columns(name, metadata) and is_table(tensor)
        if not (resize and is_table(tensor) and have[1:] == want[1:] and have and want) or cut:
            unfit.append(f"tensor {name} has shape {have}, expected {want}")
            continue
        resized.append(name)
        warn(
            f"{name} has {have[0]} rows in the checkpoint and {want[0]} now; "
            f"the first {min(have[0], want[0])} are loaded"
        )
    if unfit:
        raise CheckpointError(f"{reader.path}: {'; '.join(unfit)}")
    asked = {str(key) for key in state}
    extra = sorted(name for name in saved.keys() - wanted if name.split("/", 1)[0] in asked)
    if extra:
        warn(f"{reader.path}: {len(extra)} saved tensors are not asked for, the first is {extra[0]}")
    return resized, changed
