"""What a model must beat on the same split, trained on the same batches.

Two are fitted: ``fit(batches)``, then ``baseline(batch) -> logits [B, K]``. The others are rankers with GEM's interface
(logits, ``loss``, ``units``, ``init_bias``, ``init_dense``, :func:`gem_model.roles.roles`), on GEM's own tables and
encoders. :func:`build` makes any of them by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from gem_model.baselines.base import BaselineConfig
from gem_model.baselines.constant import ConstantRate
from gem_model.baselines.dcnv2 import DCNv2, DCNv2Config
from gem_model.baselines.deepfm import DeepFM
from gem_model.baselines.din import DIN, DinConfig
from gem_model.baselines.dlrm import DLRM
from gem_model.baselines.hstu import HSTU
from gem_model.baselines.logistic import LogisticRegression
from gem_model.baselines.sasrec import SASRec
from gem_model.baselines.sequential import SequentialConfig
from gem_model.baselines.wukong import WukongConfig, WukongRanker
from gem_model.checks import unknown
from gem_model.config import ModelInputs
from gem_model.ranker import Ranker

FITTED: dict[str, type[Any]] = {"constant": ConstantRate, "logistic": LogisticRegression}
TRAINED: dict[str, tuple[type[Any], type[Any]]] = {  # name -> (configuration, model)
    "dlrm": (BaselineConfig, DLRM),
    "deepfm": (BaselineConfig, DeepFM),
    "dcnv2": (DCNv2Config, DCNv2),
    "wukong": (WukongConfig, WukongRanker),
    "din": (DinConfig, DIN),
    "sasrec": (SequentialConfig, SASRec),
    "hstu": (SequentialConfig, HSTU),
}


def config_of(name: str, **changes: Any) -> Any:
    """The configuration of the trained baseline ``name``, with some fields changed.

    Raises:
        ValueError: for an unknown name or field, or a value out of range.
    """
    if name not in TRAINED:
        raise ValueError(f"baseline {name!r} is {unknown(name, TRAINED)}")
    kind = TRAINED[name][0]
    fields = [f.name for f in dataclasses.fields(kind)]
    for change in changes:
        if change not in fields:
            raise ValueError(f"{kind.__name__} field {change!r} is {unknown(change, fields)}")
    return kind(**changes)


def build(
    name: str,
    config: Any = None,
    inputs: ModelInputs | None = None,
    *,
    device: torch.device | str | None = None,
) -> Ranker | ConstantRate | LogisticRegression:
    """The baseline called ``name``.

    Args:
        name: one of ``FITTED`` or ``TRAINED``.
        config: its configuration (see :func:`config_of`), a mapping of the fields to change, or None. For the fitted
            ones, a mapping of their arguments.
        inputs: what the batches hold; the fitted ones do not ask.
        device: where parameters are made, "meta" too.

    Raises:
        ValueError: for an unknown name or field, with what it may have meant.
        TypeError: for a configuration of another baseline, or where the inputs are missing.
    """
    if name in FITTED:
        return FITTED[name](**(config or {}))
    if name not in TRAINED:
        raise ValueError(f"baseline {name!r} is {unknown(name, (*FITTED, *TRAINED))}")
    kind, model = TRAINED[name]
    if config is None or isinstance(config, Mapping):
        config = config_of(name, **(config or {}))
    if type(config) is not kind:
        raise TypeError(f"baseline {name!r} takes a {kind.__name__} or a mapping of its fields, got {config!r}")
    if not isinstance(inputs, ModelInputs):
        raise TypeError(f"baseline {name!r} needs ModelInputs, got {inputs!r}")
    built: Ranker = model(config, inputs, device=device)
    return built


__all__ = [
    "DIN",
    "DLRM",
    "FITTED",
    "HSTU",
    "TRAINED",
    "BaselineConfig",
    "ConstantRate",
    "DCNv2",
    "DCNv2Config",
    "DeepFM",
    "DinConfig",
    "LogisticRegression",
    "SASRec",
    "SequentialConfig",
    "WukongConfig",
    "WukongRanker",
    "build",
    "config_of",
]
