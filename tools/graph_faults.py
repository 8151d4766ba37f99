"""Which part of training ends on a card with a launch failure or an infinite gradient: the same run, a part left out.

    python tools/graph_faults.py --out FOLDER [--seconds 190] [--jobs 6] [--variants usual,portable,...]

The preset "base" with 2,048 histories of up to 16 events a step, for one epoch of 219 steps, as it failed in three runs
of four beside others on one card. `--jobs` of the variants run at a time, each a process of its own, in an order that
tells most first; those that have not ended after `--seconds` are stopped, which is no failure. FOLDER/faults.json has
how each ended, and what is left to suspect is said: parts that no run with a fault did without, where a run without
them came to its end.

A fault that did not come proves little in a single run: of runs that fail three times in four, one in four does not.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaling import configuration

DATA = (
    "data.synthetic.events=500000", "data.fractions=0.9,0.02,0.08", "data.batch_size=2048",
    "data.eval_batch_size=2048", "data.max_history=16", "optim.lr=1e-2",
)  # fmt: skip
SMALL = (
    "data.synthetic.events=3000", "data.batch_size=64", "data.eval_batch_size=256", "data.max_history=16",
    "train.max_steps=2", "train.device=cpu",
)  # fmt: skip
PARTS = (
    "graphs", "branches", "Hopper softmax", "Hopper GDPA", "forward in turn", "short backward", "Triton kernels",
    "expandable segments",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A run: what it does without, and how."""

    without: tuple[str, ...] = ()  # of PARTS
    size: str = "base"
    settings: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    change: Callable[[], None] = lambda: None  # of what is imported, in the run's process
    under: tuple[str, ...] = ()  # a program that runs it


def without_backend(name: str, operator: str | None = None) -> Callable[[], None]:
    """A backend takes no problem, or none of one operator."""

    def change() -> None:
        from gem_kernels import dispatch

        applies = dispatch._BACKENDS[name]
        dispatch._BACKENDS[name] = lambda problem: (
            (False, "left out") if operator in (None, problem.op) else applies(problem)
        )

    return change


def reference() -> None:
    """Plain PyTorch alone."""
    without_backend("hopper")()
    without_backend("triton")()


def whole_backward() -> None:
    """Short sequences take the backward of long ones."""
    launch = importlib.import_module("gem_kernels.hopper.launch_backward")
    launch.choose_backward = lambda *_, **__: launch.BACKWARD["stream"]  # type: ignore[attr-defined]


def forward_not_in_turn() -> None:
    """Short sequences take the forward of long ones, whose warpgroups do not take turns."""
    launch = importlib.import_module("gem_kernels.hopper.launch")
    launch.choose_forward = lambda *_, **__: launch.FORWARD["3x128"]  # type: ignore[attr-defined]


def one_stream() -> None:
    """Everything is captured in line."""
    importlib.import_module("gem_model.lanes").Lanes.open = lambda *_: {}  # type: ignore[attr-defined]


def variants(out: Path) -> dict[str, Variant]:
    """By name, those that tell most first."""
    hopper = ("Hopper softmax", "Hopper GDPA", "forward in turn", "short backward")
    dump = {
        "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1", "CUDA_COREDUMP_FILE": str(out / "dump.core"),
        "CUDA_COREDUMP_SHOW_PROGRESS": "1", "CUDA_COREDUMP_GENERATION_FLAGS": "skip_nonrelocated_elf_images,"
        "skip_global_memory,skip_shared_memory,skip_local_memory,skip_abort",
    }  # fmt: skip
    checks = {"GEM_CHECK_GRAPHS": "1"}
    off = ("train.cuda_graphs=off",)
    found = {
        "usual": Variant(),
        "portable": Variant(without=hopper, change=without_backend("hopper")),
        "no-graphs": Variant(without=("graphs", "branches"), settings=off, environment={"CUDA_LAUNCH_BLOCKING": "1"}),
        "checked": Variant(environment=checks),
        "whole-backward": Variant(without=("short backward",), change=whole_backward),
        "forward-128": Variant(without=("forward in turn",), change=forward_not_in_turn),
        "usual-2": Variant(environment=dump),
        "one-stream": Variant(without=("branches",), change=one_stream),
        "portable-softmax": Variant(without=("Hopper softmax",), change=without_backend("hopper", "jagged_attention")),
        "portable-gdpa": Variant(without=("Hopper GDPA",), change=without_backend("hopper", "gdpa")),
        "two-heads": Variant(size="base+heads=2", environment=checks),
        "segments": Variant(
            without=("expandable segments",), environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}
        ),
        "reference": Variant(without=(*hopper, "Triton kernels"), change=reference),
    }
    if sanitizer := shutil.which("compute-sanitizer"):
        found["sanitizer"] = Variant(
            settings=("train.max_steps=4",), under=(sanitizer, "--tool", "memcheck", "--error-exitcode", "9")
        )
    return found


