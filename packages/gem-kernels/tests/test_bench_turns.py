"""Cases built side by side and measured in turn, without a GPU: forks inherit what stands for one."""

import os
import time

import pytest
import torch
from gem_kernels.bench import __main__ as bench
from gem_kernels.bench import turns


@pytest.fixture(autouse=True)
def card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(turns.timing, "ceilings", lambda device: {"copy_tbps": 4.0})
    monkeypatch.setattr(turns, "PATIENCE", 120.0)


class Suite:
    """Rows say who measured, after what was built where."""

    def __init__(self, *dying):
        self.dying, self.built = dying, []

    def build(self, name, device):
        assert device == torch.device("cuda", 0)
        self.built.append(name)

    def measure(self, name, device, ceilings):
        if name in self.dying:
            os._exit(3)
        if name == "bad":
            raise RuntimeError("no such case")
        return [{"case": name, "by": os.getpid(), "built": list(self.built), **ceilings}]


def test_each_process_measures_what_it_built():
    names = list("abcde")
    with turns.Workers(names, 2, Suite()) as workers:
        assert workers.card == "a card"
        found = workers.ceilings()
        rows = {name: workers.measure(name, found)[0] for name in names}
        living = [process for process, _ in workers.processes]
    for name, row in rows.items():
        assert row["built"] == list("ace" if name in "ace" else "bd")
    assert len({row["by"] for row in rows.values()} - {os.getpid()}) == 2
    assert all(row["copy_tbps"] == 4.0 for row in rows.values())
    assert not any(process.is_alive() for process in living)


def test_what_a_dead_process_had_left_goes_to_a_new_one(capsys):
    with turns.Workers(list("abcd"), 2, Suite("a")) as workers:
        assert workers.measure("a", {}) == []
        assert workers.measure("b", {})[0]["built"] == ["b", "d"]
        assert workers.measure("c", {})[0]["built"] == ["c"]
        assert workers.measure("d", {})[0]["built"] == ["b", "d"]
    assert "a: the process ended" in capsys.readouterr().out


def test_a_case_that_raises_loses_only_itself(capfd):
    with turns.Workers(["bad", "good"], 1, Suite()) as workers:
        assert workers.measure("bad", {}) == []
        assert workers.measure("good", {})[0]["case"] == "good"
    assert "bad: RuntimeError: no such case" in capfd.readouterr().out


def test_a_process_that_hangs_is_ended(monkeypatch):
    suite = Suite()
    suite.measure = lambda name, device, ceilings: time.sleep(600) if name == "slow" else [{"case": name}]
    with turns.Workers(["slow", "b"], 1, suite) as workers:
        with monkeypatch.context() as patch:
            patch.setattr(turns.Workers, "_ready", lambda self, i: True)  # its answer is left for the next question
            patch.setattr(turns, "PATIENCE", 0.5)
            assert workers.measure("slow", {}) == []
        assert workers._ready(0)
        assert workers.measure("b", {}) == [{"case": "b"}]


def test_commands_that_share_a_lock_measure_one_at_a_time(tmp_path):
    """The second is ready to measure only after the first has left."""
    lock, log = tmp_path / "lock", tmp_path / "log"
    other = os.fork()
    if other == 0:
        with turns.Workers(["x"], 1, Suite(), lock), log.open("a") as file:
            file.write("x begins\n")
            file.flush()
            time.sleep(0.5)
            file.write("x ends\n")
        os._exit(0)
    while not (log.exists() and log.read_text()):
        time.sleep(0.01)
    with turns.Workers(["y"], 1, Suite(), lock), log.open("a") as file:
        file.write("y begins\n")
    os.waitpid(other, 0)
    assert log.read_text().split("\n")[:3] == ["x begins", "x ends", "y begins"]


def test_the_command(monkeypatch, tmp_path, capsys):
    row = {
        "case": "rms-256", "pass": "forward", "op": "rms_norm", "variant": "triton", "ms": 0.07, "tflops": None,
        "gbps": 3800.0, "of_gemm": None, "of_copy": 0.9, "peers": {}, "unit": "gbps",
    }  # fmt: skip
    monkeypatch.setattr(bench._Suite, "build", lambda self, name, device: None)
    monkeypatch.setattr(bench._Suite, "measure", lambda self, name, device, ceilings: [{**row, "case": name}])
    out = tmp_path / "norms.json"
    asked = ["norms", "--peer", "torch", "--case", "rms-512", "--case", "rms-256", "--jobs", "2", "--commit", "abc"]
    assert bench.main([*asked, "--out", str(out), "--lock", str(tmp_path / "lock")]) == 0
    written = bench.json.loads(out.read_text())
    assert [r["case"] for r in written["rows"]] == ["rms-512", "rms-256"]
    assert (written["card"], written["commit"], written["ceilings"]) == ("a card", "abc", {"copy_tbps": 4.0})
    assert written["command"].endswith("norms --peer torch --case rms-512 --case rms-256 --jobs 2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(asked) == 2
    assert "torch sees none" in capsys.readouterr().err
