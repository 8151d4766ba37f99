"""Recomputation by region and quantised activations: gradients, randomness, memory, plans."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import warnings

import pytest
import torch
from gem_parallel import MemoryConfig, MemoryPlan, ParallelConfig, RowWiseAdagrad, declare_cost, parallelize, start
from gem_parallel.comm.payload import Fp8Payload
from gem_parallel.memory import compiled
from gem_parallel.memory.allocate import Option, allocate, allocate_greedy, hull
from gem_parallel.memory.compiled import compile_region, measure
from gem_parallel.memory.keeper import Keeper
from gem_parallel.memory.offload import HostStore
from gem_parallel.memory.plan import make_plan
from gem_parallel.memory.profile import Curve, Machine, Point, Recorder, count_saved, curve, tensor_bytes
from gem_parallel.memory.quantise import Fp8Quantiser
from gem_parallel.memory.recompute import recompute
from gem_parallel.memory.regions import MEASURED_STEPS, Regions
from gem_parallel.testing import UNITS, SmallModel, full_state, run_ranks, small_batch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

WIDTH = 32


class Block(nn.Module):
    """A residual block with a norm, attention by hand and dropout."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.25) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.drop = nn.Linear(width, width), nn.Dropout(dropout)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, T, D] -> [B, T, D]
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.drop(self.out((q @ k.transpose(1, 2) / 8).softmax(-1) @ v))
        return x + self.drop(self.narrow(nn.functional.gelu(self.wide(x))))


def stack(blocks: int = 3, **more: float) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(Block(**more) for _ in range(blocks)))


