"""An exponential moving average of the dense weights, to be tested in their place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from gem_parallel import ParallelModel
from torch import Tensor


class Average:
    """a_t = decay_t a_(t-1) + (1 - decay_t) w_t over the updates t = 1, 2, ..., decay_t = min(decay, t / (t + 9)).

    The rising decay keeps the initial weights from lasting (as in TensorFlow's ExponentialMovingAverage). Each rank
    averages its own shards, in the parameters' dtype. Tables are left out: a second copy of them would not fit where
    they matter, and rows are seldom updated.
    """

    def __init__(self, model: ParallelModel, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self._live = dict(model.named_dense_parameters())
        self.tensors: dict[str, Tensor] = {name: p.detach().clone() for name, p in self._live.items()}
        self._averaged = False

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of one more update into the average."""
        assert not self._averaged, "the average is in the model's place"
        self.updates += 1
        decay = min(self.decay, self.updates / (self.updates + 9))
        ours = [_local(t) for t in self.tensors.values()]
        torch._foreach_lerp_(ours, [_local(self._live[name]) for name in self.tensors], 1.0 - decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the model has the averaged weights."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the model's weights with the average."""
        self._averaged = not self._averaged
        for name, tensor in self.tensors.items():
            mine, theirs = _local(tensor), _local(self._live[name])
            kept = mine.clone()
            mine.copy_(theirs)
            theirs.copy_(kept)

    def state(self) -> dict[str, Any]:
        """The live tensors and the count, for a checkpoint; `load` takes the count, the tensors are filled in place."""
        return {"updates": self.updates, "tensors": self.tensors}


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or the tensor itself."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()
