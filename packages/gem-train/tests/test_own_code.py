"""A package of somebody else's: a recipe with its own model on its own events, with nothing of ours touched."""

from __future__ import annotations

import json
import sys
import textwrap
from importlib.metadata import EntryPoint

import pytest
from gem_train import recipes
from gem_train.cli import main
from gem_train.config import RunConfig, from_toml
from gem_train.events import read
from gem_train.testing import assembled, tiny_config

THEIRS = """
import pyarrow as pa
import torch
from gem_data import Column, Schema, Task
from gem_model.embed import Tables
from gem_train.config import DataConfig, RunConfig, TrainConfig
from torch import nn


def events():
    n = 1200
    columns = {
        "time": pa.array(range(n), pa.int64()),
        "who": pa.array([i % 40 for i in range(n)], pa.int64()),
        "what": pa.array([(i * 7) % 30 for i in range(n)], pa.int64()),
        "bought": pa.array([int((i * 7) % 30 < 9) for i in range(n)], pa.int64()),
    }
    schema = Schema(
        name="theirs",
        user="who",
        columns=(
            Column(name="who", kind="id", role="user", cardinality=40),
            Column(name="what", kind="id", role="context", cardinality=30),
            Column(name="bought", kind="id", role="outcome", cardinality=2),
        ),
        tasks=(Task(name="buy", column="bought", equals=1),),
    )
    return pa.table(columns), schema


class Theirs(nn.Module):
    def __init__(self, config, inputs):
        super().__init__()
        self.tables = Tables(inputs)
        self.out = nn.Linear(inputs.table_dim * len(inputs.sparse), len(inputs.tasks))

    def forward(self, batch):
        return self.out(torch.cat(list(self.tables(batch).pooled.values()), dim=1))

    def units(self):
        return ["out"]

    def init_bias(self, rates):
        with torch.no_grad():
            self.out.bias.copy_(torch.logit(torch.tensor(rates)))

    def init_dense(self, mean, std):
        raise AssertionError("there are no dense features")


def nothing(config, inputs):
    return nn.Linear(2, 2)


def recipe():
    return RunConfig(
        build="their_package:Theirs",
        data=DataConfig(source="own", load="their_package:events", batch_size=32, eval_batch_size=64, max_history=4),
        train=TrainConfig(max_steps=24, eval_every=0, checkpoint_every=10, device="cpu"),
    )
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    (tmp_path / "their_package.py").write_text(textwrap.dedent(THEIRS))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    point = EntryPoint(name="theirs", value="their_package:recipe", group=recipes.GROUP)
    monkeypatch.setattr(recipes, "entry_points", lambda group: [point])
    monkeypatch.setattr("gem_train.report.write_report", lambda run, **_: run.report_file)
    yield
    sys.modules.pop("their_package", None)


def test_their_recipe_trains_their_model_on_their_events(theirs, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["run", "theirs", "--out", str(out), "--set", "optim.sparse_lr=0.5"]) == 0
    found = json.loads((out / "eval.json").read_text())
    assert found["source"] == "own"
    assert found["model"]["buy"]["auc"] > 0.9, "the item decides"
    assert from_toml(RunConfig, out / "config.toml").build == "their_package:Theirs"
    assert main(["run", "--config", str(out / "config.toml"), "--out", str(tmp_path / "again")]) == 0
    curves = [[r["loss"] for r in read(f / "metrics.jsonl") if r["kind"] == "step"] for f in (out, tmp_path / "again")]
    assert curves[0] == curves[1]
    capsys.readouterr()
    assert main(["export", str(out), "--out", str(tmp_path / "x")]) == 2
    assert "only GEM can be exported" in capsys.readouterr().err
    assert main(["bench", str(out)]) == 2
    assert "only GEM is measured" in capsys.readouterr().err
    assert main(["run", "--resume", "--out", str(out), "--set", "build=none"]) == 2
    assert "build: their_package:Theirs -> None" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("data.load=their_package:evnts", "'their_package:evnts' cannot be loaded"),
        ("data.load=their_package", "expected package.module:function"),
        ("build=their_package:nothing", "returned a Linear; expected a torch.nn.Module with units()"),
        ("build=no_such_package:x", "'no_such_package:x' cannot be loaded"),
    ],
)
def test_names_that_lead_nowhere_are_one_line(setting, says, theirs, tmp_path, capsys):
    assert main(["run", "theirs", "--out", str(tmp_path / "run"), "--set", setting]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_load_belongs_to_own_sources():
    with pytest.raises(ValueError, match="load is 'a:b' with source='synthetic'"):
        tiny_config("x", "data.load=a:b")


def test_gem_is_what_a_run_trains_by_itself(cache, tmp_path):
    from gem_model import GEM

    with assembled(tiny_config(cache), tmp_path / "run") as (_, trainer):
        assert isinstance(trainer.model.module, GEM)
