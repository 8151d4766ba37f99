"""Jagged batches: what crosses the wall to the model. Plain tensors and offsets, nothing padded.

Legend: B samples, T events of all histories, N sparse values, F dense features, K tasks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]
_Part = TypeVar("_Part", "JaggedSequence", "JaggedIds", "JaggedBatch")


@dataclass(frozen=True, kw_only=True)
class JaggedIds:
    """Ids of B samples, any number each; those of sample b are values[offsets[b]:offsets[b + 1]]."""

    values: Tensor  # [N] int64
    offsets: Tensor  # [B + 1] int64

    def _map(self, f: Map) -> JaggedIds:
        return _mapped(self, f)

    def select(self, index: Tensor) -> JaggedIds:
        """The samples of `index` [b] int64, in its order, repeats allowed."""
        positions, offsets, _ = _gather(self.offsets, index)
        return JaggedIds(values=self.values[positions], offsets=offsets)

    def slice(self, a: int, b: int) -> JaggedIds:
        """The samples a to b, as views."""
        offsets = self.offsets[a : b + 1]
        return JaggedIds(values=self.values[int(offsets[0]) : int(offsets[-1])], offsets=offsets - offsets[0])

    @staticmethod
    def concat(parts: Sequence[JaggedIds]) -> JaggedIds:
        """The samples of all parts, in order."""
        return JaggedIds(
            values=torch.cat([p.values for p in parts]), offsets=_concat_offsets([p.offsets for p in parts])
        )


@dataclass(frozen=True, kw_only=True)
class JaggedSequence:
    """The histories of B samples from one source, end to end; the events of sample b are offsets[b]:offsets[b + 1]."""

    ids: dict[str, Tensor]  # name -> [T] int64
    floats: dict[str, Tensor]  # name -> [T, k] float32
    time: Tensor  # [T] int64 seconds, ascending inside a sample
    offsets: Tensor  # [B + 1] int64
    max_len: int  # of the longest history, 0 where all are empty
    # "ids" columns: any number of ids for each of the T events
    lists: dict[str, JaggedIds] = field(default_factory=dict)

    def _map(self, f: Map) -> JaggedSequence:
        return _mapped(self, f)

    def select(self, index: Tensor) -> JaggedSequence:
        """The samples of `index` [b] int64, in its order, repeats allowed."""
        events, offsets, max_len = _gather(self.offsets, index)
        return JaggedSequence(
            ids={k: v[events] for k, v in self.ids.items()},
            floats={k: v[events] for k, v in self.floats.items()},
            time=self.time[events],
            offsets=offsets,
            max_len=max_len,
            lists={k: v.select(events) for k, v in self.lists.items()},
        )

    def slice(self, a: int, b: int) -> JaggedSequence:
        """The samples a to b, as views."""
        first, last = int(self.offsets[a]), int(self.offsets[b])
        offsets = self.offsets[a : b + 1]
        return JaggedSequence(
            ids={k: v[first:last] for k, v in self.ids.items()},
            floats={k: v[first:last] for k, v in self.floats.items()},
            time=self.time[first:last],
            offsets=offsets - offsets[0],
            max_len=int(offsets.diff().max()) if b > a else 0,
            lists={k: v.slice(first, last) for k, v in self.lists.items()},
        )

    @staticmethod
    def concat(parts: Sequence[JaggedSequence]) -> JaggedSequence:
        """The samples of all parts, in order."""
        return JaggedSequence(
            ids={k: torch.cat([p.ids[k] for p in parts]) for k in parts[0].ids},
            floats={k: torch.cat([p.floats[k] for p in parts]) for k in parts[0].floats},
            time=torch.cat([p.time for p in parts]),
            offsets=_concat_offsets([p.offsets for p in parts]),
            max_len=max(p.max_len for p in parts),
            lists={k: JaggedIds.concat([p.lists[k] for p in parts]) for k in parts[0].lists},
        )


@dataclass(frozen=True, kw_only=True)
class JaggedBatch:
    """B samples: histories by source, sparse ids, dense rows, labels. Weight 0 and sample id -1 mark padding.

    Where `requests` is there, samples of one request (the same user and time) share a history: the sequences hold R of
    them, R <= B, and that of sample b is number requests[b]. `expanded()` gives each sample its own again.
    """

    sequences: dict[str, JaggedSequence]
    sparse: dict[str, JaggedIds]
    dense: Tensor  # [B, F] float32
    time: Tensor  # [B] int64 seconds: when the request was made
    labels: Tensor  # [B, K] float32
    label_mask: Tensor  # [B, K] bool
    weights: Tensor  # [B] float32
    sample_ids: Tensor  # [B] int64: the row in the log, -1 for padding
    groups: Tensor  # [B] int64: the user
    requests: Tensor | None = None  # [B] int64 in [0, R)

    @property
    def batch_size(self) -> int:
        """B."""
        return self.sample_ids.shape[0]

    def __len__(self) -> int:
        return self.batch_size

    def _map(self, f: Map) -> JaggedBatch:
        return _mapped(self, f)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> JaggedBatch:
        """The batch on `device`."""
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> JaggedBatch:
        """The batch in page-locked memory, from where `to(device, non_blocking=True)` overlaps with compute."""
        return self._map(lambda t: t.pin_memory())

    def select(self, index: Tensor | Sequence[int]) -> JaggedBatch:
        """The samples of `index` [b], in its order, repeats allowed. Raises IndexError for one outside [0, B)."""
        index = torch.as_tensor(index, dtype=torch.int64, device=self.sample_ids.device)
        if index.numel() and (int(index.min()) < 0 or int(index.max()) >= self.batch_size):
            raise IndexError(f"samples {int(index.min())} to {int(index.max())} of a batch of {self.batch_size}")
        histories, requests = index, None
        if self.requests is not None:
            histories, requests = torch.unique(self.requests[index], return_inverse=True)
        return JaggedBatch(
            sequences={k: v.select(histories) for k, v in self.sequences.items()},
            sparse={k: v.select(index) for k, v in self.sparse.items()},
            requests=requests,
            **{name: getattr(self, name)[index] for name in _PER_SAMPLE},
        )

    def slice(self, a: int, b: int) -> JaggedBatch:
        """The samples a to b (0 <= a <= b <= B), sharing memory with this batch (not the histories of `requests`)."""
        if not 0 <= a <= b <= self.batch_size:
            raise IndexError(f"samples {a}:{b} of a batch of {self.batch_size}")
        if self.requests is not None:
            return self.select(torch.arange(a, b))
        return JaggedBatch(
            sequences={k: v.slice(a, b) for k, v in self.sequences.items()},
            sparse={k: v.slice(a, b) for k, v in self.sparse.items()},
            **{name: getattr(self, name)[a:b] for name in _PER_SAMPLE},
        )

    def expanded(self) -> JaggedBatch:
        """The same batch with a history for each sample, and no `requests`."""
        if self.requests is None:
            return self
        histories = {k: v.select(self.requests) for k, v in self.sequences.items()}
        return replace(self, sequences=histories, requests=None)

    @property
    def sharing(self) -> float:
        """Samples per history, B / R: 1 where nothing is shared."""
        if self.requests is None or not self.sequences:
            return 1.0
        return self.batch_size / max(1, next(iter(self.sequences.values())).offsets.shape[0] - 1)

    @staticmethod
    def concat(batches: Sequence[JaggedBatch]) -> JaggedBatch:
        """The samples of all batches, in order. Raises ValueError for none, or for batches of different features."""
        if not batches:
            raise ValueError("concat needs at least one batch")
        first = batches[0]
        for other in batches[1:]:
            for what in ("sequences", "sparse"):
                if getattr(other, what).keys() != getattr(first, what).keys():
                    raise ValueError(
                        f"batches differ in {what}: {list(getattr(first, what))} and {list(getattr(other, what))}"
                    )
        if len({b.requests is None for b in batches}) > 1:
            batches = [b.expanded() for b in batches]
        return JaggedBatch(
            sequences={k: JaggedSequence.concat([b.sequences[k] for b in batches]) for k in first.sequences},
            sparse={k: JaggedIds.concat([b.sparse[k] for b in batches]) for k in first.sparse},
            requests=_concat_requests(batches),
            **{name: torch.cat([getattr(b, name) for b in batches]) for name in _PER_SAMPLE},
        )


def _concat_requests(batches: Sequence[JaggedBatch]) -> Tensor | None:
    base, parts = 0, []
    for batch in batches:
        if batch.requests is None:
            return None
        parts.append(batch.requests + base)
        base += next(iter(batch.sequences.values())).offsets.shape[0] - 1
    return torch.cat(parts)


_PER_SAMPLE = ("dense", "time", "labels", "label_mask", "weights", "sample_ids", "groups")


def _mapped(part: _Part, f: Map) -> _Part:
    def apply(value: Any) -> Any:
        if isinstance(value, Tensor):
            return f(value)
        if isinstance(value, dict):
            return {k: apply(v) for k, v in value.items()}
        return value._map(f) if hasattr(value, "_map") else value

    return type(part)(**{x.name: apply(getattr(part, x.name)) for x in fields(part)})


def _gather(offsets: Tensor, index: Tensor) -> tuple[Tensor, Tensor, int]:
    """Positions of the selected samples' values, their new offsets, and the longest."""
    lengths = offsets.diff()[index]
    new = torch.zeros(index.numel() + 1, dtype=torch.int64, device=offsets.device)
    torch.cumsum(lengths, 0, out=new[1:])
    total = int(new[-1])
    shift = torch.repeat_interleave(offsets[:-1][index] - new[:-1], lengths, output_size=total)
    positions = torch.arange(total, device=offsets.device) + shift
    return positions, new, int(lengths.max()) if index.numel() else 0


def _concat_offsets(parts: list[Tensor]) -> Tensor:
    ends = itertools.accumulate((int(p[-1]) for p in parts), initial=0)
    return torch.cat([parts[0][:1], *(p[1:] + base for p, base in zip(parts, ends, strict=False))])
