"""Scores with an exported model. Needs torch, safetensors, pyarrow and gem-model; this file needs nothing else.

    scorer = Scorer.open("exported")           # the folder that `gem-train export` wrote
    probabilities = scorer(batch)              # [B, K] float32, the tasks in the order of `scorer.tasks`

A batch is a `gem_data.JaggedBatch`, or anything with the attributes that `gem_model.batch` lists. Embedding rows are
float32 and the whole model computes in float32, on the CPU unless another device is named.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from gem_model import GEM, GemConfig, ModelInputs, Source, Table
from gem_model.config import TowerConfig
from safetensors.torch import load_file
from torch import Tensor

FORMAT = 1


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
        root = Path(folder)
        manifest = json.loads((root / "manifest.json").read_text(encoding="utf-8"))
        if manifest.get("format") != FORMAT:
            raise ValueError(f"{root} has export format {manifest.get('format')!r}; this scorer reads {FORMAT}")
        dense = root / manifest["dense"]["file"]
        digest = hashlib.sha256(dense.read_bytes()).hexdigest()
        if digest != manifest["dense"]["sha256"]:
            raise ValueError(f"{dense} is damaged: its SHA-256 is not the manifest's")
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


def model_config(tree: dict[str, Any]) -> GemConfig:
    """The model's shape from its JSON form."""
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in tree.items()}
    plain["towers"] = tuple(TowerConfig(**t) for t in tree["towers"])
    return GemConfig(**plain)


def model_inputs(tree: dict[str, Any]) -> ModelInputs:
    """The inputs from their JSON form."""
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
    """[rows, dim] float32 from the Parquet files of a folder (row, embedding). Raises ValueError for a missing row."""
    values = torch.empty(rows, dim)
    seen = np.zeros(rows, bool)
    for path in sorted(folder.glob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches():
            at = batch.column("row").to_numpy()
            flat = batch.column("embedding").flatten().to_numpy()
            values[torch.from_numpy(at.copy())] = torch.from_numpy(flat.copy()).view(len(at), dim)
            seen[at] = True
    if not seen.all():
        raise ValueError(f"{folder} lacks {int((~seen).sum())} of {rows} rows; row {int(np.argmin(seen))} is the first")
    return values
