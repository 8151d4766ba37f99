"""Learning rates that a larger model can keep: muP, the maximal update parametrisation, in width and in depth.

Width (Yang et al. 2022, Tensor Programs V). Widen a model and its matrices sum over more numbers, whose updates all
point the same way: with Adam, whose steps have one size, what a layer puts out moves fan-in times as far. muP divides
the learning rate of such a matrix by its fan-in, relative to a base where the rate was found, and the first weights of
what makes logits by the square root of that ratio again. What does not sum over the width (biases, norms, maps of
features and of tokens) stays as it is. A larger shape has more tokens and ranks as well, over which maps of tokens and
factorisation machines sum: relative to a base *shape* they are treated alike.

Depth (Yang et al. 2023, Tensor Programs VI; Bordelon et al. 2023). Deepen a residual model from L0 to L layers, and
L / L0 times as many blocks add to its stream: at first as random numbers do, then, by updates, all the same way. With r
= L / L0, what a block adds is made sqrt(r) smaller and every parameter's rate is divided by sqrt(r), so that an update
of one block moves the stream by 1 / r. Here the factor sqrt(1 / r) is in the first weights of the map that a branch
ends with (:mod:`gem_model.init` does so for the events' stream) and in its learning rate, which is divided by r.

The personalised feed-forward network sums act(q k_p) v_p over P tokens that are mixtures of the same few, so that the
sum grows with P itself: its last map starts P / P0 smaller, and learns as much more slowly.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from gem_model.config import GemConfig, ModelInputs
from gem_model.dhen import DHEN, AttentionExpert, CrossExpert, WukongExpert
from gem_model.gem import GEM
from gem_model.init import fan_ins
from gem_model.interaction import Wukong
from gem_model.sequence import PersonalisedFFN

TOKENS = ("n_tokens", "n_dense", "n_sum", "recent")
RANKS = ("cross_rank", "interaction_rank", "interaction_hidden", "interaction_fm")
SIZES = ("layers", "ff_mult", "head_hidden", *TOKENS, *RANKS)
OPTIONAL_SIZES = ("pma_queries", "pma_seeds", "pffn_tokens")  # 0 leaves a part out
LAYER = re.compile(r"layers\.(\d+)\.(.*)")
PERSONAL_END = ".sequence.ffn.out."
BRANCH_ENDS = r"fmb\.linear\.|lcb\.|mix\.weight"  # what the interaction's branches end with
ENDS = re.compile(  # the last maps of residual branches, and what multiplies the stream itself
    r"towers\.[^.]+\.sequence\.(ffn\.down|ffn\.out|attention\.out|out)\."
    rf"|interaction\.(proj\.|norm\.|{BRANCH_ENDS}|ensemble\.experts\.\d+\.({BRANCH_ENDS}))"
)


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """How much larger a model is than where its learning rate was found, by parameter; what is not named is 1.

    A rate found at the base is to be divided, with AdamW, by ``fan_in * branch``, with Muon by ``sqrt(fan_in) *
    branch``: fan_in is how many numbers more a weight sums over, branch how much more often or louder its branch adds.
    """

    fan_in: dict[str, float] = field(default_factory=dict)
    branch: dict[str, float] = field(default_factory=dict)


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


def at_shape(config: GemConfig, base: GemConfig) -> GemConfig:
    """The same parts with the sizes of another shape: its width, depth, tokens, ranks and hidden units."""
    sizes = {name: getattr(base, name) for name in SIZES}
    sizes |= {n: getattr(base, n) for n in OPTIONAL_SIZES if getattr(base, n) and getattr(config, n)}
    if config.pma_seeds and not base.pma_seeds:  # whose queries read the history
        sizes["pma_seeds"] = sizes.get("pma_queries", config.pma_seeds)
    found = at_width(config, base.width)
    towers = tuple(t if t.layers is None else replace(t, layers=min(t.layers, base.layers)) for t in found.towers)
    return replace(found, towers=towers, **sizes)


def width_ratios(config: GemConfig, inputs: ModelInputs, base: int) -> Ratios:
    """Relative to the same shape at width ``base``: fan-ins by parameter, 1 where they do not depend on the width."""
    ours, theirs = _fan_ins(config, inputs), _fan_ins(at_width(config, base), inputs)
    return Ratios(fan_in={name: fan / theirs[name] for name, fan in ours.items() if name in theirs})


def shape_ratios(config: GemConfig, inputs: ModelInputs, base: GemConfig) -> Ratios:
    """Relative to another shape, which may have fewer layers, tokens, ranks and hidden units, too.

    A layer's counterpart is that of the same number, or the base's last. A part that the base has not is compared with
    that of its width.
    """
    ours, theirs = _fan_ins(config, inputs), _fan_ins(at_shape(config, base), inputs)
    fan_in = dict(width_ratios(config, inputs, base.width).fan_in)
    for name, fan in ours.items():
        found = LAYER.match(name)
        other = f"layers.{min(int(found[1]), base.layers - 1)}.{found[2]}" if found else name
        if other in theirs:
            fan_in[name] = fan / theirs[other]
    deeper, louder = depth_ratio(config, base), personal_ratio(config, base)
    names = [name for name, _ in GEM(config, _plain(inputs), device="meta").named_parameters()]
    branch = {n: deeper ** _depth_power(n) * (louder if PERSONAL_END in n else 1.0) for n in names}
    return Ratios(fan_in=fan_in, branch=branch)


def depth_ratio(config: GemConfig, base: GemConfig) -> float:
    """r = L / L0, how much deeper the shape is; 1 where it is not."""
    return max(1.0, config.layers / base.layers)


def personal_ratio(config: GemConfig, base: GemConfig) -> float:
    """P / P0, how many more tokens the personalised feed-forward network sums over; 1 where one has none."""
    return config.pffn_tokens / base.pffn_tokens if config.pffn_tokens and base.pffn_tokens else 1.0


@torch.no_grad()
def scale_outputs(model: GEM, ratios: Ratios) -> None:
    """Make the first logits of the width's part as much smaller as muP asks: ``heads.out`` by sqrt(1 / ratio)."""
    for name, parameter in model.heads.out.named_parameters():
        if name.endswith("weight"):
            parameter.mul_(1.0 / math.sqrt(ratios.fan_in[f"heads.out.{name}"]))


