"""What an event log holds: columns with roles, tasks derived from outcomes, streaming counters. No torch here."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Kind = Literal["id", "ids", "float", "vector", "bits"]
Encoding = Literal["frequency", "hash"]
Role = Literal["context", "outcome", "user", "hidden"]
CounterKind = Literal["count", "rate", "residual", "since", "affinity"]

TIME = "time"  # every log has it: int64 seconds
MOST_BITS = 62


_IDS: tuple[Kind, ...] = ("id", "ids")
_DENSE: tuple[Kind, ...] = ("float", "vector", "bits")


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that does not exist: what was asked, the closest match, what there is."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown {what} {name!r}{hint} (there are: {', '.join(names) or 'none'})"


def _one_of(what: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(unknown(what, value, get_args(choices)))


def _name(what: str, name: str) -> None:
    if not name.isidentifier() or name.startswith("_"):
        raise ValueError(f"{what} name {name!r} must be an identifier that does not start with an underscore")


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of the log.

    kind   "id": int64 in [0, cardinality); "ids": any number of such (tags, say); "float": float32; "vector": `size`
           float32 values (an embedding, a multi-hot); "bits": an integer whose `size` bits are flags (what a user did
           with an impression), which a batch shows as 0s and 1s.
    role   "context": known when the request is made, so on the candidate and in the history;
           "outcome": what came of it, so in the history alone;
           "user": known at the request and the same for every event of the user, so on the candidate alone;
           "hidden": kept in the log, never in a batch.

    default     what a missing value becomes (an empty list for "ids"); without it the row is rejected.
    vocabulary  the source's values are keys (text or any int64) that a vocabulary maps to [0, cardinality):
                "frequency" keeps the most frequent, "hash" needs no memory of them; see `gem_data.vocabulary`.
    min_count   of "frequency": keys that are rarer share the id of unseen ones.
    delay       of an outcome: seconds until it is known (a conversion's lag); until then a history shows 0.
    """

    name: str
    kind: Kind
    role: Role
    cardinality: int | None = None
    size: int | None = None
    default: float | None = None
    vocabulary: Encoding | None = None
    min_count: int | None = None
    delay: int | None = None

    def __post_init__(self) -> None:
        _name("column", self.name)
        _one_of("column kind", self.kind, Kind)
        _one_of("column role", self.role, Role)
        if self.name == TIME:
            raise ValueError(f"{TIME!r} is in every log and is not declared as a column")
        for attribute, kinds in (("cardinality", ("id", "ids")), ("size", ("vector", "bits"))):
            value = getattr(self, attribute)
            if self.kind in kinds and (value is None or value < 1):
                raise ValueError(f"column {self.name!r} of kind {self.kind!r} needs {attribute} >= 1, not {value!r}")
            if self.kind not in kinds and value is not None:
                raise ValueError(f"column {self.name!r} of kind {self.kind!r} takes no {attribute}, but has {value!r}")
        if self.kind == "bits" and (self.size or 0) > MOST_BITS:
            raise ValueError(f"column {self.name!r} of kind 'bits' has {self.size} bits; at most {MOST_BITS} fit")
        self._check_options()

    def _check_options(self) -> None:
        if self.vocabulary is not None:
            _one_of("vocabulary", self.vocabulary, Encoding)
            if self.kind not in ("id", "ids") or self.role == "hidden":
                raise ValueError(f"column {self.name!r} of kind {self.kind!r}, role {self.role!r} takes no vocabulary")
            if (self.cardinality or 0) < 3:
                raise ValueError(f"column {self.name!r} needs cardinality >= 3: 0 is missing, 1 unknown")
        if self.min_count is not None and (self.vocabulary != "frequency" or self.min_count < 1):
            raise ValueError(f"column {self.name!r}: min_count {self.min_count!r} needs a 'frequency' vocabulary, >= 1")
        if self.delay is not None and (self.role != "outcome" or self.delay < 0):
            raise ValueError(f"column {self.name!r}: delay {self.delay!r} needs role 'outcome' and 0 or more seconds")
        limit = {"id": self.cardinality, "bits": 1 << (self.size or 0)}.get(self.kind)
        if self.default is not None and limit is not None and not 0 <= self.default < limit:
            raise ValueError(f"column {self.name!r}: the default {self.default!r} is outside [0, {limit})")

    @property
    def width(self) -> int:
        """How many float32 values the column adds to a dense row (0 for ids)."""
        return {"id": 0, "ids": 0, "float": 1}.get(self.kind, self.size or 0)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A binary label: `column >= minimum`, or `column == equals`, or bit number `bit` of a "bits" column.

    With `given`, the label exists only where that other task is positive (a conversion given a click), and is masked
    elsewhere.
    """

    name: str
    column: str
    minimum: float | None = None
    equals: float | None = None
    bit: int | None = None
    given: str | None = None

    def __post_init__(self) -> None:
        _name("task", self.name)
        rules = sum(rule is not None for rule in (self.minimum, self.equals, self.bit))
        if rules != 1:
            found = "both" if rules else "neither"
            raise ValueError(f"task {self.name!r} needs either minimum or equals, not {found} (or bit, of 'bits')")

    def positive(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Where the rule holds."""
        if self.bit is not None:
            return np.asarray((values >> self.bit) & 1 == 1)
        return np.asarray(values >= self.minimum if self.minimum is not None else values == self.equals)


