"""Figures in other places: each sink has them, and none can end a run."""

from __future__ import annotations

import json
import math
import urllib.request
from importlib.metadata import EntryPoint

import pytest
from gem_train import sinks
from gem_train.errors import UserError
from gem_train.events import read
from gem_train.run_dir import RunDir
from gem_train.testing import tiny_config

RECORDS = [("step", 1, {"loss": 0.7, "lr": 0.1}), ("step", 2, {"loss": 0.6, "lr": 0.1, "mfu": math.nan})]
EVAL = ("eval", 2, {"ne": 0.9, "split": "validation", "tasks": {"click": {"ne": 0.8, "auc": None}}})


@pytest.fixture
def folder(tmp_path):
    run = RunDir(tmp_path / "mine")
    run.path.mkdir()
    return run


def written(name, run, cache):
    made = sinks.make([name], run, tiny_config(cache))
    for kind, step, values in [*RECORDS, EVAL]:
        made.log(kind, step, values)
    return made


def test_records_are_flat_and_finite():
    assert sinks.flatten(EVAL[2]) == {"ne": 0.9, "click/ne": 0.8}
    assert sinks.flatten(RECORDS[1][2]) == {"loss": 0.6, "lr": 0.1}
    assert sinks.flatten({"a": {"b": {"c": 1}}, "yes": True}) == {"a/b/c": 1.0}


def test_tensorboard_files_hold_the_scalars(folder, cache):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written("tensorboard", folder, cache).close()
    found = EventAccumulator(str(folder.path / "tensorboard"))
    found.Reload()
    assert [(e.step, pytest.approx(e.value)) for e in found.Scalars("step/loss")] == [(1, 0.7), (2, 0.6)]
    assert {"eval/click/ne", "eval/ne", "step/lr"} <= set(found.Tags()["scalars"])


def test_the_prometheus_endpoint_serves_the_latest_figures(folder, cache):
    pytest.importorskip("prometheus_client")
    made = written("prometheus:0", folder, cache)
    port = made._sinks["prometheus"].port
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    assert 'gem_step_loss{run="mine"} 0.6' in page
    assert 'gem_eval_click_ne{run="mine"} 0.8' in page
    assert 'gem_step_number{run="mine"} 2.0' in page
    with pytest.raises(UserError, match=f"port {port} is not to be had"):
        sinks.make([f"prometheus:{port}"], folder, tiny_config(cache))
    made.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)


def test_wandb_offline_keeps_its_files_in_the_run_folder(folder, cache, monkeypatch):
    pytest.importorskip("wandb")
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true"), ("WANDB_API_KEY", "0" * 40)):
        monkeypatch.setenv(name, value)
    written("wandb:ours", folder, cache).close()
    (file,) = (folder.path / "wandb").glob("offline-run-*/*.wandb")
    content = file.read_bytes()
    for text in (b"step/loss", b"eval/click/ne", b"ours", b"mine"):
        assert text in content


def test_trackio_keeps_a_local_database(folder, cache, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    written("trackio:ours", folder, cache).close()
    found = SQLiteStorage.get_logs("ours", "mine")
    assert [row["step/loss"] for row in found if "step/loss" in row] == [0.7, 0.6]
    assert [row["eval/click/ne"] for row in found if "eval/click/ne" in row] == [0.8]


class Broken:
    def __init__(self):
        self.calls = 0

    def log(self, kind, step, values):
        self.calls += 1
        if self.calls > 1:
            raise ConnectionError("the dashboard is down")

    def close(self):
        raise AssertionError("it was left out")


def test_a_sink_of_another_package_that_fails_does_not_end_the_run(run_cli, tmp_path, monkeypatch):
    made = []

    def make(run, config, argument):
        assert argument == "x:y"
        made.append(Broken())
        return made[0]

    monkeypatch.setattr("gem_train.testing.sink_for_tests", make, raising=False)
    point = EntryPoint(name="ours", value="gem_train.testing:sink_for_tests", group=sinks.GROUP)
    monkeypatch.setattr(sinks, "entry_points", lambda group: [point])
    with pytest.warns(UserWarning, match="the sink 'ours' failed and gets nothing from now on: the dashboard is down"):
        assert run_cli(tmp_path / "run", "train.sinks=ours:x:y", "train.max_steps=3") == 0
    assert made[0].calls == 2
    assert [r["step"] for r in read(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "step"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("spec", "says"),
    [("tensorbord", "did you mean 'tensorboard'"), ("prometheus:high", "expected a port, got 'high'")],
)
def test_mistakes_are_named_before_the_first_step(spec, says, run_cli, tmp_path, capsys):
    if spec.startswith("prometheus"):
        pytest.importorskip("prometheus_client")
    assert run_cli(tmp_path / "run", f"train.sinks={spec}") == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_client_that_is_not_installed_is_named(folder, cache, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(UserError, match="pip install prometheus-client"):
        sinks.make(["prometheus"], folder, tiny_config(cache))


def test_a_whole_run_reaches_its_sinks(run_cli, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    assert run_cli(out, "train.sinks=tensorboard", "train.max_steps=3") == 0
    found = EventAccumulator(str(out / "tensorboard"))
    found.Reload()
    steps = [r for r in read(out / "metrics.jsonl") if r["kind"] == "step"]
    assert [pytest.approx(e.value) for e in found.Scalars("step/loss")] == [r["loss"] for r in steps]
    assert json.loads((out / "model.json").read_text())["world"] == 1
