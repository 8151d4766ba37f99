"""The benchmarks on a CPU: their gates pass, their files are read."""

from __future__ import annotations

import json

import pytest
import torch
from gem_parallel import Profile
from gem_parallel.bench.__main__ import main
from gem_parallel.bench.memory import _out_of_memory, variants
from gem_parallel.testing import run_ranks


def test_memory_against_step_time(tmp_path, capsys):
    path = tmp_path / "memory.json"
    small = ["--workload", "gem_parallel.bench.stack:small_workload", "--batch", "2", "--min-kib", "4"]
    assert main(["memory", "--device", "cpu", *small, "--steps", "1", "--only", "full", "--out", str(path)]) == 0
    rows = {row["variant"]: row for row in json.loads(path.read_text())["rows"]}
    assert set(rows) == {"none", "none again", "full", "full + fp8"}
    assert rows["full"]["error"] == 0
    assert 0 < rows["full + fp8"]["error"] < 0.05
    assert "full + fp8" in capsys.readouterr().out
    assert "compile: regions 0.5" in variants([0.5], "compile")
    with pytest.raises(SystemExit, match=r"expected package\.module:function"):
        main(["memory", "--workload", "somewhere"])


def test_out_of_memory_is_seen_behind_what_came_of_it():
    assert _out_of_memory(torch.OutOfMemoryError("too much"))
    assert not _out_of_memory(RuntimeError("else"))
    behind = RuntimeError("capturing stream has unjoined work")
    behind.__context__ = torch.OutOfMemoryError("too much")  # as Python sets it
    assert _out_of_memory(behind)


def collectives(runtime, folder):
    sizes = ["--mib", "1", "2", "--repeats", "3", "--ctas", "2"]
    model = ["--layers", "1", "--width", "64", "--length", "8", "--batch", "2", "--steps", "1"]
    return main(
        ["comm", "--device", "cpu", *sizes, *model, "--out", f"{folder}/c.json", "--profile", f"{folder}/p.json"]
    )


def test_collectives_and_the_profile_that_they_give(tmp_path):
    assert run_ranks(2, __file__, "collectives", tmp_path, str(tmp_path)) == [0, 0]
    rows = json.loads((tmp_path / "c.json").read_text())["rows"]
    assert [row["op"] for row in rows if row["case"] == "ladder"] == ["plain", "prefetch", "copy engine", "fp8 payload"]
    data = json.loads((tmp_path / "p.json").read_text())
    assert [row["bytes"] for row in data["collectives"]] == [2**20] * 4 + [2**21] * 4
    for row in data["collectives"]:  # times on a busy machine may not rise with the size
        row["ms"] = row["bytes"] / 1e6
    (tmp_path / "p.json").write_text(json.dumps(data))
    (tmp_path / "rates.toml").write_text('tflops = 123.0\nsource = "rates"\n')
    profile = Profile.read(tmp_path / "rates.toml", tmp_path / "p.json")
    assert profile.tflops == 123.0
    assert profile.link("host", "all_gather").gbps == pytest.approx(0.5)
    assert profile.source.startswith("rates; python -m gem_parallel.bench comm on 2 x cpu")


def windows(runtime):
    """Every step, on files in the place of cards."""
    small = ["--device", "cpu", "--mib", "1", "--width", "64", "--layers", "1", "--steps", "2"]
    ways = [["make"], ["race"], ["gathers", "--copies", "written"], ["stack", "--reduce", "--held"]]
    return [main(["windows", "--step", *way, *small]) for way in ways]


def test_copy_engines_in_small_steps(tmp_path):
    assert run_ranks(2, __file__, "windows", tmp_path) == [[0] * 4] * 2
