"""Weights cast together are what autocast makes of them one by one."""

import pytest
import torch
from gem_model import GEM, preset
from gem_model.casting import cast_once
from gem_model.interaction import TokenMix
from gem_model.testing import example_inputs, random_batch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Casts(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.__name__] = self.counts.get(func.__name__, 0) + 1
        return func(*args, **(kwargs or {}))


def build(**changes):
    torch.manual_seed(0)
    model = GEM(preset("tiny", layers=2, qk_norm=True, pma_seeds=4, **changes), example_inputs())
    return model, random_batch(example_inputs(), 9, seed=1)


def both_passes(model, batch):
    model.zero_grad()
    with Casts() as casts, torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch)
        model.loss(logits, batch).backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}, casts.counts


@pytest.mark.parametrize("experts", [(), ("wukong", "dcn", "attention")])
def test_the_model_is_the_same_with_fewer_casts(experts, monkeypatch):
    model, batch = build(experts=experts)
    logits, gradients, counts = both_passes(model, batch)
    monkeypatch.setattr("gem_model.casting._places", lambda _: [])
    expected, theirs, before = both_passes(model, batch)
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=2e-3)
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        error = (gradient - theirs[name]).norm() / (theirs[name].norm() + 1e-9)
        assert error < 0.02, f"{name}: {error}"
    assert counts["_foreach_copy_.default"] == 4  # two layers, both passes
    assert counts["_to_copy.default"] < before["_to_copy.default"] - 100


def test_parameters_are_back_afterwards_also_after_an_error():
    layer = nn.Sequential(nn.Linear(3, 3), TokenMix(3, 2))
    held = list(layer.parameters())
    x = torch.randn(2, 3)

    def fail():
        with torch.autocast("cpu", dtype=torch.bfloat16), cast_once(layer, x):
            assert layer[0].weight.dtype == layer[0].bias.dtype == layer[1].weight.dtype == torch.bfloat16
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all(a is b for a, b in zip(layer.parameters(), held, strict=True))


def test_what_autocast_leaves_alone_stays():
    class Other(nn.Linear):
        pass

    layer = nn.ModuleList([nn.LayerNorm(3), Other(3, 3), nn.Linear(3, 3).double(), nn.Linear(3, 3)])
    x = torch.randn(2, 3)
    with cast_once(layer, x):
        assert all(p.dtype != torch.bfloat16 for p in layer.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16), cast_once(layer, x):
        assert [m.weight.dtype for m in layer] == [torch.float32, torch.float32, torch.float64, torch.bfloat16]
    layer[3].weight = layer[1].weight
    tied = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    tied[1].weight = tied[0].weight
    with torch.autocast("cpu", dtype=torch.bfloat16), cast_once(tied, x):
        assert tied[0].weight is tied[1].weight


def test_gradients_are_those_of_the_copies():
    layer, x = nn.Linear(40, 3, bias=False), torch.randn(5, 40)
    unused = nn.Linear(2, 2)
    both = nn.ModuleList([layer, unused])
    with torch.autocast("cpu", dtype=torch.bfloat16), cast_once(both, x):
        out = layer(x)
    out.float().sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.bfloat16().float().sum(0).expand(3, 40), atol=0.02, rtol=0.01)
    assert unused.weight.grad is None
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), cast_once(both, x):
        torch.testing.assert_close(layer(x), out.detach())
