"""Scores with an exported model. This file needs torch, numpy and pyarrow, and for `Scorer` safetensors and gem-model.

    scorer = Scorer.open("exported")           # the folder that `gem-train export` wrote
    probabilities = scorer(batch)              # [B, K] float32, the tasks in the order of `scorer.tasks`

    scorer = ProgramScorer.open("exported")    # the same by the program of torch.export, without gem-model

A batch is a `gem_data.JaggedBatch`, or anything with the attributes that `gem_model.batch` lists. Embedding rows are
float32 and the whole model computes in float32, on the CPU unless another device is named.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

if TYPE_CHECKING:
    from gem_model import GEM, GemConfig, ModelInputs

FORMAT = 2


class Scorer:
    """A model in evaluation mode, without gradients."""

    def __init__(self, model: GEM, manifest: dict[str, Any]) -> None:
        self.model = model.eval()
        self.manifest = manifest
        self.tasks: tuple[str, ...] = tuple(manifest["inputs"]["tasks"])

    @classmethod
    def open(cls, folder: str | Path, *, device: str = "cpu") -> Scorer:
        """Load an exported folder.

        Raises ValueError where its format is another one, a file is damaged, or a row or parameter is missing;
        FileNotFoundError where a file is.
        """
        from gem_model import GEM
        from safetensors.torch import load_file

        root, manifest = Path(folder), read_manifest(folder)
        dense = checked(root, manifest["dense"])
        model = GEM(model_config(manifest["model"]), model_inputs(manifest["inputs"]))
        state = load_file(dense)
        for name, table in manifest["tables"].items():
            state[f"{name}.weight"] = read_table(root / table["folder"], table["rows"], table["dim"])
        missing, unexpected = model.load_state_dict(state, strict=False)
        if missing or unexpected:
            raise ValueError(f"{root} is not this model: it lacks {missing} and has {unexpected} too many")
        return cls(model.to(device), manifest)

    @torch.no_grad()
    def logits(self, batch: Any) -> Tensor:
        """[B, K] float32."""
        return self.model(batch)

    def __call__(self, batch: Any) -> Tensor:
        """Probabilities [B, K] float32."""
        return self.logits(batch).sigmoid()


class ProgramScorer:
    """The dense part as a program of torch.export, the tables as plain tensors: torch, numpy and pyarrow alone."""

    def __init__(self, program: Any, tables: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        self.program, self.tables, self.manifest = program, tables, manifest
        self.tasks: tuple[str, ...] = tuple(manifest["inputs"]["tasks"])

    @classmethod
    def open(cls, folder: str | Path) -> ProgramScorer:
        """Load an exported folder. Raises as `Scorer.open`."""
        root, manifest = Path(folder), read_manifest(folder)
        program = torch.export.load(checked(root, manifest["program"])).module()
        tables = {
            name.rpartition(".")[2]: read_table(root / table["folder"], table["rows"], table["dim"])
            for name, table in manifest["tables"].items()
        }
        return cls(program, tables, manifest)

    @torch.no_grad()
    def logits(self, batch: Any) -> Tensor:
        """[B, K] float32. Raises ValueError for a history that is longer than the program was exported for."""
        inputs, flat = self.manifest["inputs"], {"dense": batch.dense, "time": batch.time}
        longest = self.manifest["program"]["max_len"]
        for source in inputs["sources"]:
            name, sequence = source["name"], batch.sequences[source["name"]]
            if sequence.max_len > longest:
                raise ValueError(f"a history of {name!r} has {sequence.max_len} events; expected at most {longest}")
            for column, table in source["ids"]:
                flat[f"ids.{name}.{column}"] = sequence.ids[column]
                flat[f"rows.{name}.{column}"] = self.tables[table][sequence.ids[column]]
            flat |= {f"floats.{name}.{column}": sequence.floats[column] for column, _ in source["floats"]}
            flat |= {f"time.{name}": sequence.time, f"offsets.{name}": sequence.offsets}
        for feature, table in inputs["sparse"]:
            ids = batch.sparse[feature]
            rows = self.tables[table][ids.values]
            flat[f"pooled.{feature}"] = torch.segment_reduce(rows, "sum", offsets=ids.offsets, axis=0, unsafe=True)
        names = self.manifest["program"]["inputs"]
        found: Tensor = self.program(*(extended(name, flat[name]) for name in names))
        return found[: batch.time.shape[0]]

    def __call__(self, batch: Any) -> Tensor:
        """Probabilities [B, K] float32."""
        return self.logits(batch).sigmoid()


def extended(name: str, value: Tensor) -> Tensor:
    """An input of the program with two more samples, all zeros, with one event of each source.

    A program knows sizes of two and more alone: batches of one sample, and without an event, become such.
    """
    if name.startswith("offsets."):
        return torch.cat([value, value[-1:] + 1, value[-1:] + 2])
    return torch.cat([value, value.new_zeros(2, *value.shape[1:])])


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """manifest.json. Raises ValueError for another format."""
    manifest: dict[str, Any] = json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{folder} has export format {manifest.get('format')!r}; this scorer reads {FORMAT}")
    return manifest


def checked(root: Path, entry: dict[str, Any]) -> Path:
    """The file of a manifest's entry. Raises ValueError where its SHA-256 is another."""
    path = root / entry["file"]
    if hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
        raise ValueError(f"{path} is damaged: its SHA-256 is not the manifest's")
    return path


def model_config(tree: dict[str, Any]) -> GemConfig:
    """The model's shape from its JSON form."""
    from gem_model import GemConfig
    from gem_model.config import TowerConfig

    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in tree.items()}
    plain["towers"] = tuple(TowerConfig(**t) for t in tree["towers"])
    return GemConfig(**plain)


def model_inputs(tree: dict[str, Any]) -> ModelInputs:
    """The inputs from their JSON form."""
    from gem_model import ModelInputs, Source, Table

    sources = tuple(
        Source(
            name=s["name"],
            ids=tuple((c, t) for c, t in s["ids"]),
            floats=tuple((c, n) for c, n in s["floats"]),
            max_len=s["max_len"],
        )
        for s in tree["sources"]
    )
    return ModelInputs(
        tables=tuple(Table(**t) for t in tree["tables"]),
        tasks=tuple(tree["tasks"]),
        sources=sources,
        sparse=tuple((f, t) for f, t in tree["sparse"]),
        dense=tree["dense"],
        dense_columns=tuple((c, n) for c, n in tree.get("dense_columns", ())),
    )


def read_table(folder: Path, rows: int, dim: int) -> Tensor:
    """[rows, dim] float32 from the Parquet files of a folder: row, embedding and, for int8 and fp8 rows, scale.

    fp8 rows (E4M3) are kept as their bytes. Raises ValueError for a missing row.
    """
    values = torch.empty(rows, dim)
    seen = np.zeros(rows, bool)
    for path in sorted(folder.glob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches():
            at = batch.column("row").to_numpy()
            flat = torch.from_numpy(batch.column("embedding").flatten().to_numpy().copy()).view(len(at), dim)
            if flat.dtype == torch.uint8:
                flat = flat.view(torch.float8_e4m3fn)
            if "scale" in batch.schema.names:
                flat = flat.float() * torch.from_numpy(batch.column("scale").to_numpy().copy())[:, None]
            values[torch.from_numpy(at.copy())] = flat
            seen[at] = True
    if not seen.all():
        raise ValueError(f"{folder} lacks {int((~seen).sum())} of {rows} rows; row {int(np.argmin(seen))} is the first")
    return values
