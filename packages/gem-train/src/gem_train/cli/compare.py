"""`gem-train compare RECIPE`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from gem_train.compare import NAMES, compete, contenders, plot, results
from gem_train.config import RunConfig
from gem_train.events import finite
from gem_train.run_dir import new_path, write_json
from gem_train.table import cell, console

COLUMNS = (("ne", "NE"), ("auc", "AUC"), ("gauc", "GAUC"))


def compare(config: RunConfig, arguments: argparse.Namespace) -> int:
    """Train everyone who is not finished, then print and write what they achieve; 1 if someone failed."""
    out = Path(arguments.out) if arguments.out else new_path(f"compare-{config.recipe}")
    names = arguments.models.split(",") if arguments.models else NAMES
    everyone = contenders(config, out, names, arguments.seeds)
    failed = compete(everyone, jobs=arguments.jobs, say=lambda line: print(line, file=sys.stderr, flush=True))
    found = results(everyone, draws=arguments.draws)
    found["notes"] += failed
    write_json(out / "compare.json", found)
    (out / "compare.svg").write_text(plot(found), encoding="utf-8")
    if arguments.json:
        print(json.dumps(finite(found), indent=2))
    else:
        _print(found, out)
    return 1 if failed else 0


def _print(found: dict[str, Any], out: Path) -> None:
    from rich.table import Table

    level = f"{found['level']:.0%}"
    table = Table(
        title=f"test figures, mean of the seeds; differences to GEM with {level} intervals", title_justify="left"
    )
    for heading in ("task", "model", "seeds", *(h for _, h in COLUMNS), "NE - GEM's", "AUC - GEM's"):
        table.add_column(heading, justify="left" if heading in ("task", "model") else "right", overflow="fold")
    for task, of_task in found["tasks"].items():
        ranked = sorted(of_task["models"].items(), key=lambda x: x[1]["figures"]["ne"])
        for i, (name, model) in enumerate(ranked):
            values = [cell(model["figures"][key]) for key, _ in COLUMNS]
            gaps = [_gap(model.get("less_gem", {}).get(key)) for key in ("ne", "auc")]
            style = "bold" if name == "gem" else None
            table.add_row(task if i == 0 else "", name, str(model["seeds"]), *values, *gaps, style=style)
        table.add_section()
    out_ = console()
    out_.print(table)
    for note in found["notes"]:
        out_.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    out_.print(f"written: {out / 'compare.json'}, compare.svg", markup=False, highlight=False, soft_wrap=True)


def _gap(d: dict[str, float] | None) -> str:
    if d is None:
        return ""
    if d["low"] != d["low"]:
        return f"{d['difference']:+.4f}"
    return f"{d['difference']:+.4f} ({d['low']:+.4f} to {d['high']:+.4f})"
