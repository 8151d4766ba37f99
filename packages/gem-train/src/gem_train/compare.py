"""`gem-train compare`: GEM and every baseline on the same batches, and whether the differences are real.

Each contender and seed is a run of its own, in its own process and folder (`contestant.py`), so that a comparison that
was stopped goes on where it was and never repeats a finished run:

    OUT/<name>/seed-<n>/    a run folder          OUT/compare.json    figures and intervals
    OUT/<name>/seed-<n>/log.txt                   OUT/compare.svg     the differences to GEM

A contender's figure is the mean of its seeds' figures. The interval of a difference to GEM is that of the bootstrap
over users (metrics/bootstrap.py): both are computed on the same draws of users, so what both find hard cancels.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gem_train.comparison import HIGHEST, LOWEST, Test
from gem_train.config import RunConfig, differences, override, to_toml
from gem_train.config.tree import suggest
from gem_train.errors import Interrupted, UserError
from gem_train.metrics.bootstrap import FEW_USERS, METRICS, resample
from gem_train.metrics.classification import logit
from gem_train.recipes.baselines import tuned
from gem_train.run_dir import RunDir, read_json, write_json

GEM = "gem"
FITTED = ("constant", "logistic")  # as gem_model.baselines has them, which would load torch to tell
TRAINED = ("dlrm", "deepfm", "dcnv2", "wukong", "din", "sasrec", "hstu")
NAMES = (GEM, *TRAINED, *FITTED)
CONTENDER = "contender.json"
POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One model with one seed: how it is trained, and where."""

    name: str
    seed: int
    config: RunConfig
    run: RunDir
    model: dict[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.run.eval_file.exists() and self.run.predictions_file.exists()

    def prepare(self) -> None:
        """Write down who runs how. Raises UserError where the folder holds another contender or configuration."""
        who = {"name": self.name, "model": self.model}
        if not self.run.config_file.exists():
            self.run.path.mkdir(parents=True, exist_ok=True)
            write_json(self.run.path / CONTENDER, who)
            self.run.config_file.write_text(to_toml(self.config), encoding="utf-8")
            return
        before = read_json(self.run.path / CONTENDER)
        changed = differences(self.run.read_config(), self.config)
        changed += [] if before == who else [f"contender: {before} -> {who}"]
        if changed:
            raise UserError(
                f"{self.run.path} was run with other settings ({'; '.join(changed)}); name another folder by --out"
            )


def contenders(config: RunConfig, out: Path, names: Iterable[str], seeds: int) -> list[Contender]:
    """Everyone who takes part, in the order in which they start. Raises UserError for an unknown name."""
    found = []
    for name in names:
        if name not in NAMES:
            raise UserError(f"unknown model {name!r}{suggest(name, NAMES)} (there are: {', '.join(NAMES)})")
        settings = tuned(config.recipe, name)
        mine = override(config, settings.run)
        for seed in range(1 if name in FITTED else seeds):  # what is fitted to an optimum has no seed
            train = dataclasses.replace(mine.train, seed=mine.train.seed + seed)
            run = RunDir(out / name / f"seed-{train.seed}")
            model = {k: list(v) if isinstance(v, tuple) else v for k, v in settings.model.items()}
            found.append(
                Contender(name=name, seed=seed, config=dataclasses.replace(mine, train=train), run=run, model=model)
            )
    return found


def compete(everyone: Sequence[Contender], *, jobs: int, say: Callable[[str], None]) -> list[str]:
    """Run all who are not finished, `jobs` at a time; returns a line for each that failed.

    The first that gets there builds the log, and the others wait for it. Raises Interrupted at Ctrl-C or SIGTERM, after
    the running ones have written their checkpoints.
    """
    for contender in everyone:
        contender.prepare()
    waiting = [c for c in everyone if not c.finished]
    if len(waiting) < len(everyone):
        say(f"{len(everyone) - len(waiting)} of {len(everyone)} runs are finished already")
    running: dict[subprocess.Popen[bytes], tuple[Contender, float]] = {}
    failed: list[str] = []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                contender = waiting.pop(0)
                running[_start(contender, jobs)] = (contender, time.monotonic())
            time.sleep(POLL_S)
            for process in [p for p in running if p.poll() is not None]:
                contender, began = running.pop(process)
                seconds = time.monotonic() - began
                if process.returncode == 0 and contender.finished:
                    say(f"{contender.name} seed {contender.seed}: {_short(contender)}  ({seconds:.0f} s)")
                else:
                    failed.append(
                        f"{contender.name} seed {contender.seed}: {_last_line(contender, process.returncode)}"
                    )
                    say(failed[-1])
    except KeyboardInterrupt:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
        raise Interrupted("the comparison was stopped; the same command goes on with it") from None
    finally:
        signal.signal(signal.SIGTERM, before)
    return failed


def results(everyone: Sequence[Contender], *, draws: int = 1000, level: float = 0.95, seed: int = 0) -> dict[str, Any]:
    """Figures by task and model, with each model's difference to GEM and its interval, of those who finished.

    Raises UserError unless all were tested on the same samples with the same labels.
    """
    done = [c for c in everyone if c.finished]
    tests = [Test.read(c.run) for c in done]
    if not tests:
        raise UserError("no contender has finished: there is nothing to compare")
    first = tests[0]
    for contender, test in zip(done, tests, strict=True):
        same = np.array_equal(test.sample_ids, first.sample_ids) and all(
            np.array_equal(test.labels[t], first.labels[t], equal_nan=True) for t in first.labels
        )
        if not same:
            raise UserError(f"{contender.run.path} was tested on other samples than {done[0].run.path}")
    names = list(dict.fromkeys(c.name for c in done))
    members = {name: [i for i, c in enumerate(done) if c.name == name] for name in names}
    tasks: dict[str, Any] = {}
    notes = []
    for task, labels in first.labels.items():
        known = np.isfinite(labels)
        if not known.any():
            notes.append(f"task {task!r} has no label in the test split")
            continue
        logits = [logit(np.clip(t.probabilities[task][known], LOWEST, HIGHEST)) for t in tests]
        found = resample(first.groups[known], labels[known], logits, draws=draws, seed=seed)
        if found.users < FEW_USERS:
            notes.append(f"task {task!r}: only {found.users} users to draw from; the intervals are too narrow")
        points = {n: found.points[:, i].mean(axis=1) for n, i in members.items()}  # [M] each
        values = {n: found.values[:, :, i].mean(axis=2) for n, i in members.items()}  # [R, M] each
        tasks[task] = {
            "samples": int(known.sum()),
            "users": found.users,
            "models": {
                n: {
                    "seeds": len(members[n]),
                    "figures": dict(zip(METRICS, map(float, points[n]), strict=True)),
                    "by_seed": [dict(zip(METRICS, map(float, found.points[:, i]), strict=True)) for i in members[n]],
                    **({} if n == GEM or GEM not in points else {"less_gem": _less(points, values, n, level)}),
                }
                for n in names
            },
        }
    parameters = {n: _parameters(next(c for c in done if c.name == n)) for n in names}
    return {"draws": draws, "level": level, "tasks": tasks, "parameters": parameters, "notes": notes}


def _less(points: dict[str, Any], values: dict[str, Any], name: str, level: float) -> dict[str, Any]:
    """By metric: the model's figure less GEM's, and the ends of its interval; a lower NE is better, a higher AUC."""
    d = values[name] - values[GEM]
    out = {}
    for m, metric in enumerate(METRICS):
        column = d[:, m][np.isfinite(d[:, m])]
        ends = np.percentile(column, [50 * (1 - level), 50 * (1 + level)]) if len(column) else [np.nan, np.nan]
        out[metric] = {
            "difference": float(points[name][m] - points[GEM][m]),
            "low": float(ends[0]),
            "high": float(ends[1]),
        }
    return out


def plot(found: dict[str, Any]) -> str:
    """The differences of the NE to GEM's with their intervals, as SVG: a panel a task, right of zero is worse."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    tasks = found["tasks"]
    rows = max(sum("less_gem" in m for m in t["models"].values()) for t in tasks.values())
    with rc_context({"svg.hashsalt": "gem-train", "font.size": 9}):
        figure = Figure(figsize=(4.4 * len(tasks), 1.2 + 0.28 * rows), layout="constrained")
        panels = figure.subplots(1, len(tasks), squeeze=False)[0]
        for axes, (task, of_task) in zip(panels, tasks.items(), strict=True):
            models = {n: m["less_gem"]["ne"] for n, m in of_task["models"].items() if "less_gem" in m}
            for y, (name, d) in enumerate(sorted(models.items(), key=lambda x: -x[1]["difference"])):
                axes.plot([d["low"], d["high"]], [y, y], color="#2563eb", linewidth=1.6)
                axes.plot(d["difference"], y, "o", color="#2563eb", markersize=4)
                axes.text(0.01, y, name, transform=axes.get_yaxis_transform(), va="center", ha="left", fontsize=8)
            axes.axvline(0.0, color="#98a2b3", linewidth=0.8, linestyle="--")
            axes.set(yticks=[], title=task, xlabel=f"NE less GEM's, {found['level']:.0%} interval")
            axes.margins(x=0.25)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return re.sub(r"^.*?(?=<svg)", "", buffer.getvalue(), flags=re.DOTALL)


def _start(contender: Contender, jobs: int) -> subprocess.Popen[bytes]:
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    with (contender.run.path / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "gem_train.contestant", str(contender.run.path)],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)},
            start_new_session=True,  # a Ctrl-C is ours to pass on, once
        )


def _short(contender: Contender) -> str:
    figures = read_json(contender.run.eval_file)["model"]
    return "  ".join(f"{task} NE {f['ne']:.4f} AUC {f['auc']:.4f}" for task, f in figures.items())


def _last_line(contender: Contender, code: int) -> str:
    lines = (contender.run.path / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"failed with exit code {code}: {lines[-1] if lines else 'it said nothing'}"


def _parameters(contender: Contender) -> dict[str, int] | None:
    return read_json(contender.run.model_file)["parameters"] if contender.run.model_file.exists() else None
