"""Dense parameters: FSDP2 over the units that the model names, and over the root for all that is left."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from gem_parallel.dense.containers import expose_dataclasses, fsdp_sees_dataclasses


def dense_modules(root: nn.Module, tables: Iterable[nn.Module]) -> list[nn.Module]:
    """Every module under `root` that neither is a table module nor lies inside one."""
    inside = {id(m) for table in tables for m in table.modules()}
    return [m for m in root.modules() if id(m) not in inside]


def place_dense(root: nn.Module, tables: Iterable[nn.Module], device: torch.device) -> None:
    """Move dense parameters and buffers to `device` and make every rank's values equal to rank 0's.

    `root.to(device)` would move (or fail on) the tables too, so that the tensors are moved one by one. FSDP2 shards
    each rank's own copy; without the broadcast, ranks that built the model from different seeds would train a mixture.
    """
    for module in dense_modules(root, tables):
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is None:
                    continue
                if tensor.is_meta:
                    raise ValueError(
                        f"dense tensor {name!r} of {type(module).__name__} is on the meta device; "
                        "build dense modules on a real device"
                    )
                tensor.data = tensor.data.to(device)
                if dist.get_world_size() > 1:
                    dist.broadcast(tensor.data if tensor.is_contiguous() else _contiguous(tensor), src=0)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    tensor.data = tensor.data.contiguous()
    return tensor.data


def shard_dense(
    root: nn.Module,
    tables: Iterable[nn.Module],
    units: Iterable[str],
    mesh: DeviceMesh,
    precision: str,
    experts: Iterable[str] = (),
    expert_mesh: DeviceMesh | None = None,
) -> list[str]:
    """Apply `fully_shard` to the units, innermost first, then to the root; the tables' parameters are ignored.

    With precision "bf16" the units compute in bfloat16 (parameters are gathered in it) and hand float32 on to what
    surrounds them; gradients are reduced in float32, and the shards that the optimizer sees stay float32. What lies
    outside every unit computes in float32. `experts` are units of their own on the axes "replicate" and "efsdp" of
    expert_mesh.

    Returns:
        the units' names in the order in which they were wrapped.

    Raises:
        ValueError: a unit that does not exist, or is a container without a forward of its own.
    """
    tables = list(tables)
    # Raw traversal: TorchRec's modules override named_parameters and hide the kernels' own parameters in it.
    ignored = {p for t in tables for m in t.modules() for p in m._parameters.values() if p is not None}
    axes = mesh if mesh["replicate"].size() > 1 else mesh["shard"]
    special: dict[str, DeviceMesh] = {}
    if expert_mesh is not None:
        replicated = expert_mesh["replicate"].size() > 1
        special = dict.fromkeys(experts, expert_mesh["replicate", "efsdp"] if replicated else expert_mesh["efsdp"])
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    unit_policy = policy
    if precision == "bf16":
        unit_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
    # A child's name is longer than its parent's: children first, as FSDP2 needs.
    order = sorted({*units, *special}, key=lambda name: (-name.count("."), name))
    for name in order:
        unit = find_unit(root, name)
        fully_shard(unit, mesh=special.get(name, axes), mp_policy=unit_policy, ignored_params=ignored)
        if not fsdp_sees_dataclasses():
            expose_dataclasses(unit)
    fully_shard(root, mesh=axes, mp_policy=policy, ignored_params=ignored)
    return order


def find_unit(root: nn.Module, name: str) -> nn.Module:
    """The module called `name`, if it can be a unit."""
    try:
        module = root.get_submodule(name)
    except AttributeError:
        raise ValueError(f"unit {name!r} is not a submodule of {type(root).__name__}") from None
    if module is root or isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise ValueError(f"unit {name!r} is a {type(module).__name__}; a unit must be an inner module with a forward")
    return module


def reshard(root: nn.Module) -> None:
    """Free what a forward pass without a backward left gathered, so that parameters are the shards again."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def param_groups(unit: FSDPModule) -> list[Any]:
    """FSDP2's own record of the parameters that it gathers together for `unit`."""
    state = unit._get_fsdp_state()
    single = getattr(state, "_fsdp_param_group", None)  # before torch had several groups of a module
    return list(getattr(state, "_fsdp_param_groups", None) or ([single] if single is not None else []))


def reduce_gradients(units: Iterable[FSDPModule], on: bool) -> None:
    """Whether the next backward passes end in reductions; until then every rank adds up gradients of whole parameters.

    `set_is_last_backward` stays as it is: what it would put off is the wait for reductions, of which there are none
    then, and lists that it would leave to grow are cleared instead.
    """
    for unit in units:
        unit.set_requires_gradient_sync(on, recurse=False)


def forget_gradients(units: Iterable[FSDPModule]) -> None:
    """Drop all gradients: those of the shards, and those that were added up and have not been reduced."""
    for unit in units:
        for group in param_groups(unit):
            group._partial_reduce_output = None
            for param in group.fsdp_params:
                param.sharded_param.grad = None
                param.unsharded_accumulated_grad = None
                if hasattr(param, "_unsharded_param"):  # there was a forward pass
                    param._unsharded_param.grad = None


def end_pass(root: nn.Module) -> None:
    """Have FSDP2 forget a pass that an exception has ended in the middle, if there is one."""
    if not isinstance(root, FSDPModule):
        return
    states = root._get_fsdp_state()._state_ctx.all_states
    if all(state._training_state.name == "IDLE" for state in states):
        return
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        warnings.warn(
            f"a pass was ended in the middle, where FSDP2 of torch {torch.__version__} cannot go on (2.13's can): "
            "start the process again from a checkpoint",
            stacklevel=3,
        )


def set_prefetch(root: nn.Module, units: Sequence[str], ahead: int) -> None:
    """Gather `ahead` units before their turn: those that follow in forward, those that precede in backward.

    The first ones are gathered when the root's forward begins, beside the lookups. Units inside other units are
    gathered with them in any case and left out.
    """
    outer = [name for name in units if not any(name.startswith(f"{other}.") for other in units)]
    modules = [root.get_submodule(name) for name in outer]
    assert isinstance(root, FSDPModule)
    root.set_modules_to_forward_prefetch(modules[:ahead])  # type: ignore[arg-type]
    for index, module in enumerate(modules):
        assert isinstance(module, FSDPModule)
        module.set_modules_to_forward_prefetch(modules[index + 1 : index + 1 + ahead])  # type: ignore[arg-type]
        module.set_modules_to_backward_prefetch(modules[max(0, index - ahead) : index][::-1])  # type: ignore[arg-type]


@torch.no_grad()
def clip_by_global_norm(params: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Like torch.nn.utils.clip_grad_norm_, for DTensors on several meshes; the norm before clipping, on every rank.

    An element that n ranks hold (replicas, or everyone for a plain tensor) counts 1 / n on each of them.
    """
    grads = [param.grad for param in params if param.grad is not None]
    world = dist.get_world_size()
    locals_, total = [], None
    for grad in grads:
        local, holders = grad, world
        if isinstance(grad, DTensor):
            local = grad.to_local()
            sharded = [grad.device_mesh.size(i) for i, place in enumerate(grad.placements) if place.is_shard()]
            holders = grad.device_mesh.size() // math.prod(sharded)
        locals_.append(local)
        square = local.float().square().sum() / holders
        total = square if total is None else total + square
    if total is None:
        raise ValueError("no dense parameter has a gradient")
    dist.all_reduce(total)
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for local in locals_:
        local.mul_(scale.to(local.dtype))
    return norm
