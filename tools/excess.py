"""How far above the best possible NE each model ends: `python tools/excess.py --out FOLDER [--jobs 9]`.

Trains GEM and the baselines on simulated impressions, whose true probabilities are known, each in a process of its own
on the same batches in one pass, as `gem-train compare` does, and tells every task's NE and

    excess = NE / NE of the true probabilities on the same test samples - 1.

The constant and the logistic regression are those of GEM's own report. `--fp32` trains GEM a second time, in float32,
where a GPU would take BF16. Writes FOLDER/excess.json, for docs/benchmarks; finished runs in FOLDER are kept.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gem_train.compare import FITTED, GEM, TRAINED, Contender, compete, contenders
from gem_train.config import override
from gem_train.errors import Interrupted
from gem_train.events import read
from gem_train.recipes import load
from gem_train.run_dir import RunDir, read_json, write_json


def row(contender: Contender, model: str) -> dict[str, Any]:
    """What a finished run says: its parameters, its time a step, and of every task NE and excess."""
    told = read_json(contender.run.eval_file)
    described = read_json(contender.run.model_file)
    steps = [r for r in read(contender.run.metrics_file) if r["kind"] == "step"]
    late = sorted(r["step_s"] + r["data_wait_s"] for r in steps[len(steps) // 2 :])
    return {
        "case": model,
        "precision": described["precision"],
        "parameters": sum(described["parameters"].values()),
        "steps": len(steps),
        "step_ms": 1e3 * late[len(late) // 2],
        "tasks": of_tasks(told["model"], told["optimal"]),
    }


def of_tasks(found: dict[str, Any], optimal: dict[str, Any]) -> dict[str, dict[str, float]]:
    """NE, AUC and excess (in percent) of every task."""
    return {
        task: {"ne": f["ne"], "auc": f["auc"], "excess_pct": 100 * (f["ne"] / optimal[task]["ne"] - 1)}
        for task, f in found.items()
    }


def result(everyone: Sequence[Contender], names: Sequence[str], recipe: str, commit: str, line: str) -> dict[str, Any]:
    """The file for docs/benchmarks, of those who finished. Raises SystemExit where GEM is not among them."""
    done = [(c, n) for c, n in zip(everyone, names, strict=True) if c.finished]
    gem = next((c for c, n in done if n == GEM), None)
    if gem is None:
        raise SystemExit("GEM has not finished, so there is nothing to compare with")
    told = read_json(gem.run.eval_file)
    rows = [row(c, n) for c, n in done]
    fitted = [
        {"case": n, "precision": "fp64", "tasks": of_tasks(told["baselines"][n], told["optimal"])} for n in FITTED
    ]
    rows = sorted([*rows, *fitted], key=lambda r: sum(t["ne"] for t in r["tasks"].values()))
    return {
        "suite": "excess",
        **circumstances(gem.run),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit,
        "command": line,
        "recipe": recipe,
        "samples": {**read_json(gem.run.data_file)["split"]},
        "optimal": {task: t["ne"] for task, t in told["optimal"].items()},
        "rows": rows,
    }


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
    """Train who is not finished, write and tell; 1 if someone failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="clicks10m")
    parser.add_argument("--models", default=",".join((GEM, *TRAINED)))
    parser.add_argument("--fp32", action="store_true", help="train GEM in float32, too")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of every run")
    parser.add_argument("--commit", default="unknown")
    args = parser.parse_args(argv)
    config = override(load(args.recipe), args.set)
    names = args.models.split(",")
    everyone = contenders(config, args.out, names, 1)
    if args.fp32:
        exact = contenders(override(config, ["train.precision=fp32"]), args.out / "fp32", [GEM], 1)
        everyone, names = [*everyone, *exact], [*names, f"{GEM}, float32"]
    try:
        failed = compete(everyone, jobs=args.jobs, say=lambda line: print(line, file=sys.stderr, flush=True))
    except Interrupted as stopped:  # those who have finished are told all the same
        failed = [str(stopped)]
        print(stopped, file=sys.stderr)
    line = command(sys.argv[1:] if argv is None else argv, args.out)
    found = result(everyone, names, args.recipe, args.commit, line)
    write_json(args.out / "excess.json", found)
    for r in found["rows"]:
        print(f"{r['case']:14}", *(f"{t} NE {f['ne']:.5f} ({f['excess_pct']:+.3f}%)" for t, f in r["tasks"].items()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
