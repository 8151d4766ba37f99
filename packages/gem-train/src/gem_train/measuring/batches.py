"""Batches of random events with lengths of one's choice: for measuring speed where the data has other lengths."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from gem_data import JaggedBatch
from gem_data.batches.batch import JaggedIds, JaggedSequence
from gem_model import ModelInputs
from torch import Tensor

REQUEST = 1_000_000_000  # seconds: when every request is made


def half_filled(inputs: ModelInputs, batch_size: int, longest: Mapping[str, int], *, seed: int = 0) -> JaggedBatch:
    """Random ids and floats; each sample's history of a source has a length uniform in 1..longest[source].

    A source that is not named keeps its `max_len`. Events are a minute apart. Raises ValueError for a name that is no
    source, or a length below 1.
    """
    names = [s.name for s in inputs.sources]
    for name, length in longest.items():
        if name not in names:
            raise ValueError(f"{name!r} is no source of the data; there are {', '.join(names) or 'none'}")
        if length < 1:
            raise ValueError(f"the length of {name!r} is {length}; expected 1 or more")
    g = torch.Generator().manual_seed(seed)

    def ids(table: str, count: int) -> Tensor:
        return torch.randint(inputs.table(table).rows, (count,), generator=g)

    sequences = {}
    for source in inputs.sources:
        lengths = torch.randint(1, longest.get(source.name, source.max_len) + 1, (batch_size,), generator=g)
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        total = int(offsets[-1])
        sample = torch.repeat_interleave(torch.arange(batch_size), lengths)
        sequences[source.name] = JaggedSequence(
            ids={column: ids(table, total) for column, table in source.ids},
            floats={column: torch.randn(total, size, generator=g) for column, size in source.floats},
            time=REQUEST - 60 * (offsets[sample + 1] - torch.arange(total)),
            offsets=offsets,
            max_len=int(lengths.max()),
        )
    one_each, tasks = torch.arange(batch_size + 1), len(inputs.tasks)
    return JaggedBatch(
        sequences=sequences,
        sparse={f: JaggedIds(values=ids(table, batch_size), offsets=one_each) for f, table in inputs.sparse},
        dense=torch.randn(batch_size, inputs.dense, generator=g),
        time=torch.full((batch_size,), REQUEST),
        labels=torch.randint(2, (batch_size, tasks), generator=g).float(),
        label_mask=torch.ones(batch_size, tasks, dtype=torch.bool),
        weights=torch.ones(batch_size),
        sample_ids=torch.arange(batch_size),
        groups=torch.arange(batch_size),
    )
