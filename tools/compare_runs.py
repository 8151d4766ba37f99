"""Compare the loss curves of two run folders: `python tools/compare_runs.py runs/one runs/two --tolerance 1e-4`.

Prints the largest relative difference of the training loss over the common steps, and the validation NEs side by side.
Exits with 1 when the difference exceeds the tolerance or the runs share no step.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def read(run: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Training loss and validation NE by step."""
    losses: dict[int, float] = {}
    validations: dict[int, float] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record: dict[str, Any] = json.loads(line)
        if record["kind"] == "step":
            losses[record["step"]] = record["loss"]
        elif record["kind"] == "eval":
            validations[record["step"]] = record["ne"]
    return losses, validations


def worst(a: dict[int, float], b: dict[int, float]) -> tuple[float, int]:
    """Largest |a - b| / |a| over the common steps, and the step where it is."""
    common = sorted(a.keys() & b.keys())
    if not common:
        raise SystemExit("the runs have no step in common")
    return max((abs(a[s] - b[s]) / abs(a[s]), s) for s in common)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=Path, help="a run folder, the one that counts as exact")
    parser.add_argument("second", type=Path, help="another run folder")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest relative difference of the loss")
    args = parser.parse_args()
    (losses, validations), (other_losses, other_validations) = read(args.first), read(args.second)
    difference, step = worst(losses, other_losses)
    print(f"{len(losses.keys() & other_losses.keys())} steps in common; largest relative difference of the loss:")
    print(f"  {difference:.2e} at step {step} ({losses[step]:.6f} and {other_losses[step]:.6f})")
    for s in sorted(validations.keys() & other_validations.keys()):
        print(f"  validation NE at step {s}: {validations[s]:.6f} and {other_validations[s]:.6f}")
    if difference > args.tolerance:
        raise SystemExit(f"more than the tolerance of {args.tolerance:.0e}")


if __name__ == "__main__":
    main()
