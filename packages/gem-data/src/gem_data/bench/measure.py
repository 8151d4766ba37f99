"""What `python -m gem_data.bench` measures besides assembly: preparing, a first batch, the memory of a worker.

Each is a function that gives one benchmark row. Times are wall time, whatever else the machine does; the load is told.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gem_data.bench.logs import kuairand_csv
from gem_data.build.out_of_core import prepare
from gem_data.log.event_log import EventLog
from gem_data.sources import kuairand

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
