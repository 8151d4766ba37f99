"""Recipes: functions that return a RunConfig; the built-in ones and those of the entry points in `gem_train.recipes`.

Another distribution adds one without touching this package, in its pyproject.toml:

    [project.entry-points."gem_train.recipes"]
    ours = "our_package.recipes:ours"
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from gem_train.config import RunConfig
from gem_train.config.tree import suggest
from gem_train.errors import UserError

GROUP = "gem_train.recipes"
BUILT_IN = (
    "clicks10m",
    "large",
    "log",
    "ml100k",
    "openbandit",
    "synthetic",
)  # there also in a source tree that is not installed and so has no entry points


def names() -> list[str]:
    """All registered recipes, sorted."""
    return sorted(_registered())


def load(name: str) -> RunConfig:
    """The configuration of the recipe `name`. Raises UserError, with the closest name, where there is none."""
    config = _function(name)()
    if not isinstance(config, RunConfig):
        raise UserError(f"the recipe {name!r} returned a {type(config).__name__}; expected a RunConfig")
    return dataclasses.replace(config, recipe=name)


def summary(name: str) -> str:
    """The first line of the recipe's docstring."""
    return (inspect.getdoc(_function(name)) or "").partition("\n")[0]


def _function(name: str) -> Callable[[], RunConfig]:
    registered = _registered()
    if name not in registered:
        raise UserError(f"unknown recipe {name!r}{suggest(name, registered)} (there are: {', '.join(names())})")
    try:
        function: Callable[[], RunConfig] = registered[name].load()
    except (ImportError, AttributeError) as error:
        raise UserError(f"the recipe {name!r} ({registered[name].value}) cannot be loaded: {error}") from error
    return function


def _registered() -> dict[str, EntryPoint]:
    built_in = [EntryPoint(name=name, value=f"{__name__}.builtin:{name}", group=GROUP) for name in BUILT_IN]
    return {point.name: point for point in (*built_in, *entry_points(group=GROUP))}
