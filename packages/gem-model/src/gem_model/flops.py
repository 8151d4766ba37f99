"""Useful FLOPs of a GEM's forward pass, exactly, from the lengths of the histories. Imports no torch.

Counted: two for each multiply-add of the matrix products, on real events and on the (query, key) pairs that may see
each other. Not counted: element-wise work, norms, lookups, padding. A training step counts three forward passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from gem_model.config import PLACES, GemConfig, ModelInputs, Source


def batch_flops(
    config: GemConfig,
    inputs: ModelInputs,
    lengths: Mapping[str, Iterable[int]],
    *,
    batch_size: int | None = None,
    requests: Iterable[int] | None = None,
) -> int:
    """FLOPs of one forward pass over a batch.

    Args:
        config: the model's shape.
        inputs: what the batches hold.
        lengths: for each source the number of events of each sample (a list, an array or a tensor of B integers).
        batch_size: B; needed only where there is no source.
        requests: which of the histories each of the B samples has, where they share them (:mod:`gem_model.sharing`);
            the lengths are those of the R histories then.

    Raises:
        ValueError: when the sources do not fit, or the number of samples is unknown or not the same for all.
    """
    return sum(unit_flops(config, inputs, lengths, batch_size=batch_size, requests=requests).values())


def unit_flops(
    config: GemConfig,
    inputs: ModelInputs,
    lengths: Mapping[str, Iterable[int]],
    *,
    batch_size: int | None = None,
    requests: Iterable[int] | None = None,
) -> dict[str, int]:
    """The same by part, as the model's submodules are named: "features", "evidence", "evidence_tokens",
    "affinity", "events.<source>", "layers.<i>", "heads".
    """
    counts = {source: [int(n) for n in values] for source, values in lengths.items()}
    if set(counts) != {s.name for s in inputs.sources}:
        raise ValueError(f"expected lengths of the sources {[s.name for s in inputs.sources]}, got {sorted(counts)}")
    of = None if requests is None else [int(r) for r in requests]
    if of is not None and (len({len(values) for values in counts.values()}) > 1 or (batch_size or len(of)) != len(of)):
        raise ValueError(f"expected one number of histories for {len(of)} samples, and batch_size to be as many")
    # What each sample sees, be it its own or shared, and what there is to be worked on.
    seen = counts if of is None else {s: [values[r] for r in of] for s, values in counts.items()}
    sizes = {len(values) for values in seen.values()} | ({batch_size} if batch_size is not None else set())
    if len(sizes) != 1:
        raise ValueError(f"expected one number of samples, got {sorted(sizes) or 'none: give batch_size'}")
    batch = sizes.pop()
    c, d = config, config.width
    hidden = c.n_dense * d
    features = batch * len(inputs.sparse) * 2 * inputs.table_dim * d
    if inputs.dense:
        features += batch * 2 * hidden * (hidden if c.dense_buckets else inputs.dense + hidden)
    parts = {"features": features}
    wide, n_evidence = inputs.dense, 0
    if asked := [s for s in inputs.sources if c.evidence_heads and inputs.candidate_columns(s)]:
        n_evidence = len(asked) * c.evidence_heads
        wide += n_evidence * c.evidence_values
        parts["evidence"] = sum(_evidence(c, inputs, s, counts[s.name], seen[s.name]) for s in asked)
        parts["evidence_tokens"] = batch * n_evidence * 2 * c.evidence_values * d
    if compared := [s for s in inputs.sources if c.affinity_heads and inputs.candidate_columns(s)]:
        wide += len(compared) * c.affinity_heads
        parts["affinity"] = sum(_affinity(c, inputs, s, sum(counts[s.name]), batch) for s in compared)
    towers = c.sources_of(0, [s.name for s in inputs.sources])
    for source in inputs.sources:
        if source.name not in towers:
            continue
        tokens = sum(counts[source.name]) + (batch if inputs.candidate_columns(source) else 0)
        parts[f"events.{source.name}"] = 2 * tokens * source.event_width(inputs.table_dim) * c.of(source.name).width
    n_in = len(inputs.sparse) + (c.n_dense if inputs.dense else 0) + n_evidence
    for layer in range(c.layers):
        parts[f"layers.{layer}"] = _layer(c, inputs, counts, seen, batch, n_in, layer)
        n_in = c.n_tokens
    per_task = 2 * (c.n_tokens * d + wide) * c.head_hidden + 2 * c.head_hidden + 2 * wide
    parts["heads"] = batch * len(inputs.tasks) * per_task
    if c.reader and wide:
        sizes_read = (wide + len(inputs.sparse) * inputs.table_dim, *c.reader, len(inputs.tasks))
        parts["heads"] += batch * sum(2 * a * b for a, b in pairwise(sizes_read))
    return parts


def _evidence(c: GemConfig, inputs: ModelInputs, source: Source, lengths: list[int], seen: list[int]) -> int:
    """The evidence of one source."""
    events, batch = sum(lengths), len(seen)
    known, rest = inputs.evidence_widths(source)
    content = c.evidence_heads * (c.evidence_dim - PLACES)
    flops = (events + batch) * 2 * known * content  # k and q
    flops += events * 2 * rest * c.evidence_heads * c.evidence_values  # v
    return flops + sum(seen) * c.evidence_heads * 4 * c.evidence_dim


def _affinity(c: GemConfig, inputs: ModelInputs, source: Source, events: int, batch: int) -> int:
    """The signed agreements with one source."""
    known, rest = inputs.evidence_widths(source)
    return 2 * c.affinity_heads * ((events + batch) * known * c.evidence_dim + events * rest)


def _layer(
    c: GemConfig,
    inputs: ModelInputs,
    counts: Mapping[str, list[int]],
    seen: Mapping[str, list[int]],
    batch: int,
    n_in: int,
    layer: int,
) -> int:
    """One InterFormer layer with ``n_in`` non-sequence tokens."""
    d = c.width
    flops, n = 0, n_in
    present = c.sources_of(layer, [s.name for s in inputs.sources])
    if present:
        flops += batch * (2 * n_in * c.n_sum * d + 2 * c.n_sum * 2 * d * d)  # mix, then MLP and gating
    for source in inputs.sources:
        if source.name not in present:
            continue
        tower = c.of(source.name)
        n_cls = c.n_sum + bool(inputs.candidate_columns(source))
        n_summary = n_cls + c.pma_queries + c.recent
        n += n_summary
        flops += _tower(tower, counts[source.name], seen[source.name], n_cls, events_attend=c.events_attend(layer))
        flops += batch * n_summary * 2 * tower.width**2  # gating
        if tower.width != d:
            flops += batch * (c.n_sum + n_summary) * 2 * tower.width * d  # enter and leave
    flops += sum(_expert(kind, c, batch, n) for kind in c.experts or ("wukong",))
    return flops + batch * 2 * n * d * c.n_tokens  # proj


def _expert(kind: str, c: GemConfig, batch: int, n: int) -> int:
    """An interaction of ``n`` tokens, without its residual."""
    d, mix = c.width, 2 * n * c.width * c.n_tokens
    if kind == "dcn":
        return batch * (2 * 2 * n * d * c.cross_rank + mix)
    if kind == "attention":
        return batch * (4 * 2 * n * d * d + 4 * d * n * n + mix)  # projections; Q K^T and P V
    hidden = c.interaction_hidden * d
    flops = 2 * (2 * n * d * c.interaction_rank)  # X^T Y and X (X^T Y)
    flops += 2 * n * c.interaction_rank * hidden + 2 * hidden * c.interaction_fm * d
    return batch * (flops + 2 * n * d * (c.n_tokens - c.interaction_fm))  # LCB


def _tower(c: GemConfig, lengths: list[int], seen: list[int], n_cls: int, *, events_attend: bool) -> int:
    """The sequence layer with CLS tokens, PMA over one source; lengths are the histories', seen are the samples'."""
    d, events, batch, histories = c.width, sum(lengths), len(seen), len(lengths)
    hstu = c.sequence_layer == "hstu"
    flops = 0 if hstu else events * 3 * 2 * d * c.ff_hidden
    if c.pffn_tokens and not hstu:
        flops += events * 2 * 2 * d * d  # q and out
        flops += histories * (c.n_sum * 2 * d * 2 * d + c.pffn_tokens * 2 * (c.n_sum + 1) * 2 * d)  # K, V of X_sum
        flops += events * c.pffn_tokens * 4 * d
    flops += events * 2 * 2 * d * d + batch * n_cls * (2 + hstu) * 2 * d * d  # k and v; q, out and HSTU's u of CLS
    flops += 4 * d * n_cls * sum(seen)
    if events_attend:
        flops += events * (2 + hstu) * 2 * d * d  # q, out and u
        flops += 4 * d * sum(visible_pairs(n, causal=c.causal, window=c.window, block=c.block) for n in lengths)
    if queries := c.pma_seeds or c.pma_queries:
        flops += events * 2 * 2 * d * d + histories * queries * 2 * d * d  # kv and out
        flops += 4 * d * queries * events
    if c.pma_seeds:
        flops += histories * c.pma_queries * 2 * 2 * d * (c.pma_seeds + d)  # the two Kronecker terms
    return flops


def visible_pairs(length: int, *, causal: bool, window: int | None, block: int | None = None) -> int:
    """How many (query, key) pairs of a history of ``length`` events see each other."""
    if block is not None:
        whole, rest = divmod(length, block)
        return whole * block**2 + rest**2
    reach = length - 1 if window is None else min(window, length - 1)
    if length == 0:
        return 0
    before = reach * length - reach * (reach + 1) // 2  # pairs with the key 1 to `reach` places before the query
    return length + before * (1 if causal else 2)
