"""Recipes: which layers of a model run in which precision, by name.

A recipe is data. Rules are tried in order and the first whose pattern matches a layer decides; `keep` patterns come
before all rules. A pattern without a dot is matched against every component of a layer's dotted name ("heads" matches
`heads.out.ctr`, "mlp*" matches `layers.3.mlp1`); one with a dot is matched against the whole name and its leading
parts ("layers.1?" matches `layers.12.kv`). Both are shell patterns (`*`, `?`, `[...]`).
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from gem_lowprec.linear import Products


@dataclass(frozen=True, kw_only=True)
class Rule(Products):
    """The precisions of the layers that `pattern` matches; the other fields are those of `Products`."""

    pattern: str = "*"

    def __post_init__(self) -> None:
        if not self.pattern:
            raise ValueError("a rule needs a non-empty pattern")
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named set of rules.

    `keep` lists patterns of layers that are left as they are (by default the task heads, whose few outputs decide the
    loss). `min_size`: layers with fewer input or output features stay too; their quantisation costs more than the
    product saves. With `fallback`, so do layers for whose shape the rates measured on such a card predict no gain
    (`gem_lowprec.speed`); where products are emulated or nothing was measured it decides nothing. With `fuse_norms`,
    the norm of a `gem_kernels.nn.NormLinear` whose projection runs block-wise writes its FP8 input: 2% faster than
    apart on an H200, forward and backward, and the normalised rows are not kept. `attention` is what
    `gem_kernels.nn.JaggedAttention` attends in: "bf16" leaves it, "fp8" and "mxfp8" are the precisions of
    `low_precision_attention`. `seed` selects the random numbers of stochastic rounding and of the Hadamard signs.
    """

    name: str
    rules: tuple[Rule, ...] = ()
    keep: tuple[str, ...] = ("head", "heads")
    min_size: int = 128
    fallback: bool = True
    fuse_norms: bool = True
    attention: str = "bf16"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.min_size < 1:
            raise ValueError(f"min_size must be at least 1, got {self.min_size}")
        if self.attention not in ("bf16", "fp8", "mxfp8"):
            raise ValueError(f"attention must be 'bf16', 'fp8' or 'mxfp8', got {self.attention!r}")

    def kept_by(self, name: str) -> str | None:
        """The first `keep` pattern that matches the layer `name`, or None."""
        return next((pattern for pattern in self.keep if matches(pattern, name)), None)

    def rule_for(self, name: str) -> Rule | None:
        """The first rule that matches the layer `name`, or None."""
        return next((rule for rule in self.rules if matches(rule.pattern, name)), None)


def matches(pattern: str, name: str) -> bool:
    """Whether a recipe's pattern matches the dotted module name `name`; the module's docstring has the rules."""
    parts = name.split(".")
    if "." not in pattern:
        return any(fnmatchcase(part, pattern) for part in parts)
    return any(fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))


RECIPES: dict[str, Recipe] = {
    r.name: r
    for r in (
        Recipe(name="none"),
        Recipe(name="bf16"),
        Recipe(name="mxfp8", rules=(Rule(forward="mxfp8", dgrad="mxfp8", wgrad="mxfp8"),)),
        Recipe(name="mxfp8_square", rules=(Rule(forward="mxfp8_square", dgrad="mxfp8_square", wgrad="mxfp8"),)),
        Recipe(name="fp8_row", rules=(Rule(forward="fp8_row", dgrad="fp8_row", wgrad="bf16"),)),
        Recipe(name="fp8_block", rules=(Rule(forward="fp8_block", dgrad="fp8_block", wgrad="fp8_block"),)),
    )
}
"""The built-in recipes. "none" and "bf16" convert nothing: the model runs in its own dtype, or in autocast's.
"mxfp8_square" scales the weights by squares, whose values are the same in both orientations.
"fp8_row" keeps the weight gradient in high precision, as a row there spans all tokens and one outlier would coarsen
it all."""


def get_recipe(recipe: str | Recipe) -> Recipe:
    """The built-in recipe of that name, or the recipe itself.

    Raises ValueError for an unknown name, with the close one that was perhaps meant.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(f"recipe must be a name or a Recipe, got {recipe!r}")
    if recipe not in RECIPES:
        close = get_close_matches(recipe, RECIPES, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown recipe {recipe!r}; expected one of {', '.join(map(repr, RECIPES))}{hint}")
    return RECIPES[recipe]
