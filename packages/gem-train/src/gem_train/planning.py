"""A configuration as gem_parallel's planner sees it: FLOPs, parameters, activations and tables, without the weights.

FLOPs, lengths of the histories and ids per sample are averages over rows of the training split; parameters are counted
on a model without memory ("meta"), and so are the copies of them that replayed layers keep. What the backward pass
keeps is an estimate (`activations`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import tomli_w
import torch
from gem_data import Collator, JaggedBatch
from gem_lowprec import convert, plan_gathers
from gem_model import GEM, GemConfig, ModelInputs
from gem_model.flops import unit_flops
from gem_model.replay_sharded import Weights
from gem_model.roles import roles
from gem_parallel import LayerSpec, ModelSpec, TableSpec
from gem_parallel.planning.layout import Layout

from gem_train import graphs
from gem_train.assemble import lowprec_recipe
from gem_train.config import RunConfig
from gem_train.data import Data
from gem_train.inputs import model_inputs

SAMPLES = 1024  # training rows that stand for all of them
# Bytes of a kept number. In bf16 fitted to the preset large on an H200, which keeps 321 MiB a sample with half-filled
# histories (docs/benchmarks/earlier/memory-large-h200-2026-11-30.json): fused kernels keep less than `activations`
# counts.
KEPT_BYTES = {"fp32": 4.0, "bf16": 1.85}
INPUTS = "inputs"  # the unit that holds what belongs to none: embeddings to tokens


def describe_model(config: RunConfig, data: Data, *, precision: str) -> ModelSpec:
    """The model of `config` on `data`; `precision` is "fp32" or "bf16" (autocast, parameters stay float32).

    With the latter, which means cards, several of them replay the layers from CUDA graphs where they can.
    """
    inputs = model_inputs(data.schema, config.inputs, max_history=config.data.max_history)
    batch = sample(data, config.data.max_history)
    replayed = precision == "bf16" and not why_launched(config, inputs)
    spec = describe(config.recipe, config.model, inputs, batch, precision=precision, replayed=replayed)
    if config.parallel.comm.payload == "fp8":  # a byte each, and scales
        return dataclasses.replace(spec, gather_bytes=1)
    return _with_gathers(spec, config, inputs) if config.parallel.comm.payload == "lowprec" else spec


def describe(
    name: str, config: GemConfig, inputs: ModelInputs, batch: Any, *, precision: str, replayed: bool = False
) -> ModelSpec:
    """The same of a model's shape and any batch of its inputs, which stands for all of them.

    `replayed`: several devices replay the layers from CUDA graphs.
    """
    count = len(batch.labels)
    lengths = {s.name: batch.sequences[s.name].offsets.diff().tolist() for s in inputs.sources}
    units = [*(f"layers.{i}" for i in range(config.layers)), "heads"]
    flops = flops_of_units(config, inputs, lengths, count, units)
    model = GEM(config, inputs, device="meta")
    params, of_experts = (parameters(model, units, role) for role in ("dense", "expert"))
    spread: dict[str, dict[str, Any]] = {}
    if n := len(config.experts):  # the planner's are all alike: the mean of these
        twice = flops_of_units(dataclasses.replace(config, experts=config.experts * 2), inputs, lengths, count, units)
        for unit in (unit for unit in units if of_experts[unit]):
            mixing: Any = model.get_submodule(f"{unit}.interaction.proj")
            tokens = mixing.weight.shape  # [M, N]: [B, N, d] -> [B, M, d]
            spread[unit] = {
                "experts": n,
                "expert_params": of_experts[unit] // n,
                "expert_flops": (twice[unit] - flops[unit]) / n,
                "expert_io_bytes": float(sum(tokens) * config.width * (2 if precision == "bf16" else 4)),
            }
            params[unit] += of_experts[unit] % n
            flops[unit] -= twice[unit] - flops[unit]
    copies = kept_parameters(model, precision) if replayed else {}
    means = {source: float(np.mean(n)) for source, n in lengths.items()}
    kept = activations(config, inputs, means)
    return ModelSpec(
        name=name,
        layers=tuple(
            LayerSpec(
                name=unit,
                flops=flops[unit],
                params=params[unit],
                activation_bytes=kept[unit] * KEPT_BYTES[precision],
                kept_bytes=copies.get(unit, 0.0),
                **spread.get(unit, {}),
            )
            for unit in flops
        ),
        tables=tables(inputs, batch),
        gather_bytes=4,  # autocast computes in bfloat16, but gathers float32 parameters
        input_bytes=_bytes(batch) / count,
    )


def _with_gathers(spec: ModelSpec, config: RunConfig, inputs: ModelInputs) -> ModelSpec:
    """The same model with weights that travel as FP8 and scales, each unit's mean of all its parameters.

    How many ranks shard a weight is what the planner is to find: where `parallel.shard_group` doesn't say it, every
    weight of whole blocks counts as divisible.
    """
    model = GEM(config.model, inputs, device="meta")
    ranks = config.parallel.shard_group or 1
    convert(model, lowprec_recipe(config))
    saved = {unit.name: 0 for unit in spec.layers}
    for row in plan_gathers(model, ranks).rows:
        if row.payload is not None:
            unit = next((name for name in saved if row.name.startswith(f"{name}.")), INPUTS)
            saved[unit] += spec.gather_bytes * row.shape[0] * row.shape[1] - ranks * row.nbytes
    params = {u.name: u.params + u.experts * u.expert_params for u in spec.layers}
    layers = tuple(
        dataclasses.replace(u, gather_bytes=spec.gather_bytes - saved[u.name] / max(params[u.name], 1))
        for u in spec.layers
    )
    return dataclasses.replace(spec, layers=layers)


def without_graphs(spec: ModelSpec) -> ModelSpec:
    """The same model where layers are launched kernel by kernel, which takes no copies of their parameters."""
    return dataclasses.replace(spec, layers=tuple(dataclasses.replace(u, kept_bytes=0.0) for u in spec.layers))


def planned_units(rows: Iterable[Mapping[str, Any]], units: Sequence[str]) -> list[dict[str, Any]]:
    """Measurements of a model's parts alone, as `gem_parallel.Profile` takes them, with those of the parts that belong
    to no unit added up under the name that the planner knows."""
    found: dict[tuple[str, float], dict[str, Any]] = {}
    for row in rows:
        name = row["name"] if row["name"] in units else INPUTS
        sums = found.setdefault((name, row["batch"]), {"name": name, "batch": row["batch"]})
        for key in ("forward_ms", "backward_ms"):
            sums[key] = sums.get(key, 0.0) + row[key]
    return list(found.values())


def sample(data: Data, max_history: int) -> JaggedBatch:
    """Rows from all over the training split, with their histories."""
    rows = data.split.train
    chosen = rows[np.unique(np.linspace(0, len(rows) - 1, min(SAMPLES, len(rows))).astype(np.int64))]
    return Collator(data.log, max_history=max_history)(chosen)


def flops_of_units(
    config: GemConfig, inputs: ModelInputs, lengths: Mapping[str, list[int]], count: int, units: list[str]
) -> dict[str, float]:
    """Useful forward FLOPs of a sample in each unit, and in what belongs to none, from the lengths of `count`."""
    found = dict.fromkeys([INPUTS, *units], 0.0)
    for part, n in unit_flops(config, inputs, lengths, batch_size=count).items():
        found[part if part in found else INPUTS] += n / count
    return found


def parameters(model: GEM, units: list[str], kind: str) -> dict[str, int]:
    """Parameters with the role `kind` ("dense", "expert") in each unit, and in what belongs to none."""
    role, found = roles(model), dict.fromkeys([INPUTS, *units], 0)
    for name, parameter in model.named_parameters():
        if role[name] == kind:
            found[next((u for u in units if name.startswith(f"{u}.")), INPUTS)] += parameter.numel()
    return found


def kept_parameters(model: GEM, precision: str) -> dict[str, float]:
    """Bytes of the copies that each layer's graphs read where FSDP2 shards it (gem_model.replay_sharded)."""
    found = {}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        for i, layer in enumerate(model.layers):
            fixed = Weights(layer, torch.empty(0)).fixed  # on "meta", where the model is
            storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in fixed}
            found[f"layers.{i}"] = float(sum(s.nbytes() for s in storages.values()))
    return found


