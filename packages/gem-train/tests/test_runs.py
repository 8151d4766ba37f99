"""ls, show RUN and validate."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from gem_train import runs
from gem_train.cli import main
from gem_train.config import to_toml
from gem_train.events import JsonLines
from gem_train.run_dir import RunDir, read_json
from gem_train.testing import tiny_config


def folder(root, name, config, *, messages=(), steps=0):
    """A run folder as if a run had got so far."""
    run = RunDir(root / name)
    run.path.mkdir(parents=True)
    run.config_file.write_text(to_toml(config))
    events, metrics = JsonLines(run.events_file), JsonLines(run.metrics_file)
    for message in messages:
        events.write(event=message, at=0.0, total=50)
    for step in range(1, steps + 1):
        metrics.write(kind="step", step=step, loss=1.0)
    return run


@pytest.fixture
def shelf(finished_run, cache, tmp_path):
    """Runs of every kind in one folder."""
    root = tmp_path / "shelf"
    shutil.copytree(finished_run, root / "deep" / "done", ignore=shutil.ignore_patterns("checkpoints", "best"))
    config = tiny_config(cache, "optim.lr=0.5")
    folder(root, "new", config)
    folder(root, "killed", config, messages=["start"], steps=7)
    folder(root, "resumed", config, messages=["start", "interrupted", "start"], steps=9)
    folder(root, "asked", config, messages=["start", "interrupted"], steps=3)
    folder(root, "nan", config, messages=["start", "not finite"], steps=2)
    (folder(root, "torn", config, messages=["start"], steps=4).metrics_file).open("a").write('{"kind": "st')
    folder(root, "strange", config).config_file.write_text("recipe = ")
    return root


def test_every_state_of_a_run_is_told_apart(shelf, capsys):
    assert main(["ls", str(shelf), "--json"]) == 0
    said = capsys.readouterr()
    found = {row["path"].rsplit("/", 1)[1]: row for row in json.loads(said.out)}
    states = {name: (row["state"], row["step"], row["total"]) for name, row in found.items()}
    assert states == {
        "done": ("finished", 24, 24),
        "new": ("not begun", None, None),
        "killed": ("unfinished", 7, 50),
        "resumed": ("unfinished", 9, 50),
        "asked": ("interrupted", 3, 50),
        "nan": ("not finite", 2, 50),
        "torn": ("unfinished", 4, 50),
    }
    results = read_json(RunDir(shelf / "deep" / "done").eval_file)
    assert found["done"]["ne"] == {task: f["ne"] for task, f in results["model"].items()}
    assert "strange can't be understood" in said.err


def test_the_list_has_a_line_for_each_run(shelf, capsys):
    assert main(["ls", str(shelf)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 7
    (done,) = [line for line in lines if "deep/done" in line]
    assert all(word in done.split() for word in ("tiny", "synthetic", "finished", "24/24", "click", "convert"))


def test_a_long_curve_is_read_from_its_end(cache, tmp_path):
    run = folder(tmp_path, "long", tiny_config(cache), steps=4000)
    assert run.metrics_file.stat().st_size > 2 * runs.TAIL
    assert runs.last_step(run.metrics_file) == 4000


def test_show_tells_what_a_run_is_and_found(finished_run, capsys):
    assert main(["show", str(finished_run)]) == 0
    text = capsys.readouterr().out
    for part in (
        "recipe tiny, finished at step 24/24",
        "no recipe 'tiny' here",
        "synthetic:",
        "dense",
        "GEM",
        "report.html",
    ):
        assert part in text


def test_show_names_the_settings_that_differ_from_the_recipe(tmp_path, capsys):
    from gem_train import recipes
    from gem_train.config import override

    folder(tmp_path, "mine", override(recipes.load("synthetic"), ["optim.lr=0.25", "train.seed=9"]))
    assert main(["show", str(tmp_path / "mine")]) == 0
    text = capsys.readouterr().out
    assert "optim.lr: 0.003 -> 0.25" in text
    assert "train.seed: 0 -> 9" in text
    assert "not begun" in text
    assert main(["show", str(tmp_path / "mine"), "--set", "optim.lr=1"]) == 2


def test_validate_accepts_what_runs_and_says_what_it_is(finished_run, tmp_path, capsys):
    assert main(["validate", str(finished_run / "config.toml")]) == 0
    dense = read_json(RunDir(finished_run).model_file)["parameters"]["dense"]
    assert f"valid; recipe tiny, synthetic data, {dense:,} dense parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[optim]\nlrr = 1", "unknown key 'optim.lrr'; did you mean 'lr'?"),
        ("[optim]\nlr = 'fast'", "optim.lr: got 'fast' (str); expected a number"),
        ("[optim\n", "not valid TOML"),
        ("[model]\nwidth = 30\nheads = 4", "width 30 is not a multiple of heads 4"),
        ("[inputs]\nexclude = ['usr']", "did you mean 'user'?"),
        ("[lowprec]\nrecipe = 'fp3'", "fp3"),
        ("[data]\nsource = 'log'\npath = 'absent'", "no event log in absent"),
    ],
)
def test_validate_refuses_what_would_not_run(text, says, tmp_path, capsys):
    (tmp_path / "good.toml").write_text("recipe = 'good'\n")
    (tmp_path / "bad.toml").write_text(text)
    assert main(["validate", str(tmp_path / "bad.toml"), str(tmp_path / "good.toml")]) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert f"{tmp_path / 'bad.toml'}: " in said.err
    assert "good.toml: valid" in said.out  # the others are checked all the same


def test_validate_looks_up_functions_of_your_own(tmp_path, capsys):
    file = tmp_path / "own.toml"
    file.write_text("build = 'math:sqrt'\n[data]\nsource = 'own'\nload = 'math:floor'\n")
    assert main(["validate", str(file)]) == 0
    assert "valid as far as can be seen; recipe custom, with floor and sqrt of your own" in capsys.readouterr().out
    file.write_text("[data]\nsource = 'own'\nload = 'math:flor'\n")
    assert main(["validate", str(file)]) == 2
    assert "'math:flor' cannot be loaded" in capsys.readouterr().err


def test_tables_that_go_to_a_file_are_whole(capsys, monkeypatch):
    from gem_train.table import console, slice_table

    part = {
        "value": "a rather long name of a value",
        "samples": 123456,
        "users": 7890,
        "tasks": {"buy": FIGURES},
    }
    monkeypatch.setenv("COLUMNS", "60")
    console().print(slice_table("column", [part]))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "buy" in line]
    for text in ("a rather long name of a value", "123,456", "0.9123 to 0.9345", "0.7654", "1.0203"):
        assert text in line


FIGURES = {"samples": 123456, "base_rate": 0.1234, "ne": 0.9234, "ne_low": 0.9123, "ne_high": 0.9345, "auc": 0.7654,
           "calibration": 1.0203}  # fmt: skip


def test_a_damaged_file_is_named(finished_run, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    (run / "eval.json").write_text('{"a"')
    for arguments in (["show", str(run)], ["report", str(run)]):
        assert main(arguments) == 2
        assert f"{run / 'eval.json'} is damaged, it is no JSON" in capsys.readouterr().err
    assert main(["ls", str(tmp_path)]) == 0
    assert "eval.json is damaged" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_a_mistake(tmp_path, capsys):
    assert main(["ls", str(tmp_path / "absent")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["ls", str(tmp_path)]) == 0  # no run, no mistake


def test_looking_at_runs_needs_no_torch(shelf):
    import subprocess

    code = "import sys; from gem_train.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    for arguments in (["ls", str(shelf)], ["show", str(shelf / "deep" / "done")]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