@torch.no_grad()
def scale_branches(model: GEM, base: GemConfig) -> None:
    """Make the first weights of what adds to a stream smaller, as a shape that is larger than ``base`` needs it.

    The non-sequence tokens become a residual stream: from the second layer on, X' = LN([FMB || LCB] + proj(X || S_sum))
    starts, with r = L / L0 and the first weights of each as they were, as::

        X' = LN(sqrt(1 - 1/r) X + sqrt(1/r) ([FMB || LCB] + proj(X || S_sum)))

    For r = 1 that is what it was, for a large r nearly LN(X). As it was, a product of many random maps of tokens would
    lie between the features and the logits.
    """
    ratio, louder = depth_ratio(model.config, base), personal_ratio(model.config, base)
    for module in model.modules():
        if isinstance(module, PersonalisedFFN) and module.personal:
            module.out.weight.mul_(1.0 / louder)
    small = math.sqrt(1.0 / ratio)
    for layer in list(model.layers)[1:]:
        block = layer.interaction
        assert isinstance(block, (Wukong, DHEN))
        block.proj.weight.mul_(small)
        block.proj.weight.diagonal().add_(math.sqrt(1.0 - 1.0 / ratio))
        for module in block.modules():
            if isinstance(module, (Wukong, WukongExpert)):
                module.fmb.linear.weight.mul_(small)
                module.lcb.weight.mul_(small)
            elif isinstance(module, (AttentionExpert, CrossExpert)):
                module.mix.weight.mul_(small)


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


def _depth_power(name: str) -> float:
    """Of r: 1 for the end of a branch and for what multiplies a stream, 1/2 for the rest of a branch, 0 for what makes
    a stream's first tokens or reads its last.
    """
    found = LAYER.match(name)
    if not found or (int(found[1]) == 0 and ".sequence." not in found[2]):
        return 0.0  # the first layer's interaction makes X_1 of features: it is no branch
    return 1.0 if ENDS.match(found[2]) else 0.5


def _plain(inputs: ModelInputs) -> ModelInputs:
    return replace(inputs, tables=tuple(replace(t, managed=False) for t in inputs.tables))  # which "meta" has not


def _fan_ins(config: GemConfig, inputs: ModelInputs) -> dict[str, int]:
    return fan_ins(GEM(config, _plain(inputs), device="meta"))


__all__ = [
    "Ratios",
    "at_shape",
    "at_width",
    "depth_ratio",
    "matrices",
    "personal_ratio",
    "scale_branches",
    "scale_outputs",
    "shape_ratios",
    "width_ratios",
]
