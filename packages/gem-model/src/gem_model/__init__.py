"""The GEM model: sequence towers, Wukong interaction, interleaved layers, multi-task heads.

Names that need torch are imported when they are first asked for, so that the configuration alone stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gem_model.__about__ import __version__
from gem_model.config import GemConfig, ModelInputs, Source, Table, TowerConfig
from gem_model.flops import batch_flops
from gem_model.presets import preset

if TYPE_CHECKING:
    from gem_model.batch import BatchLike, IdsLike, SequenceLike
    from gem_model.gem import GEM

__all__ = [
    "GEM",
    "BatchLike",
    "GemConfig",
    "IdsLike",
    "ModelInputs",
    "SequenceLike",
    "Source",
    "Table",
    "TowerConfig",
    "__version__",
    "batch_flops",
    "preset",
]

_LAZY = {
    "GEM": "gem_model.gem",
    "BatchLike": "gem_model.batch",
    "IdsLike": "gem_model.batch",
    "SequenceLike": "gem_model.batch",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
