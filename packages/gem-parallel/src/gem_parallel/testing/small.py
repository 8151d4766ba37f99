"""A small model with every kind of parameter, and its batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

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


def pool(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
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
        pooled = [pool(sequences[name].values(), batch.lengths[name]) for name in SEQUENCES]
        return self.gain * self.dense(torch.cat([*pooled, *(bags[name] for name in BAGS)], dim=1))

    def roles(self) -> dict[str, str]:
        """The role of every parameter."""
        kinds = {"sequences": "table", "bags": "table"}
        return {
            name: "expert" if ".experts." in name else kinds.get(name.split(".")[0], "dense")
            for name, _ in self.named_parameters()
        }
