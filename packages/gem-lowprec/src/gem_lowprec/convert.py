"""Replace the linear layers of a model by low-precision ones, by name, and say what was done and why."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from gem_lowprec.attention_modules import AttentionRow, convert_attention, feeding
from gem_lowprec.gemm import engine
from gem_lowprec.linear import Clock, LowPrecisionLinear
from gem_lowprec.recipe import Recipe, Rule, get_recipe, matches
from gem_lowprec.speed import WORTH, card, gain, least_tokens
from gem_lowprec.table import render


@dataclass(frozen=True, kw_only=True)
class Row:
    """One linear layer: its shape [out, in], the precision of each product, what runs the forward, and why."""

    name: str
    shape: tuple[int, int]
    forward: str
    dgrad: str
    wgrad: str
    engine: str  # "native", "emulated" or "-" for a layer that stays as it was
    why: str

    @property
    def converted(self) -> bool:
        """Whether the layer was replaced."""
        return self.engine != "-"


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What `convert` did. `modules` holds the new layers by name; `print(conversion)` shows the table."""

    recipe: Recipe
    rows: tuple[Row, ...]
    attention: tuple[AttentionRow, ...] = ()
    modules: dict[str, LowPrecisionLinear] = field(repr=False)
    clock: Clock = field(repr=False)

    def set_step(self, step: int, micro: int = 0) -> None:
        """Tell the layers the optimizer step (and micro batch): it selects random numbers and the steps of
        `wgrad_every`."""
        if self.clock.leave is not None and step != self.clock.step:
            self.clock.leave()
        self.clock.step, self.clock.micro = step, micro

    @property
    def fraction(self) -> float:
        """Share of all linear weights (elements) whose layer was converted."""
        total = sum(r.shape[0] * r.shape[1] for r in self.rows)
        return sum(r.shape[0] * r.shape[1] for r in self.rows if r.converted) / total if total else 0.0

    def table(self) -> str:
        """The rows as aligned text, headed by a summary."""
        count = sum(r.converted for r in self.rows)
        head = (
            f"recipe {self.recipe.name}: {count} of {len(self.rows)} linear layers converted, "
            f"{self.fraction:.1%} of their weights"
        )
        cells = [
            (r.name, f"{r.shape[0]}x{r.shape[1]}", r.forward, r.dgrad, r.wgrad, r.engine, r.why) for r in self.rows
        ]
        text = head + "\n" + render(("layer", "out x in", "forward", "dgrad", "wgrad", "engine", "why"), cells)
        if any(r.engine != "-" for r in self.attention):
            attending = [(r.name, f"{r.heads}x{r.head_dim}", r.precision, r.engine, r.why) for r in self.attention]
            text += "\n" + render(("attention", "heads", "precision", "engine", "why"), attending)
        return text

    def __str__(self) -> str:
        return self.table()


