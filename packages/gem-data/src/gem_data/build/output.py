"""What every build leaves: a summary, the rejected rows with reasons, a folder that appears whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gem_data.build.validate import Validated
from gem_data.log.manifest import REJECTS
from gem_data.schema import TIME
from gem_data.schema.values import REASONS


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
        lines = [f"{self.folder}: {self.rows:,} events of {self.users:,} users; label rates {rates}"]
        if self.out_of_order:
            lines.append(
                f"{self.out_of_order:,} events came after a later one of the same user and were sorted into place"
            )
        if self.ignored_columns:
            lines.append(f"columns not in the schema were ignored: {', '.join(self.ignored_columns)}")
        if self.rejected:
            reasons = ", ".join(f"{n:,} {reason}" for reason, n in self.rejected.items())
            count = sum(self.rejected.values())
            rows = f"{count:,} rows were" if count != 1 else "1 row was"
            lines.append(f"{rows} rejected ({reasons}), see {self.folder / REJECTS}:")
            lines += [f"  {sample}" for sample in self.samples]
        return "\n".join(lines)


def reject_lines(
    table: pa.Table, valid: Validated, *, base: int = 0, sample: int = 5, chunk: int = 8192
) -> tuple[Iterator[str], list[str]]:
    """The rejected rows as JSON lines, and the first `sample` for a person. `base` is the number of the first row."""
    samples = []
    for row, code, column in zip(valid.rejected[:sample].tolist(), valid.reasons, valid.where, strict=False):
        value = table.slice(row, 1).to_pylist()[0].get(column)
        what = f"{column} = {value!r} is {REASONS[code]}" if column else f"is a {REASONS[code]}"
        what += " (expected seconds, or a timestamp)" if column == TIME else ""
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
