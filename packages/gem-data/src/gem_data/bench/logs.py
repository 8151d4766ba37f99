"""Made-up logs to measure with: four columns of events with log-normal histories, and files of KuaiRand's layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
from numpy.typing import NDArray

from gem_data.build.finish import complete, merge_indices
from gem_data.build.pieces import write_part
from gem_data.log.event_log import EventLog
from gem_data.log.manifest import FORMAT_PARTS, REJECTS
from gem_data.schema import Column, Schema, Task
from gem_data.sources import kuairand


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
