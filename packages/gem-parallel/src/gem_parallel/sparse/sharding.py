"""Embedding tables: planned alike on every rank, sharded by TorchRec, updated by a fused row-wise AdaGrad."""

from __future__ import annotations

import hashlib
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.comm_ops import get_gradient_division, set_gradient_division
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner import Topology as PlannerTopology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad as TorchRecRowWiseAdagrad

from gem_parallel.config import ParallelConfig, RowWiseAdagrad, SparseSGD
from gem_parallel.planning.topology import Topology
from gem_parallel.runtime import Runtime
from gem_parallel.sparse.groups import TableGroups, move_plan
from gem_parallel.sparse.recat import keep_recats

TABLE_MODULES = (EmbeddingBagCollection, EmbeddingCollection)


class _AllTypes:
    """The stock sharders hide row-wise sharding from a CPU; it works there."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return super().sharding_types("cuda")  # type: ignore[misc]


class _BagSharder(_AllTypes, EmbeddingBagCollectionSharder):
    pass


class _SequenceSharder(_AllTypes, EmbeddingCollectionSharder):
    pass


@dataclass(frozen=True, kw_only=True)
class TableShard:
    """One row of a readable sharding plan: the block of a table that one rank holds."""

    module: str
    table: str
    sharding: str
    rank: int
    rows: tuple[int, int]
    cols: tuple[int, int]

    def __str__(self) -> str:
        rows, cols = self.rows, self.cols
        return (
            f"{self.module}.{self.table}  {self.sharding}  rank {self.rank}  "
            f"rows {rows[0]}..{rows[1]}  cols {cols[0]}..{cols[1]}"
        )


def find_tables(model: nn.Module) -> dict[str, nn.Module]:
    """The model's EmbeddingCollections and EmbeddingBagCollections by name."""
    found = {name: m for name, m in model.named_modules() if isinstance(m, TABLE_MODULES)}
    if "" in found:
        raise ValueError(
            f"the model itself is a {type(model).__name__}; wrap it in a module, so that it can be replaced"
        )
    return found


def table_configs(module: nn.Module) -> list[Any]:
    """The configurations (name, rows, dim) of a table module's tables."""
    if isinstance(module, EmbeddingBagCollection):
        return list(module.embedding_bag_configs())
    assert isinstance(module, EmbeddingCollection)
    return list(module.embedding_configs())


def plan_tables(
    model: nn.Module,
    config: ParallelConfig,
    runtime: Runtime,
    topology: Topology | None = None,
    groups: TableGroups | None = None,
) -> ShardingPlan:
    """The sharding plan, computed by the same pure function on every rank and compared between ranks.

    TorchRec's `collective_plan` plans on rank 0 alone: when it fails there, the other ranks hang. Here every rank
    plans, and a rank that planned otherwise (another model, another version) is an error on all. With `groups`, the
    plan is one group's, moved to the ranks of this rank's group.

    Raises:
        ValueError: no plan fits (the planner's reasons are in the message), or the ranks' plans differ.
    """
    tables = find_tables(model)
    if not tables:
        return ShardingPlan(plan={})
    topology = topology or Topology.detect(runtime.device.type)
    world = groups.shards if groups else runtime.world
    allowed = [config.table_sharding]
    if config.table_sharding == "auto":
        allowed = ["table_wise", "row_wise"] if world > 1 else ["table_wise"]
    constraints: dict[str, ParameterConstraints] = {}
    for module in tables.values():
        for table in table_configs(module):
            options: dict[str, Any] = {}
            if config.table_sharding == "column_wise":
                options["min_partition"] = _column_partition(table.name, table.embedding_dim, world)
            constraints[table.name] = ParameterConstraints(
                sharding_types=list(allowed), compute_kernels=[EmbeddingComputeKernel.FUSED.value], **options
            )
    try:
        with _quiet_planner():
            planner = EmbeddingShardingPlanner(
                topology=_planner_topology(topology, runtime, world),
                batch_size=config.batch_size,
                storage_reservation=FixedPercentageStorageReservation(1 - config.table_memory),
                constraints=constraints,
                debug=False,
            )
            plan = planner.plan(model, [_BagSharder(), _SequenceSharder()])
    except Exception as error:  # PlannerError and, for odd shapes, others
        raise ValueError(
            f'no sharding plan with table_sharding="{config.table_sharding}" for {world} ranks: {error}'
        ) from error
    digests = runtime.gather(
        hashlib.sha256("\n".join(map(str, plan_rows(plan))).encode()).hexdigest(), "the ranks' sharding plans"
    )
    if len(set(digests)) > 1:
        odd = [r for r, d in enumerate(digests) if d != digests[0]]
        raise ValueError(f"ranks {odd} computed another sharding plan than rank 0: do all build the same model?")
    if groups is not None:
        move_plan(plan, groups, runtime)
    return plan


def _planner_topology(topology: Topology, runtime: Runtime, world: int) -> PlannerTopology:
    """The machine in the planner's terms: bytes, and bytes per millisecond."""
    per_ms = 1e6  # 1 GB/s = 10^9 B/s = 10^6 B/ms
    links = {"intra_host_bw": topology.tiers[0].bandwidth_gbps * per_ms}
    if len(topology.tiers) > 1:
        links["inter_host_bw"] = topology.tiers[-1].bandwidth_gbps * per_ms
    memory = "hbm_mem_bw" if runtime.device.type == "cuda" else "ddr_mem_bw"
    return PlannerTopology(
        world_size=world,
        local_world_size=math.gcd(world, runtime.local_world),
        compute_device=runtime.device.type,
        hbm_cap=topology.device_memory,
        ddr_cap=topology.host_memory // runtime.local_world,
        **{memory: topology.memory_gbps * per_ms},
        **links,
    )


