"""Growing a log: new events become a generation after those that are there; nothing that was written changes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from gem_data.build.finish import complete, merge_indices, merged_statistics
from gem_data.build.output import BuildSummary, reject_lines
from gem_data.build.pieces import write_part
from gem_data.build.validate import Validated, validate
from gem_data.features.counters import compute_counters
from gem_data.features.statistics import Moments
from gem_data.log.derived import label_arrays
from gem_data.log.event_log import EventLog
from gem_data.log.manifest import FORMAT_PARTS, MANIFEST, REJECTS
from gem_data.schema import TIME, Schema
from gem_data.schema.values import LATE, REASONS
from gem_data.sorting import order_of
from gem_data.sources.events import as_table


def append(folder: str | Path, events: Any) -> BuildSummary:
    """Add events that are later than all that the log in `folder` holds; the others are rejected as late.

    Keys are mapped by the log's vocabularies, so new ones are unknown. Readers of the log keep what they have opened
    and see the new rows when they open it again; the manifest is replaced in one step. The new events are held in
    memory, and where the schema has counters, what the counters read of the whole log.

    Raises FileNotFoundError, ValueError for a log of `build_log` (which has no generations) and where nothing is left
    to add, BlockingIOError where another process is appending.
    """
    folder = Path(folder)
    log = EventLog.open(folder)
    if log.manifest["format"] != FORMAT_PARTS:
        raise ValueError(f"{folder} was made by build_log and can't grow; make it with prepare(from_table(...))")
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise BlockingIOError(f"another process is appending to {folder}") from None
            raise
        return _append(folder, EventLog.open(folder), as_table(events))
    finally:
        os.close(descriptor)


def _append(folder: Path, log: EventLog, table: Any) -> BuildSummary:
    schema = log.schema
    valid = _without_late(validate(table, schema), log.manifest["time"][1])
    if len(valid.columns[TIME]) == 0:
        reasons = ", ".join(f"{n} {reason}" for reason, n in valid.counts().items()) or "the source is empty"
        raise ValueError(f"no event to append to {folder} among {table.num_rows}: {reasons}")
    for name, vocabulary in log.vocabularies.items():
        valid.columns[name] = vocabulary.encode(valid.columns[name])
    order = order_of([valid.columns[schema.user], valid.columns[TIME]], stable=True)
    columns = {n: v[order] for n, v in valid.columns.items()}
    number = len(log.generations)
    prefix = f"g{number:04}"
    with tempfile.TemporaryDirectory(prefix=".append-", dir=folder) as name:
        work = Path(name)
        new = work / "new"
        new.mkdir()
        record = write_part(columns, schema, new, work, name=f"{prefix}-part-00000", index="part")
        record |= {"out_of_order": 0, "duplicates": 0, "samples": []}
        arrays = merge_indices(schema, [record], work, new, prefix, lambda *_: None)
        statistics = merged_statistics([{"statistics": log.statistics}, record])
        if schema.counters:
            counters = _counters(log, schema, columns)
            arrays["counters"] = f"{prefix}.counters.npy"
            np.save(new / arrays["counters"], counters)
            for i, counter in enumerate(schema.counters):
                statistics[counter.name] = Moments.from_dict(log.statistics[counter.name])
                statistics[counter.name].add(counters[:, i])
        lines, samples = reject_lines(table, valid)
        rejects = work / REJECTS
        shutil.copyfile(folder / REJECTS, rejects)
        with rejects.open("a", encoding="utf-8") as file:
            file.writelines(lines)
        for path in new.iterdir():
            path.rename(folder / path.name)
        rejects.rename(folder / REJECTS)  # a new file: readers have the old one open
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        counts = valid.counts()
        manifest["rejected"] = {
            k: manifest["rejected"].get(k, 0) + counts.get(k, 0) for k in sorted({*manifest["rejected"], *counts})
        }
        manifest["statistics"] = {n: m.to_dict() for n, m in statistics.items()}
        manifest["generations"].append({"parts": [record], "arrays": arrays})
        complete(manifest, folder)
    seen = np.maximum(record["seen"], 1)
    known = {TIME, *(c.name for c in schema.columns)}
    return BuildSummary(
        folder=folder,
        rows=record["rows"],
        users=record["users"][2],
        rejected=counts,
        samples=tuple(samples),
        out_of_order=0,
        ignored_columns=tuple(n for n in table.column_names if n not in known),
        label_rates=dict(zip(schema.task_names, (np.array(record["positives"]) / seen).tolist(), strict=True)),
    )


def _without_late(valid: Validated, last: int) -> Validated:
    """Reject what is not later than `last`: histories that were given out would have been others."""
    late = valid.columns[TIME] <= last
    if not late.any():
        return valid
    n = len(late) + len(valid.rejected)
    rest = np.ones(n, bool)
    rest[valid.rejected] = False
    rows = np.flatnonzero(rest)[late]
    fault = np.zeros(n, np.int8)
    fault[valid.rejected], fault[rows] = valid.reasons, LATE
    where = dict(zip(valid.rejected.tolist(), valid.where, strict=True)) | dict.fromkeys(rows.tolist(), TIME)
    rejected = np.flatnonzero(fault)
    return Validated(
        columns={k: v[~late] for k, v in valid.columns.items()},
        rejected=rejected,
        reasons=fault[rejected],
        where=[where[r] for r in rejected.tolist()],
        texts=valid.texts,
        keys=valid.keys,
    )


def _counters(log: EventLog, schema: Schema, columns: dict[str, Any]) -> Any:
    """Counters of the new rows, from all rows: what a build of everything would give."""
    needed = {TIME, *(t.column for t in schema.tasks)}
    needed |= {name for c in schema.counters for name in c.columns}
    whole = {n: np.concatenate([np.asarray(log._columns[n]), columns[n]]) for n in needed}
    labels, mask = label_arrays(schema, whole)
    return compute_counters(schema, whole, whole[TIME], labels, mask)[len(log) :]


assert REASONS[LATE] == "late"
