"""Experts by activations: one expert (or a few) of an ensemble per rank of the "ep" axis, every sample visits them all.

    all-gather of the ensemble's inputs -> the local experts on the whole group's batch -> reduce-scatter of the outputs

and mirrored in backward: all-gather of the output gradients, local backward, reduce-scatter of the input gradients. It
is not token routing. An ensemble is a module whose only child is a ModuleList `experts` and whose output is the sum

    y(x_1, ...) = sum_i experts[i](x_1, ...),    x_j [B, ...] -> y [B, ...]

The gradient of a local expert sums over the ep-fold batch while FSDP averages over world / ep ranks: output gradients
are divided by ep on their way in and input gradients multiplied by it on their way out, so that all gradients are those
of the mean over the world.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gem_parallel.config import ParallelConfig
from gem_parallel.runtime import Runtime

_EXPERT = re.compile(r"(?P<ensemble>.+)\.experts\.(?P<index>\d+)\.")


def make_expert_mesh(runtime: Runtime, config: ParallelConfig) -> DeviceMesh | None:
    """The ranks as ("replicate", "efsdp", "ep"), ep innermost; None when config.experts is 1.

    Raises:
        ValueError: config.experts does not divide the shard group.
    """
    if config.experts == 1:
        return None
    shard = config.shard_group or runtime.world
    if shard % config.experts:
        raise ValueError(
            f"ParallelConfig.experts = {config.experts} does not divide the shard group of {shard} ranks; "
            f"choose one of {[d for d in range(1, shard + 1) if shard % d == 0]}"
        )
    shape = (runtime.world // shard, shard // config.experts, config.experts)
    return init_device_mesh(runtime.device.type, shape, mesh_dim_names=("replicate", "efsdp", "ep"))


def find_ensembles(model: nn.Module, roles: Mapping[str, str]) -> list[str]:
    """Names of the modules whose experts carry the role "expert".

    Raises:
        ValueError: an expert parameter outside an ensemble, or an ensemble with something beside its experts.
    """
    found: dict[str, None] = {}
    for name, role in roles.items():
        if role != "expert":
            continue
        match = _EXPERT.match(name)
        if match is None:
            raise ValueError(
                f"parameter {name!r} has role 'expert' but is not called <ensemble>.experts.<i>.<...>, which is how "
                "the expert axis finds what to spread"
            )
        found[match["ensemble"]] = None
    for name in found:
        ensemble = model.get_submodule(name)
        children = [key for key, _ in ensemble.named_children()]
        own = [key for key, value in (*ensemble._parameters.items(), *ensemble._buffers.items()) if value is not None]
        if not isinstance(ensemble.experts, nn.ModuleList) or children != ["experts"] or own:
            raise ValueError(
                f"ensemble {name!r}: expected a module with a ModuleList `experts` and nothing else, found children "
                f"{children} and tensors {own}"
            )
    return list(found)


def spread_experts(model: nn.Module, ensembles: Sequence[str], mesh: DeviceMesh) -> list[str]:
    """Leave every rank its experts, in place, and make the ensembles exchange activations.

    Rank r of the ep axis keeps experts floor(r n / ep) .. floor((r + 1) n / ep) - 1 of an ensemble of n, which may
    differ in size; the rank with most to compute sets the pace. Experts must hold parameters only: statistics of a
    local batch would be those of the group's.

    Returns:
        the names of the local experts.

    Raises:
        ValueError: an ensemble with fewer experts than the axis has ranks.
    """
    group, size, rank = mesh.get_group("ep"), mesh["ep"].size(), mesh.get_local_rank("ep")
    local: list[str] = []
    for name in ensembles:
        ensemble: Any = model.get_submodule(name)
        experts = ensemble.experts
        count = len(experts)
        if count < size:
            raise ValueError(
                f"ensemble {name!r} has {count} experts, fewer than the {size} ranks of the expert axis; choose "
                f"ParallelConfig.experts <= {count}, or another ensemble"
            )
        first = [r * count // size for r in range(size + 1)]
        mine = range(first[rank], first[rank + 1])
        for index in range(count):
            if index not in mine:
                experts[index] = _Elsewhere(bisect_right(first, index) - 1)
        local += [f"{name}.experts.{index}" for index in mine]
        ensemble.forward = _Exchange([experts[index] for index in mine], group, size, name)
    return local


def is_elsewhere(name: str, ensembles: Sequence[str]) -> bool:
    """Whether a parameter's name is that of an expert of one of the ensembles."""
    match = _EXPERT.match(name)
    return match is not None and match["ensemble"] in ensembles


class _Elsewhere(nn.Module):
    """In the place of an expert that another rank holds."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, *inputs: Any) -> Any:
        raise AssertionError(f"this expert lives on rank {self.rank} of the expert axis")

    def extra_repr(self) -> str:
        return f"rank {self.rank} of the expert axis"


class _Exchange:
    """The forward of a spread ensemble."""

    def __init__(self, experts: list[nn.Module], group: Any, size: int, name: str) -> None:
        self.experts, self.group, self.size, self.name = experts, group, size, name
        self._checked: set[int] = set()

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        self._check(inputs)
        whole = [_Gather.apply(x, self.group, self.size) for x in inputs]
        total = self.experts[0](*whole)
        for expert in self.experts[1:]:
            total = total + expert(*whole)
        out: torch.Tensor = _Scatter.apply(total, self.group, self.size)
        return out

    def _check(self, inputs: tuple[torch.Tensor, ...]) -> None:
        """Equal batches on all ranks: every time on a CPU, where it is cheap, on a GPU when a size is new."""
        size = len(inputs[0])
        if any(len(x) != size for x in inputs):
            raise ValueError(f"ensemble {self.name!r}: inputs of {[len(x) for x in inputs]} samples")
        device = inputs[0].device
        if device.type != "cpu" and size in self._checked:
            return
        self._checked.add(size)
        sizes = torch.empty(self.size, dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(sizes, torch.full((1,), size, device=device), group=self.group)
        if len(set(sizes.tolist())) > 1:
            raise ValueError(
                f"ensemble {self.name!r}: the ranks of the expert axis brought {sizes.tolist()} samples; expected "
                "equal numbers (pad the smaller batches)"
            )


def _all_gather(x: torch.Tensor, group: Any, size: int) -> torch.Tensor:  # [B, ...] -> [size B, ...]
    whole = x.new_empty((size * len(x), *x.shape[1:]))
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


def _reduce_scatter(x: torch.Tensor, group: Any, size: int) -> torch.Tensor:  # [size B, ...] -> [B, ...]
    part = x.new_empty((len(x) // size, *x.shape[1:]))
    dist.reduce_scatter_tensor(part, x.contiguous(), group=group)
    return part


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, size: int) -> torch.Tensor:
        ctx.group, ctx.size = group, size
        return _all_gather(x, group, size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _reduce_scatter(grad, ctx.group, ctx.size) * ctx.size, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, size: int) -> torch.Tensor:
        ctx.group, ctx.size = group, size
        return _reduce_scatter(x, group, size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _all_gather(grad / ctx.size, ctx.group, ctx.size), None, None