def run(name: str, out: Path, more: Sequence[str], rehearse: bool) -> int:
    """One variant, in this process; FOLDER/NAME.json has how it ended."""
    told: list[str] = []
    warnings.showwarning = lambda message, *_, **__: told.append(str(message))
    variant = variants(out)[name]
    sizes = (variant.size, "base")
    if rehearse:
        sizes = ("tiny+heads=1", "tiny")
    settings = (*(SMALL if rehearse else DATA), *variant.settings, *more)
    if rehearse:
        settings = tuple(s for s in settings if not s.startswith("train.max_steps=4"))
    ended = {"ended": "finished", "where": ""}
    try:
        variant.change()
        from gem_train.run import execute

        execute(configuration("clicks10m", sizes[0], sizes[1], settings, by="width"), out / name)
    except BaseException as error:
        ended = {"ended": f"{type(error).__name__}: {error}", "where": "".join(traceback.format_exc()[-4000:])}
    seen = [w for w in dict.fromkeys(told) if "replay" in w or "falls back" in w]
    (out / f"{name}.json").write_text(json.dumps({**ended, "warnings": seen[:20]}, indent=1))
    return int(ended["ended"] != "finished")


def steps(folder: Path) -> int:
    """How many steps a run has logged."""
    file = folder / "metrics.jsonl"
    return sum('"kind": "step"' in line for line in file.read_text().splitlines()) if file.exists() else 0


def fault(row: dict[str, Any]) -> bool:
    """Whether a run ended as it should not: a failure of CUDA, a number that is none, passes that do not repeat."""
    words = (
        "CUDA",
        "launch failure",
        "illegal",
        "misaligned",
        "not finite",
        "norm is inf",
        "norm is nan",
        "has failed",
    )
    return any(w in row["ended"] for w in words) or any("two replays differ" in w for w in row["warnings"])


def suspects(rows: dict[str, dict[str, Any]]) -> list[str]:
    """The parts that no run with a fault did without, and that some run which ended without one did without."""
    clean = [row for row in rows.values() if row["ended"] == "finished" and not fault(row)]
    faulty = [row for row in rows.values() if fault(row)]
    gone = {part for row in clean for part in row["without"]}
    return [part for part in PARTS if part in gone and not any(part in row["without"] for row in faulty)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the variants beside one another, then say what is left to suspect."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=190.0, help="for all of them")
    parser.add_argument("--jobs", type=int, default=6, metavar="N", help="processes at a time")
    parser.add_argument("--variants", help="names, separated by commas")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of every run")
    parser.add_argument("--rehearse", action="store_true", help="small, on a CPU: whether everything is there")
    parser.add_argument("--one", metavar="NAME", help="run this variant here and stop")
    args = parser.parse_args(argv)
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if args.one:
        return run(args.one, out, args.set, args.rehearse)
    known = variants(out)
    names = args.variants.split(",") if args.variants else list(known)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown variants {unknown}; expected some of {', '.join(known)}")
    rows = beside_one_another({name: known[name] for name in names}, out, args)
    (out / "faults.json").write_text(json.dumps(rows, indent=1))
    for name, row in rows.items():
        what = row["ended"].splitlines()[0][:150] if row["ended"] else "stopped"
        print(f"{'FAULT' if fault(row) else '     '} {name:18} {row['steps']:4} steps {row['seconds']:4.0f} s  {what}")
        for warning in row["warnings"]:
            print(f"        {warning[:200]}")
    found = [name for name, row in rows.items() if fault(row)]
    print(
        f"left to suspect: {', '.join(suspects(rows)) or 'none of the parts by itself'}" if found else "no fault came"
    )
    return 0


def beside_one_another(chosen: dict[str, Variant], out: Path, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """How each variant ended."""
    began, waiting = time.monotonic(), list(chosen)
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    rows: dict[str, dict[str, Any]] = {}
    while waiting or running:
        late = time.monotonic() - began > args.seconds
        while waiting and len(running) < args.jobs and not late:
            name = waiting.pop(0)
            again = [
                sys.executable,
                __file__,
                "--out",
                str(out),
                "--one",
                name,
                *(["--rehearse"] if args.rehearse else []),
            ]
            again += ["--set", *args.set] if args.set else []
            log = (out / f"{name}.log").open("wb")
            environment = {
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
                **os.environ,
                **chosen[name].environment,
            }
            process = subprocess.Popen(
                [*chosen[name].under, *again], env=environment, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            running[name] = process, time.monotonic()
        if late:
            waiting.clear()
        for name, (process, since) in list(running.items()):
            if late and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.poll() is not None:
                del running[name]
                file = out / f"{name}.json"
                told = json.loads(file.read_text()) if file.exists() else {"ended": "", "where": "", "warnings": []}
                if not file.exists() and not late:
                    told["ended"] = f"CUDA or the process died, status {process.returncode}; see {name}.log"
                rows[name] = {
                    **told, "without": chosen[name].without, "steps": steps(out / name),
                    "seconds": time.monotonic() - since,
                }  # fmt: skip
        time.sleep(0.2)
    return {name: rows[name] for name in chosen if name in rows}


if __name__ == "__main__":
    sys.exit(main())
