"""What a plan says that regions need at a time, against what they need."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from gem_parallel import MemoryConfig
from gem_parallel.memory import worth
from gem_parallel.memory.keeper import Keeper
from gem_parallel.memory.live import Meter
from gem_parallel.memory.plan import make_plan
from gem_parallel.memory.profile import Curve, count_saved
from gem_parallel.memory.regions import MEASURED_STEPS, Regions
from gem_parallel.memory.testing import Block
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WIDTH = 32


class Allocations(TorchDispatchMode):
    """An account of its own: every storage that an operator has made and that is still there."""

    def __init__(self) -> None:
        super().__init__()
        self.there: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                before = self.there.get(storage._cdata)
                if before is None or before[0].expired():
                    self.there[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.there = {key: found for key, found in self.there.items() if not found[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.there.values()))
        return out


class Wasteful(torch.autograd.Function):
    """x, whose backward needs eight times as much as x for a while, as an attention needs its dS."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy + 0 * torch.cat([x] * 8, dim=-1)[..., : x.shape[-1]]


class Waste(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + Wasteful.apply(self.linear(x)).sigmoid()


def planned(model: nn.Module, batch: int, **config) -> tuple[Regions, int]:
    """A model's regions with their plan, and what a step takes that follows it."""
    how = MemoryConfig(recompute_min_kib=1, quantise_min_kib=1, **config)
    regions = Regions(model, [name for name, _ in model.named_children()], how)
    regions.launched = False
    for seed in range(MEASURED_STEPS + 1):
        x = torch.randn(batch, 64, WIDTH, requires_grad=True)
        regions.begin()
        model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        with Allocations() as account:
            y = model(x)
            y.sum().backward()
        del y
    regions.close()
    return regions, account.peak


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (Block, {"policy": "uniform", "budget": 1.0}),
        (Block, {"policy": "regions", "budget": 0.5}),
        (Block, {"policy": "uniform", "budget": 0.75}),
        (Block, {"policy": "uniform", "budget": 0.1}),
        (Block, {"policy": "regions", "budget": 0.5, "quantise": "fp8"}),
        (Waste, {"policy": "uniform", "budget": 1.0}),
        (Waste, {"policy": "regions", "budget": 0.5}),
    ],
)
def test_a_step_needs_what_the_plan_says(kind, config, monkeypatch):
    """Within 5%, whatever the clocks make the plan choose: what lacks are the output and the gradients of parameters of
    the regions that ran backward before the peak.
    """
    free = SimpleNamespace(seconds=0.0, host_s=0.0)
    monkeypatch.setattr(worth._Watching, "_time_packing", lambda *_: (free, free, 0))
    torch.manual_seed(0)
    regions, peak = planned(nn.Sequential(*(kind() for _ in range(3))), 32, **config)
    assert any(row.point.packs for row in regions.plan.regions)
    assert regions.plan.peak == pytest.approx(peak, rel=0.05), str(regions.plan)


def test_kept_bytes_alone_would_not_hold():
    """A budget that counts only what is kept and computed again is exceeded by what backward needs beside it."""
    torch.manual_seed(0)
    regions, peak = planned(nn.Sequential(*(Waste() for _ in range(3))), 32, policy="uniform", budget=1.0)
    assert peak > 1.5 * regions.plan.kept
    budget = int(0.9 * peak)
    plan = make_plan([regions.curves[name] for name in regions.names], policy="regions", engine="eager", limit=budget)
    assert plan.peak <= budget
    assert plan.kept < regions.plan.kept


def test_curves_of_a_small_batch_say_what_a_larger_one_needs():
    """All bytes are a sample's, but for the parameters' gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    small, _ = planned(model, 16, policy="uniform", budget=1.0)
    large, peak = planned(model, 64, policy="uniform", budget=1.0)
    assert 4 * small.plan.peak == pytest.approx(peak, rel=0.05)
    assert 4 * small.plan.peak == pytest.approx(large.plan.peak, rel=0.05)


def test_inputs_that_are_made_of_one_another_do_not_lead_out_of_the_region():
    linear = nn.Linear(WIDTH, WIDTH)

    class Sum(nn.Module):
        def forward(self, a, b):
            return linear(a).tanh() * b

    x = torch.randn(8, WIDTH, requires_grad=True)
    a = x.exp()
    b = a.sigmoid()
    saved, _, backward = worth.watch(Sum(), (a, b), {}, linear, Keeper(None, min_bytes=0), least=0)
    assert backward.moments
    assert saved == count_saved(Sum(), (a, b), {}, linear)
    assert linear.weight.grad is None
    (linear(a) * b).sum().backward()  # what a and b were made of is still there
    assert x.grad is not None


def test_a_meter_forgets_what_is_gone():
    x = torch.ones(1000)
    with Meter(torch.device("cpu")) as meter:
        y = x + 1
        assert y.nbytes == 4000
        del y
        kept = x[:10] + 1
        assert meter.take() == 4000
        assert meter.take() == 40
        x.add_(1)  # of before
        z = x.view(10, 100)
        assert meter.take() == 40
    assert z.numel() == 100 * kept.numel()


def test_a_curve_without_a_backward_pass_counts_what_is_kept():
    costs = [worth.Cost("norm#0", seconds=1.0, nbytes=100, first=1, last=2)]
    found: Curve = worth.curve("0", costs, inputs=10, saved=300, unpacked=300, forward_s=9.0)
    assert [(p.kept, p.working) for p in found.points] == [(10, 300), (200, 300), (300, 300)]


def test_what_two_regions_keep_is_counted_once():
    """tanh keeps its result, which the next region's linear layer keeps as well."""

    def part() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    net = nn.Sequential(part(), part()).train()
    regions = Regions(net, ["0", "1"], MemoryConfig(policy="uniform", recompute_min_kib=0.1))
    for _ in range(MEASURED_STEPS + 1):
        regions.begin()
        x = torch.randn(64, WIDTH, requires_grad=True)
        net(x).square().sum().backward()
    assert regions.plan is not None
    assert [row.point.kept for row in regions.plan.regions] == [2 * x.nbytes, x.nbytes]
