"""Recomputation by region: gradients, randomness, what is kept, and beside everything else."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from gem_parallel import MemoryConfig, ParallelConfig, RowWiseAdagrad, parallelize, start
from gem_parallel.memory.keeper import Keeper
from gem_parallel.memory.profile import Recorder
from gem_parallel.memory.quantise import Fp8Quantiser
from gem_parallel.memory.recompute import recompute
from gem_parallel.memory.regions import MEASURED_STEPS, Regions
from gem_parallel.memory.testing import WIDTH, sample, stack, train_step
from gem_parallel.testing import UNITS, SmallModel, full_state, run_ranks, small_batch
from torch import nn


@pytest.mark.parametrize("policy", ["full", "uniform", "regions"])
@pytest.mark.parametrize("budget", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("engine", ["eager", "operators"])
def test_recomputed_gradients_are_bitwise_those_of_the_unchecked_model(policy, budget, engine):
    plain, model = stack(), stack()
    config = MemoryConfig(policy=policy, budget=budget, engine=engine, recompute_min_kib=1)
    regions = Regions(model, ["0", "1", "2"], config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a budget of 0 is below the inputs
        for seed in range(MEASURED_STEPS + 2):
            expected, got = train_step(plain, seed), train_step(model, seed, regions)
            for a, b in zip(expected, got, strict=True):
                assert torch.equal(a, b)
    assert not regions.measuring


def test_curves_that_are_known_are_not_measured_again():
    first, second, plain = stack(), stack(), stack()
    config = MemoryConfig(policy="regions", budget=0.5)
    regions = Regions(first, ["0", "1", "2"], config)
    for seed in range(MEASURED_STEPS + 1):
        train_step(first, seed, regions)
    again = Regions(second, ["0", "1", "2"], config, curves=regions.curves)
    expected, got = train_step(plain, 0), train_step(second, 0, again)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert again.plan == regions.plan


def ops_of(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the operators of a block: (all that may be kept, the random ones)."""
    recorder = Recorder()
    with recorder:
        model(sample())
    names = [cost.name for cost in recorder.costs() if cost.free]
    return names, [name for name in names if "dropout" in name or "bernoulli" in name or "rand" in name]


def test_any_choice_of_operators_gives_the_same_bits_random_ones_included():
    plain, model = stack(1), stack(1)
    names, random = ops_of(model)
    assert random
    assert len(names) > 10
    keeper = Keeper(None, min_bytes=0)
    draw = torch.Generator().manual_seed(3)
    choices = [[name for name in names if torch.rand(1, generator=draw) < 0.5] for _ in range(12)]
    for chosen in [*choices, random, random[:1], random[1:], names]:
        expected = train_step(plain, 5)
        x = sample(5)
        torch.manual_seed(105)
        y = recompute(model, (x,), {}, frozenset(chosen), keeper)
        model.zero_grad()
        y.square().mean().backward()
        got = [y.detach(), x.grad, torch.rand(1), *(p.grad for p in model.parameters())]
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)), chosen


class Noise(nn.Module):
    """A block whose dropout is made of numbers, as GEM's is: drawn before and after the products."""

    def __init__(self, draw=lambda x: torch.rand(x.shape, device=x.device)) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second, self.draw = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), draw

    def forward(self, x):
        y = self.first(x).tanh()
        y = self.second(y * (self.draw(y) >= 0.3)).sigmoid()
        return x + y * (torch.rand_like(y) >= 0.3)


@pytest.mark.parametrize(
    "keeper", [Keeper(None, min_bytes=0), Keeper(Fp8Quantiser(), min_bytes=1)], ids=["as it is", "fp8"]
)
def test_random_numbers_are_kept_where_a_generator_cannot_be_put_back(keeper):
    """What a graph captures: the same bits, nothing drawn in backward, and both again in a second backward pass."""
    model, grads = Noise(), []
    for kept in (None, False, True):
        x = sample(5)
        torch.manual_seed(105)
        y = model(x) if kept is None else recompute(model, (x,), {}, frozenset(), keeper, numbers=kept)
        stands, loss = torch.get_rng_state(), y.square().mean()
        for retain in (True, False):
            model.zero_grad()
            x.grad = None
            loss.backward(retain_graph=retain)
            assert torch.equal(torch.get_rng_state(), stands)
            grads.append([y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())])
    exact = grads[0] if not keeper.works else grads[2]  # FP8: against the checkpoint that puts generators back
    for found in grads[2:]:
        assert all(torch.equal(a, b) for a, b in zip(exact, found, strict=True))
    assert not torch.equal(grads[0][0], Noise()(sample(5)))


