"""What the data offers (:class:`ModelInputs`) and how the model is built (:class:`GemConfig`). Imports no torch."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

ATTENTIONS = ("softmax", "gdpa")
ACTIVATIONS = ("identity", "relu", "relu2", "leaky_relu", "gelu", "gelu_tanh", "gelu_poly", "silu", "hardswish")
EXPERTS = ("wukong", "dcn", "attention")
ROTARIES = ("none", "position", "time", "both")
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
        _check_name("Table.name", self.name)
        _at_least(f"rows of table {self.name!r}", self.rows, 1)
        _at_least(f"dim of table {self.name!r}", self.dim, 1)


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
        _check_name("Source.name", self.name)
        if not self.ids:
            raise ValueError(f"source {self.name!r} has no categorical column: an event needs at least one id")
        _no_duplicates(f"columns of source {self.name!r}", [c for c, _ in (*self.ids, *self.floats)])
        for column, size in self.floats:
            _at_least(f"size of column {column!r} of source {self.name!r}", size, 1)
        _at_least(f"max_len of source {self.name!r}", self.max_len, 0)

    def event_width(self, table_dim: int) -> int:
        """How many numbers describe an event: its ids' rows, its floats, and two time gaps."""
        return len(self.ids) * table_dim + sum(size for _, size in self.floats) + TIME_GAPS


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """What a batch offers to the model.

    Args:
        tables: the embedding tables, all of one dim.
        sources: the histories; may be empty.
        sparse: (feature, table) pairs of the non-sequence categorical features, each with zero or more ids a sample.
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
    dense: int = 0
    dense_columns: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        _no_duplicates("tables", [t.name for t in self.tables])
        _no_duplicates("sources", [s.name for s in self.sources])
        _no_duplicates("sparse features", [f for f, _ in self.sparse])
        _no_duplicates("tasks", self.tasks)
        _at_least("dense", self.dense, 0)
        _no_duplicates("dense columns", [c for c, _ in self.dense_columns])
        for column, size in self.dense_columns:
            _at_least(f"size of dense column {column!r}", size, 1)
        if sum(size for _, size in self.dense_columns) > self.dense:
            raise ValueError(f"the dense columns {self.dense_columns} are wider than dense = {self.dense}")
        if not self.tasks:
            raise ValueError("ModelInputs.tasks is empty: the model needs at least one binary label to predict")
        if not (self.sparse or self.dense):
            raise ValueError("ModelInputs has no sparse and no dense feature: nothing says what is to be scored")
        for task in self.tasks:
            _check_name("task", task)
        for feature, _ in self.sparse:
            _check_name("sparse feature", feature)
        names = [t.name for t in self.tables]
        uses = [(f"{s.name}.{c}", table) for s in self.sources for c, table in s.ids] + list(self.sparse)
        for user, table in uses:
            if table not in names:
                raise ValueError(f"{user!r} asks for table {table!r}, which is {_known(table, names)}")
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
    def sequence_tables(self) -> frozenset[str]:
        """Tables that some history uses: they give one row an id, and are never pooled by the table's engine."""
        return frozenset(table for s in self.sources for _, table in s.ids)

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


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """How the tower of one source differs from the model's shape; None is as in the model.

    Args:
        source: the source's name.
        width: size of its events' tokens; what goes between the tower and the rest of the model is projected.
        heads: its attention heads.
        layers: it takes part in the first ``layers`` layers only; with 0 its events are evidence alone.
        window: as in :class:`GemConfig`, and 0 is everything.
    """

    source: str
    width: int | None = None
    heads: int | None = None
    layers: int | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("width", 1), ("heads", 1), ("layers", 0), ("window", 0)):
            if getattr(self, name) is not None:
                _at_least(f"{name} of the tower of {self.source!r}", getattr(self, name), least)


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """Where another model's logged probabilities for a task are: a dense column of the candidate.

    A number outside [0, 1], or NaN, says that none was logged. ``weight`` is what following them counts, against 1 for
    the labels. See :mod:`gem_model.distillation`.
    """

    task: str
    column: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ValueError(f"the weight of the teacher {self.column!r} must be positive, got {self.weight}")


