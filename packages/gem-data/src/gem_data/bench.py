"""`python -m gem_data.bench`: how fast batches are assembled on one core, against a per-sample padded collate.

Both read the same memory-mapped log; what they give is compared before a time is printed. Assembly alone: no transfer.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from gem_data.batch import JaggedBatch
from gem_data.build import build_log
from gem_data.collate import Collator
from gem_data.loader import permutation
from gem_data.log import EventLog
from gem_data.sources import synthetic
from gem_data.testing import padded_collate


def median_seconds(work: Callable[[], Any], repeats: int) -> float:
    """The median wall time of `repeats` runs after one to warm up."""
    work()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return float(np.median(times))


def check(batch: JaggedBatch, padded: dict[str, np.ndarray[Any, Any]]) -> None:
    """Raise AssertionError unless both hold the same histories."""
    sequence = batch.sequences["events"]
    lengths = sequence.offsets.diff().numpy()
    assert (lengths == padded["length"]).all()
    valid = np.arange(padded["time"].shape[1]) < lengths[:, None]
    for name, values in {"time": sequence.time, **sequence.ids, **sequence.floats}.items():
        expected = padded[name][valid]
        assert np.array_equal(values.numpy().reshape(expected.shape), expected), name


def measure(*, events: int, batch_size: int, max_history: int, repeats: int, folder: Path) -> dict[str, Any]:
    """Times of both on a synthetic log with long histories, as one benchmark row with its peer."""
    config = synthetic.SyntheticConfig(events=events, median_length=300, sigma=1.2, max_length=8192)
    build_log(*synthetic.load(config), folder)
    log = EventLog.open(folder)
    collate = Collator(log, max_history=max_history)
    rows = permutation(len(log), seed=0, epoch=0)[:batch_size]
    batch, padded = collate(rows), padded_collate(log, rows, max_history)
    check(batch, padded)
    total, longest = int(batch.sequences["events"].offsets[-1]), batch.sequences["events"].max_len
    ours = median_seconds(lambda: collate(rows), repeats)
    peer = median_seconds(lambda: padded_collate(log, rows, max_history), max(3, repeats // 4))
    return {
        "case": f"lognormal-{max_history}",
        "op": "collate",
        "variant": "jagged",
        "batch_size": batch_size,
        "events": total,
        "filled": total / (batch_size * longest),
        "ms": ours * 1e3,
        "events_per_s": total / ours,
        "samples_per_s": batch_size / ours,
        "peers": {
            "padded per sample, histories alone": {"unit": "ms", "value": peer * 1e3, "events_per_s": total / peer}
        },
    }


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, measure, print a table and write `--out`."""
    parser = argparse.ArgumentParser(prog="python -m gem_data.bench", description=__doc__)
    parser.add_argument("--events", type=int, default=300_000, help="events in the synthetic log")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--max-history", type=int, nargs="+", default=[50, 256, 1024])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    print(f"{'case':<16}{'events':>10}{'filled':>8}{'jagged ms':>11}{'events/s':>12}{'padded ms':>11}{'events/s':>12}")
    for max_history in options.max_history:
        with tempfile.TemporaryDirectory() as folder:
            row = measure(
                events=options.events,
                batch_size=options.batch_size,
                max_history=max_history,
                repeats=options.repeats,
                folder=Path(folder) / "log",
            )
        (peer,) = row["peers"].values()
        print(
            f"{row['case']:<16}{row['events']:>10}{row['filled']:>8.0%}{row['ms']:>11.2f}{row['events_per_s']:>12.3g}"
            f"{peer['value']:>11.2f}{peer['events_per_s']:>12.3g}"
        )
        rows.append(row)
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
