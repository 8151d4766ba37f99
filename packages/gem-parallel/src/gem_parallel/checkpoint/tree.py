"""A nested dict split into tensors, plain values and values of one rank, and put together again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

Path = tuple[Any, ...]


@dataclass
class PerRank:
    """A value of which every rank has its own, such as the state of a random generator."""

    value: Any


def split(state: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[Path, Any], dict[Path, Any]]:
    """(tensors by joined path, plain values by path, PerRank values by path).

    A sub-dict without tensors and PerRank values is one plain value.

    Raises:
        TypeError: two tensors whose joined paths are equal, or a distributed tensor inside a list or tuple.
    """
    tensors: dict[str, Any] = {}
    plain: dict[Path, Any] = {}
    own: dict[Path, Any] = {}

    def visit(path: Path, value: Any) -> None:
        if isinstance(value, torch.Tensor | ShardedTensor):
            name = join(path)
            if name in tensors:
                raise TypeError(f"two tensors of the state have the path {name!r}")
            tensors[name] = value
        elif isinstance(value, PerRank):
            own[path] = value.value
        elif isinstance(value, dict) and (len(path) == 0 or _has_leaves(value)):
            for key, child in value.items():
                visit((*path, key), child)
        else:
            _check(path, value)
            plain[path] = value

    visit((), dict(state))
    return tensors, plain, own


def merge(state: dict[Any, Any], saved: Mapping[Path, Any], asked: Mapping[Path, Any]) -> list[str]:
    """Write the saved values into `state` (under the top-level keys that it has); names of `asked` without a value."""
    for path, value in saved.items():
        if path[0] not in state:
            continue
        place = state
        for key in path[:-1]:
            if not isinstance(place.get(key), dict):
                place[key] = {}
            place = place[key]
        if isinstance(place.get(path[-1]), PerRank):
            place[path[-1]].value = value
        else:
            place[path[-1]] = value
    return [join(path) for path in asked if path not in saved]


def join(path: Path) -> str:
    """The path as a name."""
    return "/".join(map(str, path))


def _has_leaves(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_leaves, value.values()))
    return isinstance(value, torch.Tensor | ShardedTensor | PerRank)


def _check(path: Path, value: Any) -> None:
    if isinstance(value, DTensor | ShardedTensor | PerRank):
        raise TypeError(
            f"{join(path)}: a {type(value).__name__} inside a list; put it in a dict, so that it has a name"
        )
    if isinstance(value, list | tuple):
        for child in value:
            _check(path, child)
    elif isinstance(value, dict):
        for child in value.values():
            _check(path, child)
