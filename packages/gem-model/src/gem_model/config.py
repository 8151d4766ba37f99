"""How the model is built: :class:`GemConfig`, and again what the data offers (inputs.py). Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gem_model.checks import at_least, no_duplicates, unknown
from gem_model.inputs import PLACES, TIME_GAPS, ModelInputs, Source, Table

ATTENTIONS = ("softmax", "gdpa")
ACTIVATIONS = ("identity", "relu", "relu2", "leaky_relu", "gelu", "gelu_tanh", "gelu_poly", "silu", "hardswish")
EXPERTS = ("wukong", "dcn", "attention")
ROTARIES = ("none", "position", "time", "both")
SEQUENCE_LAYERS = ("interformer", "hstu")
BLOCKS = (16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """How the tower of one source differs from the model's shape; None is as in the model.

    Args:
        source: the source's name.
        width: size of its events' tokens; what goes between the tower and the rest of the model is projected.
        heads: its attention heads.
        layers: it takes part in the first ``layers`` layers only; with 0 its events are evidence alone.
        window: as in :class:`GemConfig`, and 0 is everything.
        block: as in :class:`GemConfig`, and 0 cuts none.
    """

    source: str
    width: int | None = None
    heads: int | None = None
    layers: int | None = None
    window: int | None = None
    block: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("width", 1), ("heads", 1), ("layers", 0), ("window", 0), ("block", 0)):
            if getattr(self, name) is not None:
                at_least(f"{name} of the tower of {self.source!r}", getattr(self, name), least)


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
        dense_buckets: buckets of each dense feature, each with a learned vector, in place of the first linear map of
            their MLP (:mod:`gem_model.buckets`); 0 takes the numbers as they are.
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
        sequence_layer: "interformer" (personalised feed-forward network, then attention), or "hstu", which has neither
            feed-forward network nor personal tokens (:mod:`gem_model.hstu`).
        attention: "softmax", or "gdpa" (O = c act(Q K^T) V).
        activation: the act of gdpa, used by attention="gdpa" and by the personalised feed-forward network.
        qk_norm: RMS-normalise every head of q and k in the events' attention and the personalised feed-forward network.
            While the norms' weights are 1, the scores then lie within sqrt(head_dim) of zero. Weights are learned, so
            no bound is asserted and "gelu_poly" is computed exactly (see `gem_kernels.gdpa`'s score_bound).
        window: an event sees itself and the ``window`` events on each side of it (only the earlier ones when
            ``causal``); None is everything. The CLS tokens and the pooling queries always see the whole history.
        block: an event sees its own block of so many events (16, 32, 64 or 128), counted from the oldest, in place of a
            window; None cuts no blocks.
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
    dense_buckets: int = 0
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
    sequence_layer: str = "interformer"
    attention: str = "softmax"
    activation: str = "silu"
    qk_norm: bool = False
    window: int | None = None
    block: int | None = None
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
            at_least(name, getattr(self, name), 1)
        for name in ("pma_queries", "pma_seeds", "recent", "pffn_tokens", "evidence_heads", "affinity_heads"):
            at_least(name, getattr(self, name), 0)
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
            at_least("hidden units of the reader", units, 1)
        if self.time_scale <= 0:
            raise ValueError(f"time_scale must be a positive number of seconds, got {self.time_scale}")
        if self.window is not None:
            at_least("window", self.window, 1)
        if self.dense_buckets < 0 or self.dense_buckets == 1:
            raise ValueError(f"dense_buckets must be 0 or at least 2, got {self.dense_buckets}")
        if self.block is not None:
            if self.block not in BLOCKS:
                raise ValueError(f"block must be one of {', '.join(map(str, BLOCKS))}, or None, got {self.block}")
            if self.window is not None or self.causal or self.sequence_layer != "interformer":
                raise ValueError(
                    f"block {self.block} goes with no window, causal=False and sequence_layer='interformer', got "
                    f"window {self.window}, causal {self.causal} and {self.sequence_layer!r}"
                )
        for name, known in (
            ("attention", ATTENTIONS),
            ("activation", ACTIVATIONS),
            ("rotary", ROTARIES),
            ("sequence_layer", SEQUENCE_LAYERS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is {unknown(getattr(self, name), known)}")
        no_duplicates("towers", [tower.source for tower in self.towers])
        no_duplicates("teachers", [f"{teacher.task} {teacher.column}" for teacher in self.teachers])
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
                raise ValueError(f"expert {expert!r} is {unknown(expert, EXPERTS)}")
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
                fields = {name: getattr(tower, name) for name in ("width", "heads", "window", "block")}
                changes = {name: value for name, value in fields.items() if value is not None}
                changes |= {name: None for name in ("window", "block") if changes.get(name) == 0}
        return replace(self, towers=(), **changes)  # type: ignore[arg-type]

    def sources_of(self, layer: int, sources: Iterable[str]) -> list[str]:
        """Which of the sources take part in a layer; ValueError where a tower is of none of them."""
        sources = list(sources)
        depth = {tower.source: tower.layers for tower in self.towers}
        for name in depth:
            if name not in sources:
                raise ValueError(f"a tower is of source {name!r}, which is {unknown(name, sources)}")
        return [s for s in sources if (limit := depth.get(s)) is None or layer < limit]

    @property
    def ff_hidden(self) -> int:
        """Hidden size of the event's feed-forward network, rounded up to a multiple of 8."""
        return -(-int(self.ff_mult * self.width) // 8) * 8


__all__ = [
    "ACTIVATIONS",
    "ATTENTIONS",
    "EXPERTS",
    "PLACES",
    "ROTARIES",
    "TIME_GAPS",
    "GemConfig",
    "ModelInputs",
    "Source",
    "Table",
    "Teacher",
    "TowerConfig",
]
