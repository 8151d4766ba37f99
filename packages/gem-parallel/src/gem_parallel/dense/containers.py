"""Dataclasses between FSDP units.

FSDP2 gathers a unit's parameters for the backward pass when the gradient of one of its outputs arrives, and reduces
their gradients when those of its inputs are done: it must see every tensor that goes in and out. Before torch 2.12 it
looks through lists and dicts but not into dataclasses, unless they are pytree nodes; a gradient that arrives inside one
then meets freed parameters ("storage of size 0"), or is lost.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import _common_utils
from torch.utils import _pytree as pytree


def fsdp_sees_dataclasses() -> bool:
    """Whether this torch's FSDP2 looks into dataclasses by itself."""
    return hasattr(_common_utils, "collect_grad_tensors")


def expose_dataclasses(unit: nn.Module) -> None:
    """Make dataclasses that enter or leave `unit` pytree nodes. Call after `fully_shard`, to run before its hooks."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        register_dataclasses((args, kwargs))

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        register_dataclasses(output)

    unit.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    unit.register_forward_hook(after, prepend=True)


def register_dataclasses(tree: Any) -> None:
    """Register the types of the dataclasses in `tree` that hold tensors with a gradient."""
    for leaf in pytree.tree_leaves(tree):
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            continue
        fields = [getattr(leaf, field.name) for field in dataclasses.fields(leaf)]
        register_dataclasses(fields)
        if any(isinstance(t, torch.Tensor) and t.requires_grad for t in pytree.tree_leaves(fields)):
            pytree.register_dataclass(type(leaf))
