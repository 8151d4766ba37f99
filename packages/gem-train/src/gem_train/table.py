"""The table of figures: the model beside what it must beat, one line per task and predictor."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

WIDE = 200  # columns of a table that goes to a file or a pipe

NAMES = {
    "model": "GEM",
    "constant": "constant (base rate)",
    "optimal": "true probabilities",
    "logistic": "logistic regression",
}
COLUMNS = (("ne", "NE"), ("auc", "AUC"), ("gauc", "GAUC"), ("calibration", "calibration"), ("log_loss", "log loss"))


def console() -> Console:
    """Standard output. Where it is no terminal, whose width is the measure, a table is as wide as its figures are."""
    return Console(width=None if sys.stdout.isatty() else WIDE)


def rows(results: dict[str, Any]) -> list[tuple[str, str, dict[str, float | None]]]:
    """(task, predictor, figures) lines of eval.json, the model first; on synthetic data the optimum last."""
    lines: list[tuple[str, str, dict[str, float | None]]] = []
    for task, figures in results["model"].items():
        lines.append((task, NAMES["model"], figures))
        lines += [(task, NAMES.get(name, name), by_task[task]) for name, by_task in results["baselines"].items()]
        if task in results.get("optimal", {}):
            best = results["optimal"][task]
            lines.append((task, NAMES["optimal"], {"ne": best["ne"]}))
    return lines


def results_table(results: dict[str, Any]) -> Table:
    """The figures of eval.json for the terminal."""
    sure = [f"{task}: 95% interval of the NE {interval(i['ne'])}" for task, i in results.get("intervals", {}).items()]
    caption = "\n".join([*sure, above_the_best(results)]).rstrip()
    title = f"{results['split']}: {results['samples']:,} samples of {results['source']}, weights: {results['weights']}"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("task")
    table.add_column("predictor")
    for _, heading in COLUMNS:
        table.add_column(heading, justify="right", overflow="fold")  # no figure is cut short
    before = None
    for task, name, figures in rows(results):
        if before not in (None, task):
            table.add_section()
        values = [cell(figures.get(key)) for key, _ in COLUMNS]
        table.add_row(task if task != before else "", name, *values, style="bold" if name == NAMES["model"] else None)
        before = task
    return table


def slice_table(name: str, parts: list[dict[str, Any]]) -> Table:
    """NE by the values of a column, for the terminal."""
    table = Table(title=f"by {name}; NE against the slice's own base rate", title_justify="left")
    for heading in ("task", "value", "samples", "users", "base rate", "NE", "95% interval", "AUC", "calibration"):
        left = heading in ("task", "value")
        table.add_column(heading, justify="left" if left else "right", overflow="fold")
    for task in dict.fromkeys(task for part in parts for task in part["tasks"]):
        for i, part in enumerate(p for p in parts if task in p["tasks"]):
            f = part["tasks"][task]
            ends = interval([f["ne_low"], f["ne_high"]])
            counts = (f"{f['samples']:,}", f"{part['users']:,}", cell(f["base_rate"]))
            figures = (cell(f["ne"]), ends, cell(f["auc"]), cell(f["calibration"]))
            table.add_row("" if i else task, part["value"], *counts, *figures)
        table.add_section()
    return table


def above_the_best(results: dict[str, Any]) -> str:
    """How far the model is from the best possible NE, where that is known."""
    return "\n".join(
        f"{task}: the model's NE is {best['excess']:.2%} above the best possible"
        for task, best in results.get("optimal", {}).items()
    )


def interval(ends: list[float | None]) -> str:
    """ "0.9512 to 0.9601", or a dash where a figure has no interval."""
    return "–" if cell(ends[0]) == "–" else f"{cell(ends[0])} to {cell(ends[1])}"


def cell(value: float | None) -> str:
    """Four decimals, or a dash for what does not exist."""
    return "–" if value is None or value != value else f"{value:.4f}"
