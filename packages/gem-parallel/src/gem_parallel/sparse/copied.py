"""V2: every group trains its own full copy of the tables; copies are averaged every n steps.

With M groups, row-wise AdaGrad divides the moment by M (Zhang et al. 2025, "Two-dimensional sparse parallelism"):

    w <- w - lr g / (sqrt(v / M) + eps) = w - (lr sqrt(M)) g / (sqrt(v) + eps sqrt(M))

so that TorchRec's fused kernel computes it with another lr and eps. Weights and moments are both averaged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gem_parallel.sparse.groups import TableGroups, flat_weights, kernels, table_batch


class CopiedTables:
    """Counts backward passes and averages the copies after every `every`-th."""

    def __init__(self, modules: Iterable[nn.Module], groups: TableGroups, every: int) -> None:
        self.every = every
        self.passes = 0
        self.groups = groups
        self._kernels = [kernel for module in modules for kernel in kernels(module)]
        self._counted = False
        for kernel in self._kernels:
            table_batch(kernel).register_forward_hook(self._after_lookup)

    def begin(self) -> None:
        """Called before a forward pass: forgets a backward pass that failed."""
        self._counted = False

    @torch.no_grad()
    def synchronize(self) -> None:
        """Average weights and moments over the copies, now. Called by all ranks together."""
        for tensor in self._tensors():
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=self.groups.copies_group)

    def _tensors(self) -> list[torch.Tensor]:
        found = []
        for kernel in self._kernels:
            found.append(flat_weights(kernel).detach())
            found += [state for states in table_batch(kernel).get_optimizer_state() for state in states.values()]
        return [tensor for tensor in found if tensor.numel()]

    def _after_lookup(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(self._in_backward)

    def _in_backward(self, gradient: torch.Tensor) -> None:
        if not self._counted:  # the first of this rank's kernels; the callback runs when the whole pass is done
            self._counted = True
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)  # type: ignore[attr-defined]

    def _after_backward(self) -> None:
        self._counted = False
        self.passes += 1
        if self.passes % self.every == 0:
            self.synchronize()
