"""Out-of-core builds: `prepare` makes a log of any size in bounded memory, with progress, and goes on after a kill.

    chunks      the source is read once; rows are checked, the bad ones written down, the good ones kept as Parquet
    vocabularies, users   counted by DuckDB
    partition   DuckDB deals the rows into ranges of users, as many as fit the memory
    parts       each range is sorted by (user, time, row), freed of duplicates and written as a mapped Arrow file
    indices     users, the order of time and the rows of each source, over all parts
    counters    in buckets of keys

Every finished piece of work lies in a folder beside the target, so that a build which was killed takes up where it
stopped. The log appears whole or not at all. What a build gives does not depend on the memory or the number of parts.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from gem_data.build.disk import is_full
from gem_data.build.engine import ROW, Engine, parquet
from gem_data.build.finish import Finisher
from gem_data.build.output import BuildSummary, reject_lines
from gem_data.build.pieces import arrow_columns, finish_part
from gem_data.build.validate import validate
from gem_data.features.vocabulary import Vocabulary
from gem_data.log.manifest import MANIFEST
from gem_data.prefetch import prefetched
from gem_data.schema import TIME, Schema
from gem_data.sources.events import Events
from gem_data.sources.files import RAW

VERSION = 1  # of what lies in the work folder


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A stage of a build, and how much of it is done: `done` of `total`, or rows where no total is known."""

    stage: str
    done: float
    total: float | None = None


Reporter = Callable[[Progress], None]


def print_progress(progress: Progress) -> None:
    """A line on standard error for each stage, rewritten as it goes on."""
    share = f"{progress.done:,.0f} rows" if progress.total is None else f"{progress.done / progress.total:.0%}"
    end = "\n" if progress.total is not None and progress.done >= progress.total else "\r"
    print(f"\x1b[2K{progress.stage}: {share}", end=end, file=sys.stderr, flush=True)


def prepare(
    events: Events,
    folder: str | Path,
    *,
    memory: int = 2 << 30,
    threads: int = 2,
    part_rows: int | None = None,
    vocabulary_until: int | None = None,
    progress: Reporter | None = None,
    overwrite: bool = False,
    restart: bool = False,
) -> BuildSummary:
    """Build the log of `events` in `folder`; the same rows in the same order as `build_log` gives.

    memory            bytes to stay within, about (beside the interpreter); a part holds its largest user whole.
    part_rows         rows a part, at most; worked out from `memory` otherwise.
    vocabulary_until  count the keys of events up to this time alone (the end of training), so that later ones are
                      unseen as they will be in production.
    restart           throw away what an interrupted build of something else left.

    Raises what `build_log` raises; ValueError also where the work folder is of another build, and BlockingIOError where
    another process is at it.
    """
    folder = Path(folder)
    if folder.exists() and not overwrite:
        raise FileExistsError(f"{folder} exists; give another folder or overwrite=True")
    if folder.exists() and not (folder / MANIFEST).is_file():
        raise FileExistsError(f"{folder} is not an event log (it has no {MANIFEST}), so it is not overwritten")
    report = progress or (lambda _: None)
    if events.licence:
        print(events.licence, file=sys.stderr)
    work = folder.parent / f".{folder.name}.prepare"
    try:
        with _claimed(work, restart):
            plan = {
                "version": VERSION,
                "fingerprint": events.schema.fingerprint(),
                "source": json.loads(json.dumps(dict(events.identity), default=str)),
                "vocabulary_until": vocabulary_until,
            }
            _require_plan(work, plan)
            try:
                return _Build(events, folder, work, memory, threads, part_rows, vocabulary_until, report).run(overwrite)
            except (ValueError, TypeError):
                if not _begun(work):  # the source was refused: what is put right is another one
                    shutil.rmtree(work, ignore_errors=True)
                raise
    except Exception as error:  # DuckDB has errors of its own
        if is_full(error):
            raise OSError(
                errno.ENOSPC,
                f"no space left on the disk while preparing {folder}; what is done is kept in {work}: "
                "make room and prepare again to go on",
                str(folder),
            ) from error
        raise


@contextmanager
def _claimed(work: Path, restart: bool) -> Iterator[None]:
    """The work folder, for this process alone; a lock that the system drops when the process dies."""
    work.parent.mkdir(parents=True, exist_ok=True)
    path = work.parent / f"{work.name}.lock"
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = path.exists() and path.stat().st_ino == os.fstat(lock.fileno()).st_ino
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            mine = False
        if not mine:  # held, or removed by one that has just finished
            raise BlockingIOError(f"another process is preparing the same log (it holds {path})")
        try:
            if restart and work.exists():
                shutil.rmtree(work)
            work.mkdir(exist_ok=True)
            yield
        finally:
            path.unlink(missing_ok=True)


