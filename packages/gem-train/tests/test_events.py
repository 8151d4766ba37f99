"""What a run leaves behind, also when it is torn off in the middle of a line or the disk is full."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path

import pytest
from gem_train.errors import UserError
from gem_train.events import Events, JsonLines, read, truncate
from gem_train.progress import Progress
from gem_train.run_dir import RunDir, environment, new_path, read_json, write_json
from gem_train.schedule import rate
from rich.console import Console


def test_records_are_on_disk_as_soon_as_written(tmp_path):
    log = JsonLines(tmp_path / "x.jsonl")
    log.write(step=1, loss=0.1 + 0.2)
    assert read(log.path) == [{"step": 1, "loss": 0.1 + 0.2}]  # before close, with all digits
    log.close()
    log.close()


def test_what_json_cannot_hold_becomes_null(tmp_path):
    log = JsonLines(tmp_path / "x.jsonl")
    log.write(a=math.nan, b=[math.inf, 1.0], c={"d": (-math.inf, "text")})
    assert read(log.path) == [{"a": None, "b": [None, 1.0], "c": {"d": [None, "text"]}}]


def test_a_torn_last_line_is_left_out_and_cut_off_by_the_next_writer(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read(path) == [{"step": 1}]
    JsonLines(path).write(step=2)
    assert read(path) == [{"step": 1}, {"step": 2}]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 2"):
        read(path)


def test_truncate_drops_what_comes_after_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        for step in range(1, 6):
            file.write(json.dumps({"kind": "step", "step": step, "loss": step / 3}) + "\n")
            file.write(json.dumps({"kind": "eval", "step": step}) + "\n")
    assert truncate(path, 3) == 4
    assert [r["step"] for r in read(path)] == [1, 1, 2, 2, 3, 3]
    assert read(path)[2]["loss"] == 2 / 3
    assert truncate(tmp_path / "absent.jsonl", 0) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_run_with_a_clear_message():
    log = JsonLines(Path("/dev/full"))
    with pytest.raises(UserError, match=r"cannot write /dev/full: No space left on device; .*checkpoints are intact"):
        log.write(step=1)
    log.close()


def test_spans_are_recorded_when_they_fail_too(tmp_path):
    events = Events(tmp_path)
    with pytest.raises(RuntimeError), events.span("checkpoint", step=3):
        raise RuntimeError("boom")
    events.message("finished", step=3)
    events.metric("step", 1, loss=1.0)
    span, message = read(tmp_path / "events.jsonl")
    assert span["span"] == "checkpoint"
    assert span["step"] == 3
    assert span["seconds"] >= 0
    assert message["event"] == "finished"
    events.close()


def test_silent_events_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    events = Events(None)
    events.metric("step", 1)
    events.message("x")
    with events.span("y"):
        pass
    events.close()
    assert not list(tmp_path.iterdir())


# The run folder.


def test_new_paths_do_not_clash(tmp_path):
    first = new_path("r", tmp_path)
    first.mkdir()
    second = new_path("r", tmp_path)
    assert second != first
    assert second.name.startswith("r-")


def test_environment_says_what_ran(monkeypatch):
    found = environment()
    assert found["versions"]["gem-train"]
    assert found["versions"]["torch"]
    assert found["cpu_cores"] == os.cpu_count()
    assert json.dumps(found)


def test_json_files_are_replaced_whole(tmp_path):
    write_json(tmp_path / "x.json", {"a": math.nan})
    write_json(tmp_path / "x.json", {"b": 1})
    assert read_json(tmp_path / "x.json") == {"b": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
    with pytest.raises(UserError, match=r"absent\.json is missing"):
        read_json(tmp_path / "absent.json")


def test_a_file_is_no_run_folder(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(UserError, match="there is no run folder"):
        RunDir.open(tmp_path / "f")


# The schedule.


def test_warm_up_then_half_a_cosine():
    values = [rate(s, total=110, warmup=10, schedule="cosine", final_ratio=0.1) for s in range(1, 111)]
    assert values[:10] == [pytest.approx(s / 10) for s in range(1, 11)]
    assert values[59] == pytest.approx(0.55)  # half way down
    assert values[-1] == pytest.approx(0.1)
    assert values[9:] == sorted(values[9:], reverse=True)
    assert rate(500, total=110, warmup=10, schedule="cosine", final_ratio=0.1) == pytest.approx(0.1)


def test_constant_and_degenerate_schedules():
    assert rate(1, total=9, warmup=0, schedule="constant", final_ratio=0.0) == 1.0
    assert rate(3, total=3, warmup=3, schedule="cosine", final_ratio=0.0) == 1.0
    with pytest.raises(ValueError, match="schedule is 'step'; expected one of 'constant', 'cosine', 'linear', 'wsd'"):
        rate(1, total=9, warmup=0, schedule="step", final_ratio=0.0)
    with pytest.raises(ValueError, match="step is 0"):
        rate(0, total=9, warmup=0, schedule="cosine", final_ratio=0.0)


def test_linear_and_wsd_schedules():
    linear = [rate(s, total=110, warmup=10, schedule="linear", final_ratio=0.2) for s in (10, 35, 60, 110)]
    assert linear == pytest.approx([1.0, 0.8, 0.6, 0.2])
    wsd = [rate(s, total=110, warmup=10, schedule="wsd", final_ratio=0.2) for s in (5, 11, 100, 105, 110)]
    assert wsd == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2])


# Progress.

RECORD = {"loss": 0.6931, "samples_per_s": 1234.0, "data_wait_s": 0.1, "step_s": 0.3, "memory_bytes": 2**30}


def test_plain_lines_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr("gem_train.progress.LINE_EVERY_S", 0.0)
    out = io.StringIO()
    with Progress(console=Console(file=out, width=200)) as progress:
        progress.start(0, 10)
        progress.step(1, RECORD)
        progress.evaluated(1, 0.9, {"click": {"ne": 0.9, "auc": 0.7}})
        progress.step(2, RECORD)
    lines = out.getvalue().splitlines()
    assert "step 1/10" in lines[0]
    assert "loss 0.6931" in lines[0]
    assert "1,234 samples/s" in lines[0]
    assert "data wait 25%" in lines[0]
    assert "ETA" in lines[0]
    assert "click: NE 0.9000 AUC 0.7000" in lines[1]
    assert "NE click 0.9000" in lines[2]


def test_lines_come_seldom(monkeypatch):
    out = io.StringIO()
    progress = Progress(console=Console(file=out, width=200))
    progress.start(0, 10)
    for step in range(1, 10):
        progress.step(step, RECORD)
    assert out.getvalue() == ""
    progress.step(10, RECORD)
    assert "step 10/10" in out.getvalue()


def test_a_bar_in_a_terminal():
    out = io.StringIO()
    with Progress(console=Console(file=out, force_terminal=True, width=120)) as progress:
        progress.start(3, 10)
        progress.step(4, RECORD)
        progress.note("a remark")
    assert "4/10" in out.getvalue()
    assert "a remark" in out.getvalue()


def test_other_ranks_are_silent(capsys):
    with Progress(enabled=False) as progress:
        progress.start(0, 1)
        progress.step(1, RECORD)
        progress.note("x")
    assert capsys.readouterr() == ("", "")
