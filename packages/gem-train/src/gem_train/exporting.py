"""A trained model as files that need no gem-train: safetensors, Parquet, a manifest and a scorer.

manifest.json       what the model is, what it was trained on, and how near the scorer's scores came to the trainer's
dense.safetensors   dense parameters and statistics, float32
tables/NAME/        rows-FIRST-END.parquet: row int64, embedding fixed-size list of float32
scorer.py           loads all of it: `Scorer.open(folder)(batch)`
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from gem_data import JaggedBatch
from gem_parallel import export_tables
from torch import Tensor

from gem_train import scorer
from gem_train.data import Data
from gem_train.errors import UserError
from gem_train.run_dir import LIBRARIES, PACKAGES, RunDir, read_json, version, write_json
from gem_train.trainer import Trainer

CHECKED = 4  # batches of the test split that the scorer is tried on
# How far float32 logits of the scorer may lie from those of a float32 trainer; other precisions are only reported.
TOLERANCE = 1e-3


def export(trainer: Trainer, data: Data, which: str, out: Path) -> dict[str, Any]:
    """Write the trainer's weights (`which` says which they are) to the folder `out`; returns the manifest.

    The folder appears when the scorer has loaded it and scored as the trainer does. In a world of one.

    Raises UserError where the folder exists, RuntimeError where the scores differ.
    """
    if out.exists():
        raise UserError(f"{out} exists already; name another folder for the export")
    from safetensors.torch import save_file

    parts = trainer.parts
    partial = out.parent / f".writing-{out.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        rows = export_tables(parts.model, partial / "tables")
        save_file(dense_state(trainer), partial / "dense.safetensors")
        shutil.copyfile(str(scorer.__file__), partial / "scorer.py")
        manifest = {
            "format": scorer.FORMAT,
            "recipe": parts.config.recipe,
            "weights": which,
            "model": dataclasses.asdict(parts.model_config),
            "inputs": dataclasses.asdict(parts.inputs),
            "max_history": parts.config.data.max_history,
            "dense": {"file": "dense.safetensors", "sha256": _digest(partial / "dense.safetensors")},
            "tables": {n: {"folder": f"tables/{n}", "rows": r, "dim": parts.inputs.table_dim} for n, r in rows.items()},
            "trained": {"precision": _trained_precision(parts.run), "lowprec": parts.config.lowprec.recipe},
            "data": {k: v for k, v in data.manifest().items() if k != "notes"},
            "versions": {name: version(name) for name in (*PACKAGES, *LIBRARIES, "safetensors")},
        }
        write_json(partial / "manifest.json", manifest)
        manifest["checked"] = check(trainer, partial)
        write_json(partial / "manifest.json", manifest)
        os.rename(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def dense_state(trainer: Trainer) -> dict[str, Tensor]:
    """Everything but the tables by name, whole and on the CPU: parameters as float32, buffers as they are."""
    found = {}
    for name, value in trainer.model.state_dict()["model"].items():
        if not trainer.model.is_table(name):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            whole = whole.detach().cpu().contiguous()
            found[name] = (whole.float() if whole.is_floating_point() else whole).clone()
    return found


def check(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """Load the folder as its user will, and compare the scores on test samples.

    Raises RuntimeError where a float32 trainer and the scorer differ by more than TOLERANCE.
    """
    loaded = scorer.Scorer.open(folder)
    worst, samples = 0.0, 0
    trainer.model.eval()
    with torch.no_grad():
        for batch in itertools.islice(iter(trainer.parts.test), CHECKED):
            ours, theirs = trainer.forward(batch).float().cpu(), loaded.logits(_on_cpu(batch))
            real = batch.sample_ids.cpu() >= 0
            worst = max(worst, float((ours - theirs)[real].abs().max()))
            samples += int(real.sum())
    plain = trainer.parts.precision == "fp32" and not any(r.converted for r in trainer.parts.conversion.rows)
    if not worst < (TOLERANCE if plain else float("inf")):
        raise RuntimeError(f"the exported model's logits differ from the trainer's by {worst:.3g} on {samples} samples")
    return {"samples": samples, "largest_logit_difference": worst, "precision": trainer.parts.precision}


def _on_cpu(batch: JaggedBatch) -> JaggedBatch:
    return batch.to(torch.device("cpu"))


def _trained_precision(run: RunDir) -> str | None:
    return read_json(run.model_file)["precision"] if run.model_file.exists() else None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
