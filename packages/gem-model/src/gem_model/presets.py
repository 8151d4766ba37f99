"""Shapes worth having a name."""

from __future__ import annotations

import dataclasses
from typing import Any

from gem_model.config import GemConfig, _known

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
    # Several GPUs; head dim 128, as the fastest kernels want it.
    "large": {"width": 512, "heads": 4, "layers": 8, "n_tokens": 40, "n_dense": 8, "n_sum": 16, "pma_queries": 32,
              "recent": 16, "pffn_tokens": 256, "interaction_rank": 64, "interaction_fm": 20, "head_hidden": 512},
}  # fmt: skip


def preset(name: str, **changes: Any) -> GemConfig:
    """The preset called ``name`` with some fields changed.

    Raises:
        ValueError: for an unknown preset or field.
    """
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is {_known(name, PRESETS)}")
    fields = [f.name for f in dataclasses.fields(GemConfig)]
    for change in changes:
        if change not in fields:
            raise ValueError(f"GemConfig field {change!r} is {_known(change, fields)}")
    return GemConfig(**{**PRESETS[name], **changes})
