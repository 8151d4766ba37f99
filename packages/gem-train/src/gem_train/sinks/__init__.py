"""Where the figures of a run go beside its folder: by name, from the entry points of the group `gem_train.sinks`.

A sink is made by a function `make(run: RunDir, config: RunConfig, argument: str) -> Sink`; `train.sinks` names it as
"name" or "name:argument". Another distribution adds one as it adds a recipe. Rank 0 alone has sinks; one that fails is
left out from then on, with a warning: no run ends because a dashboard did.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

from gem_train.config import RunConfig
from gem_train.config.tree import suggest
from gem_train.errors import UserError
from gem_train.run_dir import RunDir

GROUP = "gem_train.sinks"
BUILT_IN = ("prometheus", "tensorboard", "trackio", "wandb")
NEEDS = {"prometheus": "prometheus-client", "tensorboard": "tensorboard", "trackio": "trackio", "wandb": "wandb"}


class Sink(Protocol):
    """Takes figures as they come."""

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """The finite numbers of a record of metrics.jsonl: kind "step", "eval" or "progressive"; names like "a/ne"."""

    def close(self) -> None:
        """The run is over."""


class Sinks:
    """Several sinks as one that never fails."""

    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        self._sinks = dict(sinks)

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Hand a record to every sink that is left."""
        flat = flatten(values)
        for name, sink in list(self._sinks.items()):
            self._try(name, lambda sink=sink: sink.log(kind, step, flat))  # type: ignore[misc]

    def close(self) -> None:
        """Close every sink that is left; a second call does nothing."""
        for name, sink in list(self._sinks.items()):
            self._try(name, sink.close)
        self._sinks = {}

    def _try(self, name: str, call: Any) -> None:
        try:
            call()
        except Exception as error:  # of somebody else's client: anything
            del self._sinks[name]
            warnings.warn(f"the sink {name!r} failed and gets nothing from now on: {error}", stacklevel=3)


def make(specs: Sequence[str], run: RunDir, config: RunConfig) -> Sinks:
    """The sinks that `specs` ("name" or "name:argument") ask for.

    Raises UserError for an unknown name, or one whose client is not installed.
    """
    known = _registered()
    made: dict[str, Sink] = {}
    for spec in specs:
        name, _, argument = spec.partition(":")
        if name not in known:
            raise UserError(f"train.sinks: unknown sink {name!r}{suggest(name, known)} (there are: {', '.join(known)})")
        try:
            made[name] = known[name].load()(run, config, argument)
        except ImportError as error:
            hint = f"; pip install {NEEDS[name]}" if name in NEEDS else ""
            raise UserError(f"train.sinks: {name!r} cannot be loaded: {error}{hint}") from error
        except ValueError as error:
            raise UserError(f"train.sinks: {spec!r}: {error}") from error
    return Sinks(made)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers inside, nested names joined by "/"; a level called "tasks" adds none."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flatten(value, prefix if name == "tasks" else f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            found[f"{prefix}{name}"] = float(value)
    return found


def _registered() -> dict[str, EntryPoint]:
    built_in = [EntryPoint(name=n, value=f"{__name__}.{n}_sink:make", group=GROUP) for n in BUILT_IN]
    return {point.name: point for point in (*built_in, *entry_points(group=GROUP))}


def client(module: str) -> Any:
    """Import somebody's client; an ImportError names it."""
    return importlib.import_module(module)