@dataclass(frozen=True, kw_only=True)
class GemConfig:
    """The shape of a GEM. ``d`` below is ``width``, ``N`` the number of non-sequence tokens.

    Args:
        width: d, the size of every token.
        heads: attention heads; each has width / heads dims, which must be even for the rotary embedding.
        layers: interleaved (InterFormer) layers.
        n_tokens: N after the first layer, X in R^{N x d}; before it, N follows from the inputs.
        n_dense: tokens that the dense features become.
        n_sum: tokens of X_sum, the summary of the non-sequence tokens that the sequences see; also the CLS tokens.
        pma_queries: tokens that a history is pooled into by learned queries.
        pma_seeds: learned queries of hierarchical seed pooling, whose answers become the pma_queries tokens; 0 asks the
            history by pma_queries directly.
        recent: how many of the latest events enter the summary as they are.
        evidence_heads: heads of the evidence (:mod:`gem_model.evidence`) of each source that shares a column with the
            candidate; each gives a token and reaches the logits linearly as well. 0 leaves it out.
        evidence_dim: dims of such a head's keys, the three of time included.
        evidence_values: dims of its values, at most evidence_dim.
        affinity_heads: signed agreements of the candidate with the history (:class:`gem_model.evidence.Affinity`), of
            evidence_dim dims each, of the same sources; they reach the logits with the evidence. 0 leaves them out.
        evidence_dropout: probability, on what the evidence compares and in the reader; None is ``dropout``.
        reader: hidden units, layer by layer, of a small network that makes logits of the evidence, the dense features
            and the features' rows by itself (:mod:`gem_model.reader`); what the rest of the model adds starts at zero.
            () leaves it out.
        ff_mult: hidden size of the event's feed-forward network, in widths.
        pffn_tokens: key/value tokens made of X_sum for the personalised feed-forward network; 0 leaves it out.
        interaction_rank: k of Y in R^{N x k} in the factorisation machine block X (X^T Y).
        interaction_hidden: hidden size of that block's MLP, in widths.
        interaction_fm: how many of the N output tokens the factorisation machine block makes; the rest are linear.
        experts: the interaction experts of each layer, by kind, whose outputs are added (DHEN): any number of "wukong",
            "dcn" and "attention"; none of them is a single Wukong layer.
        cross_rank: rank of the "dcn" expert's matrix in R^{N d x N d}.
        attention: "softmax", or "gdpa" (O = c act(Q K^T) V).
        activation: the act of gdpa, used by attention="gdpa" and by the personalised feed-forward network.
        qk_norm: RMS-normalise every head of q and k in the events' attention and the personalised feed-forward network.
            While the norms' weights are 1, the scores then lie within sqrt(head_dim) of zero, as polynomial activations
            need.
        window: an event sees itself and the ``window`` events on each side of it (only the earlier ones when
            ``causal``); None is everything. The CLS tokens and the pooling queries always see the whole history.
        causal: an event sees itself and what precedes it. The whole history precedes the candidate, so False leaks
            nothing.
        self_attention_every: events attend to events in the layers 0, n, 2 n, ... only (Kunlun's computation skip); the
            CLS tokens attend in every layer.
        rotary: what rotates q and k: "position", "time" (ROTE: log(1 + dt / time_scale) to the request), "both" (half
            the heads each), "none".
        time_scale: seconds; below it, time gaps look alike.
        towers: what is different for some sources.
        teachers: whose logged predictions to learn from, beside the labels; they are no features then.
        head_hidden: hidden size of each task's MLP.
        dropout: probability, on event tokens, non-sequence tokens and in the heads.

    Raises:
        ValueError: naming the value and what was expected.
    """

    width: int = 64
    heads: int = 4
    layers: int = 2
    n_tokens: int = 16
    n_dense: int = 4
    n_sum: int = 4
    pma_queries: int = 4
    pma_seeds: int = 0
    recent: int = 4
    evidence_heads: int = 0
    evidence_dim: int = 16
    evidence_values: int = 4
    affinity_heads: int = 0
    evidence_dropout: float | None = None
    reader: tuple[int, ...] = ()
    ff_mult: float = 2.0
    pffn_tokens: int = 8
    interaction_rank: int = 8
    interaction_hidden: int = 4
    interaction_fm: int = 8
    experts: tuple[str, ...] = ()
    cross_rank: int = 32
    attention: str = "softmax"
    activation: str = "silu"
    qk_norm: bool = False
    window: int | None = None
    causal: bool = False
    self_attention_every: int = 1
    rotary: str = "time"
    time_scale: float = 60.0
    towers: tuple[TowerConfig, ...] = ()
    teachers: tuple[Teacher, ...] = ()
    head_hidden: int = 64
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in (
            "width",
            "heads",
            "layers",
            "n_tokens",
            "n_dense",
            "n_sum",
            "interaction_rank",
            "interaction_hidden",
            "head_hidden",
            "self_attention_every",
            "cross_rank",
        ):
            _at_least(name, getattr(self, name), 1)
        for name in ("pma_queries", "pma_seeds", "recent", "pffn_tokens", "evidence_heads", "affinity_heads"):
            _at_least(name, getattr(self, name), 0)
        if not (self.evidence_dim > PLACES and 1 <= self.evidence_values <= self.evidence_dim):
            raise ValueError(
                f"evidence_dim must be more than {PLACES}, and evidence_values from 1 to evidence_dim, got "
                f"{self.evidence_dim} and {self.evidence_values}"
            )
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.rotary == "both" and self.heads < 2:
            raise ValueError("rotary='both' gives half of the heads to each, so it needs at least 2 heads, got 1")
        if self.rotary != "none" and self.head_dim % 2:
            raise ValueError(
                f"rotary={self.rotary!r} needs a head dim that is a multiple of 2, "
                f"width {self.width} / heads {self.heads} gives {self.head_dim}"
            )
        if not 0 < self.interaction_fm < self.n_tokens:
            raise ValueError(
                f"interaction_fm must lie between 1 and n_tokens - 1 = {self.n_tokens - 1}, got {self.interaction_fm}"
            )
        if self.ff_mult <= 0:
            raise ValueError(f"ff_mult must be positive, got {self.ff_mult}")
        for name, value in (("dropout", self.dropout), ("evidence_dropout", self.reader_dropout)):
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name} must be in [0, 1), got {value}")
        for units in self.reader:
            _at_least("hidden units of the reader", units, 1)
        if self.time_scale <= 0:
            raise ValueError(f"time_scale must be a positive number of seconds, got {self.time_scale}")
        if self.window is not None:
            _at_least("window", self.window, 1)
        for name, known in (("attention", ATTENTIONS), ("activation", ACTIVATIONS), ("rotary", ROTARIES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is {_known(getattr(self, name), known)}")
        _no_duplicates("towers", [tower.source for tower in self.towers])
        _no_duplicates("teachers", [f"{teacher.task} {teacher.column}" for teacher in self.teachers])
        for tower in self.towers:
            if tower.layers is not None and tower.layers > self.layers:
                raise ValueError(
                    f"the tower of {tower.source!r} has {tower.layers} layers, the model only {self.layers}"
                )
            try:
                self.of(tower.source)
            except ValueError as error:
                raise ValueError(f"the tower of {tower.source!r}: {error}") from None
        if isinstance(self.experts, str):
            raise TypeError(f"experts must be a tuple of kinds, got {self.experts!r}")
        for expert in self.experts:
            if expert not in EXPERTS:
                raise ValueError(f"expert {expert!r} is {_known(expert, EXPERTS)}")
        if self.pma_seeds and not self.pma_queries:
            raise ValueError(
                f"pma_seeds {self.pma_seeds} are pooled into pma_queries tokens, which must be at least 1, got 0"
            )

    @property
    def reader_dropout(self) -> float:
        """``evidence_dropout``, or ``dropout`` where that is not given."""
        return self.dropout if self.evidence_dropout is None else self.evidence_dropout

    @property
    def head_dim(self) -> int:
        """Dims of one attention head."""
        return self.width // self.heads

    def events_attend(self, layer: int) -> bool:
        """Whether the events attend to each other in this layer."""
        return layer % self.self_attention_every == 0

    def of(self, source: str) -> GemConfig:
        """The shape of one source's tower, as a configuration without ``towers``."""
        changes: dict[str, int | None] = {}
        for tower in self.towers:
            if tower.source == source:
                fields = {name: getattr(tower, name) for name in ("width", "heads", "window")}
                changes = {name: value for name, value in fields.items() if value is not None}
                if tower.window == 0:
                    changes["window"] = None
        return replace(self, towers=(), **changes)  # type: ignore[arg-type]

    def sources_of(self, layer: int, sources: Iterable[str]) -> list[str]:
        """Which of the sources take part in a layer; ValueError where a tower is of none of them."""
        sources = list(sources)
        depth = {tower.source: tower.layers for tower in self.towers}
        for name in depth:
            if name not in sources:
                raise ValueError(f"a tower is of source {name!r}, which is {_known(name, sources)}")
        return [s for s in sources if (limit := depth.get(s)) is None or layer < limit]

    @property
    def ff_hidden(self) -> int:
        """Hidden size of the event's feed-forward network, rounded up to a multiple of 8."""
        return -(-int(self.ff_mult * self.width) // 8) * 8


def _known(value: object, known: Iterable[str]) -> str:
    """The end of an error message: that ``value`` is unknown, what it may have meant, and what is known."""
    known = list(known)
    close = difflib.get_close_matches(str(value), known, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"unknown{hint} Known: {', '.join(map(repr, known)) or 'none'}"


def _at_least(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _check_name(what: str, name: str) -> None:
    if not name:
        raise ValueError(f"{what} is empty")


def _no_duplicates(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what}: {name!r} appears twice")
        seen.add(name)
