"""The command line: quick, and polite about mistakes."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from gem_train import recipes
from gem_train.cli import main
from gem_train.config import RunConfig, from_toml
from gem_train.metrics.bootstrap import FEWEST

FEW = ("--set", "data.synthetic.events=2000", "--set", "train.device=cpu")

PROBE = """
import sys, time
from gem_train.cli import main
try:
    main({arguments!r})
except SystemExit:
    pass
heavy = {{"torch", "torchrec", "triton", "matplotlib"}}
print(time.process_time(), sorted(heavy & set(sys.modules)), file=sys.stderr)
"""


def probe(*arguments):
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(arguments=list(arguments))], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    seconds, loaded = done.stderr.strip().splitlines()[-1].split(" ", 1)
    return float(seconds), loaded, done.stdout


def test_help_is_quick_and_imports_no_torch():
    found = [probe("--help") for _ in range(3)]
    assert all(loaded == "[]" for _, loaded, _ in found)
    assert all("COMMAND" in out for _, _, out in found)
    assert min(seconds for seconds, _, _ in found) < 0.5


def test_the_parser_alone_imports_nothing_but_the_standard_library():
    code = (
        "import sys; from gem_train.cli.parser import parser; parser(); "
        "print(sorted({'numpy', 'pyarrow', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ("recipes",),
        ("show", "ml100k"),
        ("run", "--help"),
        ("data", "prepare", "--help"),
        ("bench", "--help"),
        ("ladder", "--help"),
    ],
)
def test_light_commands_import_no_torch(arguments):
    assert probe(*arguments)[1] == "[]"


def test_help_from_the_shell_takes_less_than_half_a_second():
    """Of the processor's time, which others on the machine do not lengthen."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "gem_train", "--help"], capture_output=True, check=True, timeout=300)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert 0.01 < min(times) < 0.5


