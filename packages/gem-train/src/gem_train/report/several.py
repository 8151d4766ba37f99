"""One self-contained page that compares runs, the first of them with each of the others."""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gem_train.comparison import compare, verdict
from gem_train.config import differences
from gem_train.errors import UserError
from gem_train.report import figures as draw
from gem_train.report.page import Figures, grid, page, section, table
from gem_train.report.run import Run
from gem_train.run_dir import RunDir
from gem_train.table import COLUMNS, cell, interval


def write_comparison(folders: Sequence[RunDir], out: Path, *, png: bool = False) -> Path:
    """Make the page `out` about two runs or more; with `png`, also the figures in the folder of its name.

    Raises UserError where a folder is no run.
    """
    runs = _named([Run.read(folder) for folder in folders])
    figures = Figures(out.with_suffix("") if png else None)
    tested = [r for r in runs if r.results]
    title = f"{len(runs)} runs"
    body = [f"<h1>{title}</h1>", f'<p class="sub">{html.escape(", ".join(r.name for r in runs))}</p>']
    body.append(section("Runs", _runs(runs)))
    if tested:
        body.append(section("Test", _figures(tested)))
        if len(tested) > 1:
            body.append(section(f"Against {tested[0].name}, on the same samples", _paired(tested)))
    shown = [
        figures.draw("loss", draw.loss(runs), any(r.steps for r in runs)),
        figures.draw("ne", draw.ne(runs), any(r.evals for r in runs)),
    ]
    if streams := [r for r in runs if r.progressive]:
        shown.append(figures.draw("progressive", draw.ne(streams, "progressive")))
    body.append(section("Training", grid(shown)))
    if tested:
        tasks = list(dict.fromkeys(t for r in tested for t in (r.results or {})["model"]))
        shown = [figures.draw("calibration", draw.calibration(tested))]
        shown += [
            figures.draw(f"{name}-{task}", draw.slices_of(tested, name, task))
            for name, task in itertools.product(("time", "history"), tasks)
        ]
        body.append(section("Calibration and slices", grid(shown)))
    shown = [
        figures.draw("speed", draw.steps(runs, "samples_per_s", "samples/s", "Throughput, running mean")),
        figures.draw("memory", draw.steps(runs, "memory_bytes", "GiB", "Peak memory so far", 2**30)),
    ]
    looked = [r for r in runs if r.phases]
    if looked:
        shown.append(figures.draw("phases", draw.phases(looked), height=1.4 + 0.3 * len(looked)))
        shown.append(figures.draw("imbalance", draw.balance(looked)))
        shown += [
            figures.draw(f"gantt-{i}", _titled(draw.gantt(r), r.name), height=1.6 + 0.25 * len(r.phases[-1]["ranks"]))
            for i, r in enumerate(looked)
        ]
    if benched := [r for r in runs if r.efficiency]:
        shown.append(figures.draw("waterfall", draw.waterfall(benched), height=3.6))
    body.append(section("Throughput and efficiency", grid(shown)))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(title, body), encoding="utf-8")
    return out


def _named(runs: list[Run]) -> list[Run]:
    """With their folders' whole paths as names, where the last parts are not enough to tell them apart."""
    names = [r.name for r in runs]
    if len(set(names)) == len(names):
        return runs
    return [dataclasses.replace(r, name=str(r.folder.path)) for r in runs]


def _runs(runs: Sequence[Run]) -> str:
    lines = []
    for run in runs:
        changed = differences(runs[0].config, run.config) if run is not runs[0] else []
        mean = [s["samples_per_s"] for s in run.steps[len(run.steps) // 10 :]]
        lines.append(
            (
                run.name,
                "; ".join(changed) or ("–" if run is not runs[0] else "the first"),
                f"{run.model.get('world', 1)} x {run.env['device']}",
                str(run.steps[-1]["step"] if run.steps else 0),
                f"{sum(mean) / len(mean):,.0f}" if mean else "–",
                f"{max(s['memory_bytes'] for s in run.steps) / 2**30:.2f}" if run.steps else "–",
            )
        )
    return table(("run", "settings that differ from the first's", "on", "steps", "samples/s", "GiB"), lines, text=3)


def _figures(runs: Sequence[Run]) -> str:
    lines = []
    for run in runs:
        results: dict[str, Any] = run.results or {}
        for task, f in results["model"].items():
            ends = results.get("intervals", {}).get(task, {}).get("ne", [None, None])
            lines.append((run.name, task, *(cell(f.get(key)) for key, _ in COLUMNS), interval(ends)))
    return table(("run", "task", *(h for _, h in COLUMNS), "95% of NE"), lines, text=2)


def _paired(runs: Sequence[Run]) -> str:
    """The paired bootstrap of each run with the first, or why there is none."""
    parts = []
    for run in runs[1:]:
        try:
            found = compare(runs[0].folder, run.folder)
        except UserError as error:
            parts.append(f"<p>{html.escape(f'{run.name}: {error}')}</p>")
            continue
        lines = []
        for task, of_task in found["tasks"].items():
            for key, heading in COLUMNS:
                m = of_task["metrics"][key]
                ends = "–" if math.isnan(m["low"]) else f"{m['low']:+.5f} to {m['high']:+.5f}"
                lines.append((task, heading, cell(m["a"]), cell(m["b"]), f"{m['difference']:+.5f}", ends, cell(m["p"])))
        said = "; ".join(verdict(task, t, found["level"]) for task, t in found["tasks"].items())
        headings = ("task", "", runs[0].name, run.name, "difference", "95% interval", "p")
        parts.append(f"<p>{html.escape(said)}</p>" + table(headings, lines, text=2))
    return "".join(parts)


def _titled(draw: Any, name: str) -> Any:
    def run(axes: Any) -> None:
        draw(axes)
        axes.set_title(f"{name}: {axes.get_title()}", fontsize=8)

    return run
