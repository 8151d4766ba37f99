"""V3: a rank keeps 1 / copies of its shard of the tables, weights and optimizer state alike, and nothing is stale.

The buffer of a fused TorchRec kernel is a working copy that exists only while it is needed, twice per step:

    before the lookup    all-gathered from the owners' fractions; freed after the lookup
    before its backward  zeros; the kernel's fused SGD with lr = 1 then writes  0 - gradient  into it, exactly
    after backward       reduce-scattered (mean over copies) to the owners, freed; the owner applies the optimizer

so that the update uses the gradient of the whole global batch, as one process would, which averaging weights that each
copy has updated for itself does not give with AdaGrad. There is no all-gather in backward. The reduction is started at
the end of backward and waited for before the next lookup: it overlaps the dense optimizer and the next batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata
from torchrec.distributed.types import ShardingPlan

from gem_parallel.comm.tables import DefaultTableGather, TableGather
from gem_parallel.config import RowWiseAdagrad, SparseSGD
from gem_parallel.runtime import Runtime
from gem_parallel.sparse.groups import TableGroups, flat_weights, kernels, table_batch
from gem_parallel.sparse.sharding import TableShard

Block = tuple[torch.Tensor, tuple[int, ...]]  # a part of a tensor, and its corner in the whole


class _Kernel:
    """The tables of one fused kernel: rows [n, dim] one after another, of which this rank owns a slice."""

    def __init__(self, kernel: Any, groups: TableGroups, moments: bool, gather: TableGather) -> None:
        self.module = table_batch(kernel)
        self.tables = list(kernel._config.embedding_tables)
        self.group = groups.copies_group
        self.copies = groups.copies
        dims = {table.local_cols for table in self.tables}
        assert len(dims) == 1, "plan_tables gives tables of different widths a kernel each"
        self.dim = dims.pop()
        flat = flat_weights(kernel)
        assert flat.dtype == torch.float32
        rows = flat.numel() // self.dim
        self.chunk = math.ceil(rows / self.copies)  # rows that a rank owns; the last ones may be padding
        self.begin = dist.get_rank(self.group) * self.chunk
        self._storage = flat.untyped_storage()
        self._bytes = self.copies * self.chunk * self.dim * 4
        # Padding behind the tables: TorchRec's own views of this storage stay what they are.
        assert flat.storage_offset() == 0
        self._storage.resize_(max(self._bytes, self._storage.nbytes()))
        self._whole = torch.empty(0, device=flat.device).set_(
            self._storage, 0, torch.Size([self.copies * self.chunk * self.dim]), (1,)
        )
        self._whole[flat.numel() :].zero_()
        end = self.begin + self.chunk
        self._gather = gather
        self.weight = gather.place(self._whole.view(-1, self.dim)[self.begin : end].clone())  # [chunk, dim]
        self.moment = self.weight.new_zeros(self.chunk) if moments else None  # [chunk]
        self.holds = "weights"
        self._work: Any = None
        self._received: torch.Tensor | None = None
        self.free()
        self.module.register_forward_pre_hook(lambda module, inputs: self.wait_for_weights())
        self.module.register_forward_hook(self._after_lookup)

    # --- the working copy: "nothing", "weights" (perhaps on their way), or "gradient"

    @property
    def working_bytes(self) -> int:
        """Bytes of the working copy that exist now."""
        return self._storage.nbytes()

    def free(self) -> None:
        """Give the working copy's memory back."""
        self._storage.resize_(0)
        self.holds = "nothing"

    def gather(self) -> None:
        """Start to collect the weights, unless they are there or under way."""
        if self.holds == "nothing":
            self._storage.resize_(self._bytes)
            self._work = self._gather.start(self._whole, self.weight)
            self.holds = "weights"
        assert self.holds == "weights"

    def wait_for_weights(self) -> None:
        """Before the lookup."""
        self.gather()
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _after_lookup(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.free()
        if output.requires_grad:
            output.register_hook(self._before_backward)

    def forget(self) -> None:
        """Drop weights that were gathered for a lookup that did not come."""
        if self.holds == "weights":
            self.wait_for_weights()
            self.free()

    def _before_backward(self, gradient: torch.Tensor) -> None:
        self.before_gradient()
        self.forget()
        if self.holds == "nothing":
            self._storage.resize_(self._bytes)
            self._whole.data.zero_()  # of `data`: what autograd saved counts as untouched
            self.holds = "gradient"

    def before_gradient(self) -> None:
        """Set by FullyShardedTables."""

    def reduce(self) -> None:
        """Start to send the gradient to its owners."""
        assert self.holds == "gradient"
        self._received = torch.empty_like(self.weight)
        self._work = dist.reduce_scatter_tensor(
            self._received.view(-1), self._whole, dist.ReduceOp.AVG, self.group, async_op=True
        )

    @torch.no_grad()
    def update(self, lr: float, eps: float) -> None:
        """Take the gradient and apply the optimizer to the owned rows."""
        assert self._received is not None
        self._work.wait()
        self.free()
        negative, self._work, self._received = self._received, None, None  # [chunk, dim], minus the gradient
        if self.moment is None:
            self.weight.add_(negative, alpha=lr)
        else:
            self.moment.add_(negative.square().mean(1))
            self.weight.addcdiv_(negative, (self.moment.sqrt() + eps)[:, None], value=lr)

    # --- the owned fraction as parts of tables

    def blocks(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None, tuple[int, int]]]:
        """(table, owned weights [h, w], owned moments [h], corner in the table) of every table that is touched."""
        first = 0
        for table in self.tables:
            low = max(first, self.begin)
            high = min(first + table.local_rows, self.begin + self.chunk)
            if low < high:
                row, col = table.local_metadata.shard_offsets
                own = slice(low - self.begin, high - self.begin)
                moment = None if self.moment is None else self.moment[own]
                yield table.name, self.weight[own], moment, (row + low - first, col)
            first += table.local_rows


