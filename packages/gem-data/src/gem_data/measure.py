"""What `python -m gem_data.bench` measures besides assembly: preparing, a first batch, the memory of a worker.

Each is a function that gives one benchmark row. Times are wall time, whatever else the machine does; the load is told.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
from numpy.typing import NDArray

from gem_data.finish import complete, merge_indices
from gem_data.log import FORMAT_PARTS, REJECTS, EventLog
from gem_data.outofcore import prepare
from gem_data.pieces import write_part
from gem_data.schema import Column, Schema, Task
from gem_data.sources import kuairand

USERS_PER_PART = 20_000


def four_columns(users: int) -> Schema:
    """Time and three more columns in the history: an id, a float and an outcome."""
    return Schema(
        name="four",
        columns=(
            Column(name="user", kind="id", role="user", cardinality=users),
            Column(name="item", kind="id", role="context", cardinality=1_000_000),
            Column(name="price", kind="float", role="context"),
            Column(name="action", kind="id", role="outcome", cardinality=4),
        ),
        tasks=(Task(name="click", column="action", minimum=2),),
    )


def four_events(rng: np.random.Generator, first: int, lengths: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Sorted events of users first, first + 1, ... with the given numbers of events."""
    n = int(lengths.sum())
    user = np.repeat(np.arange(first, first + len(lengths)), lengths)
    time_ = 1_600_000_000 + rng.integers(0, 60 * 86_400, n)
    order = np.lexsort((time_, user))
    return {
        "user": user,
        "time": time_[order],
        "item": np.minimum(rng.zipf(1.3, n), 999_999),
        "price": rng.random(n, np.float32),
        "action": rng.integers(1, 4, n),
    }


def lognormal_lengths(rng: np.random.Generator, events: int, *, median: float = 300.0) -> NDArray[np.int64]:
    """Events of each user, log-normal with sigma 1 and cap 4096, until there are `events`."""
    count = int(events / (median * 1.4)) + 100
    lengths = np.clip(np.rint(rng.lognormal(np.log(median), 1.0, count)), 1, 4096).astype(np.int64)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), events)) + 1]


def large_log(folder: Path, events: int, *, part_events: int = 10_000_000) -> EventLog:
    """A log of about `events` made-up events, written part by part without sorting: to measure reading alone."""
    rng = np.random.default_rng(0)
    lengths = lognormal_lengths(rng, events)
    schema = four_columns(len(lengths))
    folder.mkdir(parents=True)
    work = folder / "work"
    work.mkdir()
    records: list[dict[str, Any]] = []
    cuts = np.searchsorted(np.cumsum(lengths), np.arange(part_events, events, part_events))
    for a, b in zip([0, *cuts.tolist()], [*cuts.tolist(), len(lengths)], strict=True):
        name = f"part-{len(records):05}"
        columns: dict[str, Any] = four_events(rng, a, lengths[a:b])
        records.append(write_part(columns, schema, folder, work, name=name, index=name))
    arrays = merge_indices(schema, records, work, folder, "g0000", lambda *_: None)
    for path in work.iterdir():
        path.unlink()
    work.rmdir()
    (folder / REJECTS).touch()
    manifest: dict[str, Any] = {
        "format": FORMAT_PARTS,
        "schema": schema.to_dict(),
        "fingerprint": schema.fingerprint(),
        "rejected": {},
        "out_of_order": 0,
        "vocabularies": {},
        "statistics": {},
        "generations": [{"parts": records, "arrays": arrays}],
    }
    complete(manifest, folder)
    return EventLog.open(folder)


_FIRST = """
import sys, time
begin = time.perf_counter()
from gem_data import EventLog, Loader, LoaderConfig
imported = time.perf_counter()
log = EventLog.open(sys.argv[1])
config = LoaderConfig(batch_size=1024, max_history=256, permute="cipher")
batch = next(iter(Loader(log, range(len(log)), config)))
end = time.perf_counter()
assert len(batch) == 1024
print(imported - begin, end - imported)
"""


