"""A schema: the columns, tasks, counters and sources of a log, checked against one another, with a fingerprint."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gem_data.schema.columns import (
    MOST_BITS,
    MOST_ITEMS,
    Column,
    Counter,
    Kind,
    Role,
    Source,
    Task,
    unknown,
)

_IDS: tuple[Kind, ...] = ("id", "ids")
_DENSE: tuple[Kind, ...] = ("float", "vector", "bits")


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Columns, tasks and counters of a log. `user` names the id column that histories follow.

    sources  one history for each; without any, all events are one history named `source`.
    delay    seconds until an event is logged: at t, histories and counters see the events of s with s + delay < t.
    """

    name: str
    columns: tuple[Column, ...]
    tasks: tuple[Task, ...]
    counters: tuple[Counter, ...] = ()
    user: str = "user"
    source: str = "events"  # the name of the history in a batch's `sequences`
    sources: tuple[Source, ...] = ()
    delay: int = 0
    _by_name: dict[str, Column] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        for attribute in ("columns", "tasks", "counters", "sources"):
            object.__setattr__(self, attribute, tuple(getattr(self, attribute)))
        self._by_name.update({c.name: c for c in self.columns})
        names = [c.name for c in self.columns] + [c.name for c in self.counters]
        for group in (names, self.task_names, self.source_names):
            twice = sorted({n for n in group if group.count(n) > 1})
            if twice:
                raise ValueError(f"schema {self.name!r} declares {', '.join(map(repr, twice))} more than once")
        user = self.column(self.user)
        if user.kind != "id" or user.role != "user":
            raise ValueError(
                f"the user column {self.user!r} must be an 'id' of role 'user', not {user.kind!r} of role {user.role!r}"
            )
        if not self.tasks:
            raise ValueError(f"schema {self.name!r} needs at least one task")
        for task in self.tasks:
            self._check_task(task)
        for i, counter in enumerate(self.counters):
            self._check_counter(counter, self.counters[:i])
        for source in self.sources:
            self._check_source(source)
        if self.delay < 0:
            raise ValueError(f"schema {self.name!r}: delay must be 0 or more seconds, not {self.delay}")

    def _check_task(self, task: Task) -> None:
        column = self.column(task.column)
        if column.role != "outcome" or column.kind in ("vector", "ids") or column.vocabulary:
            raise ValueError(
                f"task {task.name!r} reads column {column.name!r} of kind {column.kind!r} and role {column.role!r}; "
                "expected an 'id' or 'float' column of role 'outcome' without a vocabulary"
            )
        if (task.bit is not None) != (column.kind == "bits") or not 0 <= (task.bit or 0) < (column.size or MOST_BITS):
            raise ValueError(
                f"task {task.name!r} has bit {task.bit!r}, but column {column.name!r} is of kind {column.kind!r}"
                f" and size {column.size!r}"
            )
        if task.given is not None and (self.task(task.given).given is not None or task.given == task.name):
            raise ValueError(
                f"task {task.name!r} is given {task.given!r}, which must be another task without a condition"
            )

    def _check_counter(self, counter: Counter, before: tuple[Counter, ...]) -> None:
        for name in counter.key:
            column = self.column(name)
            if column.kind != "id" or column.role not in ("context", "user"):
                raise ValueError(
                    f"counter {counter.name!r} has key {name!r} of kind {column.kind!r} and role {column.role!r}; "
                    "a key is an 'id' column of role 'context' or 'user' (an outcome would leak)"
                )
        if counter.task is not None:
            self.task(counter.task)
        if counter.value is not None:
            self._check_neighbour(counter)
        elif counter.over is not None:
            column = self.column(counter.over)
            if column.kind != "vector" or column.role != "context":
                raise ValueError(
                    f"counter {counter.name!r} is over {counter.over!r}: expected a 'vector' column of role 'context'"
                )
        if counter.against is not None:
            rates = {c.name: c for c in before if c.kind in ("rate", "affinity")}
            if counter.against not in rates:
                raise ValueError(unknown("earlier rate counter", counter.against, rates))

    def _check_neighbour(self, counter: Counter) -> None:
        over, value = self.column(counter.over or ""), self.column(counter.value or "")
        if over.kind != "id" or over.role != "context" or (over.cardinality or 0) > MOST_ITEMS:
            raise ValueError(
                f"counter {counter.name!r} compares {over.name!r} of kind {over.kind!r}, role {over.role!r} and "
                f"cardinality {over.cardinality}: expected an 'id' column of role 'context' and at most {MOST_ITEMS}"
            )
        if value.role != "outcome" or value.kind not in ("id", "float") or value.vocabulary:
            raise ValueError(
                f"counter {counter.name!r} has value {value.name!r} of kind {value.kind!r} and role {value.role!r}; "
                "expected an 'id' or 'float' column of role 'outcome' without a vocabulary"
            )

    def _check_source(self, source: Source) -> None:
        column = self.column(source.column)
        top = column.cardinality or 0
        if column.kind != "id" or column.vocabulary or not all(0 <= v < top for v in source.values):
            raise ValueError(
                f"source {source.name!r} selects {source.values} of column {column.name!r} of kind {column.kind!r}; "
                f"expected values in [0, {top}) of an 'id' column without a vocabulary"
            )
        for name in source.columns or ():
            if self.column(name).role not in ("context", "outcome"):
                raise ValueError(f"source {source.name!r} shows {name!r} of role {self.column(name).role!r}")

    # What a batch is made of, in the order that it uses.

    def column(self, name: str) -> Column:
        """The column of that name. Raises ValueError naming the closest match."""
        if name not in self._by_name:
            raise ValueError(unknown("column", name, self._by_name))
        return self._by_name[name]

    def task(self, name: str) -> Task:
        """The task of that name. Raises ValueError naming the closest match."""
        for task in self.tasks:
            if task.name == name:
                return task
        raise ValueError(unknown("task", name, self.task_names))

    def _pick(self, kinds: tuple[Kind, ...], *roles: Role) -> tuple[Column, ...]:
        return tuple(c for c in self.columns if c.kind in kinds and c.role in roles)

    @property
    def tables(self) -> dict[str, int]:
        """Cardinality of every id column that a batch shows; a history and its candidate share a column's table."""
        return {c.name: int(c.cardinality or 0) for c in self._pick(_IDS, "context", "outcome", "user")}

    @property
    def sequence_ids(self) -> tuple[str, ...]:
        """The id columns of the history, one id an event."""
        return tuple(c.name for c in self._pick(("id",), "context", "outcome"))

    @property
    def sequence_lists(self) -> tuple[str, ...]:
        """The "ids" columns of the history, any number of ids an event."""
        return tuple(c.name for c in self._pick(("ids",), "context", "outcome"))

    @property
    def sequence_floats(self) -> dict[str, int]:
        """The float, vector and bits columns of the history, with their width."""
        return {c.name: c.width for c in self._pick(_DENSE, "context", "outcome")}

    @property
    def history_counters(self) -> tuple[str, ...]:
        """The counters that histories show, a float column of one value each; every source has them."""
        return tuple(c.name for c in self.counters if c.in_history)

    @property
    def sparse(self) -> tuple[str, ...]:
        """The id and ids columns of the candidate and its user (the user's own id included)."""
        return tuple(c.name for c in self._pick(_IDS, "context", "user"))

    @property
    def dense_columns(self) -> dict[str, int]:
        """The float, vector and bits columns of the candidate and its user, with their width; counters come after."""
        return {c.name: c.width for c in self._pick(_DENSE, "context", "user")}

    @property
    def source_names(self) -> tuple[str, ...]:
        """The histories of a batch, by name."""
        return tuple(s.name for s in self.sources) or (self.source,)

    def source_columns(self, name: str) -> tuple[str, ...]:
        """The columns that a history's events show, in the schema's order."""
        if name not in self.source_names:
            raise ValueError(unknown("source", name, self.source_names))
        shown = next((s.columns for s in self.sources if s.name == name), None)
        return tuple(
            c.name for c in self._pick((*_IDS, *_DENSE), "context", "outcome") if shown is None or c.name in shown
        )

    @property
    def dense_names(self) -> tuple[str, ...]:
        """A name for each of the F values of a batch's dense row."""
        names: list[str] = []
        for name, width in self.dense_columns.items():
            vector = self.column(name).kind != "float"
            names += [f"{name}[{i}]" for i in range(width)] if vector else [name]
        return (*names, *(c.name for c in self.counters))

    @property
    def dense_width(self) -> int:
        """F, the width of a batch's dense row."""
        return sum(self.dense_columns.values()) + len(self.counters)

    @property
    def task_names(self) -> tuple[str, ...]:
        """The tasks in the order of a batch's labels."""
        return tuple(t.name for t in self.tasks)

    # Identity.

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; options that are not set are left out."""
        parts = {
            key: [{k: v for k, v in dataclasses.asdict(x).items() if v is not None} for x in getattr(self, key)]
            for key in ("columns", "tasks", "counters")
        }
        for counter in parts["counters"]:
            counter["key"] = list(counter["key"])
        out: dict[str, Any] = {"name": self.name, "user": self.user, "source": self.source, **parts}
        # Newer options appear only where they are used, so that older logs keep their fingerprint.
        if self.sources:
            out["sources"] = [
                {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(s).items() if v is not None}
                for s in self.sources
            ]
        if self.delay:
            out["delay"] = self.delay
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Schema:
        """The inverse of `to_dict`. Raises ValueError for an option that does not exist."""

        def make(kind: type, options: Mapping[str, Any]) -> Any:
            known = [f.name for f in dataclasses.fields(kind) if f.init]
            for key in options:
                if key not in known:
                    raise ValueError(unknown(f"option of {kind.__name__}", key, known))
            try:
                return kind(**options)
            except TypeError as error:
                raise ValueError(f"{kind.__name__} {dict(options)!r}: {error}") from None

        parts = {"columns": Column, "tasks": Task, "counters": Counter, "sources": Source}
        return make(cls, {k: tuple(make(parts[k], x) for x in v) if k in parts else v for k, v in data.items()})

    def fingerprint(self) -> str:
        """A stable hash of everything above: 16 hexadecimal digits."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def differences(self, other: Schema) -> list[str]:
        """What differs, one line each: `column 'item': cardinality 10 here, 20 there`."""
        lines = [
            f"{key}: {getattr(self, key)!r} here, {getattr(other, key)!r} there"
            for key in ("name", "user", "source", "delay")
            if getattr(self, key) != getattr(other, key)
        ]
        for group in ("columns", "tasks", "counters", "sources"):
            here, there = ({x.name: x for x in getattr(s, group)} for s in (self, other))
            what = group[:-1]
            lines += [f"{what} {n!r}: only here" for n in here if n not in there]
            lines += [f"{what} {n!r}: only there" for n in there if n not in here]
            for name in here.keys() & there.keys():
                for f in dataclasses.fields(here[name]):
                    a, b = getattr(here[name], f.name), getattr(there[name], f.name)
                    if a != b:
                        lines.append(f"{what} {name!r}: {f.name} {a!r} here, {b!r} there")
            if here.keys() == there.keys() and list(here) != list(there):
                lines.append(f"{group}: the same in another order")
        return lines

    def require(self, other: Schema, what: str) -> None:
        """Raise ValueError with both fingerprints and every difference unless `other`, of `what`, is the same."""
        if self.fingerprint() != other.fingerprint():
            lines = "; ".join(self.differences(other))
            raise ValueError(
                f"{what} has schema {other.name!r} (fingerprint {other.fingerprint()}), but expected {self.name!r} "
                f"(fingerprint {self.fingerprint()}): {lines}"
            )
