"""Modules of gem-kernels that attend, in low precision: what `convert` does with them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from gem_lowprec.recipe import Recipe

if TYPE_CHECKING:
    from gem_kernels.nn import JaggedAttention


@dataclass(frozen=True, kw_only=True)
class AttentionRow:
    """One attention module: its heads, what it runs in, "native" or "emulated" ("-" where it stays), and why."""

    name: str
    heads: int
    head_dim: int
    precision: str
    engine: str
    why: str


def convert_attention(model: nn.Module, recipe: Recipe, device: torch.device) -> tuple[AttentionRow, ...]:
    """Let every `gem_kernels.nn.JaggedAttention` of `model` attend as the recipe says; a row for each of them.

    The modules stay, with their parameters, and get another class.
    """
    if "gem_kernels.nn" not in sys.modules:  # slow to import, and the model has none then
        return ()
    from gem_kernels.nn import JaggedAttention

    rows = []
    for name, module in model.named_modules():
        if type(module) is not JaggedAttention:
            continue
        why, engine = _why_not(name, module, recipe, device)
        if engine != "-":
            from gem_lowprec.attention.layer import LowPrecisionJaggedAttention

            module.__class__ = LowPrecisionJaggedAttention
            module.precision = recipe.attention  # type: ignore[assignment]
            if engine == "native":
                between = module.pass_between()  # type: ignore[operator]
                why += (
                    "; its projection writes q, k and v in FP8" if between is None else f"; quantised apart: {between}"
                )
        precision = recipe.attention if engine != "-" else "bf16"
        rows.append(
            AttentionRow(
                name=name, heads=module.heads, head_dim=module.head_dim, precision=precision, engine=engine, why=why
            )
        )  # fmt: skip
    return tuple(rows)


def feeding(model: nn.Module, recipe: Recipe, device: torch.device) -> set[int]:
    """The ids of the linear layers that could write what FP8 attention reads: the pass over q, k and v that they save
    is worth more than what a small one would lose by itself (docs/notes/lowprec.md).
    """
    if recipe.attention != "fp8" or "gem_kernels.nn" not in sys.modules:
        return set()
    from gem_kernels.nn import JaggedAttention, NormLinear

    found = set()
    for name, module in model.named_modules():
        if type(module) is not JaggedAttention or module.crosses or module.head_dim != 128:
            continue
        if _why_not(name, module, recipe, device)[1] == "native":
            found.add(id(module.qkv.linear if isinstance(module.qkv, NormLinear) else module.qkv))
    return found


def _why_not(name: str, module: JaggedAttention, recipe: Recipe, device: torch.device) -> tuple[str, str]:
    """Why it runs in what it runs in, and the engine."""
    pattern = recipe.kept_by(name)
    if pattern is not None:
        return f"kept by pattern {pattern!r}", "-"
    if recipe.attention == "bf16":
        return f"recipe {recipe.name!r} leaves attention as it is", "-"
    from gem_lowprec.attention import attention_engine  # imports Triton

    like = torch.empty(0, module.heads, module.head_dim, dtype=torch.bfloat16, device=device)
    masked = module.causal or module.window is not None or module.scale <= 0
    runs = attention_engine(recipe.attention, like, masked=masked)
    if recipe.attention == "fp8" and runs.name != "native" and device.type == "cuda" and recipe.fallback:
        return f"{runs.why}; the emulation would be slower", "-"
    return f"{runs.name}: {runs.why}", runs.name
