"""Loading a table into one with more or fewer rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from gem_parallel.sparse import local_shards


def is_table(tensor: Any) -> bool:
    """Whether this is a table, or a table's moments, in TorchRec's representation."""
    return isinstance(tensor, ShardedTensor) or (
        isinstance(tensor, DTensor) and hasattr(tensor.to_local(), "local_shards")
    )


class CommonRows(DefaultLoadPlanner):
    """Reads what the saved and the present tensor have in common; the default planner insists on equal shapes."""

    def create_local_plan(self) -> LoadPlan:
        """Read the overlap of every local block with every saved block."""
        assert self.metadata is not None
        items = []
        for name, tensor in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            blocks = [
                ChunkStorageMetadata(offsets=torch.Size(offset), sizes=block.size())
                for block, offset in local_shards(tensor)
            ]
            items += create_read_items_for_chunk_list(name, saved, blocks)
        return LoadPlan(items)
