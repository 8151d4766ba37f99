"""A trained model as files that need no gem-train: safetensors, Parquet, a manifest and a scorer.

manifest.json       what the model is, what it was trained on, and how near the scorer's scores came to the trainer's
dense.safetensors   dense parameters and statistics, float32
dense.pt2           the dense part as a program of torch.export (program.py says what it takes)
tables/NAME/        rows-FIRST-END.parquet: row int64, embedding fixed-size list of float32; or, smaller, of int8, or
                    of uint8 (the bytes of float8 E4M3), with a scale float32 for each row: row = embedding x scale
scorer.py           loads all of it: `Scorer.open(folder)(batch)`, or `ProgramScorer` without gem-model
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
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
EXAMPLE = 8  # samples that the program is traced with
ROWS = {"float32": 0.0, "int8": 127.0, "fp8": 448.0}  # how rows may be kept, and the largest number of each


def export(trainer: Trainer, data: Data, which: str, out: Path, *, rows_as: str = "float32") -> dict[str, Any]:
    """Write the trainer's weights (`which` says which they are) to the folder `out`; returns the manifest.

    The folder appears when the scorers have loaded it and scored as the trainer does. In a world of one. `rows_as` is
    one of ROWS; of smaller rows the manifest says how far the scores move.

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
        if rows_as != "float32":
            for file in (partial / "tables").rglob("*.parquet"):
                shrink(file, rows_as)
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
            "rows_as": rows_as,
            "tables": {n: {"folder": f"tables/{n}", "rows": r, "dim": parts.inputs.table_dim} for n, r in rows.items()},
            "trained": {"precision": _trained_precision(parts.run), "lowprec": parts.config.lowprec.recipe},
            "data": {k: v for k, v in data.manifest().items() if k != "notes"},
            "versions": {name: version(name) for name in (*PACKAGES, *LIBRARIES, "safetensors")},
        }
        write_json(partial / "manifest.json", manifest)
        manifest["program"] = program(trainer, partial)
        write_json(partial / "manifest.json", manifest)
        manifest["checked"] = check(trainer, partial, exact=rows_as == "float32")
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


def program(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """Write dense.pt2 from what the folder holds so far; returns its entry of the manifest."""
    from gem_train.program import write

    parts, model = trainer.parts, scorer.Scorer.open(folder).model
    batch = _on_cpu(next(iter(parts.test)))
    batch = batch.select(list(range(min(EXAMPLE, batch.batch_size))))
    path = folder / "dense.pt2"
    entry = write(model, parts.inputs, batch, path, max_len=max((s.max_len for s in parts.inputs.sources), default=0))
    return {**entry, "sha256": _digest(path)}


def shrink(file: Path, rows_as: str) -> None:
    """Rewrite a table's file with rows r = q s, s = max |r| / largest, q rounded to int8 or float8 E4M3.

    Of a row of zeros, s is 1.
    """
    largest = ROWS[rows_as]
    table = pq.read_table(file)
    size = table.schema.field("embedding").type.list_size
    values = torch.from_numpy(table["embedding"].combine_chunks().flatten().to_numpy().copy()).view(-1, size)
    top = values.abs().amax(1, keepdim=True)
    scale = torch.where(top > 0, top / largest, 1.0)
    scaled = values / scale
    if rows_as == "int8":
        small = scaled.round().to(torch.int8).numpy()
    else:
        small = scaled.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    columns = {
        "row": table["row"],
        "embedding": pa.FixedSizeListArray.from_arrays(pa.array(small.reshape(-1)), size),
        "scale": pa.array(scale[:, 0].numpy()),
    }
    pq.write_table(pa.table(columns), file)


def check(trainer: Trainer, folder: Path, *, exact: bool) -> dict[str, Any]:
    """Load the folder as its users will, and compare the scores on test samples.

    Raises RuntimeError where the two scorers differ by more than TOLERANCE, or, with `exact` rows, a float32 trainer
    and the scorer.
    """
    loaded, other = scorer.Scorer.open(folder), scorer.ProgramScorer.open(folder)
    worst, apart, samples = 0.0, 0.0, 0
    trainer.model.eval()
    with torch.no_grad():
        for batch in itertools.islice(iter(trainer.parts.test), CHECKED):
            ours, theirs = trainer.forward(batch).float().cpu(), loaded.logits(_on_cpu(batch))
            real = batch.sample_ids.cpu() >= 0
            worst = max(worst, float((ours - theirs)[real].abs().max()))
            apart = max(apart, float((other.logits(_on_cpu(batch)) - theirs)[real].abs().max()))
            samples += int(real.sum())
    if not apart < TOLERANCE:
        raise RuntimeError(f"the exported program's logits differ from the exported model's by {apart:.3g}")
    plain = exact and trainer.parts.precision == "fp32" and not any(r.converted for r in trainer.parts.conversion.rows)
    if not worst < (TOLERANCE if plain else float("inf")):
        raise RuntimeError(f"the exported model's logits differ from the trainer's by {worst:.3g} on {samples} samples")
    return {
        "samples": samples,
        "largest_logit_difference": worst,
        "largest_program_difference": apart,
        "precision": trainer.parts.precision,
    }


def _on_cpu(batch: JaggedBatch) -> JaggedBatch:
    return batch.to(torch.device("cpu"))


def _trained_precision(run: RunDir) -> str | None:
    return read_json(run.model_file)["precision"] if run.model_file.exists() else None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
