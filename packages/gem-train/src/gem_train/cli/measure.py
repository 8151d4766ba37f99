"""`gem-train bench` and `gem-train ladder`."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tomli_w
from gem_model import GEM, ModelInputs
from gem_model.ranker import Ranker
from gem_parallel import Runtime, start

from gem_train.assemble import assemble, peak_of
from gem_train.config import RunConfig
from gem_train.errors import UserError, user_errors
from gem_train.events import Events, finite
from gem_train.ladder import results
from gem_train.ladder.climb import Options, check_names, climb
from gem_train.measuring.bench import compile_layers, measure
from gem_train.measuring.table import render
from gem_train.progress import Progress
from gem_train.run import quiet
from gem_train.run_dir import RunDir, new_path, read_json, write_json

READY_S = 300.0  # for a rung to get ready where only its measuring was limited


def bench(config: RunConfig, run: Path | None, arguments: argparse.Namespace) -> int:
    """Measure, print, and write efficiency.json and profile.toml, into the folder of the run where there is one."""
    out = Path(arguments.out) if arguments.out else run or new_path(f"bench-{config.recipe}")
    fill = _fill(arguments.fill)
    with _job(config) as runtime, _folder(out, runtime), Progress(enabled=False) as progress:
        _, trainer = assemble(
            config, runtime, RunDir(out), events=Events(None), progress=progress, build=on_device(runtime)
        )
        with user_errors("bench"):
            if arguments.compile:
                compile_layers(trainer)
            found = measure(
                trainer,
                fill,
                steps=arguments.steps,
                warm_up=arguments.warm_up,
                repeats=max(1, arguments.repeats),
                by_kernel=arguments.by == "kernel",
            )
        if runtime.is_main:
            found = results.circumstances("efficiency") | found
            write_json(out / "efficiency.json", found)
            (out / "profile.toml").write_text(tomli_w.dumps(found["profile"]), encoding="utf-8")
            print(json.dumps(finite(found), indent=2) if arguments.json else render(found))
            if not arguments.json:
                print(f"written: {out / 'efficiency.json'}, {out / 'profile.toml'} (gem-train plan --profile)")
    return 0


def ladder(config: RunConfig, arguments: argparse.Namespace) -> int:
    """Measure the rungs, printing each as it is there, and write ladder.json with a plot.

    What an earlier call has left in the folder is not measured again, unless it is named.
    """
    fill, out = _fill(arguments.fill), Path(arguments.out) if arguments.out else new_path(f"ladder-{config.recipe}")
    with user_errors("ladder"):
        check_names(arguments.rung, arguments.bench)
        done = results.measured(config, out, fill=fill, recompute=arguments.recompute)
    options = Options(
        fill=fill,
        steps=arguments.steps,
        warm_up=arguments.warm_up,
        repeats=arguments.repeats,
        train_steps=arguments.train_steps,
        recompute=arguments.recompute,
        names=tuple(arguments.rung),
        done=tuple(done),
        ready_limit=READY_S * bool(arguments.limit) if arguments.ready_limit is None else arguments.ready_limit,
        limit=arguments.limit,
        bench=arguments.bench,
    )
    with _job(config) as runtime:
        rows: list[dict[str, Any]] = []

        def report(row: dict[str, Any]) -> None:
            efficiency = row.pop("efficiency", None)
            rows.append(row)
            if efficiency is not None and runtime.is_main:
                out.mkdir(parents=True, exist_ok=True)
                write_json(out / "efficiency.json", results.circumstances("efficiency") | efficiency)
                print(render(efficiency), flush=True)
            if runtime.is_main:
                print(results.line(row), flush=True)
                write()  # after every rung: a ladder that is cut short has lost nothing

        def write() -> None:
            results.write(rows, config, out, peak=peak, fill=fill, recompute=options.recompute)

        peak = peak_of(config, runtime.device).note
        if runtime.is_main:
            print(
                f"{config.recipe} on {runtime.world} x {runtime.device.type}; {peak}\n{results.line(None)}", flush=True
            )
            for row in done.values():
                if not options.names:
                    print(results.line(row), flush=True)
        with user_errors("ladder"):
            climb(config, runtime, options, report=report)
        if runtime.is_main:
            results.plot(read_json(out / "ladder.json")["rows"], out)
            print(f"written: {out / 'ladder.json'}")
    return 0


def on_device(runtime: Runtime) -> Callable[[RunConfig, ModelInputs], Ranker]:
    """The model made where it will run: drawing many weights on the CPU takes long, and their values don't matter."""
    return lambda config, inputs: GEM(config.model, inputs, device=runtime.device)


@contextlib.contextmanager
def _job(config: RunConfig) -> Iterator[Runtime]:
    if config.build is not None:
        raise UserError(f"only GEM is measured, whose FLOPs are known; this configuration's model is {config.build}")
    with user_errors("start"):
        runtime = start(config.train.device, config.train.timeout_s)
    with runtime, quiet(runtime):
        yield runtime


@contextlib.contextmanager
def _folder(out: Path, runtime: Runtime) -> Iterator[None]:
    """The folder is there from the start, since a plan of activations may be written to it; left empty, it goes."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        if runtime.is_main:
            with contextlib.suppress(OSError):  # not empty
                for folder in made:
                    folder.rmdir()


def _fill(assignments: list[str]) -> dict[str, int]:
    found = {}
    for text in assignments:
        name, _, length = text.partition("=")
        if not length.isdigit() or int(length) < 1:
            raise UserError(f"--fill {text}: expected SOURCE=LENGTH with a length of 1 or more")
        found[name] = int(length)
    return found
