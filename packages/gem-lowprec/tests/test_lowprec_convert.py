"""Recipes, conversion by name with its table, and the numerics report."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
import sys

import pytest
import torch
from gem_kernels.nn import NormLinear
from gem_lowprec import (
    FP8_ROW,
    FP8_TENSOR,
    RECIPES,
    LowPrecisionLinear,
    Recipe,
    Rule,
    convert,
    get_recipe,
    quantize,
    speed,
    watch,
)
from gem_lowprec.norm_linear import LowPrecisionNormLinear
from gem_lowprec.recipe import matches
from gem_lowprec.report import measure
from torch import nn
from torch.nn.utils import parametrizations

gem_convert = sys.modules["gem_lowprec.convert"]  # the name is the function's in the package
MXFP8_RULE = Rule(forward="mxfp8", dgrad="mxfp8", wgrad="mxfp8")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.heads = nn.ModuleDict({"ctr": nn.Linear(width, 128), "cvr": nn.Linear(width, 128)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.heads["ctr"](x).sum(-1) + self.heads["cvr"](x).sum(-1)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("*", "a.b", True),
        ("heads", "heads.ctr", True),
        ("heads", "tower.heads.0", True),
        ("head", "multihead.q", False),
        ("mlp*", "layers.3.mlp1", True),
        ("layers.1?", "layers.12.kv", True),
        ("layers.1?", "layers.1.kv", False),
        ("layers.*.up", "layers.0.up", True),
        ("layers.*.up", "x.layers.0.up", False),
        ("layers.[01].*", "layers.2.up", False),
        ("UP", "up", False),
    ],
)
def test_patterns(pattern, name, expected):
    assert matches(pattern, name) is expected


def test_recipes_are_frozen_and_named():
    assert {"none", "bf16", "mxfp8", "fp8_row", "fp8_block"} <= RECIPES.keys()
    assert all(name == r.name and get_recipe(name) is r and get_recipe(r) is r for name, r in RECIPES.items())
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECIPES["mxfp8"].name = "x"
    with pytest.raises(ValueError, match=r"unknown recipe 'mxfp9'.*did you mean 'mxfp8'\?"):
        get_recipe("mxfp9")
    with pytest.raises(ValueError, match=r"expected one of 'none'.*'fp8_block'$"):
        get_recipe("qqqqqq")
    with pytest.raises(TypeError, match="got 8"):
        get_recipe(8)
    with pytest.raises(ValueError, match=r"min_size.*got 0"):
        Recipe(name="x", min_size=0)
    with pytest.raises(ValueError, match="fp7"):
        Rule(forward="fp7")
    with pytest.raises(ValueError, match="pattern"):
        Rule(pattern="")


@pytest.mark.parametrize("name", ["mxfp8", "fp8_row", "fp8_block"])
def test_convert_replaces_and_reports(name):
    model = Model()
    before = dict(model.named_parameters())
    keys = list(model.state_dict())
    conversion = convert(model, name)
    new = ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"]
    assert list(conversion.modules) == new
    assert all(model.get_submodule(n) is m and type(m) is LowPrecisionLinear for n, m in conversion.modules.items())
    assert list(model.state_dict()) == keys
    assert all(p is before[n] for n, p in model.named_parameters())
    rows = {r.name: r for r in conversion.rows}
    assert list(rows) == ["embed", *new, "heads.ctr", "heads.cvr"]
    assert rows["embed"].why == "128x16 is below min_size 128"
    assert rows["heads.ctr"].why == "kept by pattern 'heads'"
    assert type(model.heads["ctr"]) is nn.Linear
    assert (rows["embed"].forward, rows["embed"].engine) == ("fp32", "-")
    row = rows["layers.0.up"]
    rule = RECIPES[name].rules[0]
    assert (row.shape, row.forward, row.dgrad, row.wgrad) == ((256, 128), rule.forward, rule.dgrad, rule.wgrad)
    assert row.engine == "emulated"
    weights = 4 * 256 * 128
    assert conversion.fraction == pytest.approx(weights / (weights + 128 * 16 + 2 * 128 * 128))
    text = str(conversion)
    assert text.startswith(f"recipe {name}: 4 of 7 linear layers converted, 79.0%")
    assert len(text.splitlines()) == 3 + 7
    assert all(row.name in text and row.why in text for row in conversion.rows)
    loss = model(torch.randn(10, 16)).square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["none", "bf16"])
def test_these_convert_nothing(name):
    model = Model()
    conversion = convert(model, name)
    assert not conversion.modules
    assert conversion.fraction == 0
    assert all(r.why == f"recipe '{name}' converts nothing" for r in conversion.rows)
    assert not any(isinstance(m, LowPrecisionLinear) for m in model.modules())


def test_checkpoints_move_between_a_plain_and_a_converted_model():
    plain, low = Model(), Model()
    convert(low, "mxfp8")
    low.load_state_dict(plain.state_dict())
    plain2 = Model()
    plain2.load_state_dict(low.state_dict())
    x = torch.randn(4, 16)
    assert torch.equal(plain2(x), plain(x))
    assert not torch.equal(low(x), plain(x))
    assert (low(x) - plain(x)).norm() / plain(x).norm() < 0.1


def test_rules_by_name_in_order():
    recipe = Recipe(
        name="mine",
        min_size=16,
        keep=("ctr",),
        rules=(
            Rule(pattern="layers.1", forward="bf16"),
            Rule(pattern="up", forward="fp8_row", wgrad_every=4, stochastic=True),
            Rule(pattern="down", forward="mxfp8", wgrad="mxfp8", hadamard=32),
            Rule(pattern="heads", dgrad="mxfp8", forward="fp8_row"),
        ),
    )
    rows = {r.name: r for r in convert(Model(), recipe).rows}
    assert rows["embed"].why == "no rule matches"
    assert rows["layers.1.up"].why == "rule 'layers.1' asks for bf16"
    assert (rows["layers.0.up"].forward, rows["layers.0.up"].wgrad) == ("fp8_row", "bf16 1/4")
    assert "stochastic gradients" in rows["layers.0.up"].why
    assert "Hadamard 32 in wgrad" in rows["layers.0.down"].why
    assert rows["heads.ctr"].why == "kept by pattern 'ctr'"
    assert rows["heads.cvr"].engine == "emulated"
    assert "fp8_row emulated: " in rows["heads.cvr"].why
    assert "mxfp8 emulated: " in rows["heads.cvr"].why


def test_layers_that_cannot_be_replaced_stay_and_say_why():
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(128, 4),
            "spectral": parametrizations.spectral_norm(nn.Linear(128, 128)),
            "hooked": nn.Linear(128, 128),
            "fine": nn.Linear(128, 128),
        }
    )
    model["hooked"].register_forward_hook(lambda *_: None)
    conversion = convert(model, "mxfp8")
    why = {r.name: r.why for r in conversion.rows if not r.converted}
    assert list(conversion.modules) == ["fine"]
    assert why["attention.out_proj"] == "NonDynamicallyQuantizableLinear has a behaviour of its own"
    assert "spectral" in why
    assert why["hooked"] == "it has hooks, which a new module would lose"


def test_shared_layers_and_tied_weights_stay_shared():
    shared = nn.Linear(128, 128)
    tied = nn.Linear(128, 128)
    tied.weight = shared.weight
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": tied})
    conversion = convert(model, "mxfp8")
    assert len(conversion.rows) == 2
    assert model["a"] is model["b"][0]
    assert type(model["a"]) is LowPrecisionLinear
    assert model["c"].weight is model["a"].weight


def test_the_linear_part_of_a_norm_linear():
    nn_module = pytest.importorskip("gem_kernels.nn")
    model = nn.ModuleDict({"qkv": nn_module.NormLinear(128, 256)})
    x = torch.randn(8, 128)
    before = model["qkv"](x)
    conversion = convert(model, Recipe(name="r", rules=(dataclasses.replace(MXFP8_RULE, pattern="qkv"),)))
    assert [r.name for r in conversion.rows if r.converted] == ["qkv.linear"]
    assert 0 < (model["qkv"](x) - before).norm() / before.norm() < 0.1


def test_the_table_speaks_of_the_device_the_model_will_run_on():
    with torch.device("meta"):
        model, other = Model(), Model()
    assert "meta" in convert(model, "fp8_row").rows[1].why
    assert "kernel on cpu" in convert(other, "fp8_row", device="cpu").rows[1].why


def test_errors():
    model = Model()
    convert(model, "mxfp8")
    for recipe in ("mxfp8", "none"):
        with pytest.raises(ValueError, match=r"converted before \('layers\.0\.up'"):
            convert(model, recipe)
    with pytest.raises(ValueError, match="cannot be replaced in itself"):
        convert(nn.Linear(128, 128), "mxfp8")
    fresh = Model()
    typo = Recipe(name="typo", rules=(MXFP8_RULE, dataclasses.replace(MXFP8_RULE, pattern="layer.0")))
    with pytest.raises(ValueError, match=r"rule 'layer\.0' of recipe 'typo' matches no linear layer; there are embed"):
        convert(fresh, typo)
    assert not any(isinstance(m, LowPrecisionLinear) for m in fresh.modules())
    with pytest.raises(ValueError, match="unknown recipe"):
        convert(fresh, "int4")


def test_each_layer_and_seed_has_its_own_random_numbers():
    recipe = Recipe(name="s", rules=(dataclasses.replace(MXFP8_RULE, stochastic=True),), seed=5)
    conversion = convert(Model(), recipe)
    assert len({m.stream for m in conversion.modules.values()}) == len(conversion.modules)
    assert {m.seed for m in conversion.modules.values()} == {5}
    assert {m.seed for m in convert(Model(), recipe, seed=7).modules.values()} == {7}
    conversion.set_step(3, micro=2)
    assert all((m.clock.step, m.clock.micro) == (3, 2) for m in conversion.modules.values())


def test_measure_against_its_definitions():
    x = torch.tensor([[1000.0, -500.0, 3.0, 1e-4, 0.0, 0.77]])
    q = dataclasses.replace(quantize(x / 1000 * 448, FP8_TENSOR), scale=torch.ones(1, 1))  # amax 448 at scale 1
    sqnr, saturation, underflow, amax = measure(x, q).tolist()
    x_hat = q.dequantize()
    expected = 10 * math.log10(x.double().square().sum() / (x.double() - x_hat.double()).square().sum())
    assert sqnr == pytest.approx(expected, rel=1e-5)
    assert saturation == pytest.approx(2 / 6)
    assert underflow == pytest.approx(1 / 5)
    assert amax == 1000
    zero = torch.zeros(2, 3)
    assert measure(zero, quantize(zero, FP8_TENSOR)).tolist() == [math.inf, 0, 0, 0]
    exact = torch.ones(2, 3)
    assert measure(exact, quantize(exact, FP8_TENSOR))[0] > 100
    bad = torch.tensor([[1.0, math.nan]])
    assert math.isnan(measure(bad, quantize(bad, FP8_TENSOR))[0])


def test_watch_finds_the_worst_tensor_and_is_silent_between_steps():
    model = Model()
    conversion = convert(model, "fp8_row")
    with torch.no_grad():
        model.layers[1].down.weight[3, 0] = 1e4  # one outlier makes the rest of its row coarse
    x = torch.randn(64, 16)
    with watch(conversion, every=10) as report:
        conversion.set_step(9)
        model(x).sum().backward()
        assert report.rows() == []
        conversion.set_step(20)
        model(x).square().mean().backward()
        rows = report.rows()
        conversion.set_step(21)
        model(x * 1e3).sum().backward()
        assert report.rows() == rows
    conversion.set_step(30)
    model(x * 1e3).sum().backward()
    assert report.rows() == rows
    operands = {"forward.input", "forward.weight", "dgrad.grad_output", "dgrad.weight"}
    assert {(r.layer, f"{r.product}.{r.tensor}") for r in rows} == {
        (layer, operand) for layer in conversion.modules for operand in operands
    }
    assert [r.sqnr_db for r in rows] == sorted(r.sqnr_db for r in rows)
    assert {r.step for r in rows} == {20}
    worst = max((r for r in rows if (r.product, r.tensor) == ("forward", "weight")), key=lambda r: r.underflow)
    assert worst.layer == "layers.1.down"
    assert worst.amax == 1e4
    by_key = {(r.layer, r.product, r.tensor): r for r in rows}
    weight = model.layers[0].up.weight.detach()
    error = weight - quantize(weight, FP8_ROW).dequantize()
    expected = 10 * math.log10(weight.square().sum() / error.square().sum())
    assert by_key["layers.0.up", "forward", "weight"].sqnr_db == pytest.approx(expected, rel=1e-3)
    assert by_key["layers.0.up", "forward", "weight"].amax == weight.abs().max().item()
    lines = report.table(limit=3).splitlines()
    assert len(lines) == 5
    assert lines[0].split()[:3] == ["layer", "operand", "format"]


def test_non_finite_rows_come_first():
    model = Model()
    conversion = convert(model, "mxfp8")
    with torch.no_grad():
        model.layers[1].up.weight[0, 0] = math.nan
    report = watch(conversion, every=1)
    model(torch.randn(4, 16))
    first = report.rows()[0]
    assert (first.layer, first.tensor) in {("layers.1.up", "weight"), ("layers.1.down", "input")}
    assert math.isnan(first.sqnr_db)


def test_watch_refuses_a_period_of_zero():
    with pytest.raises(ValueError, match=r"every.*got 0"):
        watch(convert(Model(), "mxfp8"), every=0)


def test_layers_that_would_not_be_faster_stay(monkeypatch):
    rates = speed.Card(
        rates={"bf16": speed.Rate(top=700, half=50), "fp8_block": speed.Rate(top=1100, half=150)},
        wgrad={},
        quantise=3.5,
    )
    monkeypatch.setattr(gem_convert, "card", lambda device: rates)
    rule = Rule(forward="fp8_block", dgrad="fp8_block", wgrad="fp8_block")

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(128, 256), nn.Linear(4096, 4096))

    with pytest.warns(UserWarning, match="1 of 2 linear layers stay as they are"):
        conversion = convert(build(), Recipe(name="fast", rules=(rule,)))
    assert [r.converted for r in conversion.rows] == [False, True]
    assert re.fullmatch(r"256x128 would train at 0\.\d\d of BF16's speed", conversion.rows[0].why)
    layer = conversion.modules["1"]
    assert layer.min_tokens > 1000
    assert f"from {layer.min_tokens} tokens on" in conversion.rows[1].why
    x = torch.randn(3, 4096)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))  # few tokens: a plain layer
    layer.min_tokens = 3
    assert not torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert all(r.converted for r in convert(build(), Recipe(name="all", rules=(rule,), fallback=False)).rows)
    # A precision without a rate, and a rule whose kernels were not measured, decide nothing.
    for other in (Rule(forward="mxfp8"), dataclasses.replace(rule, stochastic=True)):
        assert all(r.converted for r in convert(build(), Recipe(name="x", rules=(other,))).rows)


def test_the_model_of_speed():
    rates = speed.Card(
        rates={"bf16": speed.Rate(top=500, half=0), "fp8_block": speed.Rate(top=1000, half=0)}, wgrad={}, quantise=4.0
    )
    block = Rule(forward="fp8_block", dgrad="fp8_block", wgrad="fp8_block")
    flops = 2.0 * 512 * 1024
    assert speed.step_ps(Rule(), (512, 1024), rates) == pytest.approx(3 * flops / 500)
    assert speed.step_ps(block, (512, 1024), rates) == pytest.approx(3 * flops / 1000 + 4 * (512 + 1024) / 4.0)
    assert speed.step_ps(dataclasses.replace(block, wgrad="bf16"), (512, 1024), rates) == pytest.approx(
        2 * flops / 1000 + flops / 500 + 3 * (512 + 1024) / 4.0
    )
    assert speed.gain(block, (8192, 8192), rates) == pytest.approx(2, rel=0.05)
    assert speed.card(torch.device("cpu")) is None
    tokens = speed.least_tokens(block, (4096, 4096), rates)
    saved = speed.step_ps(Rule(), (4096, 4096), rates) - speed.step_ps(block, (4096, 4096), rates)
    assert tokens * saved >= speed.LAUNCHES + 6 * 4096 * 4096 / 4.0 > (tokens - 1) * saved


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_norm_before_a_block_wise_projection_is_replaced(norm):
    torch.manual_seed(0)
    model = nn.Sequential(NormLinear(128, 256, norm=norm), NormLinear(128, 128, norm=norm))
    keys, parameters = list(model.state_dict()), list(model.parameters())
    rules = (Rule(pattern="0", forward="fp8_block"), Rule(pattern="1", forward="mxfp8"))
    apart = copy.deepcopy(model)
    convert(apart, Recipe(name="mixed", rules=rules, fuse_norms=False))
    assert [type(m) for m in apart] == [NormLinear, NormLinear]
    convert(model, Recipe(name="mixed", rules=rules))
    assert [type(m) for m in model] == [LowPrecisionNormLinear, NormLinear]
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    x = torch.randn(10, 128)
    assert torch.equal(model[0](x), model[0].linear(model[0].norm(x)))  # nothing to fuse with on a CPU
