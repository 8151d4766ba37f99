"""This rank's blocks of a tensor of any kind: plain, DTensor, ShardedTensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def global_shape(tensor: Any) -> tuple[int, ...]:
    """The shape of the whole tensor (ShardedTensor.size() announces its deprecation)."""
    metadata = getattr(tensor, "metadata", None)
    return tuple(metadata().size if callable(metadata) else tensor.size())


def local_shards(tensor: Any) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """This rank's blocks of a tensor of any kind, each with its offset in the global tensor."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if isinstance(tensor, ShardedTensor):
        for shard in tensor.local_shards():
            yield shard.tensor, tuple(shard.metadata.shard_offsets)
    elif isinstance(tensor, DTensor):
        local = tensor.to_local()
        if hasattr(local, "local_shards"):  # TorchRec's LocalShardsWrapper: several blocks in one DTensor
            blocks = local.local_shards()  # type: ignore[attr-defined]
            if blocks:  # a rank without a block still has an offset
                yield from zip(blocks, map(tuple, local.local_offsets()), strict=True)  # type: ignore[attr-defined]
        else:
            _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            yield local, tuple(offset)
    else:
        yield tensor, (0,) * tensor.dim()


@torch.no_grad()
def copy_into(target: Any, source: Any, name: str) -> None:
    """Copy `source`, whole or laid out like `target`, into the live tensor `target`; `name` is for messages.

    Raises:
        ValueError: another shape, or another layout.
    """
    if global_shape(target) != global_shape(source):
        raise ValueError(f"load_state_dict: {name}: expected shape {global_shape(target)}, got {global_shape(source)}")
    whole = type(source) in (torch.Tensor, torch.nn.Parameter)
    theirs = [] if whole else list(local_shards(source))
    for index, (block, offset) in enumerate(local_shards(target)):
        if whole:
            part = source[tuple(slice(o, o + n) for o, n in zip(offset, block.shape, strict=True))]
        else:
            part, other = theirs[index]
            if other != offset or part.shape != block.shape:
                raise ValueError(f"load_state_dict: {name}: laid out otherwise; load through a Checkpointer instead")
        if part.data_ptr() != block.data_ptr():
            block.detach().copy_(part)
