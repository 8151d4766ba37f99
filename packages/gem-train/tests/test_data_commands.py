"""Logs from the command line, and training on one of the user's own."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gem_data import EventLog, Schema
from gem_data.sources import synthetic
from gem_model import GEM, preset
from gem_parallel import start
from gem_train.cli import main
from gem_train.config import DataConfig, InputsConfig
from gem_train.data import open_data
from gem_train.errors import UserError
from gem_train.inputs import model_inputs
from gem_train.preparing import SOURCES, read_schema, size

SCHEMA = """
name = "shop"
user = "customer"
[[columns]]
name = "customer"
kind = "id"
role = "user"
cardinality = 50
[[columns]]
name = "item"
kind = "id"
role = "context"
cardinality = 40
vocabulary = "frequency"
[[columns]]
name = "tags"
kind = "ids"
role = "context"
cardinality = 9
default = 0
[[columns]]
name = "type"
kind = "id"
role = "context"
cardinality = 3
[[columns]]
name = "price"
kind = "float"
role = "context"
[[columns]]
name = "action"
kind = "id"
role = "outcome"
cardinality = 3
[[tasks]]
name = "click"
column = "action"
equals = 2
[[counters]]
name = "item_rate"
kind = "rate"
key = ["item"]
task = "click"
"""
SOURCES_OF_SHOP = """
[[sources]]
name = "impressions"
column = "type"
values = [1]
[[sources]]
name = "searches"
column = "type"
values = [2]
columns = ["item", "action"]
"""

TINY = (
    "model.width=16,model.heads=2,model.layers=1,model.n_tokens=6,model.n_dense=2,model.n_sum=2,model.pma_queries=1,"
    "model.recent=1,model.pffn_tokens=2,model.interaction_rank=4,model.interaction_fm=3,model.head_hidden=8,"
    "inputs.table_dim=8,data.batch_size=64,data.max_history=10,train.device=cpu,train.max_steps=6,optim.warmup_steps=2"
)
SET = [part for assignment in TINY.split(",") for part in ("--set", assignment)]


def shop(folder, *, n=1500, schema=SCHEMA):
    """A Parquet file with columns named as nobody else would, and its schema: (parquet, toml)."""
    rng = np.random.default_rng(3)
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {
            "customer": rng.integers(50, size=n),
            "ts": np.sort(rng.integers(1_700_000_000, 1_700_900_000, size=n)),
            "item": [f"sku-{i}" for i in rng.integers(30, size=n)],
            "tags": [rng.integers(1, 9, size=rng.integers(0, 4)).tolist() for _ in range(n)],
            "type": rng.integers(1, 3, size=n),
            "price": rng.normal(size=n).astype(np.float32),
            "action": np.where(np.arange(n) == 7, 99, rng.integers(1, 3, size=n)),  # row 7 is out of range
        }
    )
    pq.write_table(table, folder / "events.parquet")
    (folder / "shop.toml").write_text(schema)
    return folder / "events.parquet", folder / "shop.toml"


@pytest.mark.parametrize("sources", ["", SOURCES_OF_SHOP], ids=["one history", "two histories"])
def test_a_parquet_file_of_ones_own_is_prepared_and_trained_on(sources, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("gem_train.report.write_report", lambda run: run.report_file)
    parquet, schema = shop(tmp_path / "raw", schema=SCHEMA + sources)
    log = tmp_path / "log"
    prepare = ["data", "prepare", "files", str(parquet), "--schema", str(schema), "--rename", "ts=time"]
    assert main([*prepare, "--out", str(log), "--memory", "512MB"]) == 0
    said = capsys.readouterr()
    assert "1,499 events" in said.out
    assert "1 row was rejected" in said.out
    assert f"gem-train run log --set data.path={log}" in said.out
    assert "preparing: sorting by user and time" in said.err

    out = tmp_path / "run"
    assert main(["run", "log", "--set", f"data.path={log}", *SET, "--out", str(out)]) == 0
    results = json.loads((out / "eval.json").read_text())
    assert results["source"] == "log"
    assert 0.5 < results["model"]["click"]["ne"] < 1.5
    assert "optimal" not in results  # nobody knows it
    inputs = json.loads((out / "model.json").read_text())["inputs"]
    assert [s["name"] for s in inputs["sources"]] == (["impressions", "searches"] if sources else ["events"])
    if sources:
        columns = {s["name"]: [c for c, _ in s["ids"]] for s in inputs["sources"]}
        assert columns == {"impressions": ["item", "type", "action"], "searches": ["item", "action"]}
    assert ["tags", "tags"] in inputs["sparse"]
    assert ["type", "type"] in inputs["sparse"]  # although a torch module can't have a child called so


def test_a_history_may_have_a_name_that_torch_needs():
    schema = Schema.from_dict(tomllib.loads(SCHEMA + SOURCES_OF_SHOP.replace("searches", "items")))
    inputs = model_inputs(schema, InputsConfig(), max_history=5)
    assert [s.name for s in inputs.sources] == ["impressions", "items"]
    assert GEM(preset("tiny"), inputs).events["items"] is not None


def test_what_make_builds_is_what_the_synthetic_source_gives(tmp_path, capsys):
    assert main(["data", "make", "--out", str(tmp_path / "log"), "--set", "events=900", "--set", "seed=4"]) == 0
    log = EventLog.open(tmp_path / "log")
    table, schema = synthetic.load(synthetic.SyntheticConfig(events=900, seed=4))
    assert len(log) == table.num_rows
    assert log.schema.fingerprint() == schema.fingerprint()
    capsys.readouterr()

    assert main(["data", "inspect", str(tmp_path / "log")]) == 0
    text = capsys.readouterr().out
    assert "label rates" in text
    assert "click" in text
    assert main(["data", "inspect", str(tmp_path / "log"), "--json", "--verify"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == len(log)
    assert found["label_rates"].keys() == {"click", "convert"}

    with start("cpu") as runtime:
        data = open_data(DataConfig(source="log", path=str(tmp_path / "log")), runtime)
    assert data.optimal_ne(data.split.test) == synthetic.optimal_ne(log, data.split.test)

    assert main(["data", "make", "--out", str(tmp_path / "log")]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["data", "make", "--out", str(tmp_path / "log"), "--set", "events=300", "--overwrite"]) == 0
    assert len(EventLog.open(tmp_path / "log")) < len(log)


def test_samples_may_be_the_events_of_one_source_alone(tmp_path, capsys):
    """Searches are history: they were not shown to anyone who could click."""
    make = ["data", "make", "--out", str(tmp_path / "log"), "--set", "events=2000", "--set", "searches=0.4"]
    assert main(make) == 0
    path = str(tmp_path / "log")
    log = EventLog.open(path)
    shown = {"impressions": log.source_rows("impressions"), "searches": log.source_rows("searches")}
    assert len(shown["searches"]) > 100
    with start("cpu") as runtime:
        for samples, expected in ((None, "impressions"), ("impressions", "impressions"), ("searches", "searches")):
            split = open_data(DataConfig(source="log", path=path, samples=samples), runtime).split
            rows = np.concatenate([split.train, split.validation, split.test])
            np.testing.assert_array_equal(np.sort(rows), np.sort(shown[expected]))
            assert log.time[split.train].max() < log.time[split.test].min()
            assert (np.diff(log.time[split.train]) >= 0).all()
        with pytest.raises(ValueError, match=r"no source of the log; did you mean 'searches'\?"):
            open_data(DataConfig(source="log", path=path, samples="serches"), runtime)


def test_a_layout_is_prepared_from_its_folder(tmp_path, capsys):
    rows = [f"{u},{i},{c},{b},{1511544070 + 60 * t}" for t, (u, i, c, b) in enumerate(
        [(1, 2, 3, "pv"), (1, 4, 3, "buy"), (2, 2, 3, "pv"), (2, 5, 6, "fav"), (2, 7, 6, "cart")]
    )]  # fmt: skip
    (tmp_path / "UserBehavior.csv").write_text("\n".join(rows) + "\n")
    assert main(["data", "prepare", "taobao", str(tmp_path), "--out", str(tmp_path / "log")]) == 0
    assert "5 events of 2 users" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["taobo", "x"], "did you mean 'taobao'"),
        (["taobao"], "needs the path"),
        (["taobao", "a", "b"], "takes one folder, got 2"),
        (["taobao", "empty"], "there is no UserBehavior.csv"),
        (["kuairand", "empty"], "no log_*.csv of KuaiRand in empty"),
        (["kuairand", "empty", "--schema", "x.toml"], "has no use for --schema; it takes --variant"),
        (["files", "none-*.parquet", "--schema", "raw/shop.toml"], "no file at none-*.parquet"),
        (["files", "raw/events.parquet"], "--schema FILE"),
        (["files", "raw/events.parquet", "--schema", "absent.toml"], "cannot read the schema absent.toml"),
        (["files", "raw/events.parquet", "--schema", "bad.toml"], "did you mean 'cardinality'"),
        (["files", "raw/events.parquet", "--schema", "flat.toml"], "flat.toml is not a schema"),
        (["files", "raw/events.parquet", "--schema", "raw/shop.toml"], "time"),
        (["files", "raw/shop.toml", "--schema", "raw/shop.toml"], "the format is not known by its suffix"),
        (["files", "raw/events.parquet", "--schema", "raw/shop.toml", "--rename", "ts"], "cannot read 'ts'"),
        (["files", "raw/events.parquet", "--schema", "raw/shop.toml", "--memory", "much"], "got 'much' as a size"),
    ],
)
def test_mistakes_leave_no_log_and_are_one_line(arguments, says, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shop(tmp_path / "raw", n=20)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.toml").write_text('name = "x"\n[[columns]]\nname = "a"\nkind = "id"\ncardinalty = 3\n')
    (tmp_path / "flat.toml").write_text('name = "x"\ncolumns = 3\n')
    assert main(["data", "prepare", *arguments, "--out", "log"]) == 2
    error = capsys.readouterr().err
    last = error.strip().splitlines()[-1]
    assert last.startswith("gem-train: error: ")
    assert says in last
    assert not (tmp_path / "log").exists()


def test_inspecting_what_is_no_log_is_a_mistake(tmp_path, capsys):
    assert main(["data", "inspect", str(tmp_path)]) == 2
    assert "no event log in" in capsys.readouterr().err


def test_sizes():
    assert [size(t) for t in ("2GiB", "500 MB", "1e9", "4096", "1.5k")] == [2 << 30, 500 << 20, 10**9, 4096, 1536]
    for wrong in ("", "-1", "0", "3 parsecs", "1.2.3"):
        with pytest.raises(UserError, match="as a size"):
            size(wrong)


def test_the_help_lists_every_source(capsys):
    with pytest.raises(SystemExit):
        main(["data", "prepare", "--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in SOURCES)


def test_the_schema_in_the_readme_is_one(tmp_path):
    readme = Path(__file__).parents[1] / "README.md"
    (text,) = re.findall(r"```toml\n(.*?)```", readme.read_text(), flags=re.DOTALL)
    (tmp_path / "shop.toml").write_text(text)
    assert read_schema(tmp_path / "shop.toml").task_names == ("click", "buy")
