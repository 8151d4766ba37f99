"""The mesh of ranks, ("replicate", "shard"), on which the dense parameters live."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gem_parallel.config import ParallelConfig
from gem_parallel.runtime import Runtime


def make_mesh(runtime: Runtime, config: ParallelConfig) -> DeviceMesh:
    """The 2-D mesh with axes "replicate" (world / shard_group) and "shard" (shard_group neighbouring ranks).

    Raises:
        ValueError: when shard_group does not divide the world.
    """
    shard = config.shard_group or runtime.world
    if runtime.world % shard:
        divisors = [d for d in range(1, runtime.world + 1) if runtime.world % d == 0]
        raise ValueError(
            f"ParallelConfig.shard_group = {shard} does not divide the world of {runtime.world} ranks; "
            f"choose one of {divisors}, or 0 for all"
        )
    return init_device_mesh(runtime.device.type, (runtime.world // shard, shard), mesh_dim_names=("replicate", "shard"))
