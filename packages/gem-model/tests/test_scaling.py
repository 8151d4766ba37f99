"""The coordinate checks of muP: how far steps of one size move shapes of many sizes."""

from __future__ import annotations

import pytest
import torch
from gem_model import GEM, TowerConfig, preset
from gem_model.init import fan_ins
from gem_model.scaling import (
    Ratios,
    at_shape,
    at_width,
    matrices,
    scale_branches,
    scale_outputs,
    shape_ratios,
    width_ratios,
)
from gem_model.testing import example_inputs, random_batch

WIDTHS = (32, 64, 128)
DEPTHS = (1, 2, 4, 8)


def shape(width, **changes):
    sizes = {"width": width, "heads": width // 16, "layers": 2, "head_hidden": 2 * width, "qk_norm": True}
    return preset("tiny", **{**sizes, **changes})


def sizes(config, *, base=None, lr=0.01, steps=3):
    """RMS of the last layer's events as they start, and how far a few steps of Adam move them, what the feed-forward
    network adds to them, the non-sequence tokens and the logits. `base` is None, a width or a shape.
    """
    inputs = example_inputs()
    torch.manual_seed(7)
    model = GEM(config, inputs)
    ratios = Ratios()
    if isinstance(base, int):
        ratios = width_ratios(config, inputs, base)
    elif base is not None:
        ratios = shape_ratios(config, inputs, base)
        scale_branches(model, base)
    if base is not None:
        scale_outputs(model, ratios)
    batch = random_batch(inputs, 32, seed=1)
    caught = {"events": [], "ffn": [], "x": []}
    last = model.layers[-1]
    sequence = last.towers["ratings"].sequence
    sequence.register_forward_hook(lambda _m, _a, out: caught["events"].append(out[0].settled().tokens.detach()))
    sequence.ffn.down.register_forward_hook(lambda _m, _a, out: caught["ffn"].append(out.detach()))
    last.interaction.register_forward_hook(lambda _m, _a, out: caught["x"].append(out.detach()))
    groups = [
        {"params": [p], "lr": lr / ratios.fan_in.get(name, 1.0) / ratios.branch.get(name, 1.0)}
        for name, p in model.named_parameters()
        if not name.startswith("tables.")
    ]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    outs = [model(batch).detach()]
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(model(batch), batch).backward()
        optimizer.step()
    outs.append(model(batch).detach())
    found = {name: rms(seen[-1] - seen[0]) for name, seen in caught.items()}
    return {"start": rms(caught["events"][0]), **found, "logits": rms(outs[-1] - outs[0])}


def rms(x):
    return x.square().mean().sqrt().item()


def slope(counts, values):
    """d log(value) / d log(count), by least squares."""
    x, y = (torch.tensor(v).double().log() for v in (counts, values))
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def test_the_same_learning_rate_moves_every_width_as_far():
    """By plain Adam's steps a wider model moves farther, with the ratios it does not."""
    plain = [sizes(shape(width)) for width in WIDTHS]
    scaled = [sizes(shape(width), base=WIDTHS[0]) for width in WIDTHS]
    assert plain[0] == pytest.approx(scaled[0])  # the base width is left as it is
    for name in ("ffn", "logits"):
        stays = slope(WIDTHS, [s[name] for s in scaled])
        assert abs(stays) < 0.2
        assert slope(WIDTHS, [s[name] for s in plain]) > abs(stays) + 0.2


def test_the_same_learning_rate_moves_every_depth_as_far():
    """Both streams: plain, a deeper model moves farther; with the branches of depth-muP it does not."""
    plain = [sizes(preset("tiny", qk_norm=True, layers=depth)) for depth in DEPTHS]
    scaled = [sizes(preset("tiny", qk_norm=True, layers=depth), base=preset("tiny")) for depth in DEPTHS]
    assert plain[0] == pytest.approx(scaled[0])  # the base is left as it is
    for name in ("events", "x"):
        stays = slope(DEPTHS, [s[name] for s in scaled])
        assert abs(stays) < 0.2
        assert slope(DEPTHS, [s[name] for s in plain]) > abs(stays) + 0.15
    for s in scaled:
        assert 0.7 < s["start"] / scaled[0]["start"] < 1.4
        assert 0.5 < s["logits"] / scaled[0]["logits"] < 2
    assert slope(DEPTHS, [s["ffn"] for s in scaled]) < -0.25  # of one block among L: 1 / sqrt(L)


def test_branches_of_experts_are_made_smaller():
    torch.manual_seed(3)
    model = GEM(preset("tiny", layers=4, experts=("wukong", "dcn", "attention")), example_inputs())
    x = torch.randn(8, model.layers[1].interaction.proj.weight.shape[1], 16)
    first = model.layers[0].interaction.proj.weight.clone()
    before = model.layers[1].interaction.ensemble(x), model.layers[1].interaction.proj(x)
    scale_branches(model, preset("tiny"))
    torch.testing.assert_close(model.layers[1].interaction.ensemble(x), before[0] / 2)
    torch.testing.assert_close(model.layers[1].interaction.proj(x), before[1] / 2 + 0.75**0.5 * x[:, :8])
    torch.testing.assert_close(model.layers[0].interaction.proj.weight, first)


def test_a_shape_that_is_larger_in_every_way_moves_as_far():
    """As `large` is to `tiny`, at a width for a CPU: the personal tokens alone would make the events twenty times as
    large at the start.
    """
    base = preset("tiny", qk_norm=True)
    large = preset(
        "tiny", qk_norm=True, width=32, head_hidden=32, layers=3, n_tokens=40, interaction_fm=20, interaction_rank=64,
        n_sum=16, recent=16, pma_queries=32, pma_seeds=64, pffn_tokens=256,
    )  # fmt: skip
    small, plain, scaled = sizes(base), sizes(large), sizes(large, base=base)
    assert plain["start"] > 10 * small["start"]
    assert plain["events"] > 20 * small["events"]
    for name in ("start", "events", "x", "logits"):
        assert 0.5 < scaled[name] / small[name] < 2, name


def test_ratios_are_of_what_sums_over_the_width_alone():
    inputs = example_inputs()
    config = shape(64, pma_seeds=5, experts=("wukong", "dcn"), towers=(TowerConfig(source="views", width=32, heads=2),))
    ratios = width_ratios(config, inputs, 16).fan_in
    fans = fan_ins(GEM(config, inputs, device="meta"))
    assert set(ratios) == set(fans)
    assert ratios["layers.0.towers.ratings.sequence.ffn.down.weight"] == pytest.approx(4, rel=0.1)
    assert ratios["layers.1.towers.views.sequence.attention.qkv.linear.weight"] == 4
    assert ratios["layers.0.towers.views.enter.weight"] == ratios["heads.out.click.weight"] == 4
    assert ratios["features.projections"] == ratios["layers.0.summary.mix.weight"] == ratios["heads.wide.weight"] == 1
    assert at_width(config, 16).towers[0].width == 8
    assert at_width(shape(64, head_hidden=130), 16).head_hidden == 32  # the nearest


def test_ratios_to_a_shape_are_of_tokens_ranks_and_depth_too():
    inputs = example_inputs()
    config = preset("base", towers=(TowerConfig(source="views", width=32, heads=2, layers=3),))
    found = shape_ratios(config, inputs, preset("small"))
    fans, branch = found.fan_in, found.branch
    tokens = {"base": 24 + 2 * (8 + 1 + 8 + 8), "small": 12 + 2 * (3 + 1 + 2 + 3)}  # of the layers after the first
    for layer in (2, 3):
        part = f"layers.{layer}.interaction"
        theirs = tokens["small"]
        ours = tokens["base"] if layer < 3 else tokens["base"] - (8 + 1 + 8 + 8)  # where "views" takes no part
        assert fans[f"{part}.proj.weight"] == pytest.approx(ours / theirs)
        assert fans[f"{part}.fmb.mlp.0.weight"] == pytest.approx(ours * 16 / (theirs * 8))
    assert fans["layers.0.towers.ratings.sequence.attention.qkv.linear.weight"] == 256 / 48
    assert branch["layers.3.interaction.proj.weight"] == branch["layers.1.interaction.lcb.weight"] == 2
    assert branch["layers.0.towers.ratings.sequence.ffn.down.bias"] == 2
    assert branch["layers.0.towers.ratings.sequence.ffn.out.weight"] == 2 * 64 / 8
    assert branch["layers.2.interaction.fmb.compress"] == branch["layers.1.towers.ratings.pma.queries"] == 2**0.5
    assert branch["layers.0.interaction.proj.weight"] == branch["heads.out.click.weight"] == 1
    same = shape_ratios(config, inputs, config)
    assert set(same.fan_in.values()) == set(same.branch.values()) == {1.0}
    seeds = at_shape(preset("large"), preset("tiny"))
    assert (seeds.pma_seeds, seeds.pma_queries, seeds.layers, seeds.width) == (2, 2, 1, 16)


def test_first_logits_shrink_with_the_width_as_mup_asks():
    inputs = example_inputs()
    config = shape(64)
    model = GEM(config, inputs)
    before = {name: p.detach().clone() for name, p in model.heads.named_parameters()}
    scale_outputs(model, width_ratios(config, inputs, 16))
    for name, p in model.heads.named_parameters():
        factor = 0.5 if name.startswith("out.") and name.endswith("weight") else 1.0
        torch.testing.assert_close(p, factor * before[name])


def test_muon_is_for_the_matrices_of_linear_maps():
    model = GEM(shape(32, evidence_heads=2, pma_seeds=4), example_inputs())
    chosen = matrices(model)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert all(len(shapes[name]) == 2 and min(shapes[name]) > 1 for name in chosen)
    assert "layers.0.towers.ratings.sequence.attention.qkv.linear.weight" in chosen
    others = ("tables", "heads.out", "heads.wide", "queries", "mix")
    assert not [name for name in chosen if any(other in name for other in others)]
