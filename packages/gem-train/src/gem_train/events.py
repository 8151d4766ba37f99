"""What happened, one JSON object a line, flushed as it happens: a killed run has lost nothing that it wrote.

`metrics.jsonl` holds the training curve: a record per step and one per evaluation, in step order. `events.jsonl` holds
everything else: spans (what took how long) and messages. Numbers are written with all their digits, so two runs can be
compared bit for bit; NaN and infinity, which JSON does not have, become null.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from gem_train.errors import UserError


class JsonLines:
    """An append-only file of JSON objects, opened by the first record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def write(self, **record: Any) -> None:
        """Append one record and hand it to the operating system at once."""
        try:
            if self._file is None:
                _drop_torn_line(self.path)
                self._file = self.path.open("a", encoding="utf-8")
            self._file.write(json.dumps(finite(record)) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror}; the run stops here, its checkpoints are intact"
            ) from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk has been reported by the write already
                self._file.close()
            self._file = None


class Listener(Protocol):
    """Hears of metrics as they are written; see `gem_train.sinks`."""

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """A point of the curve."""

    def close(self) -> None:
        """There are no more."""


class Events:
    """The two logs of one run. Ranks that do not write pass `folder=None`: every call then does nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._metrics = JsonLines(folder / "metrics.jsonl") if folder else None
        self._events = JsonLines(folder / "events.jsonl") if folder else None
        self.sinks: Listener | None = None  # hears of every point of the curve, too

    def metric(self, kind: str, step: int, **values: Any) -> None:
        """A point of the training curve: kind "step" or "eval"."""
        if self._metrics:
            self._metrics.write(kind=kind, step=step, **values)
        if self.sinks is not None:
            self.sinks.log(kind, step, values)

    def message(self, name: str, **values: Any) -> None:
        """Something worth remembering that has no duration."""
        if self._events:
            self._events.write(event=name, at=time.time(), **values)

    @contextlib.contextmanager
    def span(self, name: str, **values: Any) -> Iterator[None]:
        """Time the block and record it, also when it fails."""
        start, clock = time.time(), time.perf_counter()
        try:
            yield
        finally:
            if self._events:
                self._events.write(span=name, at=start, seconds=time.perf_counter() - clock, **values)

    def close(self) -> None:
        """Close both files and the sinks."""
        if self.sinks is not None:
            self.sinks.close()
        for log in (self._metrics, self._events):
            if log:
                log.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Every complete record of a file; a last line torn by a crash is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise UserError(f"{path}, line {number} is not JSON: {line[:60]!r}") from None
    return records


def truncate(path: Path, step: int) -> int:
    """Drop the records after `step` (a resumed run writes them again); returns how many were dropped.

    The remainder replaces the file in one atomic move.
    """
    records = read(path)
    kept = [r for r in records if r["step"] <= step]
    fresh = path.with_suffix(".tmp")
    with fresh.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(r) + "\n" for r in kept)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    return len(records) - len(kept)


def _drop_torn_line(path: Path) -> None:
    """Cut off a last line without its newline, so that what is appended next starts a line of its own."""
    if path.is_file():
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)


def finite(value: Any) -> Any:
    """`value` with every NaN and infinity inside replaced by None, and tuples by lists: what JSON can hold."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
