"""Draw roofline plots from benchmark files: `python tools/roofline.py docs/benchmarks/x.json` (needs matplotlib).

A point is a case: useful FLOPs over the bytes that must move, against useful TFLOP/s; the roof is the copy bandwidth
and the rate of a large matrix product of the same run. One figure for each file and pass:
`roofline-<suite>-<pass>.svg`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parents[1] / "docs" / "figures"


def points(result: dict[str, Any], what: str, variant: str) -> list[dict[str, Any]]:
    """Name, FLOPs per byte, our rate and the best peer's, of every case that `variant` was timed on in pass `what`."""
    found = []
    for row in result["rows"]:
        if row["pass"] == what and row["variant"] == variant and row.get("tflops"):
            rivals = {name: rate for name, rate in row["peers"].items() if not name.startswith("gemm")}
            found.append({
                "case": row["case"], "intensity": row["tflops"] * 1e3 / row["gbps"], "ours": row["tflops"],
                "peer": max(rivals.items(), key=lambda item: item[1], default=None),
            })  # fmt: skip
    return found


def draw(result: dict[str, Any], what: str, variant: str, path: Path) -> bool:
    """Write the figure; False where there is no such row."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    found = points(result, what, variant)
    if not found:
        return False
    rate, copy = result["ceilings"]["gemm_bf16_tflops"], result["ceilings"]["copy_tbps"]
    widest = max(p["intensity"] for p in found) * 1.5
    least = min(p["intensity"] for p in found) / 1.5
    figure, axes = plt.subplots(figsize=(7, 4.2))
    xs = sorted({least, rate / copy, max(widest, rate / copy * 1.5)})
    axes.plot(xs, [min(rate, copy * x) for x in xs], color="black", linewidth=1)
    for p in found:
        axes.plot(p["intensity"], p["ours"], "o", color="tab:blue")
        axes.annotate(p["case"], (p["intensity"], p["ours"]), fontsize=6, xytext=(3, 3), textcoords="offset points")
        if p["peer"]:
            axes.plot(p["intensity"], p["peer"][1], "x", color="tab:orange")
    axes.plot([], [], "o", color="tab:blue", label=f"ours ({variant})")
    axes.plot([], [], "x", color="tab:orange", label="best peer")
    axes.set(
        xscale="log", yscale="log", xlabel="useful FLOP per byte that must move", ylabel="useful TFLOP/s",
        title=f"{result['suite']}, {what}: {result['card']}, {result['date']}",
    )  # fmt: skip
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    return True


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--variant", default="hopper", help="whose rows; the public operator by default")
    parser.add_argument("--out", type=Path, default=FIGURES)
    options = parser.parse_args(arguments)
    for file in options.files:
        result = json.loads(file.read_text())
        for what in ("forward", "backward"):
            path = options.out / f"roofline-{result['suite']}-{what}.svg"
            if draw(result, what, options.variant, path):
                print(path)


if __name__ == "__main__":
    main()