def test_recipes_are_listed_with_a_line_each(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == recipes.names()
    assert all(len(line.split()) > 4 for line in lines)


def test_show_prints_what_config_reads(capsys, tmp_path):
    assert main(["show", "synthetic", "--set", "optim.lr=0.5"]) == 0
    file = tmp_path / "shown.toml"
    file.write_text(capsys.readouterr().out)
    assert from_toml(RunConfig, file).optim.lr == 0.5
    assert main(["show", "--config", str(file), "--set", "data.batch_size=8"]) == 0
    assert "batch_size = 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "sinthetic"], "did you mean 'synthetic'"),
        (["run", "synthetic", "--set", "optim.lrr=1"], "did you mean 'optim.lr'"),
        (["run", "synthetic", "--set", "optim.lr=high"], "optim.lr: got 'high'"),
        (["run"], "name either a RECIPE"),
        (["show", "synthetic", "--config", "x.toml"], "name either a RECIPE"),
        (["run", __file__], "is a file, no recipe; name it by --config"),
        (["show", "sinthetic"], "'sinthetic' is no run folder, and no recipe; did you mean 'synthetic'"),
        (["bench", "absent"], "'absent' is no run folder, and no recipe (there are: "),
        (["bench", "synthetic", "--fill", "clicks=3", *FEW], "bench: 'clicks' is no source of the data"),
        (["ladder", "synthetic", "--rung", "jfa"], "ladder: 'jfa' is no rung; did you mean 'JFA'"),
        (["ls"], "there is no folder runs; runs are made in"),
        (["run", "--config", "absent.toml"], "cannot read the configuration absent.toml"),
        (["run", "synthetic", "--resume"], "--out DIR"),
        (["run", "--resume", "--out", "absent"], "there is no run folder absent"),
        (["run", "synthetic", "--resume", "--out", "absent"], "nothing to resume"),
        (["run", "log", "--out", "x"], "no event log in log: it has no manifest.json; build one by `gem-train data"),
        (["bench", "log"], "name it by --set data.path=FOLDER"),
        (["eval", "absent"], "there is no run folder absent"),
        (["report", "absent"], "there is no run folder absent"),
        (["report", "."], "is not a run folder"),
    ],
)
def test_mistakes_are_answered_in_one_line_with_exit_code_2(arguments, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert error.startswith("gem-train: error: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["compare", "synthetic", "--jobs", "0"], "--jobs: got '0'; expected a whole number, 1 or more"),
        (["compare", "synthetic", "--seeds", "two"], "--seeds: got 'two'"),
        (["bench", "synthetic", "--steps", "-1"], "--steps: got '-1'"),
        (["ladder", "synthetic", "--limit", "-1"], "--limit: got '-1'; expected a number, 0 or more"),
        (["diff", "a", "b", "--level", "95"], "--level: got '95'; expected a share between 0 and 1"),
        (["plan", "synthetic", "--gpus", "0"], "--gpus: got '0'"),
        (["rnu", "synthetic"], "invalid choice: 'rnu'; did you mean 'run'?"),
        (["bench", "synthetic", "--by", "kernels"], "invalid choice: 'kernels'; did you mean 'kernel'?"),
        (["compare", "synthetic", "--draws", "99"], f"--draws: got '99'; expected a whole number, {FEWEST} or more"),
        (["diff", "a", "b", "--draws", "99"], f"--draws: got '99'; expected a whole number, {FEWEST} or more"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(arguments, says, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert says in capsys.readouterr().err


def test_debug_shows_the_traceback():
    with pytest.raises(ValueError, match="unknown recipe"):
        main(["run", "nothing", "--debug"])


def test_without_a_command_the_help_is_printed(capsys):
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().out


def test_an_existing_folder_is_refused_with_both_ways_out(tmp_path, capsys):
    (tmp_path / "precious.txt").write_text("do not touch")
    assert main(["run", "synthetic", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "--resume" in error
    assert "--out" in error
    assert [p.name for p in tmp_path.iterdir()] == ["precious.txt"]


def test_other_packages_can_register_recipes(monkeypatch):
    point = EntryPoint(name="ours", value="gem_train.recipes.builtin:synthetic", group=recipes.GROUP)
    broken = EntryPoint(name="broken", value="no_such_module:recipe", group=recipes.GROUP)
    wrong = EntryPoint(name="wrong", value="builtins:dict", group=recipes.GROUP)
    monkeypatch.setattr(recipes, "entry_points", lambda group: [point, broken, wrong])
    assert recipes.names() == [
        "broken",
        "clicks10m",
        "large",
        "log",
        "ml100k",
        "openbandit",
        "ours",
        "synthetic",
        "wrong",
    ]
    assert recipes.load("ours").recipe == "ours"
    with pytest.raises(ValueError, match="no_such_module"):
        recipes.load("broken")
    with pytest.raises(ValueError, match="expected a RunConfig"):
        recipes.load("wrong")


# doctor


def test_doctor_examines_this_installation(capsys):
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (0 if found["healthy"] else 1)
    assert {k["operator"] for k in found["kernels"]} >= {"jagged_attention", "gdpa", "block_attention", "rotary"}
    assert all(k["reasons"] for k in found["kernels"])
    assert found["versions"]["torch"]
    assert found["devices"][0].startswith("cpu")
    assert main(["doctor"]) == code
    text = capsys.readouterr().out
    assert "Verdicts" in text
    (choice,) = [line for line in text.splitlines() if line.startswith("  on cpu: reference for ")]  # once for them all
    assert {"jagged_attention,", "gdpa,", "norms,"} <= set(choice.split())


def test_doctor_judges_disk_and_limits(capsys):
    from gem_train.doctor import judge, limits

    found = limits()
    assert found["free_bytes"]["here"] > 0
    assert found["open_files"] != 0
    short = {**found, "free_bytes": {"here": 5 << 20}, "open_files": 64, "file_size": 4096}
    bad = {v["what"]: v["says"] for v in judge(short) if not v["good"]}
    assert set(bad) == {"disk (here)", "open files", "file size"}
    assert "0.0 GiB free in" in bad["disk (here)"]
    assert "expected 256 or more (ulimit -n)" in bad["open files"]
    plenty = {
        **found,
        "free_bytes": {"here": 1 << 40},
        "open_files": found["unlimited"],
        "file_size": found["unlimited"],
    }
    assert all(v["good"] for v in judge(plenty))
    main(["doctor"])
    assert ": joins " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("torch", "triton", "fbgemm", "good"),
    [
        ("2.13.0+cpu", "3.7.1", "1.8.0", [True, True]),
        ("2.11.0+cu130", "3.6.0", "1.6.0", [True, True]),
        ("2.13.0", "3.6.0", "1.8.0", [False, True]),
        ("2.13.0", "3.7.1", "1.7.0", [True, False]),
        ("2.13.0", None, None, [False, False]),
        ("2.99.0", "3.7.1", "1.94.0", [True, True]),
        (None, "3.7.1", "1.8.0", [False]),
    ],
)
def test_the_match_of_versions(torch, triton, fbgemm, good):
    from gem_train.doctor import match

    found = match({"torch": torch, "triton": triton, "fbgemm-gpu": fbgemm, "fbgemm-gpu-cpu": None})
    assert [v["good"] for v in found] == good


def test_doctor_names_what_lies_under_a_failed_import(monkeypatch):
    from gem_train import doctor

    def load(name):
        if name == "torchrec":
            try:
                raise OSError("libnvidia-ml.so.1: cannot open shared object file")
            except OSError as error:
                raise OSError("Could not load this library: fbgemm_gpu_py.so") from error
        if name == "gem_model":
            raise ImportError

    monkeypatch.setattr(doctor.importlib, "import_module", load)
    says = {v["what"]: v for v in doctor._imports()}
    assert says["torch"]["good"]
    assert not says["torchrec"]["good"]
    for part in ("fbgemm_gpu_py.so", "libnvidia-ml.so.1", "without NVIDIA's driver", "fbgemm-gpu-cpu"):
        assert part in says["torchrec"]["says"]
    assert says["gem_model"]["says"] == "gem_model can't be imported: ImportError"


def test_doctor_fails_on_a_mismatch(monkeypatch, capsys):
    from gem_train import doctor

    monkeypatch.setattr(doctor, "version", lambda name: {"torch": "2.13.0", "triton": "3.1.0"}.get(name, "1.8.0"))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "BAD torch 2.13.0 with triton 3.1.0: expected triton 3.7" in out
