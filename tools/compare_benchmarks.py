"""Compare two result files of one suite: `python tools/compare_benchmarks.py OLD.json NEW.json [--slower 1.05]`.

Rows are matched by case, operator, variant, pass, dtype and head dimension. What is compared is each row's share of its
own run's ceiling (of the GEMM, of the copy), since a card's clock differs from run to run; times stand beside it.
Exits with 1 when a row has become slower by more than the factor, has lost its correctness figure, or is missing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

KEYS = ("case", "op", "variant", "pass", "dtype", "head_dim")
Row = dict[str, Any]


def rows(path: Path) -> dict[tuple[Any, ...], Row]:
    """The rows of a result file by what identifies them."""
    return {tuple(row.get(key) for key in KEYS): row for row in json.loads(path.read_text())["rows"]}


def slowdown(old: Row, new: Row) -> float:
    """How many times slower the new row is: by the larger of its shares of the ceilings, else by time."""
    for share in sorted(("of_gemm", "of_copy"), key=lambda name: -(old.get(name) or 0)):
        if old.get(share) and new.get(share):
            return float(old[share] / new[share])
    return float(new["ms"] / old["ms"])


def compare(old: dict[tuple[Any, ...], Row], new: dict[tuple[Any, ...], Row], limit: float) -> tuple[list[str], bool]:
    """A line for every row of the old file, and whether any is worse than the limit allows."""
    lines, worse = [], False
    for key, before in old.items():
        name = " ".join(str(part) for part in key if part is not None)
        after = new.get(key)
        if after is None:
            lines.append(f"missing  {name}")
            worse = True
            continue
        factor = slowdown(before, after)
        lost = before.get("error") is not None and after.get("error") is None
        bad = factor > limit or lost
        worse |= bad
        verdict = "no error " if lost else "slower   " if bad else "faster   " if factor < 1 / limit else "same     "
        lines.append(f"{verdict}{1 / factor:5.2f}x  {before['ms']:9.3f} -> {after['ms']:9.3f} ms  {name}")
    return lines, worse


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--slower", type=float, default=1.05, help="the factor that is still called the same")
    options = parser.parse_args()
    lines, worse = compare(rows(options.old), rows(options.new), options.slower)
    print(*lines, sep="\n")
    if worse:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
