"""One part of a log: from the rows that the engine gives to the mapped Arrow file and what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gem_data.build.engine import ROW
from gem_data.build.output import reject_line
from gem_data.build.validate import duplicates
from gem_data.features.statistics import moments
from gem_data.features.vocabulary import Vocabulary
from gem_data.log.derived import history_ends, label_arrays
from gem_data.log.manifest import HISTORY_END, file_digest
from gem_data.log.parts import to_arrow, write_columns
from gem_data.ragged import Ragged
from gem_data.schema import TIME, Schema
from gem_data.schema.values import DUPLICATE
from gem_data.sorting import order_of

Columns = dict[str, Any]


def arrow_columns(columns: Mapping[str, Any]) -> pa.Table:
    """Typed columns as a table, vectors and ids as lists."""
    return pa.table({name: to_arrow(values) for name, values in columns.items()})


def numpy_columns(table: pa.Table, schema: Schema) -> Columns:
    """The inverse of `arrow_columns` for the columns of a schema, time and the row numbers."""
    out: Columns = {}
    for name in (TIME, *(c.name for c in schema.columns), ROW):
        array = table.column(name).combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
        kind = "id" if name in (TIME, ROW) else schema.column(name).kind
        if kind in ("ids", "vector"):
            values = array.flatten().to_numpy(zero_copy_only=False)
            if kind == "vector":
                out[name] = values.astype(np.float32, copy=False).reshape(len(array), -1)
            else:
                offsets = array.offsets.to_numpy().astype(np.int64)
                out[name] = Ragged(values.astype(np.int64, copy=False), offsets - offsets[0])
        else:
            dtype = np.float32 if kind == "float" else np.int64
            out[name] = array.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    return out


def finish_part(
    table: pa.Table, schema: Schema, vocabularies: Mapping[str, Vocabulary], folder: Path, work: Path, number: int
) -> dict[str, Any]:
    """Sort the rows of `table`, write them as part `number` to `folder`, its indices to `work`; what is known of it."""
    columns = numpy_columns(table, schema)
    del table
    order = order_of([columns[schema.user], columns[TIME], columns[ROW]])
    columns = {n: v[order] for n, v in columns.items()}
    rows = columns.pop(ROW)
    twice = _duplicates(columns, schema)  # before keys become ids: rare ones are not alike
    lines, samples = [], []
    if twice.size:
        keep = np.ones(len(rows), bool)
        keep[twice] = False
        for i in twice.tolist():
            event = {n: v[i : i + 1].tolist()[0] for n, v in columns.items()}
            lines.append(reject_line(int(rows[i]), DUPLICATE, "", event))
        samples = [f"row {row}: is a duplicate" for row in rows[twice[:5]].tolist()]
        columns, rows = {n: v[keep] for n, v in columns.items()}, rows[keep]
    (work / f"part-{number:05}.rejects").write_text("".join(lines), encoding="utf-8")
    out_of_order = _out_of_order(columns[schema.user], columns[TIME], rows)
    for name, vocabulary in vocabularies.items():
        if name != schema.user:  # users were encoded before they were sorted
            columns[name] = vocabulary.encode(columns[name])
    record = write_part(columns, schema, folder, work, name=f"part-{number:05}", index=f"part-{number:05}")
    return {**record, "out_of_order": out_of_order, "duplicates": len(lines), "samples": samples}


def write_part(columns: Columns, schema: Schema, folder: Path, work: Path, *, name: str, index: str) -> dict[str, Any]:
    """Write sorted columns as one part: `name`.arrow in `folder`, its indices `index`.*.npy in `work`."""
    user, time = columns[schema.user], columns[TIME]
    columns[HISTORY_END] = history_ends(user, time, delay=schema.delay)
    order = [TIME, *(c.name for c in schema.columns), HISTORY_END]
    path = folder / f"{name}.arrow"
    write_columns(path, {n: columns[n] for n in order})
    starts = np.flatnonzero(np.r_[True, user[1:] != user[:-1]])
    by_time = order_of([time], stable=True)
    arrays: dict[str, NDArray[Any]] = {
        "users": user[starts],
        "starts": starts,
        "by_time": by_time,
        "times": time[by_time],
    }
    for source in schema.sources:
        arrays[f"source.{source.name}"] = np.flatnonzero(np.isin(columns[source.column], source.values))
    for key, values in arrays.items():
        np.save(work / f"{index}.{key}.npy", values.astype(np.int64, copy=False))
    labels, mask = label_arrays(schema, columns)
    plain = {c.name: columns[c.name] for c in schema.columns if c.kind in ("float", "vector")}
    return {
        "file": path.name,
        "rows": len(time),
        "bytes": path.stat().st_size,
        "sha256": file_digest(path),
        "time": [int(time.min()), int(time.max())],
        "users": [int(user[0]), int(user[-1]), len(starts)],
        "index": index,
        "positives": labels.sum(axis=0, dtype=np.float64).tolist(),
        "seen": mask.sum(axis=0).tolist(),
        "statistics": {n: m.to_dict() for n, m in moments(plain, schema, counters=False).items()},
    }


def _duplicates(columns: Columns, schema: Schema) -> NDArray[np.int64]:
    """As `duplicates`, of rows sorted by (user, time): only those that share both with a neighbour can be."""
    user, time = columns[schema.user], columns[TIME]
    same = np.concatenate([[False], (user[1:] == user[:-1]) & (time[1:] == time[:-1]), [False]])
    near = np.flatnonzero(same[1:] | same[:-1])
    return near[duplicates([v[near] for v in columns.values()])]


def _out_of_order(user: NDArray[np.int64], time: NDArray[np.int64], rows: NDArray[np.int64]) -> int:
    order = order_of([user, rows])
    user, time = user[order], time[order]
    return int(((user[1:] == user[:-1]) & (time[1:] < time[:-1])).sum())
