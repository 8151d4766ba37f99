"""The list of faults: after each of them a run ends with the losses and figures of the run that nothing befell.

GEM_KILLS says how often the process is killed at a random moment (20 by default, which take half a minute).
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import time

import pytest
from gem_train.cli import main
from gem_train.config import to_toml
from gem_train.errors import NonFiniteError
from gem_train.events import read
from gem_train.run_dir import RunDir
from gem_train.testing import assembled, command, ranks, tiny_config

KILLS = int(os.environ.get("GEM_KILLS", "20"))


def curve(folder):
    """What a run that was resumed must repeat bit by bit."""
    found = read(RunDir(folder).metrics_file)
    return [(r["kind"], r["step"], r.get("loss"), r.get("grad_norm"), r.get("lr"), r.get("ne")) for r in found]


def results(folder):
    """The figures of the test, without what is said of the run itself."""
    found = json.loads(RunDir(folder).eval_file.read_text())
    return {key: found[key] for key in ("model", "optimal", "baselines", "slices", "weights", "samples")}


def until(condition, seconds=300.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def begun(folder, process):
    return RunDir(folder).metrics_file.exists() or not process.is_alive()


def reached(folder, step):
    return lambda: any(r["kind"] == "step" and r["step"] >= step for r in read(RunDir(folder).metrics_file))


@pytest.fixture
def config_file(cache, finished_run, tmp_path):
    """The configuration of the finished run, whose log is in the cache already."""
    file = tmp_path / "config.toml"
    file.write_text(to_toml(tiny_config(cache)))
    return file


def same(out, finished_run, why=""):
    assert curve(out) == curve(finished_run), why
    assert results(out) == results(finished_run), why


def test_killed_again_and_again_at_random_moments_it_ends_with_the_same_bits(config_file, finished_run, tmp_path):
    """SIGKILL at a random moment: while it starts, in a step, in a validation, in a save, in the test."""
    seed = random.getrandbits(32)
    rng, log = random.Random(seed), tmp_path / "log.txt"
    number, killed, states = 0, 0, []
    out = tmp_path / "run-0"

    def launch():
        resume = ["--resume"] if RunDir(out).config_file.exists() else []
        return command(["run", "--config", str(config_file), "--out", str(out), *resume], log)

    while killed < KILLS:
        process = launch()
        if rng.random() < 0.8:  # most of them when there is something to lose
            until(functools.partial(begun, out, process))
        process.join(rng.uniform(0.0, 1.2))
        if process.is_alive():
            process.kill()
            process.join()
            killed += 1
            states.append(len(read(RunDir(out).metrics_file)))
        elif process.exitcode == 0:  # it was through: begin another
            same(out, finished_run, f"seed {seed}")
            number += 1
            out = tmp_path / f"run-{number}"
        else:
            raise AssertionError(f"seed {seed}: exit code {process.exitcode}: {log.read_text()[-2000:]}")
    process = launch()
    process.join(300)
    assert process.exitcode == 0, f"seed {seed}, {states}: {log.read_text()[-2000:]}"
    same(out, finished_run, f"seed {seed}, killed with so many records: {states}")


def test_killed_before_there_was_anything_to_save_it_begins_again(cache, run_cli, finished_run, tmp_path):
    """Twice: the second time with the empty curve that the first resumption has left."""
    out = tmp_path / "run"
    RunDir(out).start(tiny_config(cache), resume=False)
    (out / "metrics.jsonl").touch()
    assert run_cli(out, resume=True) == 0
    same(out, finished_run)


def test_sigterm_in_the_middle(config_file, finished_run, tmp_path):
    out, log = tmp_path / "run", tmp_path / "log.txt"
    process = command(["run", "--config", str(config_file), "--out", str(out)], log, hold=4)
    until(reached(out, 4))
    process.terminate()
    process.join(300)
    assert process.exitcode == 0
    assert read(out / "metrics.jsonl")[-1]["step"] == 5  # the one that it was in
    assert "stopped at step 5 of 24 as asked; a checkpoint was written" in log.read_text()
    process = command(["run", "--resume", "--out", str(out)], log)
    process.join(300)
    assert process.exitcode == 0
    same(out, finished_run)


def test_a_full_disk_in_the_middle(cache, finished_run, tmp_path):
    """Checkpoints of some steps can't be written; the run goes on, and its losses are none the worse."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with assembled(tiny_config(cache), tmp_path / "run") as (_, trainer):
        step = trainer.step

        def on_a_full_disk(batch, flops=0.0):
            limit = 20_000 if 4 <= trainer.position.step < 12 else before[0]
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            return step(batch, flops)

        trainer.step = on_a_full_disk
        try:
            with pytest.warns(UserWarning, match="Training goes on; earlier checkpoints are intact"):
                trainer.fit()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert trainer.checkpoints.latest() == 24
    assert curve(tmp_path / "run") == curve(finished_run)


