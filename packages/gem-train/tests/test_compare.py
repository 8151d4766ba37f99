"""Comparisons: who takes part, that finished runs are kept, and that the intervals are those of paired draws."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gem_model import baselines
from gem_train import compare, contestant, metrics
from gem_train.cli import main
from gem_train.config import from_toml, to_toml
from gem_train.config.run import RunConfig
from gem_train.errors import Interrupted, UserError
from gem_train.recipes.baselines import TUNED, Tuned
from gem_train.run_dir import RunDir, write_json
from gem_train.testing import tiny_config


def test_the_names_are_those_of_the_baselines():
    assert set(compare.TRAINED) == set(baselines.TRAINED)
    assert set(compare.FITTED) == set(baselines.FITTED)


def test_every_tuned_setting_exists():
    for recipe, models in TUNED.items():
        for name, settings in models.items():
            if name != compare.GEM:
                baselines.config_of(name, **settings.model)
            assert compare.contenders(RunConfig(recipe=recipe), RunDir("x").path, [name], 1)


def test_contenders_differ_in_seed_and_settings_alone(cache, tmp_path, monkeypatch):
    monkeypatch.setitem(TUNED, "tiny", {"din": Tuned(model={"attention": 5}, run=("optim.lr=0.5",))})
    config = tiny_config(cache)
    found = compare.contenders(config, tmp_path, ["gem", "din", "constant"], 2)
    assert [(c.name, c.seed) for c in found] == [("gem", 0), ("gem", 1), ("din", 0), ("din", 1), ("constant", 0)]
    gem, din = found[1], found[3]
    assert din.config.optim.lr == 0.5
    assert din.model == {"attention": 5}
    assert dataclasses.replace(din.config, optim=gem.config.optim) == gem.config
    assert gem.config == dataclasses.replace(config, train=dataclasses.replace(config.train, seed=1))
    with pytest.raises(UserError, match=r"unknown model 'dinn'.*did you mean 'din'"):
        compare.contenders(config, tmp_path, ["dinn"], 1)


def test_a_folder_of_other_settings_is_refused(cache, tmp_path):
    config = tiny_config(cache)
    compare.contenders(config, tmp_path, ["gem"], 1)[0].prepare()
    compare.contenders(config, tmp_path, ["gem"], 1)[0].prepare()  # the same again is fine
    other = tiny_config(cache, "optim.lr=0.7")
    with pytest.raises(UserError, match=r"optim\.lr: 0\.003 -> 0\.7"):
        compare.contenders(other, tmp_path, ["gem"], 1)[0].prepare()


def finished(config, out, name, logits_of_seeds, sample_ids, users, labels):
    """Run folders of a contender that said `logits`."""
    found = compare.contenders(config, out, [name], len(logits_of_seeds))
    for contender, logits in zip(found, logits_of_seeds, strict=True):
        contender.prepare()
        columns = {"sample_id": sample_ids, "group": users, "label_click": labels, "p_click": metrics.sigmoid(logits)}
        pq.write_table(pa.table(columns), contender.run.predictions_file)
        write_json(contender.run.eval_file, {"model": {}})
    return found


def test_differences_are_means_over_seeds_on_the_same_draws(cache, tmp_path):
    rng, n = np.random.default_rng(0), 1200
    users, ids = rng.integers(60, size=n), np.arange(n)
    truth = rng.normal(size=n) + rng.normal(size=60)[users]
    labels = (rng.random(n) < metrics.sigmoid(truth)).astype(np.float32)
    config = tiny_config(cache)
    good = [truth + 0.3 * rng.normal(size=n) for _ in range(2)]
    bad = [truth + 1.5 * rng.normal(size=n) for _ in range(2)]
    everyone = finished(config, tmp_path, "gem", good, ids, users, labels)
    everyone += finished(config, tmp_path, "din", bad, ids, users, labels)
    found = compare.results(everyone, draws=300)
    of_task = found["tasks"]["click"]
    assert of_task["samples"] == n
    for name, seeds in (("gem", good), ("din", bad)):
        ne = np.mean([metrics.normalized_entropy(labels, z) for z in seeds])
        auc = np.mean([metrics.auc(labels, z) for z in seeds])
        figures = of_task["models"][name]["figures"]
        assert figures["ne"] == pytest.approx(ne, rel=1e-6)
        assert figures["auc"] == pytest.approx(auc, rel=1e-6)
    d = of_task["models"]["din"]["less_gem"]["ne"]
    assert d["low"] < d["difference"] < d["high"]
    assert d["low"] > 0, "noise must show as a worse NE"
    # The same by hand: one draw of users is the same for both models and all seeds.
    rng = np.random.default_rng(0)
    counts = np.bincount(rng.integers(60, size=(300, 60))[0], minlength=60).astype(float)[users]
    by_hand = np.mean(
        [metrics.normalized_entropy(labels, b, counts) - metrics.normalized_entropy(labels, g, counts)
         for g, b in zip(good, bad, strict=True)]
    )  # fmt: skip
    values = metrics.resample(users, labels, [*good, *bad], draws=300).values[0, metrics.METRICS.index("ne")]
    assert values[2:].mean() - values[:2].mean() == pytest.approx(by_hand, rel=1e-6)
    assert compare.plot(found).startswith("<svg")


def test_other_samples_are_refused(cache, tmp_path):
    labels, users, z = np.ones(300, np.float32), np.arange(300), np.zeros(300)
    labels[:150] = 0
    everyone = finished(tiny_config(cache), tmp_path, "gem", [z], np.arange(300), users, labels)
    everyone += finished(tiny_config(cache), tmp_path, "din", [z], np.arange(1, 301), users, labels)
    with pytest.raises(UserError, match="was tested on other samples"):
        compare.results(everyone)


class Inside:
    """A contender that was through before anyone asked."""

    def __init__(self, contender, jobs):
        self.returncode = contestant.told([str(contender.run.path)])

    def poll(self):
        return self.returncode


@pytest.mark.slow
def test_the_command_trains_everyone_once(cache, tmp_path, capsys, monkeypatch):
    """Whole processes; a second call trains nothing, a lost result is made again from its checkpoint (in this one)."""
    file, out = tmp_path / "tiny.toml", tmp_path / "out"
    file.write_text(to_toml(tiny_config(cache, "train.max_steps=6", "train.eval_every=3")))
    command = ["compare", "--config", str(file), "--out", str(out), "--models", "constant,gem,din", "--seeds", "1"]
    command += ["--jobs", "2", "--draws", "100"]
    assert main([*command, "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    for task in ("click", "convert"):
        assert set(found["tasks"][task]["models"]) == {"gem", "din", "constant"}
        assert found["tasks"][task]["models"]["constant"]["figures"]["auc"] == 0.5
    assert json.loads((out / "compare.json").read_text())["tasks"].keys() == found["tasks"].keys()
    gem, din = (RunDir(out / name / "seed-0") for name in ("gem", "din"))
    assert from_toml(RunConfig, gem.config_file) == from_toml(RunConfig, din.config_file)
    assert json.loads(din.model_file.read_text())["parameters"] != json.loads(gem.model_file.read_text())["parameters"]
    before = gem.predictions_file.stat().st_mtime_ns
    din.eval_file.unlink()
    monkeypatch.setattr(compare, "_start", Inside)
    assert main(command) == 0
    said = capsys.readouterr()
    assert "2 of 3 runs are finished already" in said.err
    assert gem.predictions_file.stat().st_mtime_ns == before
    assert din.eval_file.exists()
    assert "NE - GEM's" in said.out


@pytest.fixture
def interruptible():
    """Ctrl-C raises KeyboardInterrupt, also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_comparison_leaves_no_one_running(cache, tmp_path, monkeypatch, interruptible, which):
    started = []

    def start(contender, jobs):
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        if len(started) == 2:  # by then it listens for signals
            threading.Timer(0.1, lambda: os.kill(os.getpid(), which)).start()
        return started[-1]

    monkeypatch.setattr(compare, "_start", start)
    everyone = compare.contenders(tiny_config(cache), tmp_path, ["gem"], 2)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="the same command goes on with it"):
        compare.compete(everyone, jobs=2, say=lambda line: None)
    assert [process.poll() for process in started] == [-signal.SIGTERM, -signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


def test_who_fails_is_named_and_the_others_run(cache, tmp_path, monkeypatch):
    def start(contender, jobs):
        (contender.run.path / "log.txt").write_text("working\nout of luck\n")
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(2)"])

    monkeypatch.setattr(compare, "_start", start)
    said = []
    failed = compare.compete(
        compare.contenders(tiny_config(cache), tmp_path, ["gem", "din"], 1), jobs=2, say=said.append
    )
    assert failed == said
    assert failed == [f"{name} seed 0: failed with exit code 2: out of luck" for name in ("gem", "din")]
