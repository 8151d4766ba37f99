"""Ids to rows, events to tokens, everything else to tokens.

`B` samples, `T` events of one source, `N` ids of one feature, `D` dim of the tables, `d` width, `F` dense features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from gem_kernels.nn import LayerNorm
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from gem_model.batch import BatchLike, IdsLike, SequenceLike
from gem_model.buckets import BucketLinear
from gem_model.config import TIME_GAPS, ModelInputs, Source
from gem_model.names import key
from gem_model.projection import linear_of
from gem_model.slots import Slots

V = TypeVar("V")


class Widths(Protocol):
    """What the encoders ask of a configuration."""

    @property
    def width(self) -> int:
        """d, the size of every token."""

    @property
    def n_dense(self) -> int:
        """Tokens that the dense features become."""


def pick(mapping: Mapping[str, V], key: str, what: str) -> V:
    """``mapping[key]``, or a ValueError that says what the batch lacks and what it has."""
    try:
        return mapping[key]
    except KeyError:
        raise ValueError(f"the batch has no {what} {key!r}; it has {sorted(mapping)}") from None


def keyed_jagged(columns: Mapping[str, tuple[Tensor, Tensor]]) -> KeyedJaggedTensor:
    """TorchRec's batch of ids from {key: (values [N] int64, offsets [B + 1])}.

    The number of ids of each key is known on the host from the shapes, and given, so that nothing waits for the device.
    """
    values = [v for v, _ in columns.values()]
    lengths = [o.diff() for _, o in columns.values()]
    return KeyedJaggedTensor(
        keys=list(columns),
        values=torch.cat(values),
        lengths=torch.cat(lengths),
        stride=lengths[0].numel(),
        length_per_key=[v.numel() for v in values],
    )


def event_key(source: str, column: str) -> str:
    """The key of an event's column: the only ones with a dot."""
    return f"{key(source)}.{key(column)}"


def filled(offsets: Tensor, batch: int) -> Tensor:
    """Offsets of R <= B histories as those of B, the last ones empty: TorchRec's keys have one number of samples."""
    missing = batch + 1 - offsets.shape[0]
    return offsets if missing <= 0 else torch.cat((offsets, offsets[-1:].expand(missing)))