def convert(
    model: nn.Module, recipe: str | Recipe, *, seed: int | None = None, device: torch.device | str | None = None
) -> Conversion:
    """Replace the `torch.nn.Linear` layers of `model` in place, as `recipe` says, and report every one.

    The new layers share the old ones' Parameters, so state_dict keys, tied weights and optimizers stay as they are;
    call it before the model is sharded or compiled. `seed` overrides the recipe's (give each data-parallel rank its
    own). `device` is where the model will run; by default it is where each weight is. Layers that low precision would
    not make faster there stay as they are, announced once (`Recipe.fallback`), but for projections that write what FP8
    attention reads.

    Raises TypeError for what is no module or recipe; ValueError for an unknown recipe, for a model that already holds
    converted layers, for a model that is itself a Linear (nothing to replace it in), and for a rule that matches no
    layer.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    recipe = get_recipe(recipe)
    linears = list(_linears(model))
    done = [name for name, module in linears if isinstance(module, LowPrecisionLinear)]
    if done:
        raise ValueError(f"the model was converted before ({done[0]!r} is a LowPrecisionLinear); convert a fresh model")
    if isinstance(model, nn.Linear):
        raise ValueError("a Linear cannot be replaced in itself; pass the module that holds it")
    for rule in recipe.rules:
        if rule.pattern != "*" and not any(matches(rule.pattern, name) for name, _ in linears):
            raise ValueError(
                f"rule {rule.pattern!r} of recipe {recipe.name!r} matches no linear layer; "
                f"there are {', '.join(name for name, _ in linears[:8]) or 'none'}{', ...' if len(linears) > 8 else ''}"
            )

    own = next((p.device for p in model.parameters()), torch.device("cpu"))
    where = own if device is None else torch.device(device)
    worth = feeding(model, recipe, where)
    rows: list[Row] = []
    slow = 0
    clock = Clock()
    modules: dict[str, LowPrecisionLinear] = {}
    for stream, (name, linear) in enumerate(linears):
        chosen = recipe.rule_for(name)
        why, tokens = _why_not(name, linear, recipe, chosen), 0
        if why is None and recipe.fallback and id(linear) not in worth:
            assert chosen is not None
            why, tokens = _no_gain(linear, chosen, linear.weight.device if device is None else torch.device(device))
            slow += why is not None
        if why is None:
            assert chosen is not None
            new = LowPrecisionLinear.from_linear(
                linear, chosen, clock=clock, seed=recipe.seed if seed is None else seed, stream=stream
            )
            new.min_tokens = tokens
            modules[name] = new
        rows.append(_row(name, linear, chosen, why, device, tokens))
    if slow:
        warnings.warn(
            f"recipe {recipe.name}: {slow} of {len(linears)} linear layers stay as they are, since low precision would "
            "not make them faster; the conversion's table has them",
            stacklevel=2,
        )
    _replace(model, {id(old): modules[name] for name, old in linears if name in modules})
    if recipe.fuse_norms:
        _replace(model, _fused(model))
    attention = convert_attention(model, recipe, where)
    return Conversion(recipe=recipe, rows=tuple(rows), modules=modules, clock=clock, attention=attention)


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Every distinct linear layer with its first name."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name, module


def _why_not(name: str, linear: nn.Linear, recipe: Recipe, rule: Rule | None) -> str | None:
    """Why a layer stays as it is; None if it is to be replaced."""
    pattern = recipe.kept_by(name)
    if not recipe.rules:
        return f"recipe {recipe.name!r} converts nothing"
    if pattern is not None:
        return f"kept by pattern {pattern!r}"
    if rule is None:
        return "no rule matches"
    if not rule.quantised:
        return f"rule {rule.pattern!r} asks for bf16"
    if min(linear.in_features, linear.out_features) < recipe.min_size:
        return f"{linear.out_features}x{linear.in_features} is below min_size {recipe.min_size}"
    if type(linear) is not nn.Linear:
        return f"{type(linear).__name__} has a behaviour of its own"
    if "weight" not in linear._parameters:
        return "its weight is computed by a parametrization"
    if any((linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks)):
        return "it has hooks, which a new module would lose"
    return None


def _no_gain(linear: nn.Linear, rule: Rule, device: torch.device) -> tuple[str | None, int]:
    """Why BF16 is the faster choice for the shape on this card, or None if it is not or nobody measured; and from how
    many tokens on the rule's precisions are faster.
    """
    rates = card(device)
    shape = (linear.out_features, linear.in_features)
    times = None if rates is None else gain(rule, shape, rates)
    if rates is None or times is None:
        return None, 0
    if times >= WORTH:
        return None, least_tokens(rule, shape, rates)
    return f"{shape[0]}x{shape[1]} would train at {times:.2f} of BF16's speed", 0


def _row(
    name: str, linear: nn.Linear, rule: Rule | None, why_not: str | None, device: torch.device | str | None,
    tokens: int,
) -> Row:  # fmt: skip
    shape = (linear.out_features, linear.in_features)
    if why_not is not None or rule is None:
        dtype = _short(linear.weight.dtype)
        return Row(name=name, shape=shape, forward=dtype, dgrad=dtype, wgrad=dtype, engine="-", why=why_not or "")
    device = linear.weight.device if device is None else device
    products = {"forward": rule.forward, "dgrad": rule.dgrad, "wgrad": rule.wgrad}
    engines = {p: engine(p, device) for p in products.values() if p not in ("bf16", "skip")}
    notes = [f"rule {rule.pattern!r}"]
    notes += [f"{p} {e.name}: {e.why}" for p, e in engines.items()]
    if tokens:
        notes.append(f"from {tokens} tokens on, else plain")
    if rule.hadamard:
        notes.append(f"Hadamard {rule.hadamard} in {', '.join(rule.hadamard_in)}")
    if rule.stochastic:
        notes.append("stochastic gradients")
    wgrad = rule.wgrad if rule.wgrad_every == 1 else f"{rule.wgrad} 1/{rule.wgrad_every}"
    names = {e.name for e in engines.values()}
    kind = names.pop() if len(names) == 1 else "mixed" if names else "unquantised"
    return Row(
        name=name, shape=shape, forward=rule.forward, dgrad=rule.dgrad, wgrad=wgrad, engine=kind, why="; ".join(notes)
    )


def _fused(model: nn.Module) -> dict[int, nn.Module]:
    """For every norm whose projection now runs block-wise: the module in which the norm writes FP8."""
    if "gem_kernels.nn" not in sys.modules:  # slow to import, and the model has none then
        return {}
    from gem_kernels.nn import NormLinear

    from gem_lowprec.norm_linear import LowPrecisionNormLinear

    return {
        id(m): LowPrecisionNormLinear.from_norm_linear(m)
        for m in model.modules()
        if type(m) is NormLinear
        and isinstance(m.linear, LowPrecisionLinear)
        and m.linear.products.forward == "fp8_block"
        and not any((m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks))
        and not any((m.norm._forward_hooks, m.norm._forward_pre_hooks))
    }


def _replace(model: nn.Module, new: Mapping[int, nn.Module]) -> None:
    """Put the new modules in every place that holds an old one, so that a shared one stays shared."""
    for parent in list(model.modules()):
        for attribute, child in parent._modules.items():
            if child is not None and id(child) in new:
                setattr(parent, attribute, new[id(child)])


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16", torch.float64: "fp64"}.get(
        dtype, str(dtype).removeprefix("torch.")
    )
