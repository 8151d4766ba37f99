"""A trained model as files: what they hold, and that they score as the trainer did, where there is no gem-train."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from gem_model import GemConfig, ModelInputs, Source, Table
from gem_model.config import TowerConfig
from gem_train import exporting, scorer
from gem_train.cli import main
from gem_train.data import build
from gem_train.run_dir import RunDir, read_json
from gem_train.testing import tiny_config
from safetensors.torch import load_file, save_file

# What someone who serves the model writes: gem_train is out of reach.
SERVE = """
import sys
sys.modules["gem_train"] = None
sys.path.insert(0, sys.argv[1])
import numpy as np, pyarrow.parquet as pq
from gem_data import Collator, EventLog
from scorer import Scorer

scorer = Scorer.open(sys.argv[1])
wanted = pq.read_table(sys.argv[3])
rows = wanted["sample_id"].to_numpy()
found = scorer(Collator(EventLog.open(sys.argv[2]), max_history=scorer.manifest["max_history"])(rows)).numpy()
for k, task in enumerate(scorer.tasks):
    np.testing.assert_allclose(found[:, k], wanted[f"p_{task}"].to_numpy(), atol=2e-6)
print("equal", found.shape)
"""


@pytest.fixture(scope="module")
def exported(finished_run, tmp_path_factory):
    out = tmp_path_factory.mktemp("exports") / "model"
    assert main(["export", str(finished_run), "--out", str(out)]) == 0
    return out


@pytest.fixture
def copy(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "copy")


def test_scores_without_gem_train_equal_the_predictions_of_the_run(exported, finished_run, cache):
    log = log_of(cache)
    predictions = RunDir(finished_run).predictions_file
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SERVE, str(exported), str(log), str(predictions)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert f"equal ({pq.read_metadata(predictions).num_rows}, 2)" in done.stdout


def test_the_folder_holds_all_of_the_model_and_says_what_it_is(exported, finished_run):
    run = RunDir(finished_run)
    manifest, model, data = read_json(exported / "manifest.json"), read_json(run.model_file), read_json(run.data_file)
    dense = load_file(exported / "dense.safetensors")
    parameters = {n: v for n, v in dense.items() if not n.endswith(("dense_mean", "dense_std"))}
    assert sum(v.numel() for v in parameters.values()) == model["parameters"]["dense"]
    assert len(dense) == len(parameters) + 2
    assert all(v.dtype == torch.float32 for v in dense.values())
    rows = {n: sum(pq.read_metadata(f).num_rows for f in (exported / t["folder"]).glob("*.parquet")) for n, t in
            manifest["tables"].items()}  # fmt: skip
    assert rows == {n: t["rows"] for n, t in manifest["tables"].items()}
    assert sum(t["rows"] * t["dim"] for t in manifest["tables"].values()) == model["parameters"]["tables"]
    assert manifest["weights"] == read_json(run.eval_file)["weights"]
    assert manifest["data"]["digest"] == data["digest"]
    assert manifest["checked"]["samples"] > 100
    assert manifest["checked"]["largest_logit_difference"] < 1e-5
    assert not [p.name for p in exported.parent.iterdir() if p != exported]  # no remains


def test_the_scorer_names_what_is_damaged(copy):
    dense = load_file(copy / "dense.safetensors")
    content = (copy / "dense.safetensors").read_bytes()
    (copy / "dense.safetensors").write_bytes(content[:-4] + b"abcd")
    with pytest.raises(ValueError, match="is damaged: its SHA-256"):
        scorer.Scorer.open(copy)

    manifest = read_json(copy / "manifest.json")
    gone = dense.pop("heads.mlps.0.0.weight", None)
    name = next(iter(dense))
    gone = dense.pop(name) if gone is None else gone
    save_file(dense, copy / "dense.safetensors")
    manifest["dense"]["sha256"] = exporting._digest(copy / "dense.safetensors")
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="is not this model: it lacks"):
        scorer.Scorer.open(copy)
    (copy / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(ValueError, match="export format 99"):
        scorer.Scorer.open(copy)


def test_a_missing_row_of_a_table_is_found(copy):
    manifest = read_json(copy / "manifest.json")
    table = max(manifest["tables"].values(), key=lambda t: t["rows"])
    (file,) = (copy / table["folder"]).glob("*.parquet")
    whole = pq.read_table(file)
    pq.write_table(whole.filter(np.arange(len(whole)) != 7), file)
    with pytest.raises(ValueError, match=rf"lacks 1 of {table['rows']} rows; row 7 is the first"):
        scorer.Scorer.open(copy)


def test_an_export_whose_scores_differ_is_not_left_behind(finished_run, tmp_path, monkeypatch):
    true = exporting.dense_state
    monkeypatch.setattr(
        exporting, "dense_state", lambda t: {n: v + 0.01 if v.dim() > 1 else v for n, v in true(t).items()}
    )
    with pytest.raises(RuntimeError, match="logits differ from the trainer's by"):
        main(["export", str(finished_run), "--out", str(tmp_path / "out")])
    assert not list(tmp_path.iterdir())


def test_an_export_does_not_replace_anything(finished_run, exported, tmp_path, capsys):
    assert main(["export", str(finished_run), "--out", str(exported)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "x")]) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_low_precision_layers_are_exported_as_the_weights_that_they_train(run_cli, tmp_path, capsys):
    """Their scores are float32's: near those of training, and the manifest says how near."""
    run, out = tmp_path / "run", tmp_path / "out"
    assert run_cli(run, "lowprec.recipe=fp8_row", "lowprec.min_size=1", "train.max_steps=6") == 0
    assert main(["export", str(run), "--out", str(out)]) == 0
    manifest = read_json(out / "manifest.json")
    assert manifest["trained"] == {"precision": "fp32", "lowprec": "fp8_row"}
    assert 1e-6 < manifest["checked"]["largest_logit_difference"] < 0.3
    scorer.Scorer.open(out)


