"""Functions by name: how a configuration, which is text, refers to somebody's code."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def function(name: str) -> Callable[..., Any]:
    """The function "package.module:name". Raises ValueError where there is none."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f"{name!r} is no function's name; expected package.module:function")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r} cannot be loaded: {error}") from error
    if not callable(found):
        raise ValueError(f"{name!r} is a {type(found).__name__}; expected a function")
    result: Callable[..., Any] = found
    return result
