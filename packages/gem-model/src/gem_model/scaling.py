"""Learning rates that a wider model can keep: muP, the maximal update parametrisation (Yang et al. 2022).

Widen a model and its matrices sum over more numbers, whose updates all point the same way: with Adam, whose steps have
one size, what a layer puts out moves fan-in times as far. muP divides the learning rate of such a matrix by its fan-in,
relative to a base width where the rate was found, and the first weights of what makes logits by the square root of that
ratio again. What does not sum over the width (biases, norms, maps of features and of tokens) stays as it is.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn

from gem_model.config import GemConfig, ModelInputs
from gem_model.gem import GEM
from gem_model.init import fan_ins


def at_width(config: GemConfig, width: int) -> GemConfig:
    """The same shape with another width: towers and hidden units of the heads in proportion, everything else kept."""

    def scaled(value: int) -> int:
        return max(1, round(value * width / config.width))

    towers = tuple(t if t.width is None else replace(t, width=scaled(t.width), heads=1) for t in config.towers)
    return replace(  # heads and rotation change no matrix's shape
        config,
        width=width,
        heads=1,
        rotary="none",
        qk_norm=False,
        towers=towers,
        head_hidden=scaled(config.head_hidden),
    )


def width_ratios(config: GemConfig, inputs: ModelInputs, base: int) -> dict[str, float]:
    """By parameter, fan-in at ``config.width`` over fan-in at width ``base``; 1 where it does not depend on the width.

    A learning rate found at width ``base`` with AdamW is to be divided by it, one with Muon by its square root.
    """
    inputs = replace(inputs, tables=tuple(replace(t, managed=False) for t in inputs.tables))  # which "meta" has not
    ours = fan_ins(GEM(config, inputs, device="meta"))
    theirs = fan_ins(GEM(at_width(config, base), inputs, device="meta"))
    return {name: fan / theirs[name] for name, fan in ours.items() if name in theirs}


@torch.no_grad()
def scale_outputs(model: GEM, ratios: dict[str, float]) -> None:
    """Make the first logits of the width's part as much smaller as muP asks: ``heads.out`` by sqrt(1 / ratio)."""
    for name, parameter in model.heads.out.named_parameters():
        if name.endswith("weight"):
            parameter.mul_(1.0 / math.sqrt(ratios[f"heads.out.{name}"]))


def matrices(model: nn.Module) -> list[str]:
    """Names of the parameters that Muon is for: the weights of linear maps within the model, both sides of them wide.

    Not the maps that make logits, and not what is no matrix of one map: stacks, queries, marks, mixtures of tokens.
    """
    linear = {f"{name}.weight" for name, module in model.named_modules() if hasattr(module, "in_features")}
    return [
        name
        for name, p in model.named_parameters()
        if name in linear and p.dim() == 2 and min(p.shape) > 1 and not name.startswith("heads.wide")
    ]


__all__ = ["at_width", "matrices", "scale_outputs", "width_ratios"]