@pytest.mark.parametrize("damage", ["flipped bit", "cut short", "missing file"])
def test_a_corrupt_newest_checkpoint_is_passed_over(damage, run_cli, finished_run, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(finished_run, out)
    newest = max((out / "checkpoints").glob("step-*"))
    file = next(newest.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    if damage == "flipped bit":
        content[len(content) // 2] ^= 1
    file.unlink()
    if damage != "missing file":
        file.write_bytes(content if damage == "flipped bit" else content[:-1])
    with pytest.warns(UserWarning, match=f"checkpoint of step {int(newest.name[5:])} is damaged and passed over"):
        assert run_cli(out, resume=True) == 0
    same(out, finished_run)


def test_a_nan_that_does_not_come_again(cache, run_cli, finished_run, tmp_path):
    out = tmp_path / "run"
    with assembled(tiny_config(cache), out) as (_, trainer):
        module = trainer.model.module.get_submodule("layers.0.interaction")
        bad = 12

        def hook(_module, _args, output):
            return output * float("nan") if trainer.position.step + 1 == bad else output

        module.register_forward_hook(hook)
        with pytest.raises(NonFiniteError, match="step 12"):
            trainer.fit()
    assert run_cli(out, resume=True) == 0
    same(out, finished_run)


def test_a_dead_worker_of_the_loader(run_cli, finished_run, tmp_path, monkeypatch):
    from gem_train.trainer import Trainer

    killed, step = [], Trainer.step

    def murderous(self, batch, flops=0.0):
        if self.position.step == 6:
            killed.extend(multiprocessing.active_children())
            for child in killed:
                os.kill(child.pid, signal.SIGKILL)
        return step(self, batch, flops)

    monkeypatch.setattr(Trainer, "step", murderous)
    out = tmp_path / "run"
    with pytest.warns(RuntimeWarning, match="a loader's worker process died"):
        assert run_cli(out, "data.workers=1") == 0
    assert killed
    same(out, finished_run)


def free_port():
    """A port outside the range from which the system takes those of outgoing connections: nobody comes between."""
    for port in random.SystemRandom().sample(range(10_000, 20_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


def test_a_dead_rank_ends_the_run_with_its_name_and_the_run_goes_on(cache, tmp_path):
    """When it is told to, and by itself, as under `torchrun --max-restarts`: the same command again, told that it is a
    restart. Not through torchrun itself, whose restart of a gloo job often fails to connect.
    """
    file, out, whole = tmp_path / "two.toml", tmp_path / "run", tmp_path / "whole"
    file.write_text(to_toml(tiny_config(cache, "train.max_steps=12", "train.timeout_s=120")))

    def started(out, *more, **options):
        return ranks(2, ["run", *more, "--out", str(out)], tmp_path, free_port(), **options)

    def through(*arguments, **options):
        for rank in started(*arguments, **options):
            rank.join(300)
            assert rank.exitcode == 0, (tmp_path / "rank-0.txt").read_text()[-2000:]

    through(whole, "--config", str(file))
    alive, victim = started(out, "--config", str(file), hold=5)
    until(reached(out, 5))
    victim.kill()
    alive.join(300)
    said = (tmp_path / "rank-0.txt").read_text()
    assert alive.exitcode == 4, said[-2000:]
    assert "rank 1, whose process on this host is gone" in said
    assert "go on with --out " in said
    assert any(r.get("event") == "peer lost" for r in read(out / "events.jsonl"))

    restarted = shutil.copytree(out, tmp_path / "restarted")
    through(out, "--resume")
    through(restarted, "--config", str(file), restarts=1)
    for folder in (out, restarted):
        assert curve(folder) == curve(whole)
        assert results(folder) == results(whole)


def test_a_restart_without_a_named_folder_is_refused(config_file, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main(["run", "--config", str(config_file)]) == 2
    assert "torchrun has restarted this run" in capsys.readouterr().err
