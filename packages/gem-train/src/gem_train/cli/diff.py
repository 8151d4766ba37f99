"""`gem-train diff RUN_A RUN_B`."""

from __future__ import annotations

import argparse
import json

from gem_train.comparison import compare, verdict
from gem_train.errors import user_errors
from gem_train.events import finite
from gem_train.run_dir import RunDir
from gem_train.table import COLUMNS, cell, console


def diff(arguments: argparse.Namespace) -> int:
    """Print the paired comparison."""
    with user_errors("diff"):
        found = compare(
            RunDir.open(arguments.run_a),
            RunDir.open(arguments.run_b),
            draws=arguments.draws,
            level=arguments.level,
            seed=arguments.seed,
        )
    if arguments.json:
        print(json.dumps(finite(found), indent=2))
        return 0
    from rich.table import Table

    title = f"A {found['a']}, B {found['b']}: {found['samples']} shared test samples, {found['draws']} draws of users"
    table = Table(title=title, title_justify="left")
    for heading in ("task", "", "A", "B", "B - A", f"{found['level']:.0%} interval", "p"):
        table.add_column(heading, justify="left" if heading in ("task", "") else "right", overflow="fold")
    for task, of_task in found["tasks"].items():
        for i, (key, heading) in enumerate(COLUMNS):
            m = of_task["metrics"][key]
            interval = "–" if m["low"] != m["low"] else f"{m['low']:+.5f} to {m['high']:+.5f}"
            values = (cell(m["a"]), cell(m["b"]), f"{m['difference']:+.5f}", interval, cell(m["p"]))
            table.add_row(task if i == 0 else "", heading, *values)
        table.add_section()
    out = console()
    out.print(table)
    for task, of_task in found["tasks"].items():
        out.print(verdict(task, of_task, found["level"]), markup=False, highlight=False, soft_wrap=True)
    for note in found["notes"]:
        out.print(f"note: {note}", style="bold yellow", markup=False, soft_wrap=True)
    return 0