def why_launched(config: RunConfig, inputs: ModelInputs) -> str:
    """Why several cards would not replay the layers of this configuration, or "": `graphs.why_not`, before any run."""
    if config.train.cuda_graphs == "off":
        return "train.cuda_graphs is off"
    machine: Any = SimpleNamespace(device=torch.device("cuda"), world=2)
    conversion: Any = SimpleNamespace(recipe=lowprec_recipe(config))
    return graphs.why_not(config, GEM(config.model, inputs, device="meta"), conversion, machine)


def tables(inputs: ModelInputs, batch: Any) -> tuple[TableSpec, ...]:
    """The embedding tables, with the ids that a sample of `batch` looks up in each on average."""
    ids = dict.fromkeys([t.name for t in inputs.tables], 0)
    for source in inputs.sources:
        for _, table in source.ids:
            ids[table] += int(batch.sequences[source.name].offsets[-1])
    for feature, table in inputs.sparse:
        ids[table] += batch.sparse[feature].values.numel()
    return tuple(
        TableSpec(
            name=t.name,
            rows=t.rows,
            dim=t.dim,
            pooling=ids[t.name] / len(batch.labels),
            pooled=t.name not in inputs.row_tables,
        )
        for t in inputs.tables
    )


def activations(c: GemConfig, inputs: ModelInputs, lengths: Mapping[str, float]) -> dict[str, float]:
    """Numbers that each unit keeps of one sample for its backward pass, an estimate.

    Counted are the inputs of the matrix products and norms and what attention keeps (q, k, v, output); not the scores,
    which the kernels compute again, nor temporaries. `lengths` are mean events of a sample by source.
    """
    d = c.width
    dense_hidden = c.n_dense * d if inputs.dense else 0
    kept = {INPUTS: len(inputs.sparse) * (inputs.table_dim + 2 * d) + 3.0 * dense_hidden}
    for source in inputs.sources:
        if source.name in c.sources_of(0, [s.name for s in inputs.sources]):
            kept[INPUTS] += lengths[source.name] * (2 * source.event_width(inputs.table_dim) + c.of(source.name).width)
    n_in = len(inputs.sparse) + (c.n_dense if inputs.dense else 0)
    for source in inputs.sources:
        if c.evidence_heads and inputs.candidate_columns(source):
            keys_and_values = 2 * c.evidence_heads * c.evidence_dim
            kept[INPUTS] += lengths[source.name] * (sum(inputs.evidence_widths(source)) + keys_and_values)
            kept[INPUTS] += c.evidence_heads * (c.evidence_values + 2 * d)
            n_in += c.evidence_heads
    for layer in range(c.layers):
        present = c.sources_of(layer, [s.name for s in inputs.sources])
        total, n = float(c.n_sum * 5 * d + n_in * d) if present else 0.0, n_in
        for source in inputs.sources:
            if source.name in present:
                n_cls = c.n_sum + bool(inputs.candidate_columns(source))
                n += n_cls + c.pma_queries + c.recent
                total += _tower(c.of(source.name), lengths[source.name], n_cls, attend=c.events_attend(layer))
        experts = c.experts or ("wukong",)
        total += n * d + sum(_expert(kind, c, n) for kind in experts) + 2 * c.n_tokens * d
        kept[f"layers.{layer}"] = total
        n_in = c.n_tokens
    kept["heads"] = 2.0 * c.n_tokens * d + len(inputs.tasks) * 3 * c.head_hidden
    return kept


