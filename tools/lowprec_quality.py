"""What low precision costs in quality: `python tools/lowprec_quality.py --out FOLDER [--seeds 3] [--jobs 4]`.

Trains a recipe of gem-train with its linear layers as they are and in low precision, on the same batches from the same
weights, and prints the relative difference of the test's NE, in pairs of one seed. Products are emulated on a CPU, with
the numbers that the formats give anywhere. Finished runs in FOLDER are kept, so that a run can be continued.
`--draw RUN` writes the plot docs/figures/lowprec-numerics.svg of a run that measured its operands.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

from gem_lowprec import RECIPES, Recipe, Rule

MX = {"forward": "mxfp8", "dgrad": "mxfp8", "wgrad": "mxfp8"}
VARIANTS: dict[str, Recipe] = {
    "none": RECIPES["none"],
    "mxfp8": RECIPES["mxfp8"],
    "fp8_block": RECIPES["fp8_block"],
    "mxfp8, hadamard": Recipe(name="mxfp8_hadamard", rules=(Rule(**MX, hadamard=32),)),  # type: ignore[arg-type]
    "mxfp8, stochastic": Recipe(name="mxfp8_stochastic", rules=(Rule(**MX, stochastic=True),)),  # type: ignore[arg-type]
    "mxfp8, wgrad bf16": Recipe(name="mxfp8_wgrad", rules=(Rule(forward="mxfp8", dgrad="mxfp8"),)),
    "mxfp8, all three": Recipe(
        name="mxfp8_full",
        rules=(Rule(forward="mxfp8", dgrad="mxfp8", hadamard=32, hadamard_in=("forward", "dgrad"), stochastic=True),),
    ),
}


SETTINGS = {
    "synthetic": ["data.synthetic.events=24000", "train.epochs=1", "lowprec.min_size=16"],
    "ml100k": ["lowprec.min_size=16"],
}


def train(arguments: list[str]) -> int:
    """`gem-train run`, with the variants among the recipes that it knows."""
    from gem_train.cli import main as gem_train

    RECIPES.update({r.name: r for r in VARIANTS.values()})
    return int(gem_train(["run", *arguments]) or 0)


def start(recipe: str, folder: Path, settings: list[str]) -> subprocess.Popen[bytes] | None:
    """A process that trains; None if its result is there."""
    if (folder / "eval.json").exists():
        return None
    command = [sys.executable, __file__, "--train", recipe, "--out", str(folder)]
    command += [word for s in settings for word in ("--set", s)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})


def report(out: Path, names: list[str], seeds: int) -> None:
    """The table of what is finished."""
    print(f"{'variant':20s} {'pairs':>5s} {'mean NE':>9s} {'against none':>13s} {'std. error':>11s}  each pair")
    for name in names:
        values, differences = [], []
        for seed in range(seeds):
            found = [out / f"{VARIANTS[n].name}-{seed}" / "eval.json" for n in (name, "none")]
            if not all(path.exists() for path in found):
                continue
            own, exact = (json.loads(path.read_text())["model"] for path in found)
            values += [own[task]["ne"] for task in own]
            differences += [own[task]["ne"] / exact[task]["ne"] - 1 for task in own]
        if values:
            error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
            print(
                f"{name:20s} {len(values):5d} {statistics.mean(values):9.5f} {statistics.mean(differences):+13.4%} "
                f"{error:11.4%}  {' '.join(f'{d:+.3%}' for d in differences)}"
            )


def draw(run: Path) -> str:
    """How well low precision represents the operands of a run with `lowprec.numerics_every`, as `gem-train report` has
    it: SVG, in tenths of a point.
    """
    from gem_train.report import figures
    from gem_train.report.page import Figures
    from gem_train.report.run import Run
    from gem_train.run_dir import RunDir

    svg = Figures(None).draw("numerics", figures.numerics(Run.read(RunDir(run))))
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    return re.sub(r"\n\s*(L )", r" \1", re.sub(r"(\d+\.\d)\d+", r"\1", svg)).strip() + "\n"


def main() -> None:
    """Command line."""
    if sys.argv[1:2] == ["--train"]:
        raise SystemExit(train(sys.argv[2:]))
    if sys.argv[1:2] == ["--draw"]:
        (Path(__file__).parent.parent / "docs/figures/lowprec-numerics.svg").write_text(draw(Path(sys.argv[2])))
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="synthetic")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="trainings side by side")
    parser.add_argument("--variant", action="append", help="may be repeated; all by default")
    parser.add_argument("--report", action="store_true", help="print the table of what is there, train nothing")
    parser.add_argument("--set", action="append", help="settings of the recipe; by default those of SETTINGS")
    options = parser.parse_args()
    chosen = options.set or SETTINGS.get(options.recipe, [])
    names = ["none", *(n for n in options.variant or VARIANTS if n != "none")]
    waiting = [] if options.report else [(seed, name) for seed in range(options.seeds) for name in names]
    running: list[subprocess.Popen[bytes]] = []
    while waiting or running:
        running = [p for p in running if p.poll() is None]
        while waiting and len(running) < options.jobs:
            seed, name = waiting.pop(0)
            settings = [*chosen, f"train.seed={seed}", f"lowprec.recipe={VARIANTS[name].name}"]
            process = start(options.recipe, options.out / f"{VARIANTS[name].name}-{seed}", settings)
            running += [process] if process else []
        time.sleep(0.5)
    report(options.out, names, options.seeds)


if __name__ == "__main__":
    main()
