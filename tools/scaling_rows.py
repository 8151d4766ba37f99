"""The rows of tools/scaling_cards.py in order of importance, and what is kept of them while they are measured."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gem_parallel import CommConfig, ParallelConfig

SM_FREE = CommConfig(all_gather="auto")
PLAIN = ParallelConfig(table_sharding="row_wise")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is trained together."""

    name: str
    config: ParallelConfig = PLAIN
    payload: bool = False
    balanced: bool = True
    strong: bool = False
    graphs: bool = True
    parts: int = 0  # as many as are asked for first

    @property
    def replayed(self) -> bool:
        """Whether graphs run the layers."""
        return self.graphs and self.config.experts == 1


def table(world: int, parts: list[int]) -> list[Row]:
    """All rows of a world of this size: what is asked for first, then what explains it.

    "plain", "+ prefetch", "+ SM-free", "+ quantised" and "+ balanced" are a ladder, each rung with all before it. Other
    rows change one thing in "balanced", which is the first rung with balanced batches.
    """
    ahead = replace(PLAIN, prefetch=2)
    fast = replace(ahead, comm=SM_FREE)
    small = replace(fast, table_exchange="bf16")
    half = {"shard_group": world // 2}
    spread = {"experts": 2, "shard_group": max(2, world // 2)}

    def copies(strategy: str, count: int) -> ParallelConfig:
        return replace(PLAIN, table_strategy=strategy, table_copies=count)

    def windows(**options: str) -> ParallelConfig:
        return replace(fast, comm=replace(SM_FREE, **options))  # type: ignore[arg-type]

    rows = [
        Row(name="plain", balanced=False),
        Row(name="balanced"),
        Row(name="+ SM-free", config=fast, balanced=False),
        Row(name="tables v3", config=copies("v3", world)),
        Row(name="2-D FSDP", config=replace(PLAIN, **half)),  # type: ignore[arg-type]
        Row(name="strong, 1-D", strong=True),
        Row(name="2-D FSDP, EP", config=replace(PLAIN, **spread)),  # type: ignore[arg-type]
        Row(name="tables v2", config=copies("v2", world)),
        *(Row(name=f"balanced, {n} parts", parts=n) for n in parts[1:]),
        Row(name="+ prefetch", config=ahead, balanced=False),
        Row(name="+ quantised", config=small, payload=True, balanced=False),
        Row(name="+ balanced", config=small, payload=True),
        Row(name="strong, 2-D FSDP", config=replace(PLAIN, **half), strong=True),  # type: ignore[arg-type]
        Row(name="strong, tables v3", config=copies("v3", world), strong=True),
        Row(name="strong, SM-free", config=fast, strong=True),
        Row(name="strong, unbalanced", strong=True, balanced=False),
        Row(name="strong, 2-D FSDP, EP", config=replace(PLAIN, **spread), strong=True),  # type: ignore[arg-type]
        Row(name="strong, tables v2", config=copies("v2", world), strong=True),
        *(
            Row(name=f"balanced, {n} parts, each reduced", parts=n, config=replace(PLAIN, reduce_every_part=True))
            for n in parts[1:]
        ),
        Row(name="SM-free, written", config=windows(copies="written", barriers="kernels")),
        Row(name="SM-free, kernels", config=windows(barriers="kernels")),
        Row(name="SM-free, reduced", config=windows(reduce_scatter="copy_engine")),
        Row(name="plain, no graphs", balanced=False, graphs=False),
    ]
    if world >= 4:
        both = [Row(name=f"tables {v}, 2 copies", config=copies(v, 2)) for v in ("v3", "v2")]
        rows[8:8] = both
    return rows


def chosen(rows: list[Row], parts_of_names: list[str] | None, names: list[str] | None) -> list[Row]:
    """Rows whose names contain one of the first, or are among the second, in their order.

    Raises ValueError for a name that no row has.
    """
    if names:
        known = {row.name: row for row in rows}
        if wrong := [name for name in names if name not in known]:
            raise ValueError(f"no row is called {', '.join(wrong)}; there are {', '.join(known)}")
        return [known[name] for name in names]
    return [row for row in rows if not parts_of_names or any(part in row.name for part in parts_of_names)]


@dataclass
class Kept:
    """A folder with a file for every row as it is measured, so that a run that is cut off keeps what it had.

    A row that began and left no result (it hung, or the run was ended in it) is not tried again: it is said and passed
    over.
    """

    folder: Path
    seconds: list[float] = field(default_factory=list)  # of the rows that were measured here

    def _file(self, row: Row, ending: str) -> Path:
        return self.folder / f"{re.sub('[^a-z0-9]+', '-', row.name.lower()).strip('-')}.{ending}"

    def found(self, row: Row) -> dict[str, Any] | None:
        """What an earlier run measured, or the note that the row did not end."""
        if self._file(row, "json").exists():
            result: dict[str, Any] = json.loads(self._file(row, "json").read_text())
            return result
        begun = self._file(row, "begun")
        return {"case": row.name, "failed": f"did not end; {begun.read_text()}"} if begun.exists() else None

    def begin(self, row: Row, note: str) -> None:
        """The row is tried now."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file(row, "begun").write_text(note)

    def end(self, row: Row, result: dict[str, Any]) -> None:
        """The row has been measured, or has failed in a way that was caught."""
        self.seconds.append(float(result["seconds"]))
        file = self._file(row, "json")
        file.with_suffix(".tmp").write_text(json.dumps(result))
        os.replace(file.with_suffix(".tmp"), file)
        self._file(row, "begun").unlink()

    def fits(self, left_s: float) -> bool:
        """Whether another row can be expected to end in so many seconds: the longest so far, and a fifth more."""
        return left_s > 1.2 * max(self.seconds, default=0.0)
