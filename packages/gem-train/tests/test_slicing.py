"""Figures by column, for new ids, with intervals; each against a computation by hand from the predictions."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
from gem_data import Collator, EventLog, time_split
from gem_train.cli import main
from gem_train.data import build
from gem_train.testing import tiny_config


@pytest.fixture(scope="module")
def sliced(finished_run, tmp_path_factory):
    out = tmp_path_factory.mktemp("sliced") / "run"
    shutil.copytree(finished_run, out)
    columns = ["category", "price", "new:item", "new:user", "segment"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gem_train.report.write_report", lambda run: run.report_file)
        assert main(["eval", str(out), *(part for c in columns for part in ("--by", c))]) == 0
    return out


@pytest.fixture(scope="module")
def truth(sliced, cache):
    """The test rows' columns and predictions."""
    log = EventLog.open(build(tiny_config(cache).data, "synthetic"))
    table = pq.read_table(sliced / "predictions.parquet").to_pydict()
    rows = np.array(table["sample_id"])
    collate = Collator(log, max_history=0)
    return collate(rows), collate(time_split(log).train), {k: np.array(v) for k, v in table.items()}


def ne(labels, p):
    loss = -np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p))
    rate = labels.mean()
    return loss / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))


def test_an_id_column_gives_its_frequent_values(sliced, truth):
    batch, _, table = truth
    found = json.loads((sliced / "eval.json").read_text())["slices"]["category"]
    assert sum(part["samples"] for part in found) == len(table["sample_id"])
    counts = [part["samples"] for part in found[:-1]]
    assert counts == sorted(counts, reverse=True)
    for part in found[:3]:
        at = batch.sparse["category"].values.numpy() == int(part["value"])
        assert at.sum() == part["samples"]
        assert part["users"] == len(np.unique(table["group"][at]))
        figures = part["tasks"]["click"]
        assert figures["ne"] == pytest.approx(ne(table["label_click"][at], table["p_click"][at]), rel=1e-6)
        assert figures["ne_low"] is None or figures["ne_low"] <= figures["ne_high"]


def test_a_float_column_is_cut_into_equal_parts(sliced, truth):
    found = json.loads((sliced / "eval.json").read_text())["slices"]["price"]
    counts = [part["samples"] for part in found]
    assert len(found) == 5
    assert max(counts) - min(counts) <= 0.05 * sum(counts)
    assert found[0]["value"].split(" to ")[1] == found[1]["value"].split(" to ")[0]


@pytest.mark.parametrize("column", ["item", "user"])
def test_new_ids_are_those_that_training_has_not_seen(column, sliced, truth):
    test, train, table = truth

    def ids(batch):
        return (batch.groups if column == "user" else batch.sparse[column].values).numpy()

    new = ~np.isin(ids(test), ids(train))
    parts = json.loads((sliced / "eval.json").read_text())["slices"][f"new:{column}"]
    found = {p["value"]: p for p in parts}
    assert found.get("new", {"samples": 0})["samples"] == new.sum()
    assert found["seen in training"]["samples"] == (~new).sum()
    rate = table["label_click"][~new].mean()
    assert found["seen in training"]["tasks"]["click"]["base_rate"] == pytest.approx(rate)


def test_the_usual_slices_stay(sliced):
    assert {"time", "history"} < set(json.loads((sliced / "eval.json").read_text())["slices"])


@pytest.mark.parametrize(
    ("column", "says"),
    [("catgory", "did you mean 'category'"), ("new:price", "'price' is a float column"), ("p_click", "is no column")],
)
def test_what_is_no_column_is_named(column, says, finished_run, tmp_path, capsys):
    assert main(["eval", str(finished_run), "--by", column]) == 2
    assert says in capsys.readouterr().err
