"""`parallelize`: one model, its tables sharded by TorchRec and its dense parameters by FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torchrec.distributed.model_parallel import DistributedModelParallel

from gem_parallel.comm.apply import Collectives
from gem_parallel.comm.fsdp import Payload
from gem_parallel.comm.payload import Fp8Payload
from gem_parallel.config import PRECISIONS, ParallelConfig, RowWiseAdagrad, SparseSGD
from gem_parallel.dense.expert import find_ensembles, is_elsewhere, make_expert_mesh, spread_experts
from gem_parallel.dense.mesh import make_mesh
from gem_parallel.dense.units import (
    clip_by_global_norm,
    end_pass,
    find_unit,
    forget_gradients,
    place_dense,
    reduce_gradients,
    reshard,
    set_prefetch,
    shard_dense,
)
from gem_parallel.memory.quantise import Quantiser
from gem_parallel.memory.regions import Regions
from gem_parallel.planning.topology import Topology
from gem_parallel.runtime import Runtime
from gem_parallel.shards import copy_into
from gem_parallel.sparse.copied import CopiedTables
from gem_parallel.sparse.fully_sharded import FullyShardedTables
from gem_parallel.sparse.groups import flat_weights, kernels, make_table_groups, table_batch
from gem_parallel.sparse.initial import init_tables
from gem_parallel.sparse.sharding import (
    TableShard,
    find_tables,
    moment_scale,
    plan_rows,
    plan_tables,
    set_learning_rate,
    shard_tables,
)


class ParallelModel:
    """A model spread over the ranks; made by `parallelize`.

    Call it like the model, on this rank's part of the batch. Its loss should be the mean over the rank's samples: the
    gradients are then those of the mean over all ranks. `backward` updates the tables (fused); the dense parameters
    wait for an optimizer over `dense_parameters()`.
    """

    def __init__(
        self,
        dmp: DistributedModelParallel,
        runtime: Runtime,
        mesh: DeviceMesh | None,
        shards: list[TableShard],
        table_names: Sequence[str],
        units: Sequence[str],
        *,
        fully_sharded: FullyShardedTables | None = None,
        copied: CopiedTables | None = None,
        sparse_scale: float = 1.0,
        ensembles: Sequence[str] = (),
        memory: Regions | None = None,
        collectives: Collectives | None = None,
        reduce_every_part: bool = False,
        gathers: object | None = None,
    ) -> None:
        self.runtime = runtime
        self.mesh = mesh
        self._dmp = dmp
        self._shards = shards
        self._table_modules = tuple(table_names)
        self._units = tuple(units)
        self.fully_sharded = fully_sharded  # the engine of table_strategy "v3"
        self.copied = copied  # the engine of table_strategy "v2"
        self._sparse_scale = sparse_scale
        self._ensembles = tuple(ensembles)
        self.collectives = collectives
        self._reduce_every_part = reduce_every_part
        self.gathers = gathers  # what `lowprec` said of the payload "lowprec", to be printed
        self._sharded = [m for m in dmp.module.modules() if isinstance(m, FSDPModule)]
        self._whole: list[nn.Parameter] = []  # where nothing is sharded, all of them
        self.memory = memory  # the engine of ParallelConfig.memory; its `plan` prints as a table

    @property
    def module(self) -> nn.Module:
        """The model itself, with its modules replaced by sharded ones."""
        return self._dmp.module

    @property
    def sparse_optimizer(self) -> Any:
        """TorchRec's KeyedOptimizer over the tables; its update runs inside `backward`. Without use for "v3"."""
        return self._dmp.fused_optimizer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward on this rank's batch."""
        with self.runtime.waiting("the forward pass"):
            if self.fully_sharded is not None:
                self.fully_sharded.prefetch()
            elif self.copied is not None:
                self.copied.begin()
            if self.memory is not None and self._dmp.training and torch.is_grad_enabled():
                self.memory.begin()
            return self._dmp(*args, **kwargs)

    def named_dense_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of everything but the tables; DTensor shards when FSDP2 is at work."""
        reshard(self.module)
        prefixes = tuple(f"{name}." for name in self._table_modules)
        named: list[tuple[str, nn.Parameter]] = []
        seen: set[int] = set()
        for prefix, module in self.module.named_modules():
            if f"{prefix}.".startswith(prefixes):
                continue
            for name, param in module._parameters.items():
                if param is not None and id(param) not in seen:
                    seen.add(id(param))
                    named.append((f"{prefix}.{name}" if prefix else name, param))
        return named

    def is_expert(self, name: str) -> bool:
        """Whether the parameter called `name` belongs to an ensemble that is spread over the expert axis."""
        return is_elsewhere(name, self._ensembles)

    def is_table(self, name: str) -> bool:
        """Whether the parameter called `name` is an embedding table."""
        return name.startswith(tuple(f"{module}." for module in self._table_modules)) and name.endswith(".weight")

    def dense_parameters(self) -> list[nn.Parameter]:
        """The parameters for the dense optimizer."""
        return [param for _, param in self.named_dense_parameters()]

    def reduce_gradients(self, on: bool) -> None:
        """Whether the next backward passes reduce dense gradients over the ranks: in a step of several parts, only the
        last one has to. Until then gradients are added up on each rank, which holds those of the whole model (with
        `ParallelConfig.reduce_every_part`, of its shard: every pass reduces). Called by all ranks alike. Tables are
        updated in every backward pass.
        """
        reduce_gradients(self._sharded, on or self._reduce_every_part)

    def forget_gradients(self) -> None:
        """Drop all dense gradients, as `zero_grad(set_to_none=True)` does, and with them what earlier parts of a step
        that is broken off have added up, which no optimizer sees; the next backward pass reduces again. After an
        exception in the middle of a pass call it before the next one, on all ranks (with torch from 2.13 on; an earlier
        FSDP2 cannot go on from there). Tables keep the updates of the passes that were finished.
        """
        end_pass(self.module)
        forget_gradients(self._sharded)
        if not self._sharded:
            self._whole = self._whole or self.dense_parameters()
            for param in self._whole:
                param.grad = None
        reduce_gradients(self._sharded, True)

    def set_sparse_lr(self, lr: float) -> None:
        """Learning rate of the tables from the next backward pass on."""
        if self.fully_sharded is not None:
            self.fully_sharded.lr = lr
        else:
            set_learning_rate(self.sparse_optimizer, lr * self._sparse_scale)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale dense gradients so that their global L2 norm is at most `max_norm`.

        Returns:
            the norm before clipping, a float32 scalar, the same on every rank. Tables are not clipped: their update has
            happened already.
        """
        params = self.dense_parameters()
        with self.runtime.waiting("the norm of the dense gradients"):
            if self._ensembles:  # of which every rank of the expert axis has others
                return clip_by_global_norm(params, max_norm)
            norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return norm.detach().to(torch.float32)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """`{"model": {name: tensor}, "sparse_optimizer": {name: tensor}}`, aliases of the live tensors.

        Tables and moments are ShardedTensors, dense parameters DTensors or plain tensors: as
        `torch.distributed.checkpoint` wants them, and it may load into them in place. Names are the unsharded model's.
        Called by all ranks together: the copies of "v2" are averaged first, an update of "v3" is finished.
        """
        reshard(self.module)
        if self.fully_sharded is not None:
            with self.runtime.waiting("the tables' update"):
                weights, moments = self.fully_sharded.tensors()
            return {"model": {**self._dmp.state_dict(), **weights}, "sparse_optimizer": dict(moments)}
        if self.copied is not None:
            with self.runtime.waiting("the average of the tables' copies"):
                self.copied.synchronize()
        sparse = {
            f"{table}.{key.rsplit('.', 1)[-1]}": tensor
            for table, values in self.sparse_optimizer.state_dict()["state"].items()
            for key, tensor in values.items()
        }
        return {"model": dict(self._dmp.state_dict()), "sparse_optimizer": sparse}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Copy `state`, laid out like `state_dict()`, into the model; a plain tensor of the global shape serves too.

        Raises:
            ValueError: names that are missing or unknown, or shapes that differ.
        """
        for part, target in self.state_dict().items():
            source = state.get(part, {})
            missing = sorted(target.keys() - source.keys())
            unknown = sorted(name for name in source.keys() - target.keys() if not self.is_expert(name))
            if missing or (unknown and part == "model"):
                raise ValueError(f"load_state_dict: {part}: missing {missing}, unknown {unknown}")
            for name, tensor in target.items():
                copy_into(tensor, source[name], f"{part}: {name}")
        if self.fully_sharded is None:
            self.sparse_optimizer.post_load_state_dict()

    def train(self, mode: bool = True) -> ParallelModel:
        """Training mode (dropout and the like), as `nn.Module.train`."""
        self._dmp.train(mode)
        return self

    def eval(self) -> ParallelModel:
        """Evaluation mode."""
        return self.train(False)

    def table_memory(self) -> dict[str, int]:
        """Bytes of this rank now: "weights" and "moments" of its tables, and the "working" copy of "v3"."""
        if self.fully_sharded is not None:
            return self.fully_sharded.memory()
        modules = [self.module.get_submodule(name) for name in self._table_modules]
        found = [kernel for module in modules for kernel in kernels(module)]
        moments = [
            state.nbytes
            for kernel in found
            for states in table_batch(kernel).get_optimizer_state()
            for state in states.values()
        ]
        return {"weights": sum(flat_weights(k).nbytes for k in found), "moments": sum(moments), "working": 0}

    def why(self) -> str:
        """Which collectives move what and why, what travels in low precision, and what is kept of activations."""
        lines = [self.collectives.why() if self.collectives is not None else ""]
        if self.gathers is not None:
            lines.append(str(self.gathers))
        if self.memory is not None:
            lines.append(str(self.memory.plan or "activations: no plan yet (or none is needed)"))
        return "\n".join(filter(None, lines))

    def describe(self) -> list[TableShard]:
        """The sharding plan, a row per block; `print(*parallel.describe(), sep="\\n")` is readable."""
        return list(self._shards)


def parallelize(
    model: nn.Module,
    roles: Mapping[str, str],
    config: ParallelConfig,
    runtime: Runtime,
    *,
    sparse: RowWiseAdagrad | SparseSGD,
    units: Sequence[str] = (),
    precision: str = "fp32",
    topology: Topology | None = None,
    quantiser: Quantiser | None = None,
    payload: Payload | None = None,
    lowprec: Callable[[nn.Module], object] | None = None,
) -> ParallelModel:
    """Spread `model` over the ranks of `runtime`. The model is changed in place; use the result from then on.

    Tables are sharded by TorchRec, also in a world of one, and (re)initialised by `init_tables`. Dense parameters are
    made equal to rank 0's, then sharded by FSDP2 on the (replicate, shard) mesh when there is more than one rank or
    when precision is "bf16" (so that bfloat16 means the same in every world).

    Args:
        model: its tables are torchrec EmbeddingCollections / EmbeddingBagCollections on any device (meta spares the
            memory), the rest is on a real device.
        roles: parameter name -> "dense", "expert" or "table", for every parameter. Experts are spread over the expert
            axis when config.experts > 1 (see `gem_parallel.dense.expert`), else sharded like dense parameters.
        config: the layout.
        runtime: from `start`.
        sparse: the tables' optimizer.
        units: names of submodules that FSDP2 gathers one by one, in the order of the forward pass.
        precision: "fp32", or "bf16": the units gather and compute in bfloat16 (their floating-point inputs are cast,
            also inside dataclasses) with float32 master weights and reductions. With autocast, leave it "fp32".
        topology: the machine, for the planner; detected by default.
        payload: how parameters travel in all-gathers, instead of config.comm's; units compute with what it unpacks.
        quantiser: of saved activations, in place of the plain FP8 one, when config.memory quantises.
        lowprec: called with the sharded model when config.comm.payload is "lowprec"; it gives weights an all-gather of
            their own (FSDP2's `fsdp_pre_all_gather`) and returns what `why` shows (gem_lowprec.quantize_gathers).

    Raises:
        ValueError: a role that is missing, unknown or contradicts the modules; a shard_group that does not divide the
            world; a unit that does not exist; tables for which no plan fits.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    table_modules = find_tables(model)
    _check_roles(model, roles, table_modules)
    for unit in units:
        find_unit(model, unit)
    if config.comm.payload == "lowprec" and lowprec is None:
        raise ValueError("CommConfig.payload is 'lowprec', which needs the function `lowprec` of parallelize, got None")
    if config.comm.payload == "lowprec" and payload is not None:  # it would pack bytes of FP8 again, as if numbers
        raise ValueError(f"CommConfig.payload is 'lowprec'; no other payload can pack it, got {payload!r}")
    sharded = runtime.world > 1 or precision == "bf16"
    mesh = make_mesh(runtime, config) if sharded else None
    expert_mesh = make_expert_mesh(runtime, config)
    ensembles = find_ensembles(model, roles) if expert_mesh is not None else []
    if expert_mesh is not None and not ensembles:
        raise ValueError(f"ParallelConfig.experts = {config.experts}, but no parameter has the role 'expert'")
    groups = make_table_groups(runtime, config) if table_modules else None
    plan = plan_tables(model, config, runtime, topology, groups)
    with runtime.waiting("the tables' sharding"):
        place_dense(model, table_modules.values(), runtime.device)
        experts = spread_experts(model, ensembles, expert_mesh) if expert_mesh is not None else []
        dmp = shard_tables(model, sparse, plan, runtime, config, groups)
        order: list[str] = []
        if mesh is not None:
            tables = [dmp.module.get_submodule(name) for name in table_modules]
            order = shard_dense(dmp.module, tables, units, mesh, precision, experts, expert_mesh)
            if config.prefetch:
                set_prefetch(dmp.module, units, config.prefetch)
    regions: Regions | None = None
    if config.memory.works:
        regions = Regions(
            dmp.module,
            units,
            config.memory,
            quantiser=quantiser,
            agree=lambda plan: runtime.gather(plan, "the memory plan")[0],
        )
    gathers: object | None = None
    if lowprec is not None and mesh is not None and config.comm.payload == "lowprec":
        gathers = lowprec(dmp.module)
    collectives = Collectives(config.comm, runtime)
    if payload is None and mesh is not None and config.comm.payload == "fp8":
        payload = Fp8Payload()
    if mesh is not None:
        collectives.install(dmp.module.modules(), payload)
    elif payload is not None:
        raise ValueError("a payload was handed in, but nothing is sharded in a world of one with precision fp32")
    init_tables(dmp.module, config.table_seed, config.table_std)
    fully_sharded = copied = None
    shards = plan_rows(plan)
    if groups is not None:
        split = {name: dmp.module.get_submodule(name) for name in table_modules}
        if config.table_strategy == "v3":
            fully_sharded = FullyShardedTables(
                split, groups, sparse, runtime, collectives.table_gather(groups.copies_group)
            )
            shards = fully_sharded.rows(plan)
        else:
            copied = CopiedTables(split.values(), groups, config.table_sync_every)
            copies = runtime.gather(shards, "the tables' copies")
            shards = [row for ranks in groups.rows() for row in copies[ranks[0]]]
    return ParallelModel(
        dmp,
        runtime,
        mesh,
        shards,
        list(table_modules),
        order,
        fully_sharded=fully_sharded,
        copied=copied,
        sparse_scale=moment_scale(sparse, config),
        ensembles=ensembles,
        memory=regions,
        collectives=collectives,
        reduce_every_part=config.reduce_every_part,
        gathers=gathers,
    )


def _check_roles(model: nn.Module, roles: Mapping[str, str], tables: Mapping[str, nn.Module]) -> None:
    names = {name for name, _ in model.named_parameters()}
    for name, param in model.named_parameters():
        if param.dim() == 0:  # in a world of one it would work, which would only hide the trouble
            raise ValueError(f"dense parameter {name!r} is a scalar, which FSDP2 cannot shard; give it the shape [1]")
    in_tables = {name for name in names if any(name.startswith(f"{table}.") for table in tables)}
    for name in sorted(names):
        role = roles.get(name)
        if role not in ("dense", "expert", "table"):
            raise ValueError(f'parameter {name!r} has role {role!r}; expected "dense", "expert" or "table"')
        if (role == "table") != (name in in_tables):
            where = "lies in" if name in in_tables else "does not lie in"
            raise ValueError(f"parameter {name!r} has role {role!r}, but {where} a torchrec embedding collection")
    unknown = sorted(set(roles) - names)
    if unknown:
        raise ValueError(f"roles names parameters that the model lacks: {unknown}")
