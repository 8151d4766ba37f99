"""For tests and `selfcheck`: a small model with every kind of parameter, its plain twin, and jobs of a few ranks."""

from __future__ import annotations

import copy
import importlib.util
import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from gem_parallel.comm import apply
from gem_parallel.comm.choice import Capabilities
from gem_parallel.parallel import ParallelModel
from gem_parallel.runtime import start
from gem_parallel.shards import local_shards

SEQUENCES = {"history": "item", "candidate": "item", "action": "action"}  # feature -> table of the EmbeddingCollection
BAGS = {"user": "user", "context": "context"}  # feature -> table of the EmbeddingBagCollection
ROWS = {"item": 59, "action": 10, "user": 41, "context": 23}
UNITS = ("dense.tower", "dense.trunk.0", "dense.trunk.1")


@dataclass(frozen=True, kw_only=True)
class SmallBatch:
    """Ragged ids by feature (`ids[f]` [N], `lengths[f]` [B]) and targets [B]."""

    ids: dict[str, torch.Tensor]
    lengths: dict[str, torch.Tensor]
    target: torch.Tensor

    def part(self, rank: int, world: int) -> SmallBatch:
        """The rank-th of `world` equal parts."""
        size = len(self.target) // world
        low, high = rank * size, (rank + 1) * size
        ids = {}
        for name, values in self.ids.items():
            ends = self.lengths[name].cumsum(0)
            begin = int(ends[low - 1]) if low else 0
            ids[name] = values[begin : int(ends[high - 1])]
        lengths = {name: value[low:high] for name, value in self.lengths.items()}
        return SmallBatch(ids=ids, lengths=lengths, target=self.target[low:high])

    def to(self, device: torch.device) -> SmallBatch:
        """The batch on another device."""
        return SmallBatch(
            ids={name: value.to(device) for name, value in self.ids.items()},
            lengths={name: value.to(device) for name, value in self.lengths.items()},
            target=self.target.to(device),
        )

    def kjt(self, names: Mapping[str, str]) -> KeyedJaggedTensor:
        """TorchRec's input for the features in `names`."""
        return KeyedJaggedTensor(
            keys=list(names),
            values=torch.cat([self.ids[name] for name in names]),
            lengths=torch.cat([self.lengths[name] for name in names]),
        )


def small_batch(seed: int, size: int = 16) -> SmallBatch:
    """A random batch; empty bags and sequences, repeated ids and rows that no sample touches occur."""
    generator = torch.Generator().manual_seed(seed)
    ids, lengths = {}, {}
    for name, table in {**SEQUENCES, **BAGS}.items():
        lengths[name] = torch.randint(0, 5, (size,), generator=generator)
        ids[name] = torch.randint(0, ROWS[table], (int(lengths[name].sum()),), generator=generator)
    return SmallBatch(ids=ids, lengths=lengths, target=torch.randn(size, generator=generator))


@dataclass(frozen=True)
class Memory:
    """A tensor inside a dataclass, on its way from unit to unit."""

    values: torch.Tensor
    note: str = "not a tensor"


class _Block(nn.Module):
    """A unit with two outputs; in backward, the one that hides in a dataclass comes first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear, self.update = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, memory: Memory) -> tuple[torch.Tensor, Memory]:
        x = x + torch.tanh(self.linear(self.norm(x)))
        return x, Memory(torch.tanh(self.update(memory.values)))


class _Ensemble(nn.Module):
    """The sum of experts of different sizes."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 8 + 3 * i), nn.GELU(), nn.Linear(8 + 3 * i, width)) for i in range(experts)
        )
        # A mean at the start: the plain sum of eight makes float32 drift from float64 by 3e-5 in one process already.
        for expert in self.experts:
            expert[2].weight.data /= experts  # type: ignore[index,union-attr,operator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.experts[0](x)
        for expert in self.experts[1:]:
            total = total + expert(x)
        return total


class _Dense(nn.Module):
    """All dense layers but the root's own parameter; `head` belongs to no unit."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.ensemble = _Ensemble(16, experts) if experts else None
        self.tower = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, 16))
        self.trunk = nn.ModuleList(_Block(16) for _ in range(2))
        self.head = nn.Linear(16, 1)
        self.register_buffer("offset", torch.full((1,), 0.1))

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:  # [B, width] -> [B]
        x = self.tower(pooled)
        if self.ensemble is not None:
            x = x + self.ensemble(x)
        memory = Memory(x)
        for block in self.trunk:
            x, memory = block(x, memory)
        return (self.head(x + memory.values) + self.offset).sum(1)


def _pool(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Sums of a ragged tensor's rows: [N, D], [B] -> [B, D]."""
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
    return values.new_zeros(len(lengths), values.shape[1]).index_add(0, owner, values)


