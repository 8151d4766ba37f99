"""Shapes worth having a name, and what each is meant to be fed with. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from gem_model.checks import unknown
from gem_model.config import GemConfig, ModelInputs, Source, Table

PRESETS: dict[str, dict[str, Any]] = {
    # For tests and for looking at: trains in seconds.
    "tiny": {"width": 16, "heads": 2, "layers": 1, "n_tokens": 8, "n_dense": 2, "n_sum": 2, "pma_queries": 2,
             "recent": 2, "pffn_tokens": 4, "interaction_rank": 4, "interaction_fm": 4, "head_hidden": 16},
    # A laptop's CPU: 100,000 samples with histories of 50 in about a minute an epoch.
    "small": {"width": 48, "heads": 2, "layers": 2, "n_tokens": 12, "n_sum": 3, "pma_queries": 2, "recent": 3,
              "interaction_fm": 6, "ff_mult": 1.0, "self_attention_every": 2, "dropout": 0.1},
    # One GPU.
    "base": {"width": 256, "heads": 4, "layers": 4, "n_tokens": 24, "n_dense": 8, "n_sum": 8, "pma_queries": 8,
             "recent": 8, "pffn_tokens": 64, "interaction_rank": 16, "interaction_fm": 12, "head_hidden": 256},
    # A GPU of 141 GB and more; head dim 128, as the fastest kernels want it; Kunlun's pooling of 256 seeds.
    "large": {"width": 512, "heads": 4, "layers": 8, "n_tokens": 40, "n_dense": 8, "n_sum": 16, "pma_queries": 32,
              "pma_seeds": 256, "recent": 16, "pffn_tokens": 256, "interaction_rank": 64, "interaction_fm": 20,
              "head_hidden": 512, "qk_norm": True},
    # For the planner: a trillion parameters with its workload's tables, experts for eight GPUs of a host.
    "gem-1t": {"width": 2048, "heads": 16, "layers": 24, "n_tokens": 64, "n_dense": 16, "n_sum": 32,
               "pma_queries": 32, "pma_seeds": 256, "recent": 32, "pffn_tokens": 256, "ff_mult": 3.0,
               "interaction_rank": 128, "interaction_fm": 32, "cross_rank": 1024, "self_attention_every": 2,
               "experts": ("wukong",) * 8, "window": 512, "qk_norm": True, "head_hidden": 2048},
}  # fmt: skip


def preset(name: str, **changes: Any) -> GemConfig:
    """The preset called ``name`` with some fields changed.

    Raises:
        ValueError: for an unknown preset or field.
    """
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is {unknown(name, PRESETS)}")
    fields = [f.name for f in dataclasses.fields(GemConfig)]
    for change in changes:
        if change not in fields:
            raise ValueError(f"GemConfig field {change!r} is {unknown(change, fields)}")
    return GemConfig(**{**PRESETS[name], **changes})


def shape(text: str) -> GemConfig:
    """The preset that a text names, with changes to its numbers: "base", "tiny+width=32+dropout=0.1".

    Raises:
        ValueError: for an unknown preset or field, or what is no number.
    """
    name, *changes = text.split("+")
    fields: dict[str, int | float] = {}
    for change in changes:
        field, _, value = change.partition("=")
        try:
            fields[field] = float(value) if "." in value else int(value)
        except ValueError:
            raise ValueError(f"shape {text!r} has {change!r}; expected a field and a number, as in width=32") from None
    return preset(name, **fields)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a preset is meant for: its inputs, the samples of a GPU's step, the longest history of each source."""

    inputs: ModelInputs
    batch: int
    longest: dict[str, int]

    def lengths(self) -> dict[str, list[int]]:
        """Half-filled histories: the lengths of the batch's samples, evenly from 1 to the longest, by source."""
        n = self.batch
        return {s: [1 + (top - 1) * i // max(n - 1, 1) for i in range(n)] for s, top in self.longest.items()}


# rows of the item, user and other tables, dim; batch; longest impressions and searches; dense features; tasks
_SIZES: dict[str, tuple[tuple[int, int, int], int, int, tuple[int, int], int, int]] = {
    "tiny": ((1_000, 1_000, 100), 8, 32, (16, 8), 8, 2),
    "small": ((20_000, 20_000, 100), 16, 512, (50, 50), 30, 2),
    "base": ((10_000_000, 10_000_000, 10_000), 64, 1024, (512, 256), 64, 4),
    "large": ((50_000_000, 100_000_000, 100_000), 64, 1024, (2048, 1024), 256, 4),
    "gem-1t": ((2_000_000_000, 1_800_000_000, 10_000_000), 256, 1024, (8192, 2048), 512, 8),
}


def workload(name: str) -> Workload:
    """Two histories (impressions with surface and action, searches with a query), ten further features, dense floats.

    Raises:
        ValueError: for an unknown preset.
    """
    if name not in _SIZES:
        raise ValueError(f"preset {name!r} is {unknown(name, _SIZES)}")
    (items, users, others), dim, batch, (impressions, searches), dense, tasks = _SIZES[name]
    features = tuple(f"feature{i}" for i in range(10))
    rows = {"item": items, "user": users, "query": items // 4, "surface": 32, "action": 64} | dict.fromkeys(
        features, others
    )
    inputs = ModelInputs(
        tables=tuple(Table(name=n, rows=r, dim=dim) for n, r in rows.items()),
        sources=(
            Source(
                name="impressions",
                ids=(("item", "item"), ("surface", "surface"), ("action", "action")),
                max_len=impressions,
            ),
            Source(name="searches", ids=(("query", "query"), ("item", "item")), max_len=searches),
        ),
        sparse=(("user", "user"), ("item", "item"), ("surface", "surface"), *((f, f) for f in features)),
        dense=dense,
        tasks=tuple(f"task{k}" for k in range(tasks)),
    )
    return Workload(inputs=inputs, batch=batch, longest={"impressions": impressions, "searches": searches})