def _begun(work: Path) -> bool:
    return any((work / "chunks").glob("*.json"))


def _require_plan(work: Path, plan: dict[str, Any]) -> None:
    path = work / "plan.json"
    if path.is_file() and _begun(work):
        found = json.loads(path.read_text())
        if found != plan:
            different = ", ".join(sorted(k for k in plan if found.get(k) != plan[k]))
            raise ValueError(
                f"{work} holds an unfinished build of something else ({different} differ); "
                "finish it as it was, or throw it away by restart=True (--restart)"
            )
        return
    write_json(path, plan)


class _Build:
    """One build, stage by stage. A stage that is done leaves a file that says so."""

    def __init__(
        self,
        events: Events,
        folder: Path,
        work: Path,
        memory: int,
        threads: int,
        part_rows: int | None,
        until: int | None,
        report: Reporter,
    ) -> None:
        self.events, self.schema, self.folder, self.work, self.until = events, events.schema, folder, work, until
        self.memory, self.threads, self.report = memory, threads, report
        # A part is held about six times over while it is sorted and written.
        self.part_rows = part_rows or max(1 << 16, memory // (6 * row_bytes(self.schema)))

    def run(self, overwrite: bool) -> BuildSummary:
        """All stages."""
        chunks = self._chunks()
        rows = sum(c["kept"] for c in chunks)
        if rows == 0:
            counts = _added([c["rejected"] for c in chunks])
            reasons = ", ".join(f"{n} {reason}" for reason, n in counts.items()) or "the source is empty"
            given = sum(c["rows"] for c in chunks)
            shutil.rmtree(self.work)
            first = next((f"; {sample}" for c in chunks for sample in c["samples"]), "")
            raise ValueError(f"no valid event for schema {self.schema.name!r} among {given} rows: {reasons}{first}")
        engine = Engine(self.work, memory=self.memory // 2, threads=self.threads)
        try:
            source = parquet(self.work / "chunks" / "*.parquet")
            vocabularies = self._vocabularies(engine, source, chunks)
            user = self.schema.user
            if user in vocabularies:
                vocabularies[user].require_all()
                source = engine.with_users(source, user, vocabularies[user])
            parts = self._parts(engine, source, vocabularies)
        finally:
            engine.close()
        finisher = Finisher(self.schema, self.work, parts, vocabularies, memory=self.memory, report=self._stage)
        summary = finisher.finish(self.folder, chunks, overwrite=overwrite)
        shutil.rmtree(self.work)
        return summary

    def _stage(self, stage: str, share: float) -> None:
        self.report(Progress(stage=stage, done=share, total=1.0))

    def _chunks(self) -> list[dict[str, Any]]:
        folder = self.work / "chunks"
        folder.mkdir(exist_ok=True)
        done = self.work / "chunks.json"
        if done.is_file():
            return list(json.loads(done.read_text()))
        found: list[dict[str, Any]] = []
        base = 0
        with closing(prefetched(self.events.chunks(), 1)) as tables:  # one is read while another is checked
            for number, table in enumerate(tables):
                record = folder / f"{number:06}.json"
                if record.is_file():
                    found.append(json.loads(record.read_text()))
                    if found[-1]["rows"] != table.num_rows:
                        raise ValueError(
                            f"the source gave {found[-1]['rows']} rows for chunk {number} before, now "
                            f"{table.num_rows}: it has changed; begin anew by restart=True (--restart)"
                        )
                else:
                    found.append(self._chunk(folder, number, table, base))
                    write_json(record, found[-1])
                base += table.num_rows
                self.report(Progress(stage="checked", done=base))
        write_json(done, found)
        return found

    def _chunk(self, folder: Path, number: int, table: Any, base: int) -> dict[str, Any]:
        valid = validate(table, self.schema, unique=False)
        good = np.ones(table.num_rows, bool)
        good[valid.rejected] = False
        columns = arrow_columns({**valid.columns, ROW: np.flatnonzero(good) + base})
        path = folder / f"{number:06}.parquet"
        pq.write_table(columns, path, compression="lz4", use_dictionary=False, write_statistics=False)
        lines, samples = reject_lines(table, valid, base=base)
        with (folder / f"{number:06}.rejects").open("w", encoding="utf-8") as file:
            file.writelines(lines)
        texts = folder / f"{number:06}.texts"
        if valid.texts:
            write_json(texts, {c: {str(k): t for k, t in found.items()} for c, found in valid.texts.items()})
        known = {TIME, RAW, *(c.name for c in self.schema.columns)}
        return {
            "rows": table.num_rows,
            "kept": int(good.sum()),
            "rejected": valid.counts(),
            "samples": samples,
            "ignored": [n for n in table.column_names if n not in known],
        }

    def _vocabularies(self, engine: Engine, source: str, chunks: list[Any]) -> dict[str, Vocabulary]:
        found: dict[str, Vocabulary] = {}
        for column in self.schema.columns:
            if column.vocabulary:
                until = None if column.name == self.schema.user else self.until
                keys, counts = engine.key_counts(source, column.name, lists=column.kind == "ids", until=until)
                found[column.name] = Vocabulary.fit(column, keys, counts)
        texts = self._texts(found, len(chunks))
        return {n: v.with_texts(texts.get(n, {})) for n, v in found.items()}

    def _texts(self, vocabularies: dict[str, Vocabulary], chunks: int) -> dict[str, dict[int, str]]:
        """What the kept keys stand for. Raises ValueError for two texts with one digest."""
        kept = {n: set(v.keys.tolist()) for n, v in vocabularies.items()}
        found: dict[str, dict[int, str]] = {n: {} for n in vocabularies}
        for number in range(chunks if vocabularies else 0):
            path = self.work / "chunks" / f"{number:06}.texts"
            for name, texts in (json.loads(path.read_text()) if path.is_file() else {}).items():
                for key, text in texts.items():
                    if int(key) in kept[name] and found[name].setdefault(int(key), text) != text:
                        raise ValueError(f"column {name!r}: {text!r} and {found[name][int(key)]!r} have one digest")
        return found

    def _parts(self, engine: Engine, source: str, vocabularies: dict[str, Vocabulary]) -> list[dict[str, Any]]:
        users, counts = engine.user_counts(source, self.schema.user)
        bounds_file = self.work / "bounds.json"  # a resumed build keeps its parts, whatever its memory
        if bounds_file.is_file():
            bounds = np.array(json.loads(bounds_file.read_text()), np.int64)
        else:
            bounds = user_bounds(users, counts, self.part_rows)
            write_json(bounds_file, bounds.tolist())
        count = len(bounds) - 1
        dealt, done = self.work / "dealt", self.work / "dealt.done"
        if count > 1 and not done.is_file():
            shutil.rmtree(dealt, ignore_errors=True)
            engine.partition(source, self.schema.user, bounds, dealt, lambda s: self._stage("dealt", s))
            done.touch()
        self._stage("dealt", 1.0)
        folder = self.work / "log"
        folder.mkdir(exist_ok=True)
        found = []
        for p in range(count):
            record = self.work / f"part-{p:05}.json"
            if not record.is_file():
                rows = parquet(dealt / f"part={p}" / "*.parquet") if count > 1 else source
                table = [engine.part(rows)]
                write_json(record, finish_part(table.pop(), self.schema, vocabularies, folder, self.work, p))
            shutil.rmtree(dealt / f"part={p}", ignore_errors=True)
            found.append(json.loads(record.read_text()))
            self._stage("sorted", (p + 1) / count)
        return found


def user_bounds(users: np.ndarray[Any, Any], counts: np.ndarray[Any, Any], part_rows: int) -> np.ndarray[Any, Any]:
    """Ranges of users of at most `part_rows` rows each, if no user has more: [parts + 1], the last beyond all."""
    total = np.concatenate([[0], np.cumsum(counts)])
    cuts = [0]
    while cuts[-1] < len(users):
        end = int(np.searchsorted(total, total[cuts[-1]] + part_rows, side="right")) - 1
        cuts.append(max(end, cuts[-1] + 1))
    return np.array([users[c] for c in cuts[:-1]] + [int(users[-1]) + 1], np.int64)


def row_bytes(schema: Schema) -> int:
    """Bytes of an event in the log, about (a list counts as four ids)."""
    width = {"id": 8, "bits": 8, "float": 4, "ids": 40}
    return 32 + sum(width.get(c.kind, 4 * c.width) for c in schema.columns) + 4 * len(schema.counters)


def write_json(path: Path, value: Any) -> None:
    """The file appears whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def _added(counts: list[dict[str, int]]) -> dict[str, int]:
    return {k: sum(c.get(k, 0) for c in counts) for k in sorted({k for c in counts for k in c})}