def sum_pool(rows: Tensor, offsets: Tensor) -> Tensor:
    """[N, D] -> [B, D]: the sum of each sample's rows, zero where it has none."""
    return torch.segment_reduce(rows, "sum", offsets=offsets, axis=0, unsafe=True)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What the tables answered: ``events`` (source, column) -> [T, D], ``pooled`` sparse feature -> [B, D]."""

    events: dict[tuple[str, str], Tensor]
    pooled: dict[str, Tensor]


class Tables(nn.Module):
    """All embedding tables, in the two TorchRec collections that its DistributedModelParallel can shard.

    A table that a history or a weighted feature uses lives in ``shared`` (EmbeddingCollection: one row an id), together
    with the sparse features that look into it, such as the candidate's own id. Every other table lives in ``bags``
    (EmbeddingBagCollection: summed). A sharded collection answers in its own order, so everything is taken by key. Rows
    start uniform, with standard deviation ``inputs.table_std``.
    """

    def __init__(self, inputs: ModelInputs, *, device: torch.device | None = None, shares: bool = False) -> None:
        super().__init__()
        self.shares = shares  # whether the model knows of samples that share histories (gem_model.sharing)
        shared = inputs.row_tables
        users: dict[str, list[str]] = {table.name: [] for table in inputs.tables}
        for source in inputs.sources:
            for column, table in source.ids:
                users[table].append(event_key(source.name, column))
        for feature, table in inputs.sparse:
            users[table].append(key(feature))

        bound = math.sqrt(3.0) * inputs.table_std

        def configs(kind: Any, names: list[str]) -> list[Any]:
            return [
                kind(
                    name=key(name),
                    embedding_dim=inputs.table_dim,
                    num_embeddings=inputs.table(name).rows,
                    feature_names=users[name],
                    weight_init_min=-bound,
                    weight_init_max=bound,
                )
                for name in names
            ]

        in_histories = [t.name for t in inputs.tables if t.name in shared]
        others = [t.name for t in inputs.tables if t.name not in shared]
        self.shared = EmbeddingCollection(configs(EmbeddingConfig, in_histories), device) if in_histories else None
        self.bags = EmbeddingBagCollection(configs(EmbeddingBagConfig, others), device=device) if others else None
        managed = [t for t in inputs.tables if t.managed]
        self.slots = Slots(managed, users, device=device or torch.device("cpu")) if managed else None
        self.bound = bound
        self.event_columns = [(s.name, column) for s in inputs.sources for column, _ in s.ids]
        self.shared_features = [f for f, table in inputs.sparse if table in shared]
        self.bag_features = [f for f, table in inputs.sparse if table not in shared]
        self.weighted = frozenset(inputs.weighted)

    def forward(self, batch: BatchLike) -> Rows:
        """Look up every id of the batch; ValueError where samples share histories and the model does not know that."""
        if not self.shares and getattr(batch, "requests", None) is not None:
            raise ValueError("this model takes a history for each sample: give it the batch's expanded()")
        events: dict[tuple[str, str], Tensor] = {}
        pooled: dict[str, Tensor] = {}
        ids = {f: pick(batch.sparse, f, "sparse feature") for f in (*self.shared_features, *self.bag_features)}
        # Both lookups start before either answer is read: sharded ones are asynchronous.
        found = summed = None
        columns: dict[str, tuple[Tensor, Tensor]] = {}
        if self.shared is not None:
            for source, column in self.event_columns:
                sequence = pick(batch.sequences, source, "sequence")
                columns[event_key(source, column)] = (
                    pick(sequence.ids, column, f"id column in sequence {source!r}:"),
                    filled(sequence.offsets, batch.time.shape[0]),
                )
            columns |= {key(f): (ids[f].values, ids[f].offsets) for f in self.shared_features}
        bags = {key(f): (ids[f].values, ids[f].offsets) for f in self.bag_features}
        if self.slots is not None:
            both = self.slots({**columns, **bags})
            columns, bags = ({k: both[k] for k in part} for part in (columns, bags))
            self._refresh(self.slots.evicted())
        if self.shared is not None:
            found = self.shared(keyed_jagged(columns))
        if self.bags is not None:
            summed = self.bags(keyed_jagged(bags))
        if found is not None:
            events = {(s, c): found[event_key(s, c)].values() for s, c in self.event_columns}
            for f in self.shared_features:
                each = found[key(f)].values()
                each = each * self._weights(f, ids[f]) if f in self.weighted else each
                pooled[f] = sum_pool(each, ids[f].offsets)
        if summed is not None:
            pooled |= {f: summed[key(f)] for f in self.bag_features}
        return Rows(events=events, pooled=pooled)

    @staticmethod
    def _weights(feature: str, ids: IdsLike) -> Tensor:
        """[N, 1] float32."""
        weights = getattr(ids, "weights", None)
        if weights is None or weights.shape != ids.values.shape:
            got = "none" if weights is None else f"shape {list(weights.shape)}"
            raise ValueError(f"feature {feature!r} is weighted: expected a weight for each of its ids, got {got}")
        return weights[:, None]  # type: ignore[no-any-return]

    @torch.no_grad()
    def _refresh(self, evicted: Mapping[str, Tensor]) -> None:
        """Draw the rows anew that an id has lost and another got; their optimizer goes on with what it has."""
        if not evicted:
            return
        weights = {name.split(".")[-2]: t for name, t in self.state_dict().items() if name.endswith(".weight")}
        for table, rows in evicted.items():
            weight = weights[key(table)]
            if hasattr(weight, "local_shards"):
                weight = weight.local_shards()[0].tensor
            weight[rows] = torch.empty_like(weight[rows]).uniform_(-self.bound, self.bound)


class EventEncoder(nn.Module):
    """Events of one source to tokens: e = Norm(W [id rows || floats || time gaps] + b), in R^{T x d}.

    The id columns include those that describe the outcome (the action). The candidate becomes a token of the same
    space: the rows of the columns that it shares with the events, zeros for what is not known of it yet, and a learned
    mark m::

        c = Norm(W [rows || 0 || 0] + b + m).
    """

    def __init__(self, source: Source, config: Widths, inputs: ModelInputs) -> None:
        super().__init__()
        self.source = source.name
        self.id_columns = [column for column, _ in source.ids]
        self.float_columns = [column for column, _ in source.floats]
        self.candidate_features = dict(inputs.candidate_columns(source))
        self.candidate_floats = inputs.candidate_floats(source)
        self.float_sizes = dict(source.floats)
        width_in = source.event_width(inputs.table_dim)
        self.linear = nn.Linear(width_in, config.width)
        self.norm = LayerNorm(config.width)  # [T, d]: torch's would make float32 of it under autocast
        self.mark = nn.Parameter(torch.zeros(config.width)) if self.candidate_features else None

    def forward(self, rows: Rows, sequence: SequenceLike, age: Tensor, gap: Tensor) -> Tensor:
        """Tokens [T, d]; ``age`` and ``gap`` [T] are log(1 + dt / time_scale) to request and previous event."""
        columns = [rows.events[self.source, column] for column in self.id_columns]
        columns += [pick(sequence.floats, c, f"float column in sequence {self.source!r}:") for c in self.float_columns]
        columns += [(0.1 * torch.stack((age, gap), dim=1))]  # about [0, 2] for gaps from nothing to centuries
        return self.norm(linear_of(self.linear, columns))  # type: ignore[no-any-return]

    def candidate(self, rows: Rows, dense: Tensor) -> Tensor | None:
        """The candidate as an event [B, d]; None where it shares no id column with this source's events.

        ``dense`` [B, F] is the batch's, not standardised: float columns are as they are in the events.
        """
        if self.mark is None:
            return None
        known = {column: rows.pooled[feature] for column, feature in self.candidate_features.items()}
        some = next(iter(known.values()))
        columns = [known.get(column, torch.zeros_like(some)) for column in self.id_columns]
        for column, size in self.float_sizes.items():
            start = self.candidate_floats.get(column, (None, 0))[0]
            columns.append(some.new_zeros(some.shape[0], size) if start is None else dense[:, start : start + size])
        columns.append(some.new_zeros(some.shape[0], TIME_GAPS))
        return self.norm(self.linear(torch.cat(columns, dim=1)) + self.mark)  # type: ignore[no-any-return]


class FeatureEncoder(nn.Module):
    """Non-sequence features to tokens X in R^{B x N x d}: a projection for each sparse feature, an MLP of the dense.

    With ``buckets`` the MLP begins with the vectors of the dense features' buckets in place of a linear map.
    """

    def __init__(self, config: Widths, inputs: ModelInputs, *, buckets: int = 0) -> None:
        super().__init__()
        self.features = [feature for feature, _ in inputs.sparse]
        self.width, self.dense_tokens = config.width, config.n_dense if inputs.dense else 0
        self.n_tokens = len(self.features) + self.dense_tokens
        if self.features:
            self.projections = nn.Parameter(torch.empty(len(self.features), inputs.table_dim, config.width))
        if inputs.dense:
            hidden = config.n_dense * config.width
            first = BucketLinear(inputs.dense, buckets, hidden) if buckets else nn.Linear(inputs.dense, hidden)
            self.dense = nn.Sequential(first, nn.GELU(), nn.Linear(hidden, hidden))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, rows: Rows, dense: Tensor | None) -> Tensor:
        """Tokens [B, N, d]; ``dense`` [B, F] is standardised already."""
        tokens = []
        if self.features:
            stacked = torch.stack([rows.pooled[f] for f in self.features])  # [F, B, D]
            tokens.append(torch.bmm(stacked, self.projections).transpose(0, 1))
        if dense is not None:
            tokens.append(self.dense(dense).unflatten(1, (self.dense_tokens, self.width)))
        return self.norm(torch.cat(tokens, dim=1))
