"""Excess over the best possible NE: of every task, from what the runs wrote."""

import json

import excess
import pytest


def test_gem_and_its_baselines_are_measured_against_the_truth(tmp_path):
    settings = [
        "data.synthetic.events=4000",
        "data.fractions=0.7,0.1,0.2",
        f"data.cache={tmp_path}/cache",
        "data.batch_size=128",
        "train.max_steps=4",
        "model.width=8",
    ]
    out = tmp_path / "out"
    assert excess.main(["--out", str(out), "--models", "gem", "--commit", "c", "--set", *settings]) == 0
    found = json.loads((out / "excess.json").read_text())
    rows = {row["case"]: row for row in found["rows"]}
    assert rows.keys() == {"gem", "constant", "logistic"}
    assert rows["gem"]["steps"] == 4
    assert rows["gem"]["step_ms"] > 0
    told = json.loads((out / "gem" / "seed-0" / "eval.json").read_text())
    for task in ("click", "convert"):
        ne = told["model"][task]["ne"]
        assert rows["gem"]["tasks"][task]["ne"] == ne
        assert rows["gem"]["tasks"][task]["excess_pct"] == pytest.approx(100 * told["optimal"][task]["excess"])
        assert rows["constant"]["tasks"][task]["excess_pct"] > rows["logistic"]["tasks"][task]["excess_pct"] > 0
    assert found["samples"]["test"] == told["samples"]
