"""Budgets of activations: the allocation, the curves and the plans."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from gem_parallel import MemoryConfig, MemoryPlan, declare_cost
from gem_parallel.memory.allocate import Option, allocate, allocate_greedy, hull, peak
from gem_parallel.memory.costs import declare_kernels
from gem_parallel.memory.plan import make_plan
from gem_parallel.memory.profile import (
    Curve,
    HostCost,
    Machine,
    Point,
    Recorder,
    count_saved,
    curve,
    host_cost,
    tensor_bytes,
    with_host,
)
from gem_parallel.memory.regions import MEASURED_STEPS, Regions
from gem_parallel.memory.testing import WIDTH, Block, sample, stack, train_step
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode


def curves_at_random(seed: int, regions: int, options: int) -> list[list[Option]]:
    rng = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(regions):
        kept = torch.randint(0, 1000, (options,), generator=rng).tolist()
        seconds = torch.rand(options, generator=rng).tolist()
        found.append([Option(kept=k, seconds=s) for k, s in zip(kept, seconds, strict=True)])
    return found


def total(regions, chosen) -> tuple[int, float]:
    options = [r[i] for r, i in zip(regions, chosen, strict=True)]
    return sum(o.kept for o in options), sum(o.seconds for o in options)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("working", [0, 700], ids=["kept alone", "and working"])
def test_the_allocation_is_exact(seed, working):
    rng = torch.Generator().manual_seed(seed)
    regions = [
        [dataclasses.replace(o, working=int(torch.randint(0, working + 1, (1,), generator=rng))) for o in options]
        for options in curves_at_random(seed, 5, 4)
    ]

    def most(chosen) -> int:
        options = [r[i] for r, i in zip(regions, chosen, strict=True)]
        at = [sum(o.kept for o in options[:i]) + max(o.kept, o.working) for i, o in enumerate(options)]
        assert peak(options) == max(at)
        return max(at)

    every = list(itertools.product(range(4), repeat=5))
    budget = most([min(range(4), key=lambda i, r=r: r[i].kept) for r in regions]) + 250 * (seed % 8)
    best = min(total(regions, c)[1] for c in every if most(c) <= budget)
    chosen, greedy = allocate(regions, budget), allocate_greedy(regions, budget)
    assert most(chosen) <= budget
    assert most(greedy) <= budget
    assert total(regions, chosen)[1] == pytest.approx(best, rel=1e-12)
    assert total(regions, greedy)[1] >= best - 1e-12


def test_greedy_is_within_a_hundredth_of_the_optimum_on_curves_of_real_size():
    """Forty regions of sixteen points each, bytes and seconds as of transformer blocks of unequal width."""
    for seed in range(10):
        rng = torch.Generator().manual_seed(seed)
        regions = []
        for _ in range(40):
            width = float(torch.rand(1, generator=rng)) * 3 + 0.5
            gain = torch.rand(15, generator=rng).sort().values
            kept, seconds, options = 1e7 * width, 5e-3 * width * width, []
            for step in [0.0, *gain.tolist()[::-1]]:
                kept, seconds = kept + (2e7 * width if step else 0), seconds - step * 4e-4 * width * width
                options.append(Option(kept=int(kept), seconds=seconds))
            regions.append(options)
        for share in (0.2, 0.5, 0.8):
            low, high = sum(r[0].kept for r in regions), sum(r[-1].kept for r in regions)
            budget = int(low + share * (high - low))
            _, exact = total(regions, allocate(regions, budget))
            _, greedy = total(regions, allocate_greedy(regions, budget))
            assert exact <= greedy <= exact * 1.01


def test_a_budget_below_the_least_is_refused():
    with pytest.raises(ValueError, match="a budget of 5 bytes is below the 7 that the regions hold at least"):
        allocate([[Option(kept=7, seconds=1.0)]], 5)
    with pytest.raises(ValueError, match="every region needs at least one option"):
        allocate([[Option(kept=7, seconds=1.0)], []], 5)
    assert hull([Option(kept=5, seconds=1.0), Option(kept=6, seconds=2.0), Option(kept=9, seconds=0.0)]) == [0, 2]


def test_the_curve_counts_what_autograd_saves():
    layer = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Linear(16, 4))
    x = torch.randn(10, 8)
    # the first layer's input and the sigmoid's output, which the second layer saves, too; no weights
    assert count_saved(layer, (x,), {}, layer) == 4 * (10 * 8 + 10 * 16)
    assert tensor_bytes((x, {"again": x.view(-1)})) == 320


def test_counting_leaves_the_generator_alone():
    model = stack(1)
    state = torch.get_rng_state()
    count_saved(model, (sample(),), {}, model)
    assert torch.equal(torch.get_rng_state(), state)


def test_plans_keep_to_their_budget_and_beat_the_uniform_one(tmp_path):
    def one(name, scale, dear):
        points = (
            Point(kept=10, seconds=scale * 1.0, names=(), working=100),
            Point(kept=60, seconds=scale * (0.2 if dear else 0.9), names=("aten.mm.default#0",), working=100),
            Point(kept=100, seconds=0.0, names=None),
        )
        return Curve(region=name, points=points, forward_s=scale)

    curves = [one("a", 1.0, True), one("b", 1.0, False), one("c", 0.1, True)]
    plans = {p: make_plan(curves, policy=p, engine="eager", share=0.6) for p in ("full", "uniform", "regions")}
    assert plans["full"].kept == 30
    assert plans["full"].peak == 10 + 10 + 100
    assert plans["uniform"].kept == 180
    assert plans["regions"].peak <= plans["uniform"].peak == 60 + 60 + 100
    assert [row.point.kept for row in plans["regions"].regions] == [100, 10, 100]  # the last one costs no peak
    assert plans["regions"].seconds < plans["uniform"].seconds < plans["full"].seconds
    assert make_plan(curves, policy="regions", engine="eager", share=0.0).seconds == pytest.approx(2.0)
    assert make_plan(curves, policy="regions", engine="eager", limit=210).peak <= 210
    assert make_plan(curves, policy="uniform", engine="eager", limit=220).kept == 180
    assert make_plan(curves, policy="regions", engine="eager", limit=300).seconds == 0
    path = tmp_path / "memory.json"
    plans["regions"].write(path)
    assert MemoryPlan.read(path) == plans["regions"]
    assert "kept MiB" in str(plans["regions"])
    path.write_text("{}")
    with pytest.raises(ValueError, match="not a memory plan"):
        MemoryPlan.read(path)


def test_a_plan_is_kept_with_the_run(tmp_path):
    config = MemoryConfig(policy="regions", budget=0.6, plan_file=str(tmp_path / "memory.json"))
    model = stack()
    regions = Regions(model, ["0", "1", "2"], config)
    for seed in range(MEASURED_STEPS + 1):
        train_step(model, seed, regions)
    again = Regions(stack(), ["0", "1", "2"], config)
    assert again.plan == regions.plan
    assert not again.measuring
    wholes = [row.whole for row in again.plan.regions]
    assert again.plan.kept <= 0.6 * sum(wholes[:2]) + wholes[2]
    assert again.plan.peak <= again.plan.budget
    with pytest.raises(ValueError, match=r"was made for 'eager, regions, 0.6 of the bytes', and .* 0.7 of the bytes"):
        Regions(stack(), ["0", "1", "2"], dataclasses.replace(config, budget=0.7))
    with pytest.raises(ValueError, match=r"is for the regions \['0', '1', '2'\]"):
        Regions(stack(), ["0", "1"], config)


def test_regions_that_cannot_be():
    with pytest.raises(ValueError, match="matches none of the model's units"):
        Regions(stack(), ["0"], MemoryConfig(policy="full", regions=("tower*",)))
    for wrong in (
        {"policy": "some"},
        {"budget": 1.5},
        {"budget_gib": -1.0},
        {"quantise": "int4"},
        {"engine": "jit"},
        {"quantise": "compiler"},
    ):
        with pytest.raises(ValueError, match=f"MemoryConfig.{next(iter(wrong))}"):
            MemoryConfig(**wrong)


@torch.library.custom_op("gem_parallel_test::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@triple.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_custom_operators_declared_cost_counts_where_nothing_runs():
    def seconds() -> float:
        recorder = Recorder(Machine(tflops=1.0, gbps=1.0))
        with FakeTensorMode(), recorder:
            triple(torch.empty(1000, 250))
        return next(c.seconds for c in recorder.costs() if "triple" in c.name)

    assert seconds() == pytest.approx(2e-3)  # two megabytes moved
    declare_cost(triple, flops=lambda x, out_shape=None: 5e9)
    assert seconds() == pytest.approx(5e-3)
    declare_cost(triple, flops=lambda x, out_shape=None: 0, nbytes=lambda x: 7e6)
    assert seconds() == pytest.approx(7e-3)
    with pytest.raises(TypeError, match=r"expected a torch\.library operator"):
        declare_cost(len, flops=lambda: 0)


def test_the_partitioner_sees_what_the_projects_kernels_cost():
    pytest.importorskip("gem_kernels.jagged_attention")
    assert declare_kernels() == ["jagged_attention", "gdpa", "norm_linear", "linear_norm"]
    kernels = torch.ops.gem_kernels
    with FakeTensorMode():
        q, k = torch.empty(60, 4, 8), torch.empty(90, 2, 8)
        q_offsets, k_offsets = torch.empty(4, dtype=torch.int64), torch.empty(4, dtype=torch.int64)
        given = (q, k, k, q_offsets, k_offsets, None, 60, 90)
        x, gain, weight = torch.empty(12, 16), torch.empty(16), torch.empty(32, 16)
        calls = {
            4 * 60 * 90 // 3 * 4 * 8: [
                lambda: kernels.jagged_attention(*given, 0.1, -1, -1, "triton"),
                lambda: kernels.gdpa(*given, "silu", 0.1, 1.0, -1, -1, "triton"),
            ],
            4 * 20 * 90 * 4 * 8: [
                lambda: kernels.gdpa(q[:20], k, k, None, *given[4:], "silu", 0.1, 1.0, -1, -1, "triton")
            ],
            2 * 12 * 16 * 32: [
                lambda: kernels.norm_linear(x, gain, weight, None, 1e-6, "triton"),
                lambda: kernels.linear_norm(x, weight, torch.empty(32), None, 1e-6, "triton"),
            ],
        }
        for flops, ways in calls.items():
            for call in ways:
                with FlopCounterMode(display=False) as counter:
                    call()
                assert counter.get_total_flops() == flops


def test_a_plan_knows_who_holds_the_step_up():
    points = (
        Point(kept=1, seconds=1.0, names=()),
        Point(kept=5, seconds=0.2, names=("aten.mm.default#0",)),
        Point(kept=9, seconds=0.0, names=None),
    )
    found = Curve(region="a", points=points, forward_s=1.0)

    def seconds(forward_s, modes_s):
        seen = with_host(found, HostCost(forward_s=forward_s, modes_s=modes_s))
        return [(p.kept, round(p.seconds, 3)) for p in seen.points]

    assert seconds(0.1, 0.2) == [(1, 1.0), (5, 0.2), (9, 0.0)]  # the device does
    assert seconds(5.0, 7.0) == [(1, 5.0), (9, 0.0)]  # the host does: single operators cost more than they spare
    assert seconds(1.4, 1.5) == [(1, 1.2), (9, 0.0)]  # both: the forward pass again costs the host more than the device


def test_the_hosts_time_is_measured_and_generators_stay():
    model, state = stack(1), torch.get_rng_state()
    cost = host_cost(model, (sample(),), {})
    assert cost.forward_s > 0
    assert cost.modes_s > 0
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_dear_is_kept_first():
    costs = Recorder(Machine(tflops=1.0, gbps=100.0))
    model = Block()
    with FakeTensorMode(allow_non_fake_inputs=True), costs:
        model(torch.empty(4, 24, WIDTH))
    rows = costs.costs()
    found = curve("block", rows, 4 * 4 * 24 * WIDTH, sum(r.nbytes for r in rows))
    assert [p.kept for p in found.points] == sorted(p.kept for p in found.points)
    assert [p.seconds for p in found.points] == sorted((p.seconds for p in found.points), reverse=True)
    quick = sorted(r.seconds for r in rows)[len(rows) // 2]
    names = {name for p in curve("block", rows, 0, 10**9, least_s=quick).points for name in p.names or ()}
    assert names == {r.name for r in rows if r.free and r.nbytes and r.seconds >= quick}
    first = next(p for p in found.points if p.names)
    assert first.names[0].startswith(("aten.addmm", "aten.bmm"))
