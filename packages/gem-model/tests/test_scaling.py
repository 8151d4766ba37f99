import pytest
import torch
from gem_model import GEM, TowerConfig, preset
from gem_model.init import fan_ins
from gem_model.scaling import at_width, matrices, scale_outputs, width_ratios
from gem_model.testing import example_inputs, random_batch

WIDTHS = (32, 64, 128)


def shape(width, **changes):
    sizes = {"width": width, "heads": width // 16, "layers": 2, "head_hidden": 2 * width, "qk_norm": True}
    return preset("tiny", **{**sizes, **changes})


def moved(width, *, base, lr=0.01, steps=3):
    """How far a few steps of Adam move what the events' feed-forward network adds, and the logits: RMS."""
    inputs = example_inputs()
    torch.manual_seed(7)
    config = shape(width)
    model = GEM(config, inputs)
    ratios = {} if base is None else width_ratios(config, inputs, base)
    if ratios:
        scale_outputs(model, ratios)
    batch = random_batch(inputs, 64, seed=1)
    caught = []
    inner = model.layers[1].towers["ratings"].sequence.ffn.down
    inner.register_forward_hook(lambda _m, _a, out: caught.append(out.detach()))
    groups = [
        {"params": [p], "lr": lr / ratios.get(name, 1.0)}
        for name, p in model.named_parameters()
        if not name.startswith("tables.")
    ]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    first = model(batch).detach()
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(model(batch), batch).backward()
        optimizer.step()
    last = model(batch).detach()
    return (caught[-1] - caught[0]).square().mean().sqrt().item(), (last - first).square().mean().sqrt().item()


def slope(values):
    """d log(value) / d log(width), by least squares."""
    x = torch.tensor(WIDTHS).double().log()
    y = torch.tensor(values).double().log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def test_the_same_learning_rate_moves_every_width_as_far():
    """The coordinate check of muP: by plain Adam's steps a wider model moves farther, with the ratios it does not."""
    plain = [moved(width, base=None) for width in WIDTHS]
    scaled = [moved(width, base=WIDTHS[0]) for width in WIDTHS]
    assert plain[0] == pytest.approx(scaled[0])  # the base width is left as it is
    for grows, stays in zip(zip(*plain, strict=True), zip(*scaled, strict=True), strict=True):
        assert abs(slope(stays)) < 0.2
        assert slope(grows) > abs(slope(stays)) + 0.2


def test_ratios_are_of_what_sums_over_the_width_alone():
    inputs = example_inputs()
    config = shape(64, pma_seeds=5, experts=("wukong", "dcn"), towers=(TowerConfig(source="views", width=32, heads=2),))
    ratios = width_ratios(config, inputs, 16)
    fans = fan_ins(GEM(config, inputs, device="meta"))
    assert set(ratios) == set(fans)
    assert ratios["layers.0.towers.ratings.sequence.ffn.down.weight"] == pytest.approx(4, rel=0.1)
    assert ratios["layers.1.towers.views.sequence.attention.qkv.linear.weight"] == 4
    assert ratios["layers.0.towers.views.enter.weight"] == ratios["heads.out.click.weight"] == 4
    assert ratios["features.projections"] == ratios["layers.0.summary.mix.weight"] == ratios["heads.wide.weight"] == 1
    assert at_width(config, 16).towers[0].width == 8
    assert at_width(shape(64, head_hidden=130), 16).head_hidden == 32  # the nearest


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
