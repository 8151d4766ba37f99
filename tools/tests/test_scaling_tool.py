"""Quality against compute: sizes by name, the line, and runs that are not repeated."""

import json

import numpy as np
import pytest
import scaling


@pytest.mark.parametrize(("by", "told"), [("shape", ("tiny+width=8", None)), ("width", (None, 8))])
def test_a_size_has_the_rates_of_the_first(by, told):
    found = scaling.configuration("clicks10m", "small+dropout=0.5", "tiny+width=8", ["optim.lr=0.5"], by=by)
    assert (found.model.width, found.model.dropout, found.optim.lr, found.train.epochs) == (48, 0.5, 0.5, 1)
    assert (found.optim.base_shape, found.optim.base_width) == told


def test_the_line_is_the_one_that_made_the_points():
    flops = np.array([2e12, 1e13, 5e13, 9e14])
    ne = 0.83 - 0.004 * np.log(flops / 2e12)
    line = scaling.fit(flops, ne)
    assert line == pytest.approx({"ne0": 0.83, "eta": 0.004, "c0": 2e12, "r2": 1.0})
    noisy = scaling.fit(flops, ne + np.array([0.004, -0.004, 0.004, -0.004]))
    assert 0.3 < noisy["r2"] < 0.99


def test_every_size_is_trained_once(tmp_path, capsys):
    settings = [
        "data.synthetic.events=3000",
        f"data.cache={tmp_path}/cache",
        "data.batch_size=128",
        "train.max_steps=4",
    ]
    arguments = ["--out", str(tmp_path / "out"), "--sizes", "tiny,tiny+width=32", "--set", *settings]
    assert scaling.main(arguments) == 0
    found = json.loads((tmp_path / "out" / "scaling.json").read_text())
    small, wide = found["rows"]
    assert (small["case"], wide["case"]) == ("tiny", "tiny+width=32")
    assert wide["flops"] > 2 * small["flops"] > 0
    assert small["steps"] == wide["steps"] == 4
    assert 0.5 < small["optimal_ne"] < small["ne"] < 1.2
    assert found["line"]["c0"] == small["flops"]
    assert "<svg" in (tmp_path / "out" / "scaling.svg").read_text()
    before = (tmp_path / "out" / "tiny" / "eval.json").stat().st_mtime_ns
    assert scaling.main([*arguments, "--jobs", "2"]) == 0  # nothing is left to do
    assert scaling.main([*arguments, "--only", "tiny"]) == 0
    assert (tmp_path / "out" / "tiny" / "eval.json").stat().st_mtime_ns == before
    assert "R^2" in capsys.readouterr().out
