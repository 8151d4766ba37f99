"""What the benchmark of activation memory says of gradients."""

from __future__ import annotations

import pytest
import torch
from gem_parallel import MemoryConfig
from gem_parallel.bench.memory import config_of, errors, right
from torch import nn

SIZES = {"quantise_min_kib": 1024.0, "recompute_min_kib": 1024.0}
INSIDE = MemoryConfig(inside="exact")
FP8, MX4 = MemoryConfig(quantise="fp8"), MemoryConfig(quantise="mx4")


def model() -> tuple[nn.Module, list[torch.Tensor]]:
    """Two regions and a layer outside of them, whose gradient is most of the norm."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), "head": nn.Linear(8, 8)})
    for name, p in net.named_parameters():
        p.grad = torch.randn_like(p) * (100 if name.startswith("head") else 1)
    return net, [p.grad.clone() for p in net.parameters()]


def test_what_goes_wrong_in_one_region_is_seen():
    net, reference = model()
    regions = ["layers.0", "layers.1"]
    assert errors(net, regions, reference)[:2] == (0.0, 0.0)
    p = net["layers"][1].weight
    p.grad += 0.3 * torch.randn_like(p)
    whole, worst, where = errors(net, regions, reference)
    assert whole < 0.01
    assert 0.2 < worst < 0.45
    assert where == "layers.1"
    row = {"error": whole, "worst": worst}
    assert not right(row, FP8, (0.0, 0.0))
    assert right(row, MX4, (0.0, 0.0))
    p.grad[0, 0] = float("nan")
    whole, worst, where = errors(net, regions, reference)
    assert where == "layers.1"
    assert not right({"error": whole, "worst": worst}, MX4, (0.0, 0.0))


@pytest.mark.parametrize("config", [None, MemoryConfig(policy="full")])
def test_recomputed_gradients_may_differ_as_two_runs_do(config):
    row = {"error": 1e-8, "worst": 3e-8}
    assert right(row, config, (1e-8, 2e-8))
    assert not right(row, config, (0.0, 0.0))
    assert not right(row, config, (1e-8, 1e-8))
    assert right({"error": 0.0, "worst": 0.0}, config, (0.0, 0.0))


def test_rows_that_are_normed_again_may_be_rounded_otherwise():
    assert right({"error": 9e-5, "worst": 1.9e-4}, INSIDE, (0.0, 0.0))
    assert not right({"error": 1.1e-4, "worst": 1.1e-4}, INSIDE, (0.0, 0.0))
    assert not right({"error": 1e-5, "worst": 2.1e-4}, INSIDE, (0.0, 0.0))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", None),
        ("inside alone", MemoryConfig(inside="exact", **SIZES)),
        ("inside8 alone", MemoryConfig(inside="fp8", **SIZES)),
        ("fp8 alone", MemoryConfig(quantise="fp8", **SIZES)),
        ("regions 0.6 + inside", MemoryConfig(policy="regions", budget=0.6, inside="exact", **SIZES)),
        (
            "uniform 80GiB + inside + fp8",
            MemoryConfig(policy="uniform", budget_gib=80, inside="exact", quantise="fp8", **SIZES),
        ),
        ("operators: none", MemoryConfig(engine="operators", **SIZES)),
    ],
)
def test_names_of_variants(name, expected):
    assert config_of(name) == expected
