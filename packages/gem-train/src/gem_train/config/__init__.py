"""The configuration of a run: frozen dataclasses, read from TOML, changed by `a.b=c`, written back without loss."""

from gem_train.config.lowprec import LowprecConfig
from gem_train.config.run import DataConfig, InputsConfig, OptimConfig, RunConfig, TrainConfig
from gem_train.config.tree import differences, from_dict, from_toml, leaves, override, to_dict, to_toml

__all__ = [
    "DataConfig",
    "InputsConfig",
    "LowprecConfig",
    "OptimConfig",
    "RunConfig",
    "TrainConfig",
    "differences",
    "from_dict",
    "from_toml",
    "leaves",
    "override",
    "to_dict",
    "to_toml",
]