def test_copies_of_parameters_are_read_again_where_they_were_made_for_all_regions():
    """As by a cast of all layers' weights: the second run comes when the parameters are back in their places."""
    model, grads = Noise(), []
    held = {m: dict(m._parameters) for m in (model.first, model.second)}
    for again in (False, True):
        x = sample(5)
        torch.manual_seed(3)
        for m, parameters in held.items():
            m._parameters.update({name: p * 2 for name, p in parameters.items()})
        y = (
            recompute(model.forward, (x,), {}, frozenset(), Keeper(None, min_bytes=0), numbers=True)
            if again
            else model(x)
        )
        for m, parameters in held.items():
            m._parameters.update(parameters)
        model.zero_grad()
        y.square().mean().backward()
        assert all(type(p) is nn.Parameter for m in held for p in m._parameters.values())
        grads.append([y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_numbers_that_cannot_be_kept_apart_are_refused():
    for draw in (nn.functional.dropout, lambda x: x.clone().bernoulli_(0.5), lambda x: torch.bernoulli(x * 0 + 0.5)):
        with pytest.raises(RuntimeError, match="whose random numbers can't be kept apart"):
            recompute(Noise(draw), (sample(),), {}, frozenset(), Keeper(None, min_bytes=0), numbers=True)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).eval()
    recompute(model, (sample(),), {}, frozenset(), Keeper(None, min_bytes=0), numbers=True).sum().backward()


def test_kept_operators_are_not_run_again():
    ran: list[str] = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            ran.append(str(op))
            return op(*args, **(kwargs or {}))

    model = stack(1)
    y = recompute(model, (sample(),), {}, frozenset(["aten.addmm.default#2"]), Keeper(None, min_bytes=0))
    with Count():
        y.sum().backward()
    # of four linear layers the third one's (#2, the wide one) was kept; dropout wants the last one's to draw its mask
    assert sum(name == "aten.addmm.default" for name in ran) == 3


def test_a_region_that_takes_another_course_is_refused():
    calls = itertools.count()

    def fickle(x):
        return (x[: 4 - next(calls)] @ torch.ones(8, 8)).sigmoid()

    y = recompute(
        fickle, (torch.randn(4, 8).requires_grad_(),), {}, frozenset(["aten.mm.default#0"]), Keeper(None, min_bytes=0)
    )
    with pytest.raises(RuntimeError, match=r"another course than the forward pass: aten\.mm\.default#0"):
        y.sum().backward()


def test_what_is_changed_in_place_is_not_planned_and_not_believed():
    def region(x):
        y = x @ torch.eye(8)
        y.add_(1)
        return y.sigmoid()

    recorder = Recorder()
    with recorder:
        region(torch.randn(4, 8))
    assert not next(c for c in recorder.costs() if c.name == "aten.mm.default#0").free
    y = recompute(
        region, (torch.randn(4, 8).requires_grad_(),), {}, frozenset(["aten.mm.default#0"]), Keeper(None, min_bytes=0)
    )
    with pytest.raises(RuntimeError, match="kept and then changed in place"):
        y.sum().backward()


def sharded(runtime, config):
    """Losses and the state after five steps."""
    model = SmallModel(experts=2 if config.experts > 1 else 0)
    parallel = parallelize(model, model.roles(), config, runtime, sparse=RowWiseAdagrad(lr=0.05, eps=1e-4), units=UNITS)
    optimizer = torch.optim.SGD(parallel.dense_parameters(), lr=0.1)
    losses = []
    for step in range(5):
        batch = small_batch(step, 16).part(runtime.rank, runtime.world)
        loss = (parallel(batch) - batch.target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, full_state(parallel)["model"], parallel.memory and parallel.memory.plan


def two_ways(runtime, memory, more):
    return [sharded(runtime, ParallelConfig(memory=m, **more)) for m in (MemoryConfig(), memory)]


@pytest.mark.parametrize(
    "more", [{}, {"experts": 2}, {"prefetch": 1, "shard_group": 1}], ids=["fsdp", "ep", "replicas"]
)
def test_two_ranks_train_the_same_bits_with_recomputation(tmp_path, more):
    memory = MemoryConfig(policy="regions", budget=0.8, recompute_min_kib=0.01)
    results = run_ranks(2, __file__, "two_ways", tmp_path, memory, more)
    for (plain, state, _), (losses, other, plan) in results:
        assert losses == plain
        assert all(torch.equal(state[name], other[name]) for name in state)
        assert plan == results[0][1][2]  # one plan for all
    assert plan.seconds > 0


def test_a_world_of_one_follows_the_plan():
    with start("cpu", timeout_s=20) as runtime:
        (plain, state, _), (losses, other, plan) = two_ways(runtime, MemoryConfig(policy="uniform", budget=0.5), {})
    assert losses == plain
    assert all(torch.equal(state[name], other[name]) for name in state)
    assert [row.region for row in plan.regions] == list(UNITS)
