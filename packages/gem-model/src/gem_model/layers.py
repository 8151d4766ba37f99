"""The interleaved layers, one after the other; in training they may be replayed from CUDA graphs (replay.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from gem_model.casting import cast_once
from gem_model.history import History
from gem_model.lanes import Lanes

Inputs = tuple[Tensor, dict[str, History], dict[str, Tensor]]  # X [B, N, d], histories and CLS tokens by source


class Replaying(Protocol):
    """What can run the layers in training."""

    def __call__(self, x: Tensor, histories: dict[str, History], cls: dict[str, Tensor], /) -> Tensor:
        """As `Layers.through`."""

    def forget(self) -> None:
        """Let go of all memory."""


class Layers(nn.ModuleList):
    """X_0, S_0 -> X_L: the last layer's non-sequence tokens.

    Attributes:
        replay: what runs the layers in training in the place of :meth:`through`, or None.
        lanes: the streams that the histories are captured on.
    """

    replay: Replaying | None

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__(layers)
        self.replay = None
        self.lanes = Lanes()

    def forward(self, x: Tensor, histories: dict[str, History], cls: dict[str, Tensor]) -> Tensor:
        """X [B, N, d], histories and CLS tokens [B, C, d] by source -> X [B, N, d]."""
        shared = any(h.requests is not None for h in histories.values())  # in shapes that differ from batch to batch
        if self.replay is not None and self.training and torch.is_grad_enabled() and not shared:
            return self.replay(x, histories, cls)
        return self.through(x, histories, cls)

    def through(self, x: Tensor, histories: dict[str, History], cls: dict[str, Tensor]) -> Tensor:
        """As `forward`, layer by layer; in a capture, each history on a stream of its own (lanes.py)."""
        lanes = self.lanes.open(histories, x)
        if not lanes:
            return self._through(x, histories, cls)
        with cast_once(self, x) as halves:  # all weights at once: a history need not wait for those of its next layer
            for lane in lanes.values():
                lane.takes(*halves)
                lane.stream.wait_stream(torch.cuda.current_stream(x.device))
            return self._through(x, {s: replace(h, lane=lanes[s]) for s, h in histories.items()}, cls)

    def _through(self, x: Tensor, histories: dict[str, History], cls: dict[str, Tensor]) -> Tensor:
        for layer in self:
            x, histories, cls = layer(x, histories, cls)
        return x


@contextlib.contextmanager
def one_by_one(model: nn.Module) -> Iterator[None]:
    """Within the block every layer of `model` is called as a module, with its hooks, also where graphs would run it.

    The graphs' memory is let go of; the next batch after the block captures them anew.
    """
    found = [m for m in model.modules() if isinstance(m, Layers)]
    held = [layers.replay for layers in found]
    for layers in found:
        if layers.replay is not None:
            layers.replay.forget()
        layers.replay = None
    try:
        yield
    finally:
        for layers, replay in zip(found, held, strict=True):
            layers.replay = replay
