"""The event log, opened: rows sorted by (user, time), columns mapped from disk, histories and labels of rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gem_data.features.statistics import check_statistics
from gem_data.log.derived import label_arrays
from gem_data.log.gather import Plan, Spread, spread
from gem_data.log.manifest import (
    COUNTERS,
    EVENTS,
    HISTORY_END,
    MANIFEST,
    REJECTS,
    file_digest,
    generations_of,
    read_manifest,
)
from gem_data.log.maps import Watched, read_ahead
from gem_data.log.parts import Generation
from gem_data.log.runs import Runs
from gem_data.ragged import spans
from gem_data.schema import TIME, Schema, unknown

if TYPE_CHECKING:
    from gem_data.features.vocabulary import Vocabulary

# Events of a history, on average, from which copies of runs beat a gather: in one part, and in several.
LONG_RUN, LONG_RUN_PARTS = 32, 8

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


class EventLog:
    """An opened log: rows sorted by (user, time), columns as read-only views of the memory-mapped files.

    Open one with `EventLog.open(folder)`; pickling one sends the folder's name, not the data. Where a log has several
    parts, a column is a `Spread`, which is indexed by rows as an array is. What was appended to a log (`append`) comes
    after the rows that were there, sorted by (user, time) in itself.
    """

    def __init__(
        self,
        folder: Path,
        manifest: dict[str, Any],
        schema: Schema,
        generations: list[Generation],
        files: list[Watched],
    ) -> None:
        self.folder, self.manifest, self.schema = folder, manifest, schema
        self.generations, self._files = generations, files
        self._firsts = np.array([p.first for g in generations for p in g.parts], np.int64)
        self._reading: bool | None = None
        self._bases = np.array([g.first for g in generations], np.int64)
        names = generations[0].parts[0].columns.keys()
        self._columns = {n: spread([p.columns[n] for g in generations for p in g.parts], self._firsts) for n in names}

    @classmethod
    def open(cls, folder: str | Path, *, expect: Schema | None = None, verify: bool = False) -> EventLog:
        """Memory-map the log in `folder`.

        `expect` refuses a log of another schema, naming both fingerprints and what differs; `verify` also reads the
        whole of every file to compare its SHA-256. Raises FileNotFoundError where there is no log, ValueError for a
        foreign, truncated or changed one.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        schema = Schema.from_dict(manifest["schema"])
        if schema.fingerprint() != manifest["fingerprint"]:
            raise ValueError(
                f"{folder / MANIFEST} declares fingerprint {manifest['fingerprint']}, but its schema has "
                f"{schema.fingerprint()}: the file was changed by hand or by another version"
            )
        if expect is not None:
            expect.require(schema, f"the log in {folder}")
        files: list[Watched] = []
        recorded = {n: r for n, r in manifest["files"].items() if n != REJECTS or verify}
        for name, record in recorded.items():
            path = folder / name
            if not path.is_file():
                raise FileNotFoundError(f"{folder} has a {MANIFEST} but no {name}")
            file = Watched(path)
            files.append(file)
            if file.bytes != record["bytes"]:
                raise ValueError(
                    f"{path} has {file.bytes} bytes, but {record['bytes']} were written: truncated or replaced; "
                    "build it again"
                )
            if verify and file_digest(path) != record["sha256"]:
                raise ValueError(
                    f"{path} does not have the SHA-256 of the manifest: its content has changed; build it again"
                )
        log = cls(folder, manifest, schema, generations_of(folder, manifest, schema), files)
        assert log.vocabularies is not None  # reading them checks them
        check_statistics(log.statistics, schema, folder / MANIFEST)
        return log

    def __reduce__(self) -> Any:
        self.require_unchanged()  # who opens the files again cannot know how they were here
        return _reopen, (self.folder, self.digest)

    def __len__(self) -> int:
        return int(self.manifest["rows"])

    def __repr__(self) -> str:
        users = self.manifest.get("users", "?")
        return f"EventLog({str(self.folder)!r}: {self.schema.name}, {len(self)} rows, {users} users)"

    @property
    def digest(self) -> str:
        """SHA-256 of the events: the same data and the same schema, whatever the folder."""
        return str(self.manifest.get("digest") or self.manifest["files"][EVENTS]["sha256"])

    def advise(self, *, scattered: bool) -> None:
        """Tell the system whether rows are read all over the log or in order: a hint, which changes speed alone."""
        for generation in self.generations:
            generation.maps.advise(scattered=scattered)

    def read_ahead(self) -> bool:
        """Have the files read in the background, once, if they fit in half of the memory that is free; if they do."""
        if self._reading is None:
            self._reading = read_ahead(self._files) is not None
        return self._reading

    def require_unchanged(self) -> None:
        """Raise ValueError if a file of the log was written to since it was opened (a few microseconds a file)."""
        for file in self._files:
            file.require_unchanged()

    def column(self, name: str) -> Array:
        """A column as a zero-copy, read-only view: [n] int64 or float32, [n, size] float32, or lists. "time" is one."""
        if name not in self._columns or name.startswith("_"):
            raise ValueError(unknown("column", name, [TIME, *(c.name for c in self.schema.columns)]))
        return self._columns[name]

    @property
    def time(self) -> NDArray[np.int64]:
        """Seconds, [n] int64."""
        return self._columns[TIME]

    @property
    def user(self) -> NDArray[np.int64]:
        """The user of each row, [n] int64, ascending (within a generation)."""
        return self._columns[self.schema.user]

    @cached_property
    def counters(self) -> NDArray[np.float32]:
        """The streamed counters, [n, C] float32."""
        empty = np.empty((0, 0), np.float32)
        if not self.schema.counters:
            return np.empty((len(self), 0), np.float32)
        if COUNTERS in self._columns:
            return self._columns[COUNTERS]
        arrays = []
        for generation in self.generations:
            stored = generation.stored("counters")
            for part in generation.parts:  # one file for all of them, shown as they are, so that plans fit
                at = part.first - generation.first
                arrays.append(empty if stored is None else stored[at : at + part.rows])
        return spread(arrays, self._firsts)

    @property
    def user_offsets(self) -> NDArray[np.int64]:
        """Where each user's rows begin, [users + 1] int64; the last is n. For a log that was never appended to."""
        if len(self.generations) > 1:
            raise ValueError(f"{self.folder} was appended to, so a user's rows are in several places; use events()")
        return self.generations[0].starts

    @cached_property
    def users(self) -> NDArray[np.int64]:
        """The users that have events, ascending."""
        found = [g.users for g in self.generations]
        return found[0] if len(found) == 1 else np.unique(np.concatenate(found))

    @cached_property
    def by_time(self) -> NDArray[np.int64]:
        """All rows in order of time, equal times in the order of the log: [n] int64."""
        if len(self.generations) == 1:
            return self.generations[0].by_time
        return np.concatenate([g.by_time + g.first for g in self.generations])

    def rows(self, rows: Any) -> NDArray[np.int64]:
        """`rows` as int64 indices [B]. Raises ValueError naming the first that is not a row."""
        index = np.asarray(rows, dtype=np.int64).reshape(-1)
        if index.size and (index.min() < 0 or index.max() >= len(self)):
            bad = index[(index < 0) | (index >= len(self))]
            raise ValueError(f"row {bad[0]} is outside the log, which has rows 0 to {len(self) - 1}")
        return index

    def source_rows(self, name: str) -> NDArray[np.int64]:
        """The rows of a source's events, ascending: the samples, where only some types of events are predicted."""
        return np.concatenate([self._source(g, name) + g.first for g in self.generations])

    def plan(self, index: NDArray[np.int64]) -> Plan:
        """Where rows [B] lie, to take several columns of them with `take`."""
        return Plan.of(index, self._firsts)

    def take(self, name: str, plan: Plan | Runs) -> Array:
        """The rows of `plan` of a column: [B] or [B, size], or Ragged."""
        return _taken(self._columns[name], plan)

    def take_counters(self, plan: Plan | Runs) -> NDArray[np.float32]:
        """The rows of `plan` of the counters: [B, C]."""
        return _taken(self.counters, plan)

    @cached_property
    def vocabularies(self) -> dict[str, Vocabulary]:
        """The vocabulary of each column that has one, checked against the schema."""
        from gem_data.features.vocabulary import Vocabulary, vocabulary_file

        coded = [c for c in self.schema.columns if c.vocabulary]
        return {c.name: Vocabulary.read(self.folder / vocabulary_file(c.name), c) for c in coded}

    @property
    def statistics(self) -> dict[str, dict[str, Any]]:
        """Count, mean, std, min and max of each float and vector column and counter, as lists over their width."""
        return dict(self.manifest.get("statistics", {}))

    # Histories.

    def history(self, rows: Any, max_history: int) -> History:
        """The most recent `max_history` events of each row's user with a strictly earlier time. Vectorised.

        For a log that was never appended to, and all types of events; `events` knows the others too.
        """
        index, _ = self._checked(rows, max_history)
        if len(self.generations) > 1:
            raise ValueError(f"{self.folder} was appended to, so a history is in several places; use events()")
        end = self._history_end(index)
        starts = self.generations[0].starts
        segment = np.searchsorted(starts, index, side="right") - 1
        return History(start=np.maximum(starts[segment], end - max_history), end=end)

    def events(self, rows: Any, max_history: int, source: str | None = None) -> tuple[Array, NDArray[np.int64]]:
        """The rows [T] of the events of each row's history, ascending in time, and offsets [B + 1].

        `source` is one of the schema's; without it, all events count.
        """
        index, source = self._checked(rows, max_history, source)
        if source is None and len(self.generations) == 1:
            history = self.history(index, max_history)
            return spans(history.start, history.lengths)
        low, high = self._segments(index, max_history, source)
        events, offsets = spans(low.reshape(-1), (high - low).reshape(-1))
        if source is not None:
            arrays = [self._source(g, source) for g in self.generations]
            firsts = np.cumsum([0, *(len(a) for a in arrays)])
            if len(arrays) == 1:
                events = arrays[0].take(events)
            else:
                of = np.searchsorted(firsts[1:-1], events, side="right")
                shifted = Spread(arrays=arrays, firsts=firsts[:-1]).take(events)
                events = shifted + self._bases[of]
        return events, offsets[:: len(self.generations)]

    def events_plan(self, rows: Any, max_history: int, source: str | None = None) -> tuple[Plan | Runs, Array]:
        """As `events`, but a plan to take columns of the events with, the faster of those there are; and offsets."""
        index, source = self._checked(rows, max_history, source)
        if source is not None:  # every so many rows: no runs
            events, offsets = self.events(index, max_history, source)
            return self.plan(events), offsets
        if len(self.generations) == 1:
            history = self.history(index, max_history)
            start, lengths = history.start, history.lengths
        else:
            low, high = self._segments(index, max_history, None)
            start, lengths = low.reshape(-1), (high - low).reshape(-1)
        long = LONG_RUN if len(self._firsts) == 1 else LONG_RUN_PARTS
        if lengths.sum() > long * len(lengths):
            offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
            return Runs.of(start, lengths, self._firsts), offsets[:: len(self.generations)]
        events, offsets = spans(start, lengths)
        return self.plan(events), offsets[:: len(self.generations)]

    def history_lengths(self, rows: Any, max_history: int, source: str | None = None) -> NDArray[np.int64]:
        """The number of events of each row's history, [B] int64: what balance needs, without reading them."""
        index, source = self._checked(rows, max_history, source)
        if source is None and len(self.generations) == 1:
            return self.history(index, max_history).lengths
        low, high = self._segments(index, max_history, source)
        return (high - low).sum(axis=1)

    def _checked(self, rows: Any, max_history: int, source: str | None = None) -> tuple[Array, str | None]:
        if max_history < 0:
            raise ValueError(f"max_history must be 0 or more, not {max_history}")
        if source is not None and source not in self.schema.source_names:
            raise ValueError(unknown("source", source, self.schema.source_names))
        return self.rows(rows), source if self.schema.sources else None

    def _history_end(self, index: Array) -> Array:
        """Within the row's own generation, in rows of the log (parts store it relative to themselves)."""
        plan = self.plan(index)
        if len(self._firsts) == 1:
            return self.take(HISTORY_END, plan)
        base = self._firsts[np.searchsorted(self._firsts, index, side="right") - 1]
        return self.take(HISTORY_END, plan) + base

    def _source(self, generation: Generation, name: str) -> Array:
        for source in self.schema.sources:
            if source.name == name:
                return generation.source_rows(name, source.column, source.values)
        raise ValueError(unknown("source", name, [s.name for s in self.schema.sources]))

    def _segments(self, index: Array, max_history: int, source: str | None) -> tuple[Array, Array]:
        """[B, G] each: where the history lies in each generation, in rows or, for a source, in its rows' order."""
        own = np.searchsorted(self._bases, index, side="right") - 1
        plan = self.plan(index)
        user, time, end = self.take(self.schema.user, plan), self.take(TIME, plan), self._history_end(index)
        shape = (len(index), len(self.generations))
        low, high = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        left = np.full(len(index), max_history)
        counts = [0] if source is None else np.cumsum([0, *(len(self._source(g, source)) for g in self.generations)])
        for g in reversed(range(shape[1])):
            generation = self.generations[g]
            here = np.flatnonzero(own >= g)
            begin, stop = generation.segments(user[here])
            mine = own[here] == g
            stop = np.where(mine, end[here] - generation.first, stop)
            if self.schema.delay and not mine.all():
                old = np.flatnonzero(~mine)
                times = generation.column(TIME)
                stop[old] = _bisect(times, begin[old], stop[old], time[here][old] - self.schema.delay)
            if source is not None:
                rows = self._source(generation, source)
                begin, stop = np.searchsorted(rows, begin), np.searchsorted(rows, stop)
            begin = np.maximum(begin, stop - left[here])
            left[here] -= stop - begin
            base = generation.first if source is None else counts[g]
            low[here, g], high[here, g] = begin + base, stop + base
        return low, high

    def labels(self, rows: Any) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Labels [B, K] float32 (0 where masked) and mask [B, K] bool, tasks in the schema's order."""
        plan = self.plan(self.rows(rows))
        needed = {t.column for t in self.schema.tasks}
        return label_arrays(self.schema, {name: self.take(name, plan) for name in needed})


def _taken(column: Array, plan: Plan | Runs) -> Array:
    if isinstance(plan, Runs):
        return plan.take(column)
    return column.take_plan(plan) if isinstance(column, Spread) else column.take(plan.pieces[0][2], axis=0)


def _bisect(times: Array, low: Array, high: Array, bound: Array) -> Array:
    """The first position in [low, high) whose time is `bound` or more, for each: as searchsorted, in segments."""
    low, high = low.copy(), high.copy()
    while (open_ := np.flatnonzero(low < high)).size:
        middle = (low[open_] + high[open_]) // 2
        less = times[middle] < bound[open_]
        low[open_] = np.where(less, middle + 1, low[open_])
        high[open_] = np.where(less, high[open_], middle)
    return low


def _reopen(folder: Path, digest: str) -> EventLog:
    log = EventLog.open(folder)
    if log.digest != digest:
        raise ValueError(f"the log in {folder} was built again or appended to since it was opened: its digest differs")
    return log
