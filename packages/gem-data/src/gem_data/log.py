"""The event log on disk: a folder with `events.arrow` (memory-mapped), `manifest.json` and `rejects.jsonl`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gem_data.schema import TIME, Schema, unknown

FORMAT = 1
EVENTS, MANIFEST, REJECTS = "events.arrow", "manifest.json", "rejects.jsonl"
HISTORY_END, COUNTERS = "_history_end", "_counters"

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class History:
    """The history of each of B rows: rows [start, end) of the log, all of the same user and strictly earlier."""

    start: NDArray[np.int64]
    end: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Events per history, [B] int64; 0 is valid."""
        return self.end - self.start


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def history_ends(user: Array, time: Array) -> NDArray[np.int64]:
    """For rows sorted by (user, time), where the history of each ends: the first row of its (user, time) tie group."""
    n = len(user)
    new = np.ones(n, bool)
    new[1:] = (user[1:] != user[:-1]) | (time[1:] != time[:-1])
    return np.maximum.accumulate(np.where(new, np.arange(n), 0))


def label_arrays(schema: Schema, columns: Mapping[str, Array]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Labels [n, K] float32 (0 where masked) and mask [n, K] bool of outcome columns [n]."""
    positive = {t.name: t.positive(columns[t.column]) for t in schema.tasks}
    mask = [positive[t.given] if t.given else np.ones(len(positive[t.name]), bool) for t in schema.tasks]
    labels = [positive[t.name] & m for t, m in zip(schema.tasks, mask, strict=True)]
    return np.stack(labels, axis=1).astype(np.float32), np.stack(mask, axis=1)


class EventLog:
    """An opened log: rows sorted by (user, time), columns as read-only views of the memory-mapped file.

    Open one with `EventLog.open(folder)`; pickling one sends the folder's name, not the data.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], schema: Schema, columns: dict[str, Array]) -> None:
        self.folder, self.manifest, self.schema = folder, manifest, schema
        self._columns = columns

    @classmethod
    def open(cls, folder: str | Path, *, expect: Schema | None = None, verify: bool = False) -> EventLog:
        """Memory-map the log in `folder`.

        `expect` refuses a log of another schema, naming both fingerprints and what differs; `verify` also reads the
        whole file to compare its SHA-256. Raises FileNotFoundError where there is no log, ValueError for a foreign,
        truncated or changed one.
        """
        folder = Path(folder)
        manifest = _read_manifest(folder)
        schema = Schema.from_dict(manifest["schema"])
        if schema.fingerprint() != manifest["fingerprint"]:
            raise ValueError(
                f"{folder / MANIFEST} declares fingerprint {manifest['fingerprint']}, but its schema has "
                f"{schema.fingerprint()}: the file was changed by hand or by another version"
            )
        if expect is not None:
            expect.require(schema, f"the log in {folder}")
        path = folder / EVENTS
        recorded = manifest["files"][EVENTS]
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has a {MANIFEST} but no {EVENTS}")
        size = path.stat().st_size
        if size != recorded["bytes"]:
            raise ValueError(
                f"{path} has {size} bytes, but {recorded['bytes']} were written: truncated or replaced; build it again"
            )
        if verify and file_digest(path) != recorded["sha256"]:
            raise ValueError(
                f"{path} does not have the SHA-256 of the manifest: its content has changed; build it again"
            )
        return cls(folder, manifest, schema, _map(path, schema, manifest["rows"]))

    def __reduce__(self) -> Any:
        return EventLog.open, (self.folder,)

    def __len__(self) -> int:
        return int(self.manifest["rows"])

    def __repr__(self) -> str:
        return f"EventLog({str(self.folder)!r}: {self.schema.name}, {len(self)} rows, {len(self.users)} users)"

    @property
    def digest(self) -> str:
        """SHA-256 of the events: the same data and the same schema, whatever the folder."""
        return str(self.manifest["files"][EVENTS]["sha256"])

    def column(self, name: str) -> Array:
        """A column as a zero-copy, read-only view: [n] int64 or float32, or [n, size] float32. "time" is one."""
        if name not in self._columns or name.startswith("_"):
            raise ValueError(unknown("column", name, [TIME, *(c.name for c in self.schema.columns)]))
        return self._columns[name]

    @property
    def time(self) -> NDArray[np.int64]:
        """Seconds, [n] int64."""
        return self._columns[TIME]

    @property
    def user(self) -> NDArray[np.int64]:
        """The user of each row, [n] int64, ascending."""
        return self._columns[self.schema.user]

    @property
    def counters(self) -> NDArray[np.float32]:
        """The streamed counters, [n, C] float32."""
        return self._columns[COUNTERS]

    @cached_property
    def user_offsets(self) -> NDArray[np.int64]:
        """Where each user's rows begin, [users + 1] int64; the last is n."""
        starts = np.flatnonzero(np.diff(self.user, prepend=-1))
        return np.append(starts, len(self)).astype(np.int64)

    @property
    def users(self) -> NDArray[np.int64]:
        """The users that have events, ascending."""
        return self.user[self.user_offsets[:-1]]

    def rows(self, rows: Any) -> NDArray[np.int64]:
        """`rows` as int64 indices [B]. Raises ValueError naming the first that is not a row."""
        index = np.asarray(rows, dtype=np.int64).reshape(-1)
        bad = index[(index < 0) | (index >= len(self))]
        if bad.size:
            raise ValueError(f"row {bad[0]} is outside the log, which has rows 0 to {len(self) - 1}")
        return index

    def history(self, rows: Any, max_history: int) -> History:
        """The most recent `max_history` events of each row's user with a strictly earlier time. Vectorised."""
        if max_history < 0:
            raise ValueError(f"max_history must be 0 or more, not {max_history}")
        index = self.rows(rows)
        end = self._columns[HISTORY_END][index]
        segment = np.searchsorted(self.user_offsets, index, side="right") - 1
        return History(start=np.maximum(self.user_offsets[segment], end - max_history), end=end)

    def labels(self, rows: Any) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Labels [B, K] float32 (0 where masked) and mask [B, K] bool, tasks in the schema's order."""
        index = self.rows(rows)
        needed = {t.column for t in self.schema.tasks}
        return label_arrays(self.schema, {name: self._columns[name][index] for name in needed})


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"no event log in {folder}: it has no {MANIFEST}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the manifest of an event log: {error!r}") from None
    if version != FORMAT:
        raise ValueError(
            f"{path} has format {version!r}; this version of gem-data reads format {FORMAT}: build the log again"
        )
    missing = {"schema", "fingerprint", "rows", "files"} - manifest.keys()
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}: it is not a whole manifest")
    return dict(manifest)


def _map(path: Path, schema: Schema, rows: int) -> dict[str, Array]:
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path), "r"))
        if reader.num_record_batches != 1:
            raise ValueError(f"expected one record batch, found {reader.num_record_batches}")
        batch = reader.get_batch(0)
    except (pa.ArrowInvalid, OSError, ValueError) as error:
        raise ValueError(f"{path} is not a readable Arrow file of an event log: {error}") from None
    expected = [TIME, *(c.name for c in schema.columns), HISTORY_END, *([COUNTERS] if schema.counters else [])]
    if batch.schema.names != expected or batch.num_rows != rows:
        raise ValueError(
            f"{path} has {batch.num_rows} rows of columns {', '.join(batch.schema.names)}; "
            f"its manifest says {rows} rows of {', '.join(expected)}"
        )
    columns = {name: _view(batch.column(name)) for name in expected}
    columns.setdefault(COUNTERS, np.empty((rows, 0), np.float32))
    return columns


def _view(array: pa.Array) -> Array:
    if pa.types.is_fixed_size_list(array.type):
        return array.flatten().to_numpy(zero_copy_only=True).reshape(-1, array.type.list_size)
    return array.to_numpy(zero_copy_only=True)
