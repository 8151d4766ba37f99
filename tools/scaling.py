"""Model quality against compute: one epoch of each size on the same data, and a line through them.

    python tools/scaling.py --out FOLDER --sizes tiny,small,base,large [--recipe synthetic] [--set KEY=VALUE ...]

A size is a preset, or one with changes: `tiny+width=32+heads=4`. Every run is a usual one, in FOLDER/<size>; a finished
one is not repeated. C is its training FLOPs, useful ones (of the steps whose FLOPs are counted, times all). With NE the
mean of the tasks' test NEs, NE(C) = NE0 - eta log(C / C0) is fitted by least squares, C0 the smallest C (Kunlun's
scaling law). Where the data knows its best possible NE, what is above it is told too. Writes FOLDER/scaling.json and
scaling.svg.

Learning rates go from size to size by muP (`optim.base_width`, or `base_shape` with `--mup shape`): that of the recipe
is taken to be the first size's.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import io
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from gem_model.presets import shape
from gem_train.config import RunConfig, override
from gem_train.events import read
from gem_train.recipes import load
from gem_train.run_dir import RunDir, read_json, write_json


def configuration(recipe: str, text: str, first: str, changes: Sequence[str], *, by: str = "width") -> RunConfig:
    """The recipe with the size's shape, for one epoch, its learning rate made for the first size, or for its width."""
    config = override(load(recipe), changes)
    base = {"base_shape": first} if by == "shape" else {"base_width": shape(first).width}
    return dataclasses.replace(
        config,
        model=shape(text),
        optim=dataclasses.replace(config.optim, **base),
        train=dataclasses.replace(config.train, epochs=1),
    )


def point(run: RunDir) -> dict[str, Any]:
    """What a finished run says: its FLOPs, its mean test NE, and the best possible one where that is known."""
    steps = [r for r in read(run.metrics_file) if r["kind"] == "step"]
    counted = [r["tflops"] * 1e12 * (r["step_s"] + r["data_wait_s"]) for r in steps if "tflops" in r]
    told = read_json(run.eval_file)
    nes = [figures["ne"] for figures in told["model"].values()]
    best = told.get("optimal")
    return {
        "flops": float(np.mean(counted)) * len(steps),
        "parameters": read_json(run.model_file)["parameters"],
        "steps": len(steps),
        "seconds": sum(r["step_s"] + r["data_wait_s"] for r in steps),
        "ne": float(np.mean(nes)),
        "optimal_ne": float(np.mean([task["ne"] for task in best.values()])) if best else None,
    }


def fit(flops: Sequence[float], ne: Sequence[float]) -> dict[str, float]:
    """NE0, eta and C0 of NE = NE0 - eta log(C / C0), and R^2: the share of the NE's variance that the line explains."""
    c, y = np.asarray(flops, np.float64), np.asarray(ne, np.float64)
    x = np.log(c / c.min())
    slope, ne0 = np.polyfit(x, y, 1)
    left, whole = np.square(y - ne0 - slope * x).sum(), np.square(y - y.mean()).sum()
    return {"ne0": float(ne0), "eta": float(-slope), "c0": float(c.min()), "r2": float(1.0 - left / whole)}


