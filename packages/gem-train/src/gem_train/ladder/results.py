"""The ladder as JSON, as lines of text and as a plot."""

from __future__ import annotations

import datetime
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gem_train.config import RunConfig
from gem_train.ladder.rungs import RUNGS
from gem_train.run_dir import environment, read_json, write_json

SAME = ("card", "commit", "recipe", "batch_size", "accumulate", "lengths", "recompute")
HEADINGS = ("rung", "samples/s", "step ms", "TFLOP/s", "MFU", "local TFLOP/s", "local MFU", "GiB", "NE")
WIDTHS = (max(len(rung.name) for rung in RUNGS) + 2, 11, 11, 9, 7, 14, 10, 7, 8)


def line(row: dict[str, Any] | None) -> str:
    """A row as aligned text, or the headings for None."""
    if row is None:
        cells = HEADINGS
    elif row["reason"]:
        return f"{row['rung']:<{WIDTHS[0]}}not measured: {row['reason']}"
    else:
        cells = (
            row["rung"],
            f"{row['samples_per_s']:,.0f}",
            f"{row['step_ms']:.1f}",
            _figure(row["tflops"]),
            _share(row["mfu"]),
            _figure(row["local_tflops"]),
            _share(row["local_mfu"]),
            f"{row['memory_gib']:.1f}",
            "–" if row["ne"] is None else f"{row['ne']:.4f}",
        )
    return f"{cells[0]:<{WIDTHS[0]}}" + "".join(f"{c:>{w}}" for c, w in zip(cells[1:], WIDTHS[1:], strict=True))


def circumstances(suite: str) -> dict[str, Any]:
    """What every result file says of where it comes from."""
    env = environment()
    return {
        "suite": suite,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "card": env["device"],
        "devices": env["devices"],
        "commit": env["commit"],
        "versions": {k: v for k, v in env["versions"].items() if v is not None},
        "command": f"gem-train {shlex.join(Path(a).name if a.startswith('/') else a for a in sys.argv[1:])}",
    }


def _measured_on(config: RunConfig, *, fill: Mapping[str, int], recompute: bool) -> dict[str, Any]:
    return {
        "recipe": config.recipe,
        "batch_size": config.data.batch_size,
        "accumulate": config.optim.accumulate,
        "lengths": {name: f"uniform in 1..{n}" for name, n in fill.items()} or "of the data",
        "recompute": recompute,
    }


def measured(config: RunConfig, folder: Path, *, fill: Mapping[str, int], recompute: bool) -> dict[str, dict[str, Any]]:
    """The rungs with figures that an earlier call has left in `folder`, by name.

    Raises ValueError where they were measured on something else.
    """
    file = folder / "ladder.json"
    if not file.exists():
        return {}
    before = read_json(file)
    new = circumstances("ladder") | _measured_on(config, fill=fill, recompute=recompute)
    different = [key for key in SAME if before[key] != new[key]]
    if different:
        raise ValueError(f"{file} was measured with another {', '.join(different)}; name another folder")
    return {row["rung"]: row for row in before["rows"] if not row["reason"]}


def write(
    rows: list[dict[str, Any]], config: RunConfig, folder: Path, *, peak: str, fill: Mapping[str, int], recompute: bool
) -> Path:
    """ladder.json of the rows so far, with those of other rungs that an earlier call has left there.

    Returns the folder.

    Raises ValueError where what is there was measured on something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    measured(config, folder, fill=fill, recompute=recompute)
    file = folder / "ladder.json"
    found = {row["rung"]: row for row in (read_json(file)["rows"] if file.exists() else [])}
    for row in rows:
        found[row["rung"]] = {
            "case": config.recipe,
            "op": "step",
            "variant": row["rung"],
            "pass": "step",
            "head_dim": config.model.head_dim,
            "ms": row.get("step_ms"),
            **row,
        }
    order = [rung.name for rung in RUNGS]
    ordered = sorted(found.values(), key=lambda row: order.index(row["rung"]) if row["rung"] in order else len(order))
    on = _measured_on(config, fill=fill, recompute=recompute)
    write_json(file, {**circumstances("ladder"), **on, "peak": peak, "ceilings": {}, "rows": ordered})
    return folder


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """ladder.svg and ladder.png: samples per second of what was measured, with the gain over the first."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if not row["reason"]]
    if not rows:
        return
    figure = Figure(figsize=(9, 0.5 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    first = rows[0]["samples_per_s"]
    for i, row in enumerate(rows):
        axes.barh(i, row["samples_per_s"], color="#2563eb", alpha=0.85, hatch=None if row["same_function"] else "//")
        axes.text(row["samples_per_s"], i, f" {row['samples_per_s'] / first:.2f}x", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [row["rung"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="samples per second (hatched: not the function of the first rung)")
    axes.spines[["top", "right"]].set_visible(False)
    for kind in ("svg", "png"):
        figure.savefig(folder / f"ladder.{kind}", dpi=150)


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
