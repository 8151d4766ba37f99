"""`python -m gem_data.bench`: how fast batches are assembled on one core, and what else the package promises.

Assembly is measured against a per-sample padded collate in numpy, a plain torch Dataset with `pad_sequence`, and
pyarrow list arrays, all on the same memory-mapped log; what they give is compared before a time is printed.
`--prepare`, `--one-user`, `--first-batch` and `--balance` measure those; they make their own data under `--scratch`.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from gem_data.balance import LengthCost
from gem_data.balance.simulate import Lognormal, simulate
from gem_data.bench.assembly import measure
from gem_data.bench.logs import large_log
from gem_data.bench.measure import first_batch, one_user, preparing, worker_memory


def others(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of what was asked for besides assembly."""
    for events in options.first_batch or ():
        log = folder / f"log-{events}"
        large_log(log, events)
        yield first_batch(log)
        yield worker_memory(log)
        shutil.rmtree(log)
    for ranks in options.balance or ():
        cost = LengthCost(quadratic=1, linear=4096)
        for row in simulate(Lognormal(), ranks=ranks, cost=cost):
            yield {"case": f"balance-{ranks}", "op": row.method, "max_over_mean": row.mean, "speed_up": row.speed_up}
    if options.prepare:
        yield preparing(folder / "prepare", options.prepare, memory=options.memory << 20)
        shutil.rmtree(folder / "prepare")
    if options.one_user:
        yield one_user(folder / "one-user", options.one_user, memory=options.memory << 20)


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, measure, print a table and write `--out`."""
    parser = argparse.ArgumentParser(prog="python -m gem_data.bench", description=__doc__)
    parser.add_argument("--events", type=int, default=300_000, help="events in the synthetic log")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--max-history", type=int, nargs="*", default=[50, 256, 1024])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--prepare", type=int, metavar="EVENTS", help="build a log of KuaiRand's layout")
    parser.add_argument("--memory", type=int, metavar="MIB", default=2048, help="what these two may use, about")
    parser.add_argument("--one-user", type=int, metavar="EVENTS", help="build a log where one user has so many events")
    parser.add_argument("--first-batch", type=int, metavar="EVENTS", nargs="+", help="open logs of so many events")
    parser.add_argument("--balance", type=int, metavar="RANKS", nargs="+", help="simulate so many ranks")
    parser.add_argument("--scratch", type=Path, help="where the data of these goes (a temporary folder otherwise)")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    print("processor time on one thread; how many times faster than each, and in brackets than its histories alone")
    head = f"{'case':<16}{'events':>9}{'filled':>8}{'ms':>7}{'events/s':>10}{'of copy':>9}"
    print(f"{head}{'padded':>16}{'Dataset':>16}{'arrow':>9}")
    for max_history in options.max_history:
        with tempfile.TemporaryDirectory() as folder:
            row = measure(
                events=options.events,
                batch_size=options.batch_size,
                max_history=max_history,
                repeats=options.repeats,
                folder=Path(folder) / "log",
            )
        ratio = {name: peer["ratio"] for name, peer in row["peers"].items()}
        pairs = [
            f"{ratio[n]:.1f}x ({ratio[f'{n}, histories alone']:.1f}x)"
            for n in ("padded per sample", "torch Dataset, pad_sequence")
        ]
        print(
            f"{row['case']:<16}{row['events']:>9.0f}{row['filled']:>8.0%}{row['cpu_ms']:>7.2f}{row['events_per_s']:>10.2g}"
            f"{row['of_copy']:>9.0%}{pairs[0]:>16}{pairs[1]:>16}{ratio['pyarrow list arrays, histories alone']:>8.1f}x"
        )
        rows.append(row)
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        for more in others(options, Path(folder)):
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in more.items()))
            rows.append(more)
    if options.out is not None:
        result = {
            "suite": "data",
            "date": time.strftime("%Y-%m-%d"),
            "card": platform.processor() or platform.machine(),
            "versions": {"torch": torch.__version__, "numpy": np.__version__, "pyarrow": pa.__version__},
            "command": shlex.join(
                ["python", "-m", "gem_data.bench", *(sys.argv[1:] if arguments is None else arguments)]
            ),
            "ceilings": {},
            "rows": rows,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