def plot(points: dict[str, dict[str, Any]], line: dict[str, float] | None) -> str:
    """NE against log C, as SVG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "gem-train", "font.size": 9}):
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        axes = figure.subplots()
        c = np.array([p["flops"] for p in points.values()])
        axes.semilogx(c, [p["ne"] for p in points.values()], "o", color="#2563eb", markersize=5)
        for name, p in points.items():
            axes.annotate(name, (p["flops"], p["ne"]), xytext=(4, 4), textcoords="offset points", fontsize=8)
        if line is not None:
            label = f"NE = {line['ne0']:.4f} - {line['eta']:.2g} log(C / C0), R² {line['r2']:.2f}"
            axes.semilogx(np.sort(c), line["ne0"] - line["eta"] * np.log(np.sort(c) / line["c0"]), "-", label=label)
        best = [p["optimal_ne"] for p in points.values() if p["optimal_ne"] is not None]
        if best:
            axes.axhline(best[0], color="#98a2b3", linewidth=0.8, linestyle="--", label="best possible")
        axes.set(xlabel="C, training FLOPs of one epoch", ylabel="test NE, mean of the tasks")
        axes.margins(x=0.2, y=0.2)
        if line is not None or best:
            axes.legend(fontsize=7)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return re.sub(r"^.*?(?=<svg)", "", buffer.getvalue(), flags=re.DOTALL)


def command(argv: Sequence[str], out: Path) -> str:
    """The command line, without where this machine keeps things."""
    words = ["FOLDER" if word == str(out) else word for word in argv if not word.startswith("data.cache=")]
    return " ".join(["python", f"tools/{Path(__file__).name}", *words])


def circumstances(run: RunDir) -> dict[str, Any]:
    """Card and versions of a run."""
    told = read_json(run.env_file)
    return {
        "card": told["device"],
        "versions": {name: told["versions"].get(name) for name in ("torch", "triton", "torchrec", "python")},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run what has not run, fit, write and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", default="tiny,small,base,large", help="presets, with changes as in tiny+width=32")
    parser.add_argument("--recipe", default="synthetic")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of every run")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time, each a process")
    parser.add_argument("--only", metavar="SIZE", help="train this one of the sizes and stop")
    parser.add_argument("--mup", choices=("width", "shape"), default="width", help="how rates go from size to size")
    parser.add_argument("--commit", default="unknown")
    args = parser.parse_args(argv)
    sizes = args.sizes.split(",")
    runs = {text: RunDir(args.out / text.replace("+", "-")) for text in sizes}
    for text in [args.only] if args.only else sizes if args.jobs == 1 else []:
        from gem_train.run import execute  # torch takes seconds, which a process that starts others need not spend

        if not runs[text].eval_file.exists():
            config = configuration(args.recipe, text, sizes[0], args.set, by=args.mup)
            execute(config, runs[text].path, resume=runs[text].config_file.exists())
    if args.only:
        return 0
    if args.jobs > 1:
        again = [sys.executable, *(sys.argv if argv is None else [__file__, *argv])]
        waiting = [text for text in reversed(sizes) if not runs[text].eval_file.exists()]  # the longest first
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(lambda text: subprocess.run([*again, "--only", text], check=False), waiting))
    points: dict[str, dict[str, Any]] = {}
    missing = [text for text in sizes if not runs[text].eval_file.exists()]
    for text in sizes:
        if text in missing:
            print(f"{text}: did not finish, and is left out")
            continue
        points[text] = found = point(runs[text])
        over = "" if found["optimal_ne"] is None else f", {found['ne'] / found['optimal_ne'] - 1:+.2%} of the best"
        print(f"{text}: {found['flops']:.3g} FLOPs, NE {found['ne']:.5f}{over}, {found['seconds']:.0f} s")
    line = None
    if len(points) > 1:
        line = fit([p["flops"] for p in points.values()], [p["ne"] for p in points.values()])
        print(f"NE = {line['ne0']:.5f} - {line['eta']:.5f} log(C / {line['c0']:.3g}), R^2 {line['r2']:.3f}")
    if not points:
        return 1
    some = runs[next(iter(points))]
    found = {
        "suite": "quality",
        **circumstances(some),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": args.commit,
        "command": command(sys.argv[1:] if argv is None else argv, args.out),
        "recipe": args.recipe,
        "samples": read_json(some.data_file)["split"],
        "line": line,
        "rows": [{"case": name, **of_size} for name, of_size in points.items()],
    }
    write_json(args.out / "scaling.json", found)
    (args.out / "scaling.svg").write_text(plot(points, line), encoding="utf-8")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
