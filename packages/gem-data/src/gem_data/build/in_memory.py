"""Building a log: validate, sort, count, write beside the target, then rename into place."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gem_data.features.counters import compute_counters
from gem_data.log.event_log import (
    COUNTERS,
    EVENTS,
    FORMAT,
    HISTORY_END,
    MANIFEST,
    REJECTS,
    file_digest,
    history_ends,
    label_arrays,
)
from gem_data.log.parts import write_columns
from gem_data.schema import TIME, Schema
from gem_data.features.statistics import Moments
from gem_data.build.validate import REASONS, Validated, as_table, validate
from gem_data.features.vocabulary import Vocabulary, vocabulary_file

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class BuildSummary:
    """What a build did; `str(summary)` is the message for a person."""

    folder: Path
    rows: int
    users: int
    rejected: dict[str, int]  # rows by reason
    samples: tuple[str, ...]  # a few of the rejects, one line each
    out_of_order: int  # rows earlier than the event that the source had before them for the same user
    ignored_columns: tuple[str, ...]
    label_rates: dict[str, float]

    def __str__(self) -> str:
        rates = ", ".join(f"{name} {rate:.4f}" for name, rate in self.label_rates.items())
        lines = [f"{self.folder}: {self.rows} events of {self.users} users; label rates {rates}"]
        if self.out_of_order:
            lines.append(
                f"{self.out_of_order} events came after a later one of the same user and were sorted into place"
            )
        if self.ignored_columns:
            lines.append(f"columns not in the schema were ignored: {', '.join(self.ignored_columns)}")
        if self.rejected:
            reasons = ", ".join(f"{n} {reason}" for reason, n in self.rejected.items())
            lines.append(f"{sum(self.rejected.values())} rows were rejected ({reasons}), see {self.folder / REJECTS}:")
            lines += [f"  {sample}" for sample in self.samples]
        return "\n".join(lines)


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
        raise ValueError(f"no valid event for schema {schema.name!r} among {table.num_rows} rows: {reasons}")
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


def moments(columns: dict[str, Any], schema: Schema, *, counters: bool = True) -> dict[str, Moments]:
    """Statistics of the float and vector columns and of the counters, by name."""
    found = {c.name: Moments() for c in schema.columns if c.kind in ("float", "vector")}
    for name, part in found.items():
        part.add(columns[name])
    for i, counter in enumerate(schema.counters if counters else ()):
        found[counter.name] = Moments()
        found[counter.name].add(columns[COUNTERS][:, i])
    return found


def _arrange(valid: Validated, schema: Schema) -> tuple[int, dict[str, Array], Array, Array]:
    """Sorted columns with the history ends and counters, the number of out-of-order rows, labels and mask."""
    by_user = np.argsort(valid.columns[schema.user], kind="stable")
    user, time = valid.columns[schema.user][by_user], valid.columns[TIME][by_user]
    out_of_order = int(((user[1:] == user[:-1]) & (time[1:] < time[:-1])).sum())
    order = by_user[np.lexsort((time, user))]  # stable, so equal times keep the order of the source
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


def reject_lines(
    table: pa.Table, valid: Validated, *, base: int = 0, sample: int = 5, chunk: int = 8192
) -> tuple[Iterator[str], list[str]]:
    """The rejected rows as JSON lines, and the first `sample` for a person. `base` is the number of the first row."""
    samples = []
    for row, code, column in zip(valid.rejected[:sample].tolist(), valid.reasons, valid.where, strict=False):
        value = table.slice(row, 1).to_pylist()[0].get(column)
        what = f"{column} = {value!r} is {REASONS[code]}" if column else f"is a {REASONS[code]}"
        samples.append(f"row {row + base}: {what}")

    def lines() -> Iterator[str]:
        for start in range(0, len(valid.rejected), chunk):
            part = slice(start, start + chunk)
            events = table.take(pa.array(valid.rejected[part])).to_pylist()
            for row, code, column, event in zip(
                valid.rejected[part].tolist(), valid.reasons[part].tolist(), valid.where[part], events, strict=True
            ):
                yield reject_line(row + base, code, column, event)

    return lines(), samples


def reject_line(row: int, code: int, column: str, event: dict[str, Any]) -> str:
    """One rejected row as a line of JSON."""
    record = {"row": row, "reason": REASONS[code]}
    if column:
        record["column"] = column
    # NaN and infinity are no JSON: they, dates and the like are written as text.
    return json.dumps({**record, "event": _plain(event)}, default=str) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value


@contextmanager
def in_place(folder: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary sibling that becomes `folder` at the end, or vanishes with any error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    mark = f"{os.getpid()}-{secrets.token_hex(4)}"
    temporary, old = (folder.parent / f".{folder.name}.{mark}.{kind}" for kind in ("tmp", "old"))
    try:
        temporary.mkdir()
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            _sync(path)
        if overwrite and folder.exists():
            folder.rename(old)
        try:
            temporary.rename(folder)
        except BaseException as error:
            if old.exists():
                old.rename(folder)
            if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise FileExistsError(f"{folder} was built by another process in the meantime") from None
            raise
        _sync(folder.parent)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OSError(
                errno.ENOSPC,
                f"no space left on the disk while building {folder}; nothing was left in place",
                str(folder),
            ) from error
        raise
    finally:
        for leftover in (temporary, old):
            if leftover.exists():
                shutil.rmtree(leftover, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
