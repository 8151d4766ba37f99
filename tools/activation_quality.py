"""What quantised activations cost in quality: `python tools/activation_quality.py --out FOLDER [--as mx4] [--seeds 3]`.

Trains the recipe twice for every seed, with activations as they are and in FP8 (or MXFP4), on the same batches from
the same weights, and prints the relative difference of the test's NE in pairs. Exits with 1 when the mean over seeds
and tasks exceeds the tolerance. Finished runs in FOLDER are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path


def variants(form: str) -> dict[str, list[str]]:
    """Settings by name."""
    small = "parallel.memory.quantise_min_kib=1"  # small models have small tensors
    return {"exact": [], form: [f"parallel.memory.quantise={form}", small]}


def train(recipe: str, folder: Path, settings: list[str]) -> dict[str, float]:
    """NE on the test split, by task."""
    result = folder / "eval.json"
    if not result.exists():
        command = [sys.executable, "-m", "gem_train", "run", recipe, "--out", str(folder)]
        subprocess.run(
            [*command, *(word for s in settings for word in ("--set", s))], check=True, stdout=subprocess.DEVNULL
        )
    return {task: figures["ne"] for task, figures in json.loads(result.read_text())["model"].items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--as", dest="form", choices=("fp8", "mx4"), default="fp8")
    parser.add_argument("--recipe", default="synthetic")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of the mean relative difference of NE")
    parser.add_argument("--set", action="append", default=["data.synthetic.events=24000", "train.epochs=1"])
    args = parser.parse_args()
    found: list[float] = []
    for seed in range(args.seeds):
        ne = {
            name: train(args.recipe, args.out / f"{name}-{seed}", [*args.set, f"train.seed={seed}", *more])
            for name, more in variants(args.form).items()
        }
        for task, exact in ne["exact"].items():
            other = ne[args.form][task]
            found.append(other / exact - 1)
            print(f"seed {seed} {task:12} NE {exact:.6f} and {other:.6f} in {args.form}: {found[-1]:+.4%}", flush=True)
    mean = statistics.mean(found)
    error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else float("nan")
    print(f"mean of {len(found)} pairs: {mean:+.4%}, standard error {error:.4%}")
    if abs(mean) > args.tolerance:
        raise SystemExit(f"more than {args.tolerance:.1%}")


if __name__ == "__main__":
    main()
