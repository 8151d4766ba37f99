"""Assembling batches against others doing the same: one benchmark row for each length of histories.

What all of them give is compared before a time is taken.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gem_data.batches.batch import JaggedBatch
from gem_data.batches.collate import Collator
from gem_data.batches.loader import permutation
from gem_data.bench.logs import four_columns, four_events, lognormal_lengths
from gem_data.bench.peers import arrow_collate, arrow_lists, dataset_collate, padded_collate
from gem_data.build.in_memory import build_log
from gem_data.log.event_log import EventLog


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
    """Times on a log with four columns and log-normal histories (sigma 1), as one benchmark row with its peers."""
    rng = np.random.default_rng(0)
    lengths = lognormal_lengths(rng, events)
    build_log(pa.table(four_events(rng, 0, lengths)), four_columns(len(lengths)), folder)
    log = EventLog.open(folder)
    collate = Collator(log, max_history=max_history)
    rows = permutation(len(log), seed=0, epoch=0)[:batch_size]
    batch, padded = collate(rows), padded_collate(log, rows, max_history)
    check(batch, padded)
    check(batch, {k: v.numpy() for k, v in dataset_collate(log, rows, max_history).items()})
    lists = arrow_lists(log)
    for name, values in arrow_collate(lists, log, rows, max_history).items():
        ours_ = {"time": batch.sequences["events"].time, **batch.sequences["events"].ids}.get(name)
        assert ours_ is None or np.array_equal(values.values.to_numpy(), ours_.numpy()), name
    total, longest = int(batch.sequences["events"].offsets[-1]), batch.sequences["events"].max_len
    ours = median_seconds(lambda: collate(rows), repeats)
    few = max(3, repeats // 4)
    works = {
        "padded per sample, histories alone": lambda: padded_collate(log, rows, max_history),
        "torch Dataset and pad_sequence, histories alone": lambda: dataset_collate(log, rows, max_history),
        "pyarrow list arrays, histories alone": lambda: arrow_collate(lists, log, rows, max_history),
    }
    peers = {name: median_seconds(work, few) for name, work in works.items()}
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
        "load": os.getloadavg()[0],
        "peers": {
            name: {"unit": "ms", "value": t * 1e3, "events_per_s": total / t, "ratio": t / ours}
            for name, t in peers.items()
        },
    }
