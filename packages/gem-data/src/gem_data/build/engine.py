"""The engine of the out-of-core build: DuckDB over Parquet, with a memory limit and a folder to spill to.

Plain queries, so that another engine can stand in: what `prepare` needs of it is Parquet chunks, partitioned by ranges
of users. On a cluster, Spark writes the same with
`df.repartitionByRange(n, "user").write.parquet(...)`, one `files(...)` source per range for `prepare`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gem_data.features.vocabulary import Vocabulary

ROW = "_row"  # the number of the row in the source

Report = Callable[[float], None]


class Engine:
    """A DuckDB connection that works in `folder` with at most about `memory` bytes and `threads` threads."""

    def __init__(self, folder: Path, *, memory: int, threads: int) -> None:
        import duckdb

        self.folder = folder
        self.connection = duckdb.connect(
            config={
                "memory_limit": f"{max(memory, 128 << 20) // (1 << 20)}MiB",
                "temp_directory": str(folder / "spill"),
                "threads": threads,
                "preserve_insertion_order": False,
            }
        )
        # query_progress knows nothing without the bar, which is not to be drawn.
        self.connection.execute("SET enable_progress_bar = true; SET enable_progress_bar_print = false")

    def close(self) -> None:
        """Give the memory and the spilled files back."""
        self.connection.close()

    def query(self, sql: str, report: Report | None = None) -> pa.Table:
        """The result of a query. `report` hears of its progress, from 0 to 1."""
        with self._watched(report):
            return self.connection.sql(sql).to_arrow_table()

    def run(self, sql: str, report: Report | None = None) -> None:
        """A statement without a result."""
        with self._watched(report):
            self.connection.execute(sql)

    @contextmanager
    def _watched(self, report: Report | None) -> Iterator[None]:
        if report is None:
            yield
            return
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.5):
                report(max(0.0, float(self.connection.query_progress())) / 100)

        thread = threading.Thread(target=watch, name="gem-data-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    # What a build asks for.

    def key_counts(self, chunks: str, column: str, *, lists: bool, until: int | None) -> tuple[Any, Any]:
        """Distinct keys, ascending, of events up to time `until`, and how often each comes."""
        value = f"unnest({quoted(column)})" if lists else quoted(column)
        where = "" if until is None else f"WHERE time <= {int(until)}"
        table = self.query(
            f"SELECT k, count(*) AS n FROM (SELECT {value} AS k FROM {chunks} {where}) GROUP BY k ORDER BY k"
        )
        return tuple(table[n].to_numpy().astype(np.int64) for n in ("k", "n"))

    def user_counts(self, chunks: str, user: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Users, ascending, and the number of rows of each."""
        table = self.query(f"SELECT {quoted(user)} AS u, count(*) AS n FROM {chunks} GROUP BY u ORDER BY u")
        return table["u"].to_numpy().astype(np.int64), table["n"].to_numpy().astype(np.int64)

    def with_users(self, chunks: str, user: str, vocabulary: Vocabulary) -> str:
        """The chunks with the users' keys replaced by their ids."""
        known = pa.table({"_key": vocabulary.keys, "_id": vocabulary.ids})
        self.connection.register("_known_users", known)
        return (
            f"(SELECT c.* REPLACE (v._id AS {quoted(user)}) FROM {chunks} c "
            f"JOIN _known_users v ON c.{quoted(user)} = v._key)"
        )

    def partition(self, chunks: str, user: str, bounds: NDArray[np.int64], folder: Path, report: Report) -> None:
        """Write the rows to folder/part=0/, part=1/, ...: part p holds the users in [bounds[p], bounds[p + 1])."""
        steps = " + ".join(f"({quoted(user)} >= {int(b)})::INTEGER" for b in bounds[1:-1]) or "0"
        self.run(
            f"COPY (SELECT *, {steps} AS part FROM {chunks}) TO {text(folder)} (FORMAT parquet, PARTITION_BY (part), "
            "COMPRESSION uncompressed, DICTIONARY_SIZE_LIMIT 1, OVERWRITE_OR_IGNORE)",  # read once, soon
            report,
        )

    def part(self, rows: str) -> pa.Table:
        """All rows, in any order."""
        return self.query(f"SELECT * FROM {rows}")


def parquet(pattern: Path) -> str:
    """The table of Parquet files, for a query."""
    return f"read_parquet({text(pattern)}, hive_partitioning = false)"


def quoted(name: str) -> str:
    """A column's name, for a query (names are identifiers: the schema has seen to it)."""
    return f'"{name}"'


def text(value: Any) -> str:
    """A string, for a query."""
    return "'" + str(value).replace("'", "''") + "'"