def test_every_option_of_the_model_survives_the_manifest():
    """A shape with every nested option, through JSON and back."""
    config = GemConfig(
        experts=("wukong", "dcn"), towers=(TowerConfig(source="events", width=32, window=0),), window=3, pma_seeds=6
    )
    inputs = ModelInputs(
        tables=(Table(name="item", rows=5, dim=4), Table(name="type", rows=3, dim=4)),
        tasks=("a", "b"),
        sources=(Source(name="events", ids=(("item", "item"),), floats=(("price", 1),), max_len=9),),
        sparse=(("item", "item"), ("type", "type")),
        dense=2,
        dense_columns=(("price", 1),),
    )
    there = json.loads(json.dumps([dataclasses.asdict(config), dataclasses.asdict(inputs)]))
    assert scorer.model_config(there[0]) == config
    assert scorer.model_inputs(there[1]) == inputs


# The program of torch.export, and smaller rows.

PROGRAM = """
import sys
for name in ("gem_train", "gem_model", "gem_kernels", "torchrec", "fbgemm_gpu", "safetensors"):
    sys.modules[name] = None
sys.path.insert(0, sys.argv[1])
import numpy as np, pyarrow.parquet as pq
from gem_data import Collator, EventLog
from scorer import ProgramScorer

scorer = ProgramScorer.open(sys.argv[1])
wanted = pq.read_table(sys.argv[3])
rows = wanted["sample_id"].to_numpy()
collate = Collator(EventLog.open(sys.argv[2]), max_history=scorer.manifest["max_history"])
for count in (len(rows), 2, 1):
    found = scorer(collate(rows[:count])).numpy()
    for k, task in enumerate(scorer.tasks):
        np.testing.assert_allclose(found[:, k], wanted[f"p_{task}"].to_numpy()[:count], atol=2e-6)
first = np.array([0, 1])  # a user's first event has no history
assert collate(first).sequences["events"].offsets.tolist()[1] == 0
assert np.isfinite(scorer(collate(first)).numpy()).all()
print("equal", found.shape)
"""


def log_of(cache):
    return build(tiny_config(cache).data, "synthetic")


def test_the_program_scores_with_torch_numpy_and_pyarrow_alone(exported, finished_run, cache):
    predictions = RunDir(finished_run).predictions_file
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(exported), str(log_of(cache)), str(predictions)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "equal" in done.stdout


def test_the_program_refuses_histories_that_are_too_long(exported, cache):
    from gem_data import Collator, EventLog

    loaded = scorer.ProgramScorer.open(exported)
    longest = loaded.manifest["program"]["max_len"]
    batch = Collator(EventLog.open(log_of(cache)), max_history=longest + 5)(np.arange(2000))
    assert batch.sequences["events"].max_len > longest
    with pytest.raises(ValueError, match=f"expected at most {longest}"):
        loaded.logits(batch)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_small_rows_lie_within_a_step_of_the_rows_that_were_trained(kind, exported, tmp_path):
    manifest = read_json(exported / "manifest.json")
    table = max(manifest["tables"].values(), key=lambda t: t["rows"])
    folder = shutil.copytree(exported / table["folder"], tmp_path / "rows")
    before = scorer.read_table(folder, table["rows"], table["dim"])
    sizes = sum(f.stat().st_size for f in folder.glob("*.parquet"))
    for file in folder.glob("*.parquet"):
        exporting.shrink(file, kind)
    after = scorer.read_table(folder, table["rows"], table["dim"])
    top = before.abs().amax(1, keepdim=True)
    # int8: half of 1/127 of the row's largest; E4M3: half of the last of three mantissa bits, or of the smallest step.
    bound = top / 254 if kind == "int8" else torch.maximum(before.abs() / 16, top / 448 * 2.0**-10)
    assert ((after - before).abs() <= bound * 1.001).all()
    assert (after != before).any()
    assert sum(f.stat().st_size for f in folder.glob("*.parquet")) < sizes


def test_rows_of_zeros_stay_zero(tmp_path):
    import pyarrow as pa

    values = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(8, np.float32)), 4)
    pq.write_table(pa.table({"row": pa.array([0, 1]), "embedding": values}), tmp_path / "rows-0-2.parquet")
    exporting.shrink(tmp_path / "rows-0-2.parquet", "int8")
    assert torch.equal(scorer.read_table(tmp_path, 2, 4), torch.zeros(2, 4))


def test_an_export_in_int8_says_how_far_the_scores_move(finished_run, tmp_path, capsys):
    out = tmp_path / "small"
    assert main(["export", str(finished_run), "--out", str(out), "--rows", "int8"]) == 0
    assert "int8 numbers" in capsys.readouterr().out
    manifest = read_json(out / "manifest.json")
    assert manifest["rows_as"] == "int8"
    assert 0 < manifest["checked"]["largest_logit_difference"] < 0.1
    assert manifest["checked"]["largest_program_difference"] < 1e-4
