"""A planted outlier: a feature 10^7 times the others, as a raw count among normalised floats would be. The naive recipe
loses what the others say, the full one does not."""

from __future__ import annotations

import torch
from gem_lowprec import Recipe, Rule, convert
from torch import nn

NAIVE = Recipe(name="naive", rules=(Rule(forward="fp8_row", dgrad="fp8_row", wgrad="fp8_row"),), min_size=1)
FULL = Recipe(
    name="full", min_size=1, keep=("2",),
    rules=(Rule(forward="mxfp8", dgrad="mxfp8", wgrad="mxfp8", hadamard=32, stochastic=True),),
)  # fmt: skip


def final_loss(recipe: Recipe | None, seed: int) -> float:
    """Mean squared error, relative to the target's variance, after a short training on 64 features and the outlier."""
    torch.manual_seed(seed)
    direction = torch.randn(64, 1) / 8
    model = nn.Sequential(nn.Linear(96, 128), nn.GELU(), nn.Linear(128, 1))
    with torch.no_grad():
        model[0].weight[:, 64] *= 1e-7  # a trained network has a small weight for a large feature
    if recipe is not None:
        convert(model, recipe)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(120):
        x = torch.randn(256, 96)
        x[:, 64] = 1e7 * (1 + 0.1 * torch.rand(256))  # in a block of 32 that the target does not need
        target = torch.tanh(x[:, :64] @ direction)
        loss = nn.functional.mse_loss(model(x), target) / target.var()
        optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            model[0].weight.grad[:, 64] = 0  # its own gradient is another story
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


def test_the_naive_recipe_fails_and_the_full_one_does_not():
    exact, naive, full = (final_loss(recipe, seed=0) for recipe in (None, NAIVE, FULL))
    assert exact < 0.2
    assert naive > 0.8  # it has learnt next to nothing
    assert full < exact + 0.03
