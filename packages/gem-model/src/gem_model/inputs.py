"""What the data offers the model: tables, histories, features, tasks. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gem_model.checks import at_least, check_name, no_duplicates, unknown

TIME_GAPS = 2  # numbers that the model adds to each event: time to the request, time since the previous event
PLACES = 3  # dims of an evidence key that say when the event was


@dataclass(frozen=True, kw_only=True)
class Table:
    """An embedding table of ``rows`` x ``dim`` float32; an id is a row, so ids run from 0 to ``rows - 1``.

    With ``managed``, ids are any int64 and rows go to those that come most and latest (:mod:`gem_model.slots`).
    """

    name: str
    rows: int
    dim: int
    managed: bool = False

    def __post_init__(self) -> None:
        check_name("Table.name", self.name)
        at_least(f"rows of table {self.name!r}", self.rows, 1)
        at_least(f"dim of table {self.name!r}", self.dim, 1)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A history of events: its categorical columns with their tables, its float columns with their sizes.

    ``ids`` holds (column, table) pairs, ``floats`` (column, size) pairs. ``max_len`` is the longest history that the
    data sends, in events; 0 means that nobody knows.
    """

    name: str
    ids: tuple[tuple[str, str], ...]
    floats: tuple[tuple[str, int], ...] = ()
    max_len: int = 0

    def __post_init__(self) -> None:
        check_name("Source.name", self.name)
        if not self.ids:
            raise ValueError(f"source {self.name!r} has no categorical column: an event needs at least one id")
        no_duplicates(f"columns of source {self.name!r}", [c for c, _ in (*self.ids, *self.floats)])
        for column, size in self.floats:
            at_least(f"size of column {column!r} of source {self.name!r}", size, 1)
        at_least(f"max_len of source {self.name!r}", self.max_len, 0)

    def event_width(self, table_dim: int) -> int:
        """How many numbers describe an event: its ids' rows, its floats, and two time gaps."""
        return len(self.ids) * table_dim + sum(size for _, size in self.floats) + TIME_GAPS


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """What a batch offers to the model.

    Args:
        tables: the embedding tables, all of one dim.
        sources: the histories; may be empty.
        sparse: (feature, table) pairs of the non-sequence categorical features, each with zero or more ids a sample,
            whose rows are summed.
        weighted: those of them whose ids have weights, by which their rows are multiplied first.
        dense: how many dense floats a sample has.
        tasks: the names of the binary labels, in the order of the labels' columns.
        dense_columns: (column, size) pairs of the dense floats that come first, where they have names. A float column
            of a history that has the name and size of one of them is known of the candidate, too.

    Raises:
        ValueError: for a name used twice, an unknown table, a table that nothing uses or whose dim differs.
    """

    tables: tuple[Table, ...]
    tasks: tuple[str, ...]
    sources: tuple[Source, ...] = ()
    sparse: tuple[tuple[str, str], ...] = ()
    weighted: tuple[str, ...] = ()
    dense: int = 0
    dense_columns: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        no_duplicates("tables", [t.name for t in self.tables])
        no_duplicates("sources", [s.name for s in self.sources])
        no_duplicates("sparse features", [f for f, _ in self.sparse])
        no_duplicates("tasks", self.tasks)
        for feature in self.weighted:
            if feature not in dict(self.sparse):
                raise ValueError(f"weighted feature {feature!r} is {unknown(feature, dict(self.sparse))}")
        at_least("dense", self.dense, 0)
        no_duplicates("dense columns", [c for c, _ in self.dense_columns])
        for column, size in self.dense_columns:
            at_least(f"size of dense column {column!r}", size, 1)
        if sum(size for _, size in self.dense_columns) > self.dense:
            raise ValueError(f"the dense columns {self.dense_columns} are wider than dense = {self.dense}")
        if not self.tasks:
            raise ValueError("ModelInputs.tasks is empty: the model needs at least one binary label to predict")
        if not (self.sparse or self.dense):
            raise ValueError("ModelInputs has no sparse and no dense feature: nothing says what is to be scored")
        for task in self.tasks:
            check_name("task", task)
        for feature, _ in self.sparse:
            check_name("sparse feature", feature)
        names = [t.name for t in self.tables]
        uses = [(f"{s.name}.{c}", table) for s in self.sources for c, table in s.ids] + list(self.sparse)
        for user, table in uses:
            if table not in names:
                raise ValueError(f"{user!r} asks for table {table!r}, which is {unknown(table, names)}")
        if unused := sorted(set(names) - {table for _, table in uses}):
            raise ValueError(
                f"no feature and no event column uses table {unused[0]!r}; remove it from ModelInputs.tables"
            )
        if len({t.dim for t in self.tables}) > 1:
            raise ValueError(f"all tables must have one dim, found { ({t.name: t.dim for t in self.tables}) }")

    def table(self, name: str) -> Table:
        """The table called ``name``."""
        return next(t for t in self.tables if t.name == name)

    @property
    def table_dim(self) -> int:
        """The dim that all tables share; 0 where there is no table."""
        return self.tables[0].dim if self.tables else 0

    @property
    def table_std(self) -> float:
        """Standard deviation that the rows start with, whatever the number of rows: a row's norm is then about 0.6."""
        return 1.0 / math.sqrt(3.0 * max(self.table_dim, 1))

    @property
    def row_tables(self) -> frozenset[str]:
        """Tables that some history or weighted feature uses: they give one row an id, and are never pooled by the
        table's engine.
        """
        weighted = {table for feature, table in self.sparse if feature in self.weighted}
        return frozenset(weighted.union(table for s in self.sources for _, table in s.ids))

    def candidate_columns(self, source: Source) -> tuple[tuple[str, str], ...]:
        """(column, sparse feature) pairs: which columns of ``source`` the candidate itself has, by sharing their table.

        A feature of the column's own name comes first, then any other of the table; each stands for one column at most.
        """
        tables = dict(self.sparse)
        chosen = {column: column for column, table in source.ids if tables.get(column) == table}
        free = [feature for feature in tables if feature not in chosen]
        for column, table in source.ids:
            shared = [feature for feature in free if tables[feature] == table]
            if column not in chosen and shared:
                chosen[column] = shared[0]
                free.remove(shared[0])
        return tuple((column, chosen[column]) for column, _ in source.ids if column in chosen)

    def candidate_floats(self, source: Source) -> dict[str, tuple[int, int]]:
        """Float columns of ``source`` that the candidate has, too: column -> (its place in the dense row, size)."""
        starts, at = {}, 0
        for column, size in self.dense_columns:
            starts[column] = (at, size)
            at += size
        return {c: starts[c] for c, size in source.floats if c in starts and starts[c][1] == size}

    def evidence_widths(self, source: Source) -> tuple[int, int]:
        """How many numbers of an event the candidate has as well, and how many speak of what came of it.

        (0, 0) where the candidate shares no id column with the source: there is no evidence to be had then.
        """
        ids, floats = self.candidate_columns(source), self.candidate_floats(source)
        if not ids:
            return 0, 0
        known = len(ids) * self.table_dim + sum(size for _, size in floats.values())
        rest = (len(source.ids) - len(ids)) * self.table_dim
        rest += sum(size for column, size in source.floats if column not in floats)
        return known, rest + PLACES - 1
