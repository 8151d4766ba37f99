"""Variants of the Hopper forward that nobody chooses: the attention and gdpa suites gate and time them with `--trials`,
until a card has shown them right and faster, or they go.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gem_kernels.bench.cases import Case

if TYPE_CHECKING:
    from gem_kernels.bench.suite import Problem

WINDOWS = ("across", "own loader", "rolling")


def names(case: Case, act: str | None) -> list[str]:
    """What `make` gives for a case."""
    from gem_kernels.hopper import launch

    left, right = case.window
    if case.bias or (act is not None and act.endswith("_poly")):
        return []
    if left >= 0 and right == 0 and case.dim in (64, 128):
        return [f"trial window {name}" for name in WINDOWS]
    if max(left, right) >= 0 or case.dim not in (64, 128):
        return []
    return [f"trial {name}" for name in launch.TRIALS]


def make(p: Problem) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """The variants of a problem, by name: calls that give O."""
    from gem_kernels.hopper import launch, window_across, window_rolling

    act: dict[str, Any] = {"act": p.act or "softmax", "out_scale": 1.0}

    def whole(config: launch.ForwardConfig) -> Tensor:
        return launch.forward(p.q, p.k, p.v, *p.where, p.scale, config=config, **act)[0]

    def window(kind: str) -> Tensor:
        arguments = p.q, p.k, p.v, p.k_offsets, p.scale, p.case.window[0]
        if kind == "rolling":
            return window_rolling.forward(*arguments, **act)[0]
        return window_across.forward(*arguments, across=kind == "across", **act)[0]

    for name in names(p.case, p.act):
        kind = name.removeprefix("trial ")
        if kind.startswith("window "):
            yield name, functools.partial(window, kind.removeprefix("window "))
        else:
            yield name, functools.partial(whole, launch.TRIALS[kind])