def first_batch(folder: Path) -> dict[str, Any]:
    """From the folder's name to the first shuffled batch of 1,024, in a fresh process; the imports apart."""
    log = EventLog.open(folder)
    out = subprocess.run([sys.executable, "-c", _FIRST, str(folder)], capture_output=True, text=True, check=True)
    imports, seconds = map(float, out.stdout.split())
    return {
        "case": f"first-batch-{len(log)}",
        "op": "open",
        "events": len(log),
        "ms": seconds * 1e3,
        "imports_ms": imports * 1e3,
    }


_WORKER = """
import os, sys
from gem_data import EventLog, Loader, LoaderConfig
import gem_data.collate
log = EventLog.open(sys.argv[1])
config = LoaderConfig(batch_size=256, max_history=256, permute="cipher")
loader = Loader(log, range(len(log)), config)
collate = loader._collate
def anonymous():
    with open("/proc/self/status") as file:
        return int(next(l for l in file if l.startswith("RssAnon")).split()[1])
before = anonymous()
for step in range(200):
    rows, padding = loader.local_rows(0, step % len(loader))
    collate(rows, padding=padding)
print(before, anonymous())
"""


def worker_memory(folder: Path) -> dict[str, Any]:
    """What a process that collates 200 batches holds for itself (RssAnon: not the mapped files, which are shared)."""
    log = EventLog.open(folder)
    out = subprocess.run([sys.executable, "-c", _WORKER, str(folder)], capture_output=True, text=True, check=True)
    before, after = map(int, out.stdout.split())
    return {
        "case": f"worker-{len(log)}",
        "op": "memory",
        "events": len(log),
        "mb": after / 1024,
        "opened_mb": before / 1024,
    }


def kuairand_csv(folder: Path, rows: int) -> Path:
    """A file with KuaiRand's layout and made-up content."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    activity = rng.lognormal(0, 1, 27_285)
    activity /= activity.sum()

    def tables() -> Iterator[pa.Table]:
        for start in range(0, rows, 1_000_000):
            n = min(1_000_000, rows - start)
            table: dict[str, Any] = {
                "user_id": rng.choice(27_285, n, p=activity),
                "video_id": np.minimum(rng.zipf(1.2, n), 4_000_000),
                "date": np.full(n, 20_220_408),
                "hourmin": rng.integers(0, 2359, n),
                "time_ms": 1_649_347_200_000 + rng.integers(0, 30 * 86_400_000, n),
            }
            for signal in kuairand.SIGNALS[:-1]:
                table[signal] = (rng.random(n) < (0.3 if signal in ("is_click", "long_view") else 0.02)).astype(
                    np.int64
                )
            table |= {
                "play_time_ms": rng.integers(0, 60_000, n),
                "duration_ms": rng.integers(3_000, 120_000, n),
                "profile_stay_time": np.zeros(n, np.int64),
                "comment_stay_time": np.zeros(n, np.int64),
                "is_profile_enter": np.zeros(n, np.int64),
                "is_rand": np.zeros(n, np.int64),
                "tab": rng.integers(0, 15, n),
            }
            yield pa.table(table)

    with pa.OSFile(str(folder / "log_standard.csv"), "wb") as sink:
        writer = None
        for table in tables():
            writer = writer or csv.CSVWriter(sink, table.schema)
            writer.write_table(table)
        assert writer is not None
        writer.close()
    return folder


def preparing(folder: Path, rows: int, *, memory: int = 2 << 30) -> dict[str, Any]:
    """The time and the peak memory of `prepare` on a file of KuaiRand's layout (memory: of this whole process)."""
    source = kuairand.events(kuairand_csv(folder / "csv", rows), variant="27k")
    begin, busy = time.perf_counter(), time.process_time()
    summary = prepare(source, folder / "log", memory=memory)
    seconds, busy = time.perf_counter() - begin, time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "case": f"prepare-kuairand-{rows}",
        "op": "prepare",
        "events": summary.rows,
        "ms": seconds * 1e3,
        "events_per_s": summary.rows / seconds,
        "cpu_s": busy,  # of all threads: what it would take on one core of its own
        "peak_gb": peak,
        "load": os.getloadavg()[0],
    }
