"""Train, evaluate and report recommendation models of the GEM kind.

Names are imported when they are first asked for: `import gem_train` costs nothing, the configuration needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gem_train.__about__ import __version__

if TYPE_CHECKING:
    from gem_train.config import RunConfig, from_toml, override, to_toml
    from gem_train.errors import Interrupted, NonFiniteError, UserError
    from gem_train.report import write_report
    from gem_train.run import Outcome, execute, reevaluate
    from gem_train.run_dir import RunDir
    from gem_train.trainer import Trainer

_HOME = {
    "Interrupted": "errors",
    "NonFiniteError": "errors",
    "Outcome": "run",
    "RunConfig": "config",
    "RunDir": "run_dir",
    "Trainer": "trainer",
    "UserError": "errors",
    "execute": "run",
    "from_toml": "config",
    "override": "config",
    "reevaluate": "run",
    "to_toml": "config",
    "write_report": "report",
}

__all__ = [
    "Interrupted",
    "NonFiniteError",
    "Outcome",
    "RunConfig",
    "RunDir",
    "Trainer",
    "UserError",
    "__version__",
    "execute",
    "from_toml",
    "override",
    "reevaluate",
    "to_toml",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"gem_train.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