def sample(seed: int = 0, *, grad: bool = True) -> torch.Tensor:
    return torch.randn(4, 24, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def train_step(model: nn.Module, seed: int, regions: Regions | None = None) -> list[torch.Tensor]:
    """[output, gradient of the input, gradients of the parameters]"""
    x = sample(seed)
    if regions is not None:
        regions.begin()
    torch.manual_seed(100 + seed)
    y = model(x)
    model.zero_grad()
    y.square().mean().backward()
    after = torch.rand(1)  # the generator stands where it would without recomputation
    return [y.detach(), x.grad, after, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("policy", ["full", "uniform", "regions"])
@pytest.mark.parametrize("budget", [0.0, 0.3, 0.6, 0.9])
def test_recomputed_gradients_are_bitwise_those_of_the_unchecked_model(policy, budget):
    plain, model = stack(), stack()
    regions = Regions(model, ["0", "1", "2"], MemoryConfig(policy=policy, budget=budget))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a budget of 0 is below the inputs
        for seed in range(MEASURED_STEPS + 2):
            expected, got = train_step(plain, seed), train_step(model, seed, regions)
            for a, b in zip(expected, got, strict=True):
                assert torch.equal(a, b)
    assert not regions.measuring


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


# --- the allocation


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
def test_the_allocation_is_exact(seed):
    regions = curves_at_random(seed, 5, 4)
    least = sum(min(o.kept for o in r) for r in regions)
    budget = least + 250 * (seed % 8)
    rng = torch.Generator().manual_seed(seed)
    prefix = list(itertools.accumulate(min(o.kept for o in r) for r in regions))
    uneven = [p + int(torch.randint(0, 1500, (1,), generator=rng)) for p in prefix]
    for limits in (budget, uneven):
        each = [limits] * 5 if isinstance(limits, int) else limits

        def fits(chosen, each=each) -> bool:
            return all(total(regions[: i + 1], chosen[: i + 1])[0] <= limit for i, limit in enumerate(each))

        every = [c for c in itertools.product(range(4), repeat=5) if fits(c)]
        best = min(total(regions, c)[1] for c in every)
        chosen, greedy = allocate(regions, limits), allocate_greedy(regions, limits)
        assert fits(chosen)
        assert fits(greedy)
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
    with pytest.raises(ValueError, match="a budget of 5 bytes is below the 7 that the regions keep at least"):
        allocate([[Option(kept=7, seconds=1.0)]], 5)
    with pytest.raises(ValueError, match="every region needs a limit and at least one option, got 2 for 1"):
        allocate([[Option(kept=7, seconds=1.0)]], [5, 5])
    assert hull([Option(kept=5, seconds=1.0), Option(kept=6, seconds=2.0), Option(kept=9, seconds=0.0)]) == [0, 2]


# --- the curve and the plan


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
            Point(kept=10, seconds=scale * 1.0, names=()),
            Point(kept=60, seconds=scale * (0.2 if dear else 0.9), names=("aten.mm.default#0",)),
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
    assert again.plan.peak <= 0.6 * sum(wholes[:2]) + wholes[2]
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


def test_what_is_dear_is_kept_first():
    costs = Recorder(Machine(tflops=1.0, gbps=100.0))
    model = Block()
    with FakeTensorMode(allow_non_fake_inputs=True), costs:
        model(torch.empty(4, 24, WIDTH))
    rows = costs.costs()
    found = curve("block", rows, 4 * 4 * 24 * WIDTH, sum(r.nbytes for r in rows))
    assert [p.kept for p in found.points] == sorted(p.kept for p in found.points)
    assert [p.seconds for p in found.points] == sorted((p.seconds for p in found.points), reverse=True)
    first = next(p for p in found.points if p.names)
    assert first.names[0].startswith(("aten.addmm", "aten.bmm"))


# --- quantised activations


@pytest.mark.parametrize("block", [0, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_is_as_near_as_it_says(block, dtype):
    x = torch.randn(7, 5, 64, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    x[0, 0] = 0
    x[1, 2, 3] = 200
    quantiser = Fp8Quantiser(block=block)
    packed = quantiser.pack(x)
    back = quantiser.unpack(packed)
    assert back.dtype == dtype
    assert back.shape == x.shape
    rows = x.double().reshape(-1, block or 64)
    top = rows.abs().amax(1, keepdim=True)
    limit = torch.maximum(rows.abs() / 16, top / 448 / 1024) * (1 + 2**-6)  # and the rounding to the result's dtype
    assert ((back.double().reshape_as(rows) - rows).abs() <= limit).all()
    assert packed.nbytes == x.numel() + 4 * len(rows)
    x[3, 3, 3] = float("inf")
    assert quantiser.unpack(quantiser.pack(x))[3, 3].isnan().any()
    empty = quantiser.unpack(quantiser.pack(torch.empty(0, 8)))
    assert empty.shape == (0, 8)


@pytest.mark.parametrize("policy", ["keep", "full", "regions"])
@pytest.mark.parametrize("block", [0, 32])
def test_gradients_with_fp8_activations_are_within_five_percent(policy, block):
    plain, model = stack(dropout=0.0), stack(dropout=0.0)
    config = MemoryConfig(policy=policy, budget=0.6, quantise="fp8", quantise_min_kib=1, quantise_block=block)
    regions = Regions(model, ["0", "1", "2"], config)
    for seed in range(MEASURED_STEPS + 2):
        expected, got = train_step(plain, seed), train_step(model, seed, regions)
    assert regions.keeper.seen > 0
    assert torch.equal(expected[0], got[0])  # the forward pass is exact
    for a, b in zip(expected[3:], got[3:], strict=True):
        if a.norm() > 1e-6:
            assert (a - b).norm() <= 0.05 * a.norm()
    assert any(not torch.equal(a, b) for a, b in zip(expected[3:], got[3:], strict=True))


def test_a_plan_reckons_with_what_is_stored():
    """With FP8 the same budget in bytes keeps more, so that less is computed again."""
    plans = {}
    for quantise in ("none", "fp8"):
        model = stack(dropout=0.0)
        config = MemoryConfig(
            policy="regions", budget_gib=330 / 2**20, quantise=quantise, quantise_min_kib=1, exclude=("*norm*",)
        )
        regions = Regions(model, ["0", "1", "2"], config)
        for seed in range(MEASURED_STEPS + 1):
            train_step(model, seed, regions)
        plans[quantise] = regions.plan
        assert regions.plan.peak <= 330 * 1024
    whole = {name: sum(row.whole for row in plan.regions) for name, plan in plans.items()}
    assert 0.25 < whole["fp8"] / whole["none"] < 0.6  # norms keep theirs in float32
    assert plans["none"].seconds > 0
    assert all(row.point.names is None for row in plans["fp8"].regions)  # all fits
    keeper = Keeper(Fp8Quantiser(), min_bytes=100, offload_bytes=10_000)
    assert [keeper.size(torch.empty(n)) for n in (8, 100, 10_000)] == [32, 100, 0]


def test_what_is_quantised():
    kinds: list[tuple[tuple[int, ...], torch.dtype]] = []

    class Spy(Fp8Quantiser):
        def pack(self, tensor):
            kinds.append((tuple(tensor.shape), tensor.dtype))
            return super().pack(tensor)

    model = nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 2)))
    config = MemoryConfig(quantise="fp8", quantise_min_kib=0.9)
    Regions(model, ["0"], config, quantiser=Spy())
    x = torch.randn(16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x).sum().backward()
    # inputs of the three linear layers (512 bytes in bfloat16 are too small), no weights, nothing of the norm
    assert kinds == []
    x = torch.randn(32, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x).sum().backward()
    assert kinds == [((32, 16), torch.bfloat16)] * 3
    kinds.clear()
    model(x).sum().backward()  # the norm's output goes into a linear layer: its own input stays
    assert kinds == [((32, 16), torch.float32)] * 3


def test_a_tensor_that_two_operators_save_is_packed_once():
    keeper = Keeper(Fp8Quantiser(), min_bytes=1)
    x = torch.randn(8, 64)
    first, second = keeper.pack(x), keeper.pack(x.detach())
    assert first is second
    x.add_(1)
    assert keeper.pack(x) is not first
    assert keeper.pack(x[:, :32]) is not keeper.pack(x)
    del first, second
    gc.collect()
    assert len(keeper._known) == 0
    with keeper.exactly():
        assert keeper.pack(x) is x
    assert keeper.pack(x.expand(4, 8, 64)) is not None
    wide = torch.randn(1, 64).expand(1000, 64)
    assert keeper.pack(wide) is wide


def test_an_address_that_is_used_again_is_another_tensor():
    keeper = Keeper(Fp8Quantiser(), min_bytes=1)
    kept = []
    for value in range(50):
        x = torch.full((64, 64), float(value))
        kept.append(keeper.pack(x))
        del x
    for value, item in enumerate(kept):
        assert (keeper.unpack(item) - value).abs().max() < 1e-3


@pytest.mark.parametrize("quantise", ["none", "fp8"])
def test_tensors_come_back_from_the_host(quantise):
    plain, model = stack(), stack()
    config = MemoryConfig(offload_min_mib=2**-10, quantise=quantise, quantise_min_kib=1)
    regions = Regions(model, ["0", "1", "2"], config)
    for seed in range(2):
        expected, got = train_step(plain, seed), train_step(model, seed, regions)
    assert regions.keeper.host.bytes_sent > 0
    for a, b in zip(expected[3:], got[3:], strict=True):
        assert torch.equal(a, b) if quantise == "none" else (a - b).norm() <= 0.05 * a.norm() + 1e-6
    store = HostStore()
    copies = [store.put((torch.full((3,), float(i)),)) for i in range(3)]
    assert [c.take()[0][0].item() for c in reversed(copies)] == [2, 1, 0]


def test_nothing_leaks_over_a_thousand_steps():
    """Recomputed, quantised and moved at once."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8)) for _ in range(2)))
    config = MemoryConfig(
        policy="regions", budget=0.7, quantise="fp8", quantise_min_kib=0.1, offload_min_mib=2**-11, exclude=()
    )
    regions = Regions(model, ["0", "1"], config)
    counts = []
    for step in range(1000):
        regions.begin()
        model(torch.randn(16, 8)).sum().backward()
        model.zero_grad()
        if step in (20, 999):
            gc.collect()
            counts.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
    assert counts[1] <= counts[0]
    assert len(regions.keeper._known) == 0
    assert regions.keeper.host.bytes_sent > 0


def test_the_dequantised_copy_lives_only_inside_its_backward():
    alive: list[int] = []
    copies: list[torch.multiprocessing.reductions.StorageWeakRef] = []

    class Spy(Fp8Quantiser):
        def unpack(self, packed):
            alive.append(sum(not c.expired() for c in copies))
            whole = super().unpack(packed)
            copies.append(torch.multiprocessing.reductions.StorageWeakRef(whole.untyped_storage()))
            return whole

    model = nn.Sequential(nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6))))
    Regions(model, ["0"], MemoryConfig(quantise="fp8", quantise_min_kib=1), quantiser=Spy())
    model(torch.randn(16, 32, requires_grad=True)).sum().backward()
    assert len(alive) > 6
    assert max(alive) <= 1


# --- compiled regions


@pytest.mark.parametrize("api", [True, False], ids=["annotated", "patched"])
def test_every_compiled_region_has_its_own_budget(monkeypatch, api):
    """Equal blocks: without a code object of their own, the second would get the first one's graph."""
    if api and not compiled.has_region_api():
        pytest.skip("this torch cannot annotate a region")
    monkeypatch.setattr(compiled, "has_region_api", lambda: api)
    blocks = [Block(dropout=0.0) for _ in range(2)]
    kept = [
        count_saved(compile_region(block.forward, budget, "aot_eager_decomp_partition"), (sample(),), {}, block)
        for block, budget in zip(blocks, (1.0, 0.0), strict=True)
    ]
    assert kept[1] < 0.7 * kept[0]
    with pytest.raises(ValueError, match=r"must be in \[0, 1\], got 2"):
        compile_region(blocks[0].forward, 2.0)


class Linear(nn.Module):
    """Linear in its input, y = J x, whatever the masks: the sum of y is x times its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.b(self.drop(self.a(self.drop(x)))))


def test_a_budget_and_random_numbers_do_not_meet():
    call = compile_region(Linear().forward, 0.5, "aot_eager_decomp_partition")
    with pytest.raises(RuntimeError, match=r"activation budget of 0\.5 draws random numbers"):
        call(sample())


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.slow)])
def test_dropout_of_compiled_regions_is_the_same_when_it_is_recomputed(monkeypatch, backend):
    monkeypatch.setattr(compiled, "BACKEND", backend)
    torch.manual_seed(0)
    model = nn.Sequential(Linear(), Linear())
    regions = Regions(model, ["0", "1"], MemoryConfig(policy="full", engine="compile"))
    for _ in range(MEASURED_STEPS + 2):
        x = sample()
        regions.begin()
        y = model(x)
        y.sum().backward()
        assert (x.grad * x).sum().item() == pytest.approx(y.sum().item(), rel=1e-3, abs=1e-3)
    assert all(row.point.names == () for row in regions.plan.regions)


@pytest.mark.skipif(not compiled.has_region_api(), reason="this torch cannot annotate a region")
def test_where_torch_refuses_to_annotate_its_configuration_serves():
    block = Block(dropout=0.0)

    def broken(x):
        y = block.norm(x)
        torch._dynamo.graph_break()
        return block.forward(y)

    call = compile_region(broken, 0.0, "aot_eager_decomp_partition")
    compiled._said.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = call(sample())
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in block.parameters())
    said = [str(w.message) for w in caught if "refuses to annotate" in str(w.message)]
    assert len(said) == 1


def test_the_curve_of_a_compiled_region_and_its_gradients():
    block, plain = stack(1, dropout=0.0), stack(1, dropout=0.0)
    found, functions = measure(
        "block", block.forward, (sample(),), {}, block, (0.0, 1.0), 1, "aot_eager_decomp_partition"
    )
    assert found.points[0].kept <= found.whole
    assert all(p.grad is None for p in block.parameters())
    expected = train_step(plain, 3)
    for function in functions.values():
        block.zero_grad()
        x = sample(3)
        y = function(x)
        y.square().mean().backward()
        for a, b in zip(expected[3:], [p.grad for p in block.parameters()], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_activations_of_a_compiled_region_are_quantised():
    block = stack(1, dropout=0.0)
    keeper = Keeper(Fp8Quantiser(), min_bytes=1024)
    function = compile_region(block.forward, 1.0, "aot_eager_decomp_partition")
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(keeper.pack, keeper.unpack):
            y = function(sample())
        y.square().mean().backward()
    assert keeper.seen > 4 * 4 * 24 * WIDTH
    expected = train_step(stack(1, dropout=0.0), 0)
    for a, b in zip(expected[3:], [p.grad / 2 for p in block.parameters()], strict=True):
        assert (a - b).norm() <= 0.05 * a.norm() + 1e-6


def test_the_compilers_pass_quantises_what_a_region_keeps():
    plain, block = stack(1, dropout=0.0), stack(1, dropout=0.0)
    kept = {}
    for kib in (None, 1.0):
        function = compile_region(block.forward, 1.0, "aot_eager_decomp_partition", quantise_kib=kib)
        kept[kib] = count_saved(function, (sample(),), {}, block)
    assert kept[1.0] < 0.7 * kept[None]
    expected = train_step(plain, 0)
    x = sample(0)
    y = function(x)
    y.square().mean().backward()
    assert (y.detach() - expected[0]).abs().max() < 1e-5
    errors = [(a - p.grad).norm() / a.norm() for a, p in zip(expected[3:], block.parameters(), strict=True)]
    assert 1e-4 < max(e for e, a in zip(errors, expected[3:], strict=True) if a.norm() > 1e-6) < 0.05


# --- with everything else


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
    memory = MemoryConfig(policy="regions", budget=0.5)
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


# --- on a card

on_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize(
    "config",
    [
        MemoryConfig(policy="full"),
        MemoryConfig(policy="regions", budget=0.5),
        MemoryConfig(offload_min_mib=0.1),
        MemoryConfig(policy="regions", budget=0.5, offload_min_mib=0.1),
    ],
    ids=["full", "regions", "offload", "both"],
)
def test_on_a_card_gradients_and_random_numbers_are_the_unchecked_ones(config):
    plain, model = stack().cuda(), stack().cuda()
    regions = Regions(model, ["0", "1", "2"], config)
    x = torch.randn(64, 48, WIDTH, device="cuda")
    for seed in range(MEASURED_STEPS + 3):
        got = []
        for net in (plain, model):
            if net is model:
                regions.begin()
            mine = x.clone().requires_grad_()
            torch.manual_seed(seed)
            y = net(mine)
            net.zero_grad()
            y.square().mean().backward()
            numbers = torch.rand(1, device="cuda")
            got.append([y.detach(), mine.grad, numbers, *(p.grad.clone() for p in net.parameters())])
        names = ("output", "input", "numbers", *(name for name, _ in plain.named_parameters()))
        wrong = {n: float((a - b).abs().max() / a.abs().max()) for n, a, b in zip(names, *got, strict=True)}
        assert not {n: error for n, error in wrong.items() if error}, f"step {seed}\n{regions.plan}"


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize(("shape", "block"), [((7, 5, 64), 0), ((7, 5, 64), 32), ((3, 10_001), 0), ((513, 33), 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_card_the_fused_quantiser_is_the_plain_one(shape, block, dtype):
    x = (torch.randn(shape, device="cuda") * 3).to(dtype)
    x[0] = 0
    x[1, 2:4] = float("inf")
    fused, plain = Fp8Quantiser(block, fused=True), Fp8Quantiser(block, fused=False)
    got, want = fused.pack(x), plain.pack(x)
    torch.testing.assert_close(got.scale, want.scale, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(fused.unpack(got), plain.unpack(want), rtol=0, atol=0, equal_nan=True)
    payload, shard = Fp8Payload(), torch.randn(1000, device="cuda").to(dtype)
    packed, on_host = (torch.empty(payload.nbytes(1000, dtype), dtype=torch.uint8, device=d) for d in ("cuda", "cpu"))
    payload.pack(shard, packed)
    payload.pack(shard.cpu(), on_host)
    back, wanted = torch.full_like(shard, float("nan")), torch.empty_like(shard, device="cpu")
    payload.unpack(packed, back)
    payload.unpack(on_host, wanted)
    torch.testing.assert_close(back.cpu(), wanted, rtol=1e-2, atol=0)  # the host may divide otherwise in the last place


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize("fused", [False, True])
def test_on_a_card_quantised_activations_take_less_and_nothing_leaks(fused):
    plain, model = stack(dropout=0.0).cuda(), stack(dropout=0.0).cuda()
    config = MemoryConfig(policy="keep", quantise="fp8", quantise_min_kib=16)
    regions = Regions(model, ["0", "1", "2"], config, quantiser=Fp8Quantiser(fused=fused))
    x = torch.randn(256, 64, WIDTH, device="cuda", requires_grad=True)
    kept, allocated = [], []
    for step in range(120):
        for net in (plain, model):
            regions.begin()
            before = torch.cuda.memory_allocated()
            y = net(x).square().mean()
            if step == 100:
                kept.append(torch.cuda.memory_allocated() - before)
            net.zero_grad(set_to_none=False)
            y.backward()
        del y
        if step in (20, 119):
            allocated.append(torch.cuda.memory_allocated())
    assert allocated[1] == allocated[0]
    assert kept[1] < 0.75 * kept[0]
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 0.05 * a.grad.norm() + 1e-6