@contextmanager
def _quiet_planner() -> Iterator[None]:
    """Without the planner's advice on its own construction, which does not concern the user."""
    logger = logging.getLogger("torchrec.distributed.planner.types")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _column_partition(name: str, dim: int, world: int) -> int:
    """The narrowest block of columns to plan for: a multiple of 4 (fbgemm's vectors) that divides dim."""
    widths = [w for w in range(4, dim + 1, 4) if dim % w == 0]
    if not widths:
        raise ValueError(f"table {name!r}: column-wise sharding needs a dim divisible by 4, got {dim}")
    return min((w for w in widths if dim // w <= world), default=dim)


def plan_rows(plan: ShardingPlan) -> list[TableShard]:
    """The plan as rows, sorted by module, table and offset."""
    rows = []
    for module, tables in plan.plan.items():
        for table, sharding in tables.items():  # type: ignore[attr-defined]
            for shard in sharding.sharding_spec.shards:
                (r, c), (height, width) = shard.shard_offsets, shard.shard_sizes
                rows.append(
                    TableShard(
                        module=module,
                        table=table,
                        sharding=sharding.sharding_type,
                        rank=shard.placement.rank(),
                        rows=(r, r + height),
                        cols=(c, c + width),
                    )
                )
    return sorted(rows, key=lambda s: (s.module, s.table, s.rows, s.cols))


def shard_tables(
    model: nn.Module,
    sparse: RowWiseAdagrad | SparseSGD,
    plan: ShardingPlan,
    runtime: Runtime,
    config: ParallelConfig | None = None,
    groups: TableGroups | None = None,
) -> DistributedModelParallel:
    """Replace the model's table modules, in place, by TorchRec's sharded ones with the fused optimizer.

    A full table is never allocated: what the model holds on a real device is dropped first. The gradient of a table is
    divided by the world (by the group that holds one copy, with `groups`), as FSDP2 divides the dense ones, so that
    both are gradients of the loss averaged over ranks.
    """
    keep_recats()
    config = config or ParallelConfig()
    optimizer, options = _fused_optimizer(sparse, config)
    fused: dict[str, Any] = {}
    for name, module in find_tables(model).items():
        if config.table_strategy == "v3" and getattr(module, "is_weighted", lambda: False)():
            raise ValueError(f'{name}: table_strategy "v3" does not support bags with per-sample weights')
        if len({table.embedding_dim for table in table_configs(module)}) > 1 and config.table_strategy == "v3":
            fused["use_one_tbe_per_table"] = True  # a kernel's rows must have one width to be owned in equal parts
        _drop_weights(module)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            apply_optimizer_in_backward(optimizer, module.parameters(), options)
    if not get_gradient_division():
        warnings.warn(
            "torchrec's gradient division was off; gem-parallel turns it on, so that table gradients are averaged",
            stacklevel=2,
        )
        set_gradient_division(True)
    more: dict[str, Any] = {} if groups is None else {"env": groups.environment(config.table_copies_inside)}
    return DistributedModelParallel(
        model,
        device=runtime.device,
        plan=plan,
        sharders=[
            kind(fused_params=dict(fused), qcomm_codecs_registry=_exchange_codecs(config))
            for kind in (_BagSharder, _SequenceSharder)
        ],
        init_data_parallel=False,
        init_parameters=False,
        **more,
    )


def _fused_optimizer(sparse: RowWiseAdagrad | SparseSGD, config: ParallelConfig) -> tuple[Any, dict[str, float]]:
    """The optimizer that TorchRec fuses into the kernels."""
    if config.table_strategy == "v3":
        return torch.optim.SGD, {"lr": 1.0}  # writes minus the gradient into zeros; the owner updates
    if isinstance(sparse, SparseSGD):
        return torch.optim.SGD, {"lr": sparse.lr}
    scale = moment_scale(sparse, config)
    return TorchRecRowWiseAdagrad, {"lr": sparse.lr * scale, "eps": sparse.eps * scale}


def _exchange_codecs(config: ParallelConfig) -> dict[str, Any] | None:
    """TorchRec's codecs for embeddings and gradients on their way."""
    if config.table_exchange == "fp32":
        return None
    kind = {"fp16": CommType.FP16, "bf16": CommType.BF16}[config.table_exchange]
    codecs: dict[str, Any] = get_qcomm_codecs_registry(QCommsConfig(forward_precision=kind, backward_precision=kind))
    return codecs


def moment_scale(sparse: RowWiseAdagrad | SparseSGD, config: ParallelConfig) -> float:
    """What lr and eps are multiplied by, so that the kernel's sqrt(v) stands for sqrt(v / table_copies)."""
    scaled = config.table_strategy == "v2" and config.table_moment_scaling and isinstance(sparse, RowWiseAdagrad)
    return math.sqrt(config.table_copies) if scaled else 1.0


def _drop_weights(module: nn.Module) -> None:
    """Move a table module to the meta device (TorchRec would shard by copying whole tables)."""
    meta = torch.device("meta")
    for inner in module.modules():
        for name, param in inner._parameters.items():
            if param is not None and not param.is_meta:
                inner._parameters[name] = nn.Parameter(
                    torch.empty_like(param, device=meta), requires_grad=param.requires_grad
                )
    module._device = meta  # type: ignore[assignment]


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Set the fused optimizers' learning rate for the next backward pass."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    if optimizer.param_groups:
        optimizer.step()  # the update itself ran inside backward; this hands the rate to the kernels
