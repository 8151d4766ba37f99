"""What each baseline is trained with on each recipe, where that differs from GEM's settings. Tuned on validation alone.

`gem-train compare` reads this. A recipe that is not here trains every baseline in its own shape with the recipe's
settings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """Fields of the baseline's own configuration, and settings of the run such as "optim.lr=1e-3"."""

    model: dict[str, Any] = field(default_factory=dict)
    run: tuple[str, ...] = ()


_CALM = (  # models without evidence over-fit MovieLens-100K in the second epoch at GEM's rates, and by demographics
    "inputs.exclude=user,age,gender,occupation",
    "optim.lr=1e-3",
    "optim.weight_decay=0.3",
    "optim.sparse_lr=0.05",
    "optim.ema_decay=none",
    "optim.schedule=cosine",
    "optim.sparse_schedule=cosine",
    "optim.final_ratio=0.05",
    "optim.warmup_steps=30",
    "train.epochs=2",
)

_DIN = (  # with a norm before its MLP, and averaged weights, it takes more
    *_CALM,
    "optim.lr=3e-3",
    "optim.weight_decay=0.1",
    "optim.sparse_lr=0.1",
    "optim.ema_decay=0.99",
    "train.epochs=3",
)

TUNED: dict[str, dict[str, Tuned]] = {
    "ml100k": {
        **dict.fromkeys(("dlrm", "deepfm", "dcnv2", "wukong", "sasrec", "hstu"), Tuned(run=_CALM)),
        "din": Tuned(run=_DIN),
    },
}


def tuned(recipe: str, name: str) -> Tuned:
    """The settings of one contender on one recipe."""
    return TUNED.get(recipe, {}).get(name, Tuned())
