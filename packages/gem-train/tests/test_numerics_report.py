"""How well low precision represents a run's layers: measured while it trains, in numerics.jsonl and in the report."""

from __future__ import annotations

import json

import pytest
from gem_train.cli import main
from gem_train.config import LowprecConfig
from gem_train.events import read
from gem_train.report.run import Run
from gem_train.run_dir import RunDir


@pytest.fixture(scope="module")
def watched(run_cli, tmp_path_factory):
    out = tmp_path_factory.mktemp("numerics") / "run"
    settings = ("lowprec.recipe=mxfp8", "lowprec.min_size=8", "lowprec.numerics_every=2", "train.max_steps=5")
    assert run_cli(out, *settings) == 0
    return out


def test_every_second_step_is_measured(watched):
    records = read(watched / "numerics.jsonl")
    assert [r["step"] for r in records] == sorted({r["step"] for r in records})
    assert len(records) >= 2
    assert all(r["step"] % 2 == 0 for r in records)
    layers = {
        r["name"] for r in json.loads((watched / "model.json").read_text())["linear_layers"] if r["engine"] != "-"
    }
    for record in records:
        assert {row["layer"] for row in record["rows"]} <= layers
        assert {row["product"] for row in record["rows"]} == {"forward", "dgrad", "wgrad"}
        found = [row["sqnr_db"] for row in record["rows"] if row["sqnr_db"] is not None]
        assert found == sorted(found)
        assert all(15 < db < 60 for db in found)  # three mantissa bits: about 31 dB


def test_the_report_shows_it(watched):
    assert main(["report", str(watched), "--png"]) == 0
    text = (watched / "report.html").read_text()
    worst = Run.read(RunDir(watched)).numerics[-1]["rows"][0]
    assert "Low precision" in text
    assert worst["layer"] in text
    assert (watched / "figures" / "numerics.png").read_bytes()[:4] == b"\x89PNG"


def test_resuming_measures_its_steps_once(watched, run_cli, tmp_path):
    settings = ("lowprec.recipe=mxfp8", "lowprec.min_size=8", "lowprec.numerics_every=1", "train.checkpoint_every=2")
    assert run_cli(tmp_path / "run", *settings, "train.max_steps=3") == 0
    assert run_cli(tmp_path / "run", *settings, "train.max_steps=6", resume=True) == 0
    steps = [r["step"] for r in read(tmp_path / "run" / "numerics.jsonl")]
    assert steps == sorted(set(steps))


def test_a_negative_interval_is_refused():
    with pytest.raises(ValueError, match=r"lowprec\.numerics_every .* -1"):
        LowprecConfig(numerics_every=-1)