@dataclass(frozen=True, kw_only=True)
class Counter:
    """A dense feature streamed over the log, from events strictly before the event's time.

    With N and P the number of earlier events with the same key, and of those that are positive for `task`; r the
    running rate of everyone, (P_all + 0.5) / (N_all + 1):

    count     log(1 + N)
    rate      (P + prior * r) / (N + prior)
    residual  sum over the earlier events of (label - what counter `against` said then) / (N + prior)
    since     log(1 + seconds since the last earlier event of the key), 0 where there is none
    affinity  `rate` per element g of the vector column `over`, towards the key's own rate, averaged with the
              candidate's x_g: sum_g x_g (P_g + prior * rate) / (N_g + prior) / sum_g x_g, where N_g and P_g weigh an
              event by its x_g; the key's rate where sum_g x_g is 0

    Where a task is masked (`given`), an event counts neither in N nor in P of rate, residual and affinity.
    An empty key means all events.
    """

    name: str
    kind: CounterKind
    key: tuple[str, ...]
    task: str | None = None
    over: str | None = None
    against: str | None = None
    prior: float = 10.0

    def __post_init__(self) -> None:
        _name("counter", self.name)
        _one_of("counter kind", self.kind, CounterKind)
        key: Any = self.key
        object.__setattr__(self, "key", (key,) if isinstance(key, str) else tuple(key))
        if not self.prior > 0:
            raise ValueError(f"counter {self.name!r} needs prior > 0, not {self.prior!r}")
        needs = {"rate": {"task"}, "residual": {"task", "against"}, "affinity": {"task", "over"}}.get(self.kind, set())
        for attribute in ("task", "over", "against"):
            given = getattr(self, attribute)
            if (given is not None) != (attribute in needs):
                verb = "needs" if attribute in needs else "takes no"
                raise ValueError(f"counter {self.name!r} of kind {self.kind!r} {verb} {attribute}, but has {given!r}")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A history of its own for some types of events: those whose id column `column` is one of `values`.

    `columns` are the ones that its events show (None: every context and outcome column). A batch has one
    `JaggedSequence` for each source, under its name.
    """

    name: str
    column: str
    values: tuple[int, ...]
    columns: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _name("source", self.name)
        object.__setattr__(self, "values", tuple(int(v) for v in self.values))
        if self.columns is not None:
            object.__setattr__(self, "columns", tuple(self.columns))
        if not self.values:
            raise ValueError(f"source {self.name!r} needs at least one value of {self.column!r}")


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
        if counter.over is not None:
            column = self.column(counter.over)
            if column.kind != "vector" or column.role != "context":
                raise ValueError(
                    f"counter {counter.name!r} is over {counter.over!r}: expected a 'vector' column of role 'context'"
                )
        if counter.against is not None:
            rates = {c.name: c for c in before if c.kind in ("rate", "affinity")}
            if counter.against not in rates:
                raise ValueError(unknown("earlier rate counter", counter.against, rates))

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