class FullyShardedTables:
    """The engine of V3 over all table modules of a model; made by `parallelize`."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        groups: TableGroups,
        sparse: RowWiseAdagrad | SparseSGD,
        runtime: Runtime,
        gather: Callable[[], TableGather] | None = None,
    ) -> None:
        gather = gather or (lambda: DefaultTableGather(groups.copies_group))
        self.lr = sparse.lr
        self._eps = getattr(sparse, "eps", 0.0)
        self._runtime = runtime
        moments = isinstance(sparse, RowWiseAdagrad)
        self._kernels: list[tuple[str, _Kernel]] = []
        for name, module in modules.items():
            inner = "embedding_bags" if hasattr(module, "embedding_bags") else "embeddings"
            for found in kernels(module):
                kernel = _Kernel(found, groups, moments, gather())
                kernel.before_gradient = self._in_backward  # type: ignore[method-assign]
                self._kernels.append((f"{name}.{inner}", kernel))
        self._queued = False
        self._pending: float | None = None  # the learning rate of a reduction that is under way
        self._layout = self._exchange_layout(runtime)

    def prefetch(self) -> None:
        """Finish the last update and start to gather; called before a forward pass."""
        if self._queued:  # a backward pass that failed: what it left is no gradient
            self._queued = False
            for _, kernel in self._kernels:
                if kernel.holds == "gradient":
                    kernel.free()
        self.finish()
        for _, kernel in self._kernels:
            kernel.gather()

    def finish(self) -> None:
        """Finish the last update, if it is still under way."""
        if self._pending is not None:
            lr, self._pending = self._pending, None
            for _, kernel in self._kernels:
                if kernel.holds == "gradient":
                    kernel.update(lr, self._eps)

    def _in_backward(self) -> None:
        if not self._queued:
            self._queued = True
            self.finish()  # of another backward pass, without a forward pass in between
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)  # type: ignore[attr-defined]

    def _after_backward(self) -> None:
        self._queued = False
        self._pending = self.lr
        for _, kernel in self._kernels:
            if kernel.holds == "gradient":
                kernel.reduce()

    def rows(self, plan: ShardingPlan) -> list[TableShard]:
        """The readable plan: what every rank owns."""
        kinds = {
            (path, table): sharding.sharding_type
            for path, tables in plan.plan.items()
            for table, sharding in tables.items()  # type: ignore[attr-defined]
        }
        found = []
        for name, (shards, _) in self._layout["weights"].items():
            module, _, table, _ = name.rsplit(".", 3)
            for shard in shards:
                (row, col), (height, width) = shard.shard_offsets, shard.shard_sizes
                place: Any = shard.placement
                found.append(
                    TableShard(
                        module=module,
                        table=table,
                        sharding=kinds[(module, table)],
                        rank=place.rank(),
                        rows=(row, row + height),
                        cols=(col, col + width),
                    )
                )
        return sorted(found, key=lambda s: (s.module, s.table, s.rows, s.cols))

    def memory(self) -> dict[str, int]:
        """Bytes of this rank now: owned "weights" and "moments", and the "working" copy."""
        kernels = [kernel for _, kernel in self._kernels]
        return {
            "weights": sum(k.weight.nbytes for k in kernels),
            "moments": sum(0 if k.moment is None else k.moment.nbytes for k in kernels),
            "working": sum(k.working_bytes for k in kernels),
        }

    # --- state

    def tensors(self) -> tuple[dict[str, ShardedTensor], dict[str, ShardedTensor]]:
        """(weights [rows, dim], moments [rows]) by parameter name, aliases of the owned fractions, over all ranks.

        What was gathered is dropped, because the caller may write into the fractions.
        """
        self.finish()
        for _, kernel in self._kernels:
            kernel.forget()
        weights: dict[str, list[Block]] = {}
        moments: dict[str, list[Block]] = {}
        for prefix, kernel in self._kernels:
            for table, weight, moment, (row, col) in kernel.blocks():
                name = f"{prefix}.{table}.weight"
                weights.setdefault(name, []).append((weight, (row, col)))
                if moment is not None:
                    moments.setdefault(f"{name}.momentum1", []).append((moment, self._moment_corner(name, row, col)))
        return self._sharded(weights, "weights"), self._sharded(moments, "moments")

    def _moment_corner(self, name: str, row: int, col: int) -> tuple[int]:
        """TorchRec's layout: a column block's moments follow those of the block before it."""
        columns, rows = self._columns[name], self._rows[name]
        return (columns.index(col) * rows + row,)

    def _exchange_layout(self, runtime: Runtime) -> dict[str, dict[str, tuple[list[ShardMetadata], tuple[int, ...]]]]:
        mine = [
            (f"{prefix}.{table}.weight", tuple(weight.shape), corner, moment is not None)
            for prefix, kernel in self._kernels
            for table, weight, moment, corner in kernel.blocks()
        ]
        everyone = runtime.gather(mine, "the tables' fractions")
        found = [(rank, *block) for rank, blocks in enumerate(everyone) for block in blocks]
        self._rows: dict[str, int] = {}
        self._dims: dict[str, int] = {}
        columns: dict[str, set[int]] = {}
        for _, name, (height, width), (row, col), _ in found:
            self._rows[name] = max(self._rows.get(name, 0), row + height)
            self._dims[name] = max(self._dims.get(name, 0), col + width)
            columns.setdefault(name, set()).add(col)
        self._columns = {name: sorted(cols) for name, cols in columns.items()}
        layout: dict[str, dict[str, tuple[list[ShardMetadata], tuple[int, ...]]]] = {"weights": {}, "moments": {}}
        for rank, name, shape, (row, col), has_moment in found:
            where = "cpu" if runtime.device.type == "cpu" else f"cuda:{rank % runtime.local_world}"
            place = f"rank:{rank}/{where}"
            whole = (self._rows[name], self._dims[name])
            part = layout["weights"].setdefault(name, ([], whole))
            part[0].append(ShardMetadata([row, col], list(shape), place))
            if has_moment:
                size = (self._rows[name] * len(self._columns[name]),)
                part = layout["moments"].setdefault(f"{name}.momentum1", ([], size))
                part[0].append(ShardMetadata(list(self._moment_corner(name, row, col)), [shape[0]], place))
        return layout

    def _sharded(self, blocks: Mapping[str, Iterable[Block]], kind: str) -> dict[str, ShardedTensor]:
        tensors = {}
        for name, (shards, size) in self._layout[kind].items():
            mine = {
                tuple(shard.shard_offsets): shard
                for shard in shards
                if shard.placement is not None and shard.placement.rank() == self._runtime.rank  # type: ignore[union-attr]
            }
            local = [Shard(tensor, mine[tuple(corner)]) for tensor, corner in blocks.get(name, ())]
            properties = TensorProperties(dtype=torch.float32)
            metadata = ShardedTensorMetadata(shards, torch.Size(size), properties)
            tensors[name] = ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)
        return tensors
