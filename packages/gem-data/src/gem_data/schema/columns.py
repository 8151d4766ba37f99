"""What a schema is made of: columns with roles, tasks derived from outcomes, streaming counters, sources."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Kind = Literal["id", "ids", "float", "vector", "bits"]
Encoding = Literal["frequency", "hash"]
Role = Literal["context", "outcome", "user", "hidden"]
CounterKind = Literal["count", "rate", "residual", "since", "affinity", "neighbour"]

TIME = "time"  # every log has it: int64 seconds
MOST_BITS = 62
MOST_ITEMS = 8192  # that a counter of neighbours compares: 12 bytes for each pair, 768 MiB


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
                "frequency" keeps the most frequent, "hash" needs no memory of them; see `gem_data.features.vocabulary`.
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


_NEEDS: dict[str, set[str]] = {
    "rate": {"task"},
    "residual": {"task", "against"},
    "affinity": {"task", "over"},
    "neighbour": {"over", "value"},
}


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

    neighbour  what the key's earlier events say of the candidate through how alike the two have been taken by everyone:
              an average of `value` less what was usual for the event's id in the column `over` and for the key, weighed
              by a similarity of ids that is counted as the events come (gem_data.features.neighbours)

    Where a task is masked (`given`), an event counts neither in N nor in P of rate, residual and affinity.
    An empty key means all events.

    in_history: whether histories show the counter as well, as a float column of one value: what it was when the
                event's own request was made, so that an outcome can be compared with what was usual then.
    """

    name: str
    kind: CounterKind
    key: tuple[str, ...]
    task: str | None = None
    over: str | None = None
    against: str | None = None
    value: str | None = None
    prior: float = 10.0
    in_history: bool | None = None

    def __post_init__(self) -> None:
        _name("counter", self.name)
        _one_of("counter kind", self.kind, CounterKind)
        key: Any = self.key
        object.__setattr__(self, "key", (key,) if isinstance(key, str) else tuple(key))
        if not self.prior > 0:
            raise ValueError(f"counter {self.name!r} needs prior > 0, not {self.prior!r}")
        needs = _NEEDS.get(self.kind, set())
        for attribute in ("task", "over", "against", "value"):
            given = getattr(self, attribute)
            if (given is not None) != (attribute in needs):
                verb = "needs" if attribute in needs else "takes no"
                raise ValueError(f"counter {self.name!r} of kind {self.kind!r} {verb} {attribute}, but has {given!r}")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads, beside those of its task."""
        return (*self.key, *(name for name in (self.over, self.value) if name is not None))


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