def _tower(c: GemConfig, events: float, n_cls: int, *, attend: bool) -> float:
    """Of one source in one layer; `c` is the tower's shape."""
    d = c.width
    event = 2 * d + 5 * c.ff_hidden  # PFFN: norm's input and output, gate, up, silu, product, its cast
    event += 2 * d if c.pffn_tokens else 0
    event += 2 * d + (6 * d if attend else 3 * d)  # norm; q and k rotated and not, v, output
    event += 4 * d if c.pma_queries else 0
    n_summary = n_cls + c.pma_queries + c.recent
    tokens = n_cls * 5 + n_summary * 6 + c.pffn_tokens * 3 + (c.pma_seeds or c.pma_queries) * 3
    return events * event + tokens * d


def _expert(kind: str, c: GemConfig, n: int) -> float:
    """Of one interaction of `n` tokens."""
    d = c.width
    if kind == "dcn":
        return n * (2 * d) + c.cross_rank
    if kind == "attention":
        return n * (6 * d)
    return n * (2 * d + 2 * c.interaction_rank) + d * c.interaction_rank + 2 * c.interaction_hidden * d


def settings(layout: Layout) -> list[str]:
    """The layout as `--set` assignments of `gem-train run`."""
    found = {
        "optim.accumulate": layout.parts,
        "parallel.shard_group": layout.fsdp,
        "parallel.experts": layout.ep,
        "parallel.table_strategy": layout.strategy,
        "parallel.table_copies": layout.table_copies,
        "parallel.table_copies_inside": str(layout.copies_inside).lower(),
        "parallel.table_sync_every": layout.sync_every,
        "parallel.reduce_every_part": str(layout.reduce_every_part).lower(),
    }
    return [f"{key}={value}" for key, value in found.items()]


def as_toml(spec: ModelSpec) -> str:
    """The description as TOML: what `python -m gem_parallel.planning` reads, to be edited by hand."""
    tree = dataclasses.asdict(spec)
    return tomli_w.dumps(tree | {key: list(tree[key]) for key in ("layers", "tables")})


def _bytes(value: Any) -> int:
    """Of all tensors in a batch."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(_bytes(v) for v in value.values())
    return sum(_bytes(v) for v in vars(value).values()) if hasattr(value, "__dict__") else 0
