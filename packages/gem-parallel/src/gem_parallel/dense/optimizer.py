"""The dense optimizer's state by parameter name, so that it can be saved in one world and loaded in another."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from gem_parallel.shards import copy_into

if TYPE_CHECKING:
    from gem_parallel.parallel import ParallelModel

# What torch.optim's optimizers start from zero; the rest has a start of its own, which the first step writes.
_ZERO_AT_START = frozenset(
    (
        "step",
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
    )
)


def optimizer_state(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state by name: `{"state": {"name/key": tensor}, "groups": {index: {option: value, "params": [name, ...]}}}`.

    The tensors are the live ones, which a Checkpointer may load into; those with a parameter's shape are sharded like
    it. An optimizer that has made no step yet is given its initial state first, so that there is what to load into.

    Raises:
        ValueError: the optimizer holds a parameter that is not a dense parameter of the model.
    """
    names = {id(param): name for name, param in model.named_dense_parameters()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in names:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not a dense parameter "
                    "of the model"
                )
    if not optimizer.state:
        _initialise(optimizer)
    state: dict[str, Any] = {}
    for param, values in optimizer.state.items():
        for key, value in values.items():
            if value is not None:
                state[f"{names[id(param)]}/{key}"] = value
    groups = {
        str(index): {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [names[id(param)] for param in group["params"]],
        }
        for index, group in enumerate(optimizer.param_groups)
    }
    return {"state": state, "groups": groups}


@torch.no_grad()
def load_optimizer_state(model: ParallelModel, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Copy `state`, laid out like `optimizer_state`, into the optimizer; the groups' options (lr, betas) too.

    Raises:
        ValueError: names or groups that do not match.
    """
    live = optimizer_state(model, optimizer)
    missing, unknown = live["state"].keys() - state["state"].keys(), state["state"].keys() - live["state"].keys()
    if missing or unknown:
        raise ValueError(f"load_optimizer_state: missing {sorted(missing)}, unknown {sorted(unknown)}")
    by_name = dict(model.named_dense_parameters())
    for path, value in state["state"].items():
        name, key = path.rsplit("/", 1)
        target = live["state"][path]
        if isinstance(target, torch.Tensor):
            copy_into(target, value, path)
        else:
            optimizer.state[by_name[name]][key] = value
    for index, group in enumerate(optimizer.param_groups):
        group.update(_saved_options(live["groups"][str(index)]["params"], state["groups"], index))


def _saved_options(names: list[str], saved: Mapping[str, Mapping[str, Any]], index: int) -> dict[str, Any]:
    """The options of the saved groups that held these parameters.

    Groups are found by their parameters, because `optimizer_groups` cuts them otherwise in another layout. Experts
    stand for one another: every rank of an expert axis has others, and the saved names are rank 0's.
    """
    home = {_any_expert(name): group for group in saved.values() for name in group["params"]}
    found = [home[_any_expert(name)] for name in names if _any_expert(name) in home]
    absent = [name for name in names if _any_expert(name) not in home and _any_expert(name) == name]
    options = [{key: value for key, value in group.items() if key != "params"} for group in found]
    if absent or not options or any(other != options[0] for other in options[1:]):
        raise ValueError(
            f"load_optimizer_state: group {index} holds other parameters than the saved ones"
            + (f"; {absent[0]} was in none of them" if absent else "")
        )
    return options[0]


def _any_expert(name: str) -> str:
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", name)


def optimizer_groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups cut so that none mixes meshes: torch's fused and foreach optimizers refuse DTensors of several.

    Args:
        groups: dicts with "params" and options, as for torch.optim. Without an expert axis they come back as they are.
    """
    cut: list[dict[str, Any]] = []
    for group in groups:
        by_mesh: dict[Any, list[Any]] = {}
        for param in group["params"]:
            by_mesh.setdefault(getattr(param, "device_mesh", None), []).append(param)
        cut += [{**group, "params": params} for params in by_mesh.values()]
    return cut


@torch.no_grad()
def _initialise(optimizer: torch.optim.Optimizer) -> None:
    """Make the lazy state by a step with zero gradients and learning rate zero, then put it back to its start."""
    grads, rates = [], [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for param in group["params"]:
            grads.append((param, param.grad))
            param.grad = torch.zeros_like(param)
    try:
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for param, grad in grads:
            param.grad = grad
    for values in optimizer.state.values():
        for key, value in values.items():
            if key in _ZERO_AT_START and isinstance(value, torch.Tensor):
                value.zero_()
