"""Two-dimensional tables: groups of ranks that hold one copy together, and the ranks that hold the same shard.

TorchRec's own class for this, DMPCollection, insists on CUDA, averages weights after the lookup has read them (the
lookup at step t + 1 misses other groups' step t) and keeps full optimizer states. Only its environment is used here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.types import ShardingEnv2D, ShardingPlan

from gem_parallel.config import ParallelConfig
from gem_parallel.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class TableGroups:
    """The mesh ("replicate", "shard") of the tables.

    Attributes:
        mesh: every row is a group that holds one copy; every column holds the same shard.
        copies: ranks in a column.
        shards: ranks in a row.
    """

    mesh: DeviceMesh
    copies: int
    shards: int

    @property
    def copies_group(self) -> Any:
        """The process group of this rank's column."""
        return self.mesh.get_group("replicate")

    def rows(self) -> list[list[int]]:
        """Global ranks of every group that holds one copy."""
        return [[int(rank) for rank in row] for row in self.mesh.mesh]

    def environment(self, inside: bool) -> ShardingEnv2D:
        """What TorchRec has to know."""
        assert dist.group.WORLD is not None
        return ShardingEnv2D(
            sharding_pg=self.mesh.get_group("shard"),
            replica_pg=self.copies_group,
            global_pg=dist.group.WORLD,
            device_mesh=self.mesh,
            node_group_size=None,
            use_inter_host_allreduce=not inside,
        )


def make_table_groups(runtime: Runtime, config: ParallelConfig) -> TableGroups | None:
    """The groups of config.table_copies copies, or None where every table exists once.

    Raises:
        ValueError: table_copies does not divide the world.
    """
    copies = config.table_copies
    if copies == 1:
        return None
    if runtime.world % copies:
        divisors = [d for d in range(1, runtime.world + 1) if runtime.world % d == 0]
        raise ValueError(
            f"ParallelConfig.table_copies = {copies} does not divide the world of {runtime.world} ranks; "
            f"choose one of {divisors}"
        )
    shards = runtime.world // copies
    if config.table_copies_inside:
        rows = [[copies * shard + copy for shard in range(shards)] for copy in range(copies)]
    else:
        rows = [[shards * copy + shard for shard in range(shards)] for copy in range(copies)]
    mesh = DeviceMesh(runtime.device.type, rows, mesh_dim_names=("replicate", "shard"))
    return TableGroups(mesh=mesh, copies=copies, shards=shards)


def move_plan(plan: ShardingPlan, groups: TableGroups, runtime: Runtime) -> None:
    """Rewrite a plan of one group's ranks 0..shards - 1, in place, to the global ranks of this rank's group."""
    row = next(row for row in groups.rows() if runtime.rank in row)
    device = runtime.device.type
    for tables in plan.plan.values():
        for sharding in tables.values():  # type: ignore[attr-defined]
            sharding.ranks = [row[rank] for rank in sharding.ranks]
            for shard in sharding.sharding_spec.shards:
                rank = row[shard.placement.rank()]
                where = "cpu" if device == "cpu" else f"{device}:{rank % runtime.local_world}"
                shard.placement = _remote_device(f"rank:{rank}/{where}")


def kernels(module: nn.Module) -> list[nn.Module]:
    """The fused kernels of a sharded table module; TorchRec keeps its lookups in a plain list."""
    found = []
    for lookup in module._lookups:  # type: ignore[union-attr]
        inner = getattr(lookup, "module", lookup)
        found += [kernel for kernel in inner.modules() if hasattr(kernel, "_emb_module")]
    return found


def table_batch(kernel: nn.Module) -> Any:
    """fbgemm's module inside a kernel."""
    return kernel._emb_module


def flat_weights(kernel: nn.Module) -> nn.Parameter:
    """The one-dimensional parameter that holds all tables of a kernel."""
    inner = table_batch(kernel)
    weights: nn.Parameter = inner.weights_dev if inner.weights_dev.numel() else inner.weights_host
    return weights
