"""A small random batch that satisfies the Protocols of :mod:`gem_model.batch`, for tests and examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from gem_model.config import ModelInputs, Source, Table


@dataclass(frozen=True, kw_only=True)
class RandomIds:
    """Satisfies IdsLike."""

    values: Tensor
    offsets: Tensor
    weights: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class RandomSequence:
    """Satisfies SequenceLike."""

    ids: dict[str, Tensor]
    floats: dict[str, Tensor]
    time: Tensor
    offsets: Tensor
    max_len: int


@dataclass(frozen=True, kw_only=True)
class RandomBatch:
    """Satisfies BatchLike."""

    sequences: dict[str, RandomSequence]
    sparse: dict[str, RandomIds]
    dense: Tensor
    time: Tensor
    labels: Tensor
    label_mask: Tensor
    weights: Tensor

    def to(self, device: torch.device | str) -> RandomBatch:
        """The same batch on another device."""

        def move(value: object) -> object:
            if isinstance(value, Tensor):
                return value.to(device)
            if isinstance(value, dict):
                return {k: move(v) for k, v in value.items()}
            if isinstance(value, (RandomIds, RandomSequence)):
                return type(value)(**{f.name: move(getattr(value, f.name)) for f in fields(value)})  # type: ignore[arg-type]
            return value

        return type(self)(**{f.name: move(getattr(self, f.name)) for f in fields(self)})  # type: ignore[arg-type]

    def select(self, index: Sequence[int]) -> RandomBatch:
        """The samples ``index``, in that order."""
        rows = torch.as_tensor(index, dtype=torch.int64)
        sequences = {}
        for name, s in self.sequences.items():
            events, offsets = _events(s.offsets, rows)
            sequences[name] = RandomSequence(
                ids={c: v[events] for c, v in s.ids.items()},
                floats={c: v[events] for c, v in s.floats.items()},
                time=s.time[events],
                offsets=offsets,
                max_len=s.max_len,
            )
        sparse = {}
        for name, ids in self.sparse.items():
            places, offsets = _events(ids.offsets, rows)
            weights = None if ids.weights is None else ids.weights[places]
            sparse[name] = RandomIds(values=ids.values[places], offsets=offsets, weights=weights)
        return RandomBatch(
            sequences=sequences,
            sparse=sparse,
            dense=self.dense[rows],
            time=self.time[rows],
            labels=self.labels[rows],
            label_mask=self.label_mask[rows],
            weights=self.weights[rows],
        )


def example_inputs(*, dim: int = 8, dense: int = 5, tasks: tuple[str, ...] = ("click", "buy")) -> ModelInputs:
    """Two histories that share the item table with the candidate, a multi-valued and two single-valued features."""
    return ModelInputs(
        tables=(
            Table(name="item", rows=50, dim=dim),
            Table(name="rating", rows=6, dim=dim),
            Table(name="genre", rows=9, dim=dim),
            Table(name="country", rows=7, dim=dim),
        ),
        sources=(
            Source(name="ratings", ids=(("item", "item"), ("rating", "rating")), floats=(("vector", 3),), max_len=12),
            Source(name="views", ids=(("item", "item"), ("genre", "genre")), max_len=6),
        ),
        sparse=(("item", "item"), ("genres", "genre"), ("country", "country")),
        dense=dense,
        tasks=tasks,
    )


def random_batch(
    inputs: ModelInputs,
    batch: int,
    *,
    seed: int = 0,
    lengths: Mapping[str, Sequence[int]] | None = None,
    max_len: int | None = None,
    single_valued: bool = False,
) -> RandomBatch:
    """A batch of random samples.

    Args:
        inputs: what the batch has to hold.
        batch: B.
        seed: of everything.
        lengths: events of each sample by source; drawn from 0 to the source's max_len where it is missing.
        max_len: instead of the sources' max_len.
        single_valued: exactly one id for each sparse feature instead of zero to three.
    """
    g = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, high, shape, generator=g)

    def offsets_of(counts: Tensor) -> Tensor:
        return torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))

    request = integers(100_000, batch, low=50_000)
    sequences = {}
    for source in inputs.sources:
        longest = source.max_len if max_len is None else max_len
        given = (lengths or {}).get(source.name)
        counts = integers(longest + 1, batch) if given is None else torch.tensor(list(given), dtype=torch.int64)
        offsets, total = offsets_of(counts), int(counts.sum())
        ago = [integers(50_000, int(n), low=1).sort(descending=True).values for n in counts]
        sequences[source.name] = RandomSequence(
            ids={c: integers(inputs.table(t).rows, total) for c, t in source.ids},
            floats={c: torch.randn(total, size, generator=g) for c, size in source.floats},
            time=request.repeat_interleave(counts) - torch.cat([*ago, torch.zeros(0, dtype=torch.int64)]),
            offsets=offsets,
            max_len=max(longest, int(counts.max()) if batch else 0),
        )
    sparse = {}
    for feature, table in inputs.sparse:
        counts = torch.ones(batch, dtype=torch.int64) if single_valued else integers(4, batch)
        total = int(counts.sum())
        sparse[feature] = RandomIds(
            values=integers(inputs.table(table).rows, total),
            offsets=offsets_of(counts),
            weights=torch.rand(total, generator=g) + 0.5 if feature in inputs.weighted else None,
        )
    tasks = len(inputs.tasks)
    return RandomBatch(
        sequences=sequences,
        sparse=sparse,
        dense=torch.randn(batch, inputs.dense, generator=g),
        time=request,
        labels=integers(2, batch, tasks).float(),
        label_mask=torch.rand(batch, tasks, generator=g) < 0.8,
        weights=torch.rand(batch, generator=g) + 0.5,
    )


def _events(offsets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Where the events of the samples ``rows`` lie, and their new offsets."""
    counts = offsets.diff()[rows]
    new = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    within = torch.arange(int(counts.sum())) - new[:-1].repeat_interleave(counts)
    return offsets[:-1][rows].repeat_interleave(counts) + within, new


class Repeated:
    """A recorder (:class:`gem_model.recorder.Recorder`) that launches every operator again, on any device: quicker than
    :class:`gem_model.testing_graphs.CpuGraphs`, and knows nothing of memory.
    """

    def __call__(self, run: Callable[[], list[Tensor]], name: str) -> tuple[list[Tensor], Callable[[], None]]:
        """What `run` makes, and what makes it again in the same place."""
        fixed = [t.detach().clone() for t in run()]

        def again() -> None:
            for place, made in zip(fixed, run(), strict=True):
                place.copy_(made.detach())

        return fixed, again

    def forget(self) -> None:
        """There is nothing to let go of."""