class SmallModel(nn.Module):
    """Sequence and bag tables, FSDP units, a layer outside every unit, a parameter of the root and a buffer."""

    def __init__(
        self,
        *,
        seed: int = 0,
        dim: int = 8,
        device: str = "meta",
        rows: Mapping[str, int] = ROWS,
        tables: bool = True,
        experts: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tables = tables
        if tables:
            self.sequences = EmbeddingCollection(
                tables=[EmbeddingConfig(**self._table(name, SEQUENCES, rows, dim)) for name in ("item", "action")],
                device=torch.device(device),
            )
            self.bags = EmbeddingBagCollection(
                tables=[EmbeddingBagConfig(**self._table(name, BAGS, rows, dim)) for name in ("user", "context")],
                device=torch.device(device),
            )
        torch.manual_seed(seed)  # so that the dense layers do not depend on where the tables are
        self.width = dim * (len(SEQUENCES) + len(BAGS))
        self.dense = _Dense(self.width, experts)
        self.gain = nn.Parameter(torch.ones(1))

    @staticmethod
    def _table(name: str, features: Mapping[str, str], rows: Mapping[str, int], dim: int) -> dict[str, Any]:
        names = [feature for feature, table in features.items() if table == name]
        return {"name": name, "num_embeddings": rows[name], "embedding_dim": dim, "feature_names": names}

    def forward(self, batch: SmallBatch) -> torch.Tensor:
        """Predictions [B]."""
        if not self.tables:
            return self.gain * self.dense(batch.target[:, None].expand(-1, self.width))
        sequences, bags = self.sequences(batch.kjt(SEQUENCES)), self.bags(batch.kjt(BAGS))
        pooled = [_pool(sequences[name].values(), batch.lengths[name]) for name in SEQUENCES]
        return self.gain * self.dense(torch.cat([*pooled, *(bags[name] for name in BAGS)], dim=1))

    def roles(self) -> dict[str, str]:
        """The role of every parameter."""
        kinds = {"sequences": "table", "bags": "table"}
        return {
            name: "expert" if ".experts." in name else kinds.get(name.split(".")[0], "dense")
            for name, _ in self.named_parameters()
        }


class _Round(torch.autograd.Function):
    """To a dtype and back, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = dtype
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad.to(ctx.dtype).to(grad.dtype), None


class PlainModel:
    """SmallModel without TorchRec and FSDP: indexing, autograd, and row-wise AdaGrad as its formula, in one process.

    Args:
        model: gives the dense layers.
        tables: initial tables by name.
        lr, eps: of the sparse optimizer.
        sgd: plain SGD instead of row-wise AdaGrad.
        blocks: by table, into how many blocks of columns a row is cut, each with a moment of its own.
        divisor: what the moment is divided by before its root.
        exchange: embeddings and their gradients are rounded to it and back.
    """

    def __init__(
        self,
        model: SmallModel,
        tables: Mapping[str, torch.Tensor],
        lr: float,
        eps: float,
        *,
        sgd: bool = False,
        blocks: Mapping[str, int] | None = None,
        divisor: float = 1.0,
        exchange: torch.dtype = torch.float32,
    ) -> None:
        self.dense = copy.deepcopy(model.dense)
        self.gain = copy.deepcopy(model.gain)
        self.tables = {name: nn.Parameter(value.clone()) for name, value in tables.items()}
        self.blocks = {name: (blocks or {}).get(name, 1) for name in tables}
        self.moments = {name: value.new_zeros(self.blocks[name] * len(value)) for name, value in tables.items()}
        self.lr, self.eps, self.sgd, self.divisor, self.exchange = lr, eps, sgd, divisor, exchange

    def named_dense_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Names as in SmallModel."""
        return [("gain", self.gain), *((f"dense.{name}", param) for name, param in self.dense.named_parameters())]

    def __call__(self, batch: SmallBatch) -> torch.Tensor:
        """The forward on a whole batch."""
        pooled = []
        for name, table in {**SEQUENCES, **BAGS}.items():
            vectors = self.tables[table][batch.ids[name]]
            if name in SEQUENCES:  # every vector travels; of a bag, the sum
                vectors = _Round.apply(vectors, self.exchange)
            total = _pool(vectors, batch.lengths[name])
            pooled.append(total if name in SEQUENCES else _Round.apply(total, self.exchange))
        return self.gain * self.dense(torch.cat(pooled, dim=1))

    @torch.no_grad()
    def update_tables(self, scale: float = 1.0) -> None:
        """One step of the sparse optimizer from `scale` times the gradients that backward left."""
        for name, table in self.tables.items():
            assert table.grad is not None
            grad, blocks = table.grad * scale, self.blocks[name]
            table.grad = None
            if self.sgd:
                table.sub_(self.lr * grad)
                continue
            cut = grad.view(len(grad), blocks, -1)  # [rows, blocks, dim / blocks]
            self.moments[name] += cut.square().mean(2).T.reshape(-1)
            moment = self.moments[name].view(blocks, -1).T  # [rows, blocks]
            step = cut / ((moment / self.divisor).sqrt() + self.eps)[:, :, None]
            table.sub_(self.lr * step.view_as(table))


def full_state(parallel: ParallelModel) -> dict[str, dict[str, torch.Tensor]]:
    """`parallel.state_dict()` with whole CPU tensors, on every rank."""
    full: dict[str, dict[str, torch.Tensor]] = {}
    for part, tensors in parallel.state_dict().items():
        blocks = {
            name: [(block.detach().cpu().clone(), offset) for block, offset in local_shards(tensor)]
            for name, tensor in tensors.items()
        }
        everyone = parallel.runtime.gather(blocks, "the whole state")
        full[part] = {}
        for name in sorted({name for rank in everyone for name in rank}):
            found = [pair for rank in everyone for pair in rank.get(name, [])]
            shape = [max(o[d] + b.shape[d] for b, o in found) for d in range(found[0][0].dim())]
            whole = torch.full(shape, torch.nan, dtype=found[0][0].dtype)
            for block, offset in found:
                whole[tuple(slice(o, o + n) for o, n in zip(offset, block.shape, strict=True))] = block
            full[part][name] = whole
    return full


def run_ranks(
    world: int, file: str, function: str, folder: Path, *args: Any, device: str = "cpu", timeout_s: float = 60
) -> list[Any]:
    """Run `function(runtime, *args)` of the test file `file` on `world` processes; everyone's result by rank. They wait
    `timeout_s` for one another: long on a busy machine, but for tests of what happens then.

    A rank that ends by itself (`os._exit(0)`) has the result None. On the CPU, the processes are forked from a clean
    server which has imported TorchRec once.

    Raises:
        RuntimeError: with the traceback of the first rank that failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job = len(list(folder.glob("job-*")))
    here = folder / f"job-{job}"
    here.mkdir()
    method = "spawn"  # on CUDA: importing fbgemm asks the driver for its devices, which no fork survives
    if device == "cpu":
        method = "forkserver"
        torch.multiprocessing.get_context(method).set_forkserver_preload(["gem_parallel.testing"])
    start_processes(
        _rank, (world, str(here), file, function, args, device, timeout_s), nprocs=world, start_method=method, join=True
    )
    results = []
    for rank in range(world):
        path = here / f"result-{rank}.pt"
        outcome = torch.load(path, weights_only=False) if path.exists() else (None, None)
        if outcome[1]:
            raise RuntimeError(f"rank {rank} of {world} failed:\n{outcome[1]}")
        results.append(outcome[0])
    return results


def _rank(
    rank: int,
    world: int,
    folder: str,
    file: str,
    function: str,
    args: tuple[Any, ...],
    device: str,
    timeout_s: float,
) -> None:
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    outcome: tuple[Any, str | None]
    try:
        init = f"file://{folder}/store"
        with start(device, timeout_s=timeout_s, rank=rank, world=world, init_method=init) as runtime:
            outcome = (getattr(module, function)(runtime, *args), None)
    except BaseException:
        outcome = (None, traceback.format_exc())
    temporary = f"{folder}/.result-{rank}.pt"
    torch.save(outcome, temporary)
    os.replace(temporary, f"{folder}/result-{rank}.pt")


class FileWindow:
    """Stands for a window of symmetric memory (`gem_parallel.comm.windows.Window`): the same reads, writes and
    barriers, in files that all ranks of a host map.
    """

    folder = ""
    made = 0

    def __init__(self, nbytes: int, group: Any, device: torch.device, **options: Any) -> None:
        assert options.keys() <= {"kernels", "watch"}
        ranks = dist.get_process_group_ranks(group)
        FileWindow.made += 1
        names = [f"{FileWindow.folder}/{'-'.join(map(str, ranks))}-{FileWindow.made}-{rank}" for rank in ranks]
        own = names[ranks.index(dist.get_rank())]
        self.local = torch.from_file(own, shared=True, size=nbytes, dtype=torch.uint8)
        self.group, self.place = group, torch.tensor([FileWindow.made, 0])
        dist.barrier(group)
        self._all = [torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8) for name in names]

    def peer(self, rank: int) -> torch.Tensor:
        """See Window."""
        return self._all[rank]

    def barrier(self) -> None:
        """See Window; that all have come to the same barrier of the same window is checked."""
        self.place[1] += 1
        places = [torch.empty_like(self.place) for _ in self._all]
        dist.all_gather(places, self.place, self.group)
        if any(not torch.equal(place, self.place) for place in places):
            raise AssertionError(f"ranks are at different windows and barriers: {[place.tolist() for place in places]}")


def pretend_cards(folder: str | Path) -> None:
    """Let this process's groups have what a host of Hopper cards has, with files in `folder` for their memory."""
    os.makedirs(folder, exist_ok=True)
    FileWindow.folder = str(folder)
    apply.CudaWindow = FileWindow  # type: ignore[misc, assignment]

    def capabilities(self: apply.Collectives, group: Any) -> Capabilities:
        size = dist.get_world_size(group)
        return Capabilities(device="cuda", major=9, size=size, peers=True, nccl=(2, 29, 7), symmetric=True)

    apply.Collectives.capabilities = capabilities  # type: ignore[method-assign]


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """max |value - expected| / max |expected|; NaN anywhere gives infinity."""
    error = (value.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30)
    return float(torch.nan_to_num(error, nan=float("inf")))
