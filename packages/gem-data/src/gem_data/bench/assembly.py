"""Assembling batches against others doing the same: one benchmark row for each length of histories.

Every round takes another batch and gives it to each in turn, so that what else the machine does hits all of them alike;
figures are medians over the rounds. All run on one thread. Ratios are of processor time, which a busy machine stretches
less than wall time. What all of them give is compared before a time is taken.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gem_data.batches.batch import JaggedBatch
from gem_data.batches.collate import Collator
from gem_data.batches.loader import permutation
from gem_data.bench.logs import four_columns, four_events, lognormal_lengths
from gem_data.bench.peers import arrow_collate, arrow_lists, dataset_collate, padded_collate
from gem_data.build.in_memory import build_log
from gem_data.log.event_log import EventLog

Rows = NDArray[np.int64]
OURS, COPY = "jagged", "memory copy"


def timed(works: Mapping[str, Callable[[Rows], Any]], batches: list[Rows], rounds: int) -> dict[str, NDArray[Any]]:
    """Wall and processor seconds of each work, [rounds, 2]. It first does the batch before, untimed: a loader does one
    after another, and the caches should not hold what another work has left."""
    found = {name: np.zeros((rounds, 2)) for name in works}
    for r in range(rounds):
        for name, work in works.items():
            work(batches[(r - 1) % len(batches)])
            begin, busy = time.perf_counter(), time.thread_time()
            work(batches[r % len(batches)])
            found[name][r] = time.perf_counter() - begin, time.thread_time() - busy
    return found


def check(batch: JaggedBatch, padded: dict[str, np.ndarray[Any, Any]]) -> None:
    """Raise AssertionError unless both hold the same histories and, where `padded` has them, the same samples."""
    sequence = batch.sequences["events"]
    lengths = sequence.offsets.diff().numpy()
    assert (lengths == padded["length"]).all()
    valid = np.arange(padded["time"].shape[1]) < lengths[:, None]
    for name, values in {"time": sequence.time, **sequence.ids, **sequence.floats}.items():
        expected = padded[name][valid]
        assert np.array_equal(values.numpy().reshape(expected.shape), expected), name
    for name in padded.keys() & {"dense", "labels", "label_mask"}:
        assert np.array_equal(getattr(batch, name).numpy(), padded[name]), name
    for name, ids in batch.sparse.items():
        assert np.array_equal(ids.values.numpy(), padded.get(f"candidate.{name}", ids.values.numpy())), name


def copier(log: EventLog, batches: list[Rows], max_history: int) -> Callable[[Rows], Any]:
    """Copies as many bytes of each column as the histories of a batch have, from one place each: the ceiling."""
    columns = [log.column(n) for n in ("time", *log.schema.sequence_ids, *log.schema.sequence_floats)]
    events = {id(rows): int(log.history_lengths(rows, max_history).sum()) for rows in batches}
    at = 0

    def copy(rows: Rows) -> list[NDArray[Any]]:
        nonlocal at
        n = min(events[id(rows)], len(log))
        at = (at + n) % (len(log) - n + 1)  # not where the last one was, which the caches still hold
        return [c[at : at + n].copy() for c in columns]

    return copy


def measure(*, events: int, batch_size: int, max_history: int, repeats: int, folder: Path) -> dict[str, Any]:
    """Times on a log with four columns and log-normal histories (sigma 1), as one benchmark row with its peers."""
    rng = np.random.default_rng(0)
    lengths = lognormal_lengths(rng, events)
    build_log(pa.table(four_events(rng, 0, lengths)), four_columns(len(lengths)), folder)
    log = EventLog.open(folder)
    collate = Collator(log, max_history=max_history)
    order = permutation(len(log), seed=0, epoch=0)
    batches = [order[b * batch_size : (b + 1) * batch_size] for b in range(max(1, min(8, len(log) // batch_size)))]
    lists = arrow_lists(log)
    for whole in (True, False):
        check(collate(batches[0]), padded_collate(log, batches[0], max_history, whole=whole))
        torch_ = dataset_collate(log, batches[0], max_history, whole=whole)
        check(collate(batches[0]), {k: v.numpy() for k, v in torch_.items()})
    sequence = collate(batches[0]).sequences["events"]
    for name, values in arrow_collate(lists, log, batches[0], max_history).items():
        expected = {"time": sequence.time, **sequence.ids, **sequence.floats}[name].numpy().reshape(-1)
        assert np.array_equal(values.values.to_numpy(), expected), name
    peers: dict[str, Callable[[Rows], Any]] = {
        "padded per sample": lambda rows: padded_collate(log, rows, max_history),
        "torch Dataset, pad_sequence": lambda rows: dataset_collate(log, rows, max_history),
        "pyarrow list arrays, histories alone": lambda rows: arrow_collate(lists, log, rows, max_history),
        "padded per sample, histories alone": lambda rows: padded_collate(log, rows, max_history, whole=False),
        "torch Dataset, pad_sequence, histories alone": lambda rows: dataset_collate(
            log, rows, max_history, whole=False
        ),
    }
    works: dict[str, Callable[[Rows], Any]] = {OURS: collate, COPY: copier(log, batches, max_history), **peers}
    found = timed(works, batches, repeats)
    shapes = [collate(rows).sequences["events"] for rows in batches]
    total = np.array([int(shapes[r % len(batches)].offsets[-1]) for r in range(repeats)], np.float64)
    longest = np.array([shapes[r % len(batches)].max_len for r in range(repeats)], np.float64)
    ours = found.pop(OURS)
    copy = found.pop(COPY)
    return {
        "case": f"lognormal-{max_history}",
        "op": "collate",
        "variant": "jagged",
        "batch_size": batch_size,
        "events": float(total.mean()),
        "filled": float((total / (batch_size * longest)).mean()),
        "ms": float(np.median(ours[:, 0])) * 1e3,
        "cpu_ms": float(np.median(ours[:, 1])) * 1e3,
        "events_per_s": float(np.median(total / ours[:, 1])),
        "samples_per_s": float(np.median(batch_size / ours[:, 1])),
        "of_copy": float(np.median(copy[:, 1] / ours[:, 1])),
        "load": os.getloadavg()[0],
        "peers": {
            name: {
                "unit": "ms",
                "value": float(np.median(t[:, 0])) * 1e3,
                "cpu_ms": float(np.median(t[:, 1])) * 1e3,
                "events_per_s": float(np.median(total / t[:, 1])),
                "ratio": float(np.median(t[:, 1] / ours[:, 1])),
                "wall_ratio": float(np.median(t[:, 0] / ours[:, 0])),
            }
            for name, t in {COPY: copy, **found}.items()
        },
    }
