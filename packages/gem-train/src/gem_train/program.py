"""The dense part of a model as one program of torch.export: from embedding rows to logits, with torch alone to run it.

Its inputs are tensors, in the order of `names`; T events of a source, B samples, D the tables' dim:

    rows.SOURCE.COLUMN        [T, D] float32, a row for each event's id
    pooled.FEATURE            [B, D] float32, the sum of a sample's rows
    ids.SOURCE.COLUMN         [T] int64
    floats.SOURCE.COLUMN      [T, k] float32
    time.SOURCE               [T] int64 seconds
    offsets.SOURCE            [B + 1] int64
    dense                     [B, F] float32
    time                      [B] int64 seconds

B and T are free. Attention is the reference implementation, over histories of at most `max_len` events.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gem_data import JaggedBatch
from gem_model import GEM, ModelInputs
from gem_model.embed import Rows
from torch import Tensor, nn


class Given(nn.Module):
    """In the tables' place: the rows are with the batch already."""

    def forward(self, batch: Any) -> Rows:
        """What the tables would answer."""
        rows: Rows = batch.rows
        return rows


class Dense(nn.Module):
    """`model` from rows to logits, on flat inputs. The model's tables are taken out of it."""

    def __init__(self, model: GEM, inputs: ModelInputs, max_len: int) -> None:
        super().__init__()
        self.model, self.inputs, self.max_len = model, inputs, max_len
        self.model.tables = Given()  # type: ignore[assignment]

    def forward(self, *tensors: Tensor) -> Tensor:
        """Logits [B, K]."""
        given = dict(zip(names(self.inputs), tensors, strict=True))
        sequences = {
            s.name: SimpleNamespace(
                ids={c: given[f"ids.{s.name}.{c}"] for c, _ in s.ids},
                floats={c: given[f"floats.{s.name}.{c}"] for c, _ in s.floats},
                time=given[f"time.{s.name}"],
                offsets=given[f"offsets.{s.name}"],
                max_len=self.max_len,
            )
            for s in self.inputs.sources
        }
        rows = Rows(
            events={(s.name, c): given[f"rows.{s.name}.{c}"] for s in self.inputs.sources for c, _ in s.ids},
            pooled={feature: given[f"pooled.{feature}"] for feature, _ in self.inputs.sparse},
        )
        batch = SimpleNamespace(rows=rows, sequences=sequences, sparse={}, dense=given["dense"], time=given["time"])
        logits: Tensor = self.model(batch)
        return logits


def names(inputs: ModelInputs) -> list[str]:
    """What the program takes, in its order."""
    found = [f"rows.{s.name}.{c}" for s in inputs.sources for c, _ in s.ids]
    found += [f"pooled.{feature}" for feature, _ in inputs.sparse]
    for s in inputs.sources:
        found += [f"ids.{s.name}.{c}" for c, _ in s.ids] + [f"floats.{s.name}.{c}" for c, _ in s.floats]
        found += [f"time.{s.name}", f"offsets.{s.name}"]
    return [*found, "dense", "time"]


def write(model: GEM, inputs: ModelInputs, batch: JaggedBatch, path: Path, *, max_len: int) -> dict[str, Any]:
    """Export the model in `path`, with `batch` as the example; the model's tables are gone afterwards.

    Returns the manifest's entry: the file, the names of the inputs and max_len.
    """
    with torch.no_grad():
        rows = model.tables(batch)
    flat = {f"rows.{s}.{c}": t for (s, c), t in rows.events.items()}
    flat |= {f"pooled.{f}": t for f, t in rows.pooled.items()} | {"dense": batch.dense, "time": batch.time}
    for source, sequence in batch.sequences.items():
        flat |= {f"ids.{source}.{c}": t for c, t in sequence.ids.items()}
        flat |= {f"floats.{source}.{c}": t for c, t in sequence.floats.items()}
        flat |= {f"time.{source}": sequence.time, f"offsets.{source}": sequence.offsets}
    wanted = names(inputs)
    example = tuple(flat[name].clone() for name in wanted)  # of views, the program would look at the base as well
    free: Sequence[dict[int, Any]] = tuple({0: torch.export.Dim.AUTO} for _ in example)
    program = torch.export.export(Dense(model, inputs, max_len).eval(), example, dynamic_shapes=(free,), strict=False)
    torch.export.save(program, path)
    return {"file": path.name, "inputs": wanted, "max_len": max_len}
