"""What `python -m gem_data.bench` measures besides assembly: preparing, a first batch, the memory of a worker.

Each is a function that gives one benchmark row. Times are wall time, whatever else the machine does; the load is told.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gem_data.batches.collate import Collator
from gem_data.bench.logs import four_columns, four_events, kuairand_csv
from gem_data.build.out_of_core import prepare
from gem_data.log.event_log import EventLog
from gem_data.sources import kuairand
from gem_data.sources.events import Events
from gem_data.sources.files import files

_FIRST = """
import sys, time
def now():
    return time.perf_counter(), time.process_time()
begin = now()
from gem_data import EventLog, Loader, LoaderConfig
imported = now()
log = EventLog.open(sys.argv[1])
config = LoaderConfig(batch_size=1024, max_history=256, permute="cipher")
batch = next(iter(Loader(log, range(len(log)), config)))
end = now()
assert len(batch) == 1024
print(*(b - a for a, b in [*zip(begin, imported), *zip(imported, end)]))
"""


def first_batch(folder: Path) -> dict[str, Any]:
    """From the folder's name to the first shuffled batch of 1,024, in a fresh process; the imports apart.

    "cold": the system was told to forget the files before, so that they come from the disk; then once more.
    """
    rows = len(EventLog.open(folder))
    for path in folder.iterdir():
        _forget(path)
    found: dict[str, Any] = {"case": f"first-batch-{rows}", "op": "open", "events": rows}
    for prefix in ("cold_", ""):
        out = subprocess.run([sys.executable, "-c", _FIRST, str(folder)], capture_output=True, text=True, check=True)
        imports, imports_cpu, seconds, cpu = (float(x) * 1e3 for x in out.stdout.split())
        found |= {f"{prefix}ms": seconds, f"{prefix}cpu_ms": cpu}
        found |= {"imports_ms": imports, "imports_cpu_ms": imports_cpu, "load": os.getloadavg()[0]}
    return found


def _forget(path: Path) -> None:
    """Drop a file's pages from the system's cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


@contextmanager
def _own_memory(every_s: float = 0.03) -> Iterator[list[int]]:
    """What the process holds for itself meanwhile, in bytes: mapped files, which the system takes back, apart."""
    found, done = [_anonymous()], threading.Event()

    def watch() -> None:
        while not done.wait(every_s):
            found.append(_anonymous())

    thread = threading.Thread(target=watch, name="gem-data-memory", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def _anonymous() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return 1024 * int(next(line for line in file if line.startswith("RssAnon")).split()[1])


_WORKER = """
import os, sys
from gem_data import EventLog, Loader, LoaderConfig
import gem_data.batches.collate
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


def preparing(folder: Path, rows: int, *, memory: int) -> dict[str, Any]:
    """`prepare` on a file of KuaiRand's layout: time, processor time of all threads, and the most memory."""
    kuairand_csv(folder / "csv", rows)
    return {"case": f"prepare-kuairand-{rows}", "op": "prepare", **_alone(_prepare_kuairand, folder, memory)}


def one_user(folder: Path, rows: int, *, memory: int) -> dict[str, Any]:
    """`prepare` and the latest history of a log where one of 20,001 users has `rows` events and the others a tenth."""
    folder.mkdir(parents=True)
    for start in range(0, rows, 1_000_000):  # in several files, so that making them takes no memory
        rng = np.random.default_rng(start)
        lengths = np.array([min(1_000_000, rows - start)])
        heavy = four_events(rng, 20_000, lengths)
        light = four_events(rng, 0, np.bincount(rng.integers(20_000, size=int(lengths[0]) // 10), minlength=20_000))
        both = {name: np.concatenate([heavy[name], light[name]]) for name in heavy}
        pq.write_table(pa.table(both), folder / f"{start:012}.parquet")
    return {"case": f"one-user-{rows}", "op": "prepare", **_alone(_prepare_one_user, folder, memory)}


def _alone(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What `work` gives in a fresh process, whose peak of memory is then its own."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def _prepare_kuairand(folder: Path, memory: int) -> dict[str, Any]:
    return _prepared(kuairand.events(folder / "csv", variant="27k"), folder / "log", memory)


def _prepare_one_user(folder: Path, memory: int) -> dict[str, Any]:
    found = _prepared(files(folder / "*.parquet", four_columns(20_001)), folder / "log", memory)
    log = EventLog.open(folder / "log")
    begin = time.perf_counter()
    batch = Collator(log, max_history=1024)([len(log) - 1])
    assert batch.sequences["events"].max_len == min(1024, int(np.diff(log.user_offsets)[-1]) - 1)
    return {**found, "batch_ms": (time.perf_counter() - begin) * 1e3}


def _prepared(events: Events, folder: Path, memory: int) -> dict[str, Any]:
    begin, busy = time.perf_counter(), time.process_time()
    with _own_memory() as own:
        summary = prepare(events, folder, memory=memory)
    seconds, busy = time.perf_counter() - begin, time.process_time() - busy
    return {
        "events": summary.rows,
        "ms": seconds * 1e3,
        "events_per_s": summary.rows / seconds,
        "cpu_s": busy,  # of all threads: what it would take on one core of its own
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,  # with the mapped files
        "own_gb": max(own) / 2**30,
        "load": os.getloadavg()[0],
    }
