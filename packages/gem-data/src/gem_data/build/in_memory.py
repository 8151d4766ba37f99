"""Building a log: validate, sort, count, write beside the target, then rename into place."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gem_data.build.output import BuildSummary, in_place, reject_lines
from gem_data.build.validate import Validated, validate
from gem_data.features.counters import compute_counters
from gem_data.features.statistics import moments
from gem_data.features.vocabulary import Vocabulary, vocabulary_file
from gem_data.log.derived import history_ends, label_arrays
from gem_data.log.manifest import COUNTERS, EVENTS, FORMAT, HISTORY_END, MANIFEST, REJECTS, file_digest
from gem_data.log.parts import write_columns
from gem_data.schema import TIME, Schema
from gem_data.sorting import order_of
from gem_data.sources.events import as_table

Array = NDArray[Any]


def build_log(
    events: pa.Table | pa.RecordBatch | pa.RecordBatchReader | Iterable[pa.RecordBatch],
    schema: Schema,
    folder: str | Path,
    *,
    overwrite: bool = False,
) -> BuildSummary:
    """Build the log of `events` in `folder` and return what was done.

    Bad rows (a missing, unparsable or not finite value, an id outside its table, an exact duplicate of an earlier row)
    go to `rejects.jsonl` with the reason; the others are sorted by (user, time), equal times in the source's order.
    The folder appears whole or not at all. The events are held in memory while they are sorted.

    Raises FileExistsError where the folder is there and not `overwrite` (or is no log), ValueError where no row is
    valid or a column is missing, TypeError for a column whose type can't hold its kind, OSError (ENOSPC) where the disk
    is full.
    """
    folder = Path(folder)
    if folder.exists() and not overwrite:
        raise FileExistsError(f"{folder} exists; give another folder or overwrite=True")
    if folder.exists() and not (folder / MANIFEST).is_file():
        raise FileExistsError(f"{folder} is not an event log (it has no {MANIFEST}), so it is not overwritten")
    table = as_table(events)
    valid = validate(table, schema)
    if len(valid.columns[TIME]) == 0:
        reasons = ", ".join(f"{n} {reason}" for reason, n in valid.counts().items()) or "the source is empty"
        first = "".join(f"; {sample}" for sample in reject_lines(table, valid, sample=1)[1])
        raise ValueError(f"no valid event for schema {schema.name!r} among {table.num_rows} rows: {reasons}{first}")
    vocabularies = fit_vocabularies(valid, schema)
    for name, vocabulary in vocabularies.items():
        valid.columns[name] = vocabulary.encode(valid.columns[name])
    out_of_order, columns, labels, mask = _arrange(valid, schema)
    with in_place(folder, overwrite) as temporary:
        _write_events(temporary / EVENTS, columns, schema)
        samples = _write_rejects(temporary / REJECTS, table, valid)
        for name, vocabulary in vocabularies.items():
            vocabulary.write(temporary / vocabulary_file(name))
        seen = mask.sum(axis=0)
        rates = labels.sum(axis=0, dtype=np.float64) / np.maximum(seen, 1)
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "schema": schema.to_dict(),
            "fingerprint": schema.fingerprint(),
            "rows": len(columns[TIME]),
            "users": int(np.unique(columns[schema.user]).size),
            "time": [int(columns[TIME].min()), int(columns[TIME].max())],
            "label_rates": {name: float(rate) for name, rate in zip(schema.task_names, rates, strict=True)},
            "rejected": valid.counts(),
            "out_of_order": out_of_order,
            "statistics": {name: m.to_dict() for name, m in moments(columns, schema).items()},
            "vocabularies": {name: v.report for name, v in vocabularies.items()},
            "files": {
                name: {"bytes": (temporary / name).stat().st_size, "sha256": file_digest(temporary / name)}
                for name in (EVENTS, REJECTS, *map(vocabulary_file, vocabularies))
            },
        }
        with (temporary / MANIFEST).open("w", encoding="utf-8") as file:
            file.write(json.dumps(manifest, indent=1) + "\n")
    known = {TIME, *(c.name for c in schema.columns)}
    return BuildSummary(
        folder=folder,
        rows=manifest["rows"],
        users=manifest["users"],
        rejected=manifest["rejected"],
        samples=tuple(samples),
        out_of_order=out_of_order,
        ignored_columns=tuple(n for n in table.column_names if n not in known),
        label_rates=manifest["label_rates"],
    )


def fit_vocabularies(valid: Validated, schema: Schema) -> dict[str, Vocabulary]:
    """A vocabulary for each column that asks for one, from the keys of all valid rows."""
    found = {
        c.name: Vocabulary.fit(c, *valid.keys[c.name], valid.texts.get(c.name)) for c in schema.columns if c.vocabulary
    }
    if schema.user in found:
        found[schema.user].require_all()
    return found


def _arrange(valid: Validated, schema: Schema) -> tuple[int, dict[str, Array], Array, Array]:
    """Sorted columns with the history ends and counters, the number of out-of-order rows, labels and mask."""
    by_user = order_of([valid.columns[schema.user]], stable=True)
    user, time = valid.columns[schema.user][by_user], valid.columns[TIME][by_user]
    out_of_order = int(((user[1:] == user[:-1]) & (time[1:] < time[:-1])).sum())
    order = by_user[order_of([user, time], stable=True)]  # equal times keep the order of the source
    columns = {name: values[order] for name, values in valid.columns.items()}
    labels, mask = label_arrays(schema, columns)
    columns[HISTORY_END] = history_ends(columns[schema.user], columns[TIME], delay=schema.delay)
    if schema.counters:
        columns[COUNTERS] = compute_counters(schema, columns, columns[TIME], labels, mask)
    return out_of_order, columns, labels, mask


def _write_events(path: Path, columns: dict[str, Any], schema: Schema) -> None:
    write_columns(path, columns)


def _write_rejects(path: Path, table: pa.Table, valid: Validated) -> list[str]:
    lines, samples = reject_lines(table, valid)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(lines)
    return samples
