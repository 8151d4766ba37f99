"""Draw gem-parallel's measurements: `python tools/parallel_curves.py docs/benchmarks/*.json` (needs matplotlib).

activation-memory.svg, of files of the suite "memory": the peak of a step against its time, for budgets that are
uniform, by region, and by region with FP8. scaling-cards.svg, of files of the suite "scaling": every row's ratio, and
the plan's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
KINDS = {"uniform": "tab:orange", "regions": "tab:blue", "regions + fp8": "tab:green", "other": "black"}


def kind(variant: str) -> str:
    """Which curve a variant is on."""
    if variant.startswith("regions"):
        return "regions + fp8" if variant.endswith("fp8") else "regions"
    return "uniform" if variant.startswith("uniform") else "other"


def memory(results: list[dict[str, Any]], axes: Any) -> None:
    """Peak against time at one batch, relative to the same file's row without recomputation, since cards differ."""
    points: dict[str, list[tuple[float, float, str]]] = {}
    for result in results:
        alone = next(row for row in result["rows"] if row["variant"] == "none")
        for row in result["rows"]:
            if row["variant"] != "none again" and row.get("case") == alone.get("case") and "ms" in row:
                point = (row["peak_mib"] / 1024, row["ms"] / alone["ms"], row["variant"])
                points.setdefault(kind(row["variant"]), []).append(point)
    for name, found in points.items():
        found = sorted(set(found))
        style = "o" if name == "other" else "o-"
        axes.plot([p[0] for p in found], [p[1] for p in found], style, color=KINDS[name], label=name)
        for gib, times, variant in found:
            axes.annotate(variant, (gib, times), fontsize=6, xytext=(3, 3), textcoords="offset points")
    axes.set(xlabel="peak of a step beyond parameters, GiB", ylabel="step time, without recomputation = 1")
    axes.legend(frameon=False, fontsize=8)


def scaling(results: list[dict[str, Any]], axes: Any) -> None:
    """Ratios by row, a group of bars for each number of cards: those of its last file. Rows that failed have none."""
    results = list({result["world"]: result for result in results}.values())
    measured = [row for result in results for row in result["rows"] if "ratio" in row and row["case"] != "alone"]
    names = list(dict.fromkeys(row["case"] for row in measured))
    width = 0.8 / len(results)
    for index, result in enumerate(sorted(results, key=lambda r: r["world"])):
        rows = {row["case"]: row for row in result["rows"] if "ratio" in row}
        xs = [i + index * width for i, name in enumerate(names) if name in rows]
        axes.bar(xs, [rows[n]["ratio"] for n in names if n in rows], width, label=f"{result['world']} cards")
        planned = [
            (i + index * width, rows[n]["ratio"] * rows[n]["ms"] / rows[n]["plan"]["ms"])
            for i, n in enumerate(names)
            if n in rows and rows[n].get("plan")
        ]
        axes.plot([x for x, _ in planned], [y for _, y in planned], "k_", label=None if index else "the plan")
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=7)
    axes.set(ylabel="scaling ratio", ylim=(0, 1.1))
    axes.axhline(1, color="grey", linewidth=0.5)
    axes.legend(frameon=False, fontsize=8)


DRAW: dict[str, tuple[str, Callable[[list[dict[str, Any]], Any], None]]] = {
    "memory": ("activation-memory.svg", memory),
    "scaling": ("scaling-cards.svg", scaling),
}


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=FIGURES)
    options = parser.parse_args(arguments)
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "gem"
    results = [json.loads(file.read_text()) for file in options.files]
    for suite, (name, draw) in DRAW.items():
        mine = [result for result in results if result.get("suite") == suite]
        if mine:
            figure, axes = plt.subplots(figsize=(7, 4.2))
            draw(mine, axes)
            axes.set_title(f"{mine[0]['card']}, {mine[0]['date']}", fontsize=9)
            figure.savefig(options.out / name, bbox_inches="tight", metadata={"Date": None})
            plt.close(figure)
            print(options.out / name)


if __name__ == "__main__":
    main()
