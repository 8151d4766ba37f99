"""What the planner has to know about a model: FLOPs, parameters, activations and tables, without the model itself."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from gem_parallel.planning.fields import made, require


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One FSDP unit, or `count` equal ones after another.

    Attributes:
        name: of the unit.
        flops: useful forward FLOPs of one sample, without the experts; training counts three times.
        params: dense parameters, without the experts.
        activation_bytes: kept for the backward pass, of one sample (experts included).
        count: how many units of this kind follow one another.
        kept_bytes: of the copy of its parameters that every device of several keeps, where the unit is replayed from
            CUDA graphs, which need no all-gather for the backward pass. 0: its parameters are gathered again.
        gather_bytes: of a parameter in an all-gather, on average; 0: the model's.
        needs_tables: False for a unit that can run before the embeddings have arrived.
        experts: experts of an ensemble whose outputs are summed; 0 for none. Every sample visits every expert.
        expert_params, expert_flops: of one expert (FLOPs forward, of one sample).
        expert_io_bytes: activations of one sample that enter the ensemble plus those that leave it.
    """

    name: str
    flops: float
    params: int
    activation_bytes: float
    count: int = 1
    kept_bytes: float = 0.0
    gather_bytes: float = 0.0
    needs_tables: bool = True
    experts: int = 0
    expert_params: int = 0
    expert_flops: float = 0.0
    expert_io_bytes: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            require(value >= 0, f"layer {self.name!r}: {field.name} must be >= 0, got {value!r}")
        require(self.count >= 1, f"layer {self.name!r}: count must be >= 1, got {self.count!r}")
        require(
            (self.experts > 0) == (self.expert_params > 0),
            f"layer {self.name!r}: experts and expert_params go together, got {self.experts} and {self.expert_params}",
        )


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """`count` equal embedding tables.

    Attributes:
        rows, dim: of one table.
        pooling: ids of one sample that are looked up in it, on average.
        pooled: whether a sample's rows are summed into one vector (a bag) or kept (a sequence).
    """

    name: str
    rows: int
    dim: int
    pooling: float = 1.0
    pooled: bool = True
    count: int = 1

    def __post_init__(self) -> None:
        for key in ("rows", "dim", "count"):
            require(getattr(self, key) >= 1, f"table {self.name!r}: {key} must be >= 1, got {getattr(self, key)!r}")
        require(self.pooling >= 0, f"table {self.name!r}: pooling must be >= 0, got {self.pooling!r}")

    @property
    def vectors(self) -> float:
        """Embedding vectors of one sample that leave the table."""
        return min(1.0, self.pooling) if self.pooled else self.pooling


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model as the planner sees it.

    Attributes:
        layers: in the order of the forward pass.
        tables: the embedding tables.
        table_bytes: bytes of one table element.
        moment_bytes: bytes of optimizer state of one table row (4: row-wise AdaGrad; 0: SGD).
        state_bytes: bytes that stay for one dense parameter: float32 master, gradient and two Adam moments are 16.
        gather_bytes, reduce_bytes: bytes of a dense parameter in an all-gather, of its gradient in a reduce-scatter.
        input_bytes: of one sample's batch on the device.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    tables: tuple[TableSpec, ...] = ()
    table_bytes: int = 4
    moment_bytes: int = 4
    state_bytes: int = 16
    gather_bytes: int = 2
    reduce_bytes: int = 4
    input_bytes: float = 0.0

    def __post_init__(self) -> None:
        require(bool(self.layers), f"model {self.name!r} has no layers")

    def gather_bytes_of(self, unit: LayerSpec) -> float:
        """Bytes of one of the unit's parameters in an all-gather."""
        return unit.gather_bytes or self.gather_bytes

    @cached_property
    def units(self) -> tuple[LayerSpec, ...]:
        """The layers, each as often as it occurs."""
        return tuple(layer for layer in self.layers for _ in range(layer.count))

    @cached_property
    def dense_params(self) -> int:
        """Dense parameters without experts."""
        return sum(layer.params * layer.count for layer in self.layers)

    @cached_property
    def expert_params(self) -> int:
        """Parameters of all experts."""
        return sum(layer.experts * layer.expert_params * layer.count for layer in self.layers)

    @cached_property
    def table_params(self) -> int:
        """Elements of all tables."""
        return sum(table.rows * table.dim * table.count for table in self.tables)

    @cached_property
    def flops(self) -> float:
        """Useful forward FLOPs of one sample."""
        return sum((layer.flops + layer.experts * layer.expert_flops) * layer.count for layer in self.layers)

    @classmethod
    def from_toml(cls, path: str | Path) -> ModelSpec:
        """Read keys of this class, `[[layers]]` and `[[tables]]`.

        Raises:
            ValueError: a key that is missing, unknown or out of range, naming the file.
        """
        with open(path, "rb") as file:
            data: dict[str, Any] = tomllib.load(file)
        try:
            layers = tuple(made(LayerSpec, layer) for layer in data.pop("layers", ()))
            tables = tuple(made(TableSpec, table) for table in data.pop("tables", ()))
            return made(cls, {"layers": layers, "tables": tables, **data})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a model: {error}") from error
