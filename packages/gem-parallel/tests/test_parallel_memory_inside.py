"""What backward kernels write on their way: which regions do, what a plan says of it, and results beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from gem_parallel import MemoryConfig
from gem_parallel.memory import regions as memory_regions
from gem_parallel.memory.plan import MemoryPlan
from gem_parallel.memory.regions import MEASURED_STEPS, Regions
from gem_parallel.memory.testing import WIDTH, sample
from torch import nn


class Squares(torch.autograd.Function):
    """x^2 W, which keeps x^2, or x alone if it is `inside`."""

    @staticmethod
    def forward(ctx, x, weight, inside):
        ctx.inside = inside
        square = x * x
        ctx.save_for_backward(x, weight, None if inside else square)
        return square @ weight

    @staticmethod
    def backward(ctx, dy):
        x, weight, square = ctx.saved_tensors
        square = x * x if square is None else square
        return 2 * x * (dy @ weight.t()), square.flatten(0, -2).t() @ dy.flatten(0, -2), None


class Block(nn.Module):
    """A linear layer and a square."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside = nn.Linear(WIDTH, WIDTH), "none"
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.ran: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ran.append(self.inside)
        return x + Squares.apply(self.first(x), self.weight, self.inside != "none")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block()).train()


def step(net: nn.Module, regions: Regions | None = None) -> list[torch.Tensor]:
    if regions is not None:
        regions.begin()
    net.zero_grad()
    x = sample(3)
    net(x).square().mean().backward()
    return [x.grad, *(p.grad for p in net.parameters())]


@pytest.fixture
def one_second(monkeypatch):
    """What is written on the way takes a second a region; the clock of a busy machine says nothing."""
    monkeypatch.setattr(memory_regions, "longer", lambda *_: 1.0)


def test_all_is_kept_but_what_is_written(one_second, tmp_path: Path):
    net, plain = model(), model()
    config = MemoryConfig(inside="exact", recompute_min_kib=1, plan_file=str(tmp_path / "plan.json"))
    regions = Regions(net, ["0", "1", "2"], config)
    for _ in range(MEASURED_STEPS + 2):
        for a, b in zip(step(net, regions), step(plain), strict=True):
            assert torch.equal(a, b)
    assert [block.ran[-1] for block in net] == ["exact"] * 3
    assert [block.inside for block in net] == ["none"] * 3
    assert regions.plan is not None
    nbytes = sample(3).nbytes
    for row in regions.plan.regions:
        assert row.whole - row.point.kept == nbytes  # the square
        assert row.point.seconds == 1.0
    said = str(regions.plan)
    assert "keep, eager" in said
    assert "all, exact inside" in said
    assert MemoryPlan.read(config.plan_file) == regions.plan
    again = Regions(model(), ["0", "1", "2"], config)
    assert not again.measuring
    with pytest.raises(ValueError, match="exact inside"):
        Regions(model(), ["0", "1", "2"], MemoryConfig(plan_file=config.plan_file, policy="uniform"))
    regions.close()


@pytest.mark.parametrize(("seconds", "used"), [(1e-9, True), (1e3, False)])
def test_a_plan_takes_it_where_it_is_cheap(seconds, used, monkeypatch):
    monkeypatch.setattr(memory_regions, "longer", lambda *_: seconds)
    net = model()
    config = MemoryConfig(policy="uniform", budget=0.8, inside="exact", recompute_min_kib=1)
    regions = Regions(net, ["0", "1", "2"], config)
    for _ in range(MEASURED_STEPS + 1):
        step(net, regions)
    assert regions.plan is not None
    for row in regions.plan.regions:
        assert (row.point.inside == "exact") == used, str(regions.plan)
        assert row.point.kept <= 0.8 * row.whole


def test_a_region_that_runs_again_writes_nothing(one_second):
    net, plain = model(), model()
    regions = Regions(net, ["0", "1", "2"], MemoryConfig(policy="full", inside="exact"))
    for a, b in zip(step(net, regions), step(plain), strict=True):
        assert torch.equal(a, b)
    assert [block.ran for block in net] == [["none", "none"]] * 3


def test_where_nothing_can_it_is_said():
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    with pytest.warns(UserWarning, match="attribute `inside`"):
        regions = Regions(net, ["0"], MemoryConfig(inside="exact"))
    for _ in range(MEASURED_STEPS + 1):
        step(net, regions)
    assert regions.plan is not None
    assert regions.plan.seconds == 0
    with pytest.raises(ValueError, match="needs engine"):
        MemoryConfig(inside="exact", engine="operators")
    with pytest.raises(ValueError, match="one of none, exact, fp8"):
        MemoryConfig(inside="all")


KERNELS = """
    import torch
    from gem_kernels import LateProduct, gated_heads, gdpa, norm_rows, rotary_heads
    from gem_kernels.nn import NormLinear
    from gem_kernels.stream import norm_rows_twice
    from gem_model.projection import project_bare, project_both
    from gem_parallel.memory import worth
    from gem_parallel.memory.again import Saving
    from gem_parallel.memory.keeper import Keeper

    torch.manual_seed(0)
    T, D, H = 12, 32, 2
    kinds = {"backend": "triton"}
    places, others = torch.tensor([i for i in range(14) if i not in (3, 9)]), torch.tensor([3, 9])
    up, next_up = (NormLinear(D, 3 * D, norm="layer") for _ in range(2))
    gain, shift, head = (torch.nn.Parameter(1 + 0.1 * torch.randn(n)) for n in (D, D, D // H))
    down, out = torch.nn.Linear(D, D), torch.nn.Linear(D, D)
    net = torch.nn.ModuleList((up, next_up, down, out))
    rows = {"kind": "layer", "eps": 1e-6, **kinds}
    offsets = torch.tensor([0, 7, 12])

    def layer(x, more, late):
        def product(weight):
            return LateProduct(weight) if late else None

        def times(made, rows, linear):
            bias = linear.bias.detach()
            return torch.nn.functional.linear(rows, linear.weight, bias) if made is None else made(rows, bias)

        def feed(packed, bias, total):
            gate = product(down.weight)
            h, q = gated_heads(packed, D, H, head, bias=bias, product=gate, **kinds)
            told = gdpa(q, q, q, offsets, offsets, 7, 7, **kinds).flatten(1)
            more, bias = project_both(down, h, out, told, gate)
            return more + bias

        first = product(up.linear.weight)
        n, total, _ = norm_rows(x, gain, shift, product=first, **rows)
        more = more.index_copy(0, places, more[places] + feed(times(first, n, up.linear), up.linear.bias, total))
        where = {"residual": more, "places": places, "others": others, "product": product(down.weight)}
        y, total, _, bare = norm_rows_twice(total, gain, shift, bare_eps=1e-5, **where, **rows)
        y = times(where["product"], y, down)
        if bare is None:  # under a mode that counts bytes
            bare = torch.nn.functional.layer_norm(total, (D,), eps=1e-5)
        packed, bias = project_bare(next_up, bare, total if late else None, 1e-5)
        third = product(up.linear.weight)
        n, total, _ = norm_rows(total, gain, shift, product=third, **rows)
        whole = times(third, n, up.linear) if third is None else None
        qk, v = (whole, None) if third is None else third.parts(n, (2 * D, D), up.linear.bias.detach())
        q, k, v = rotary_heads(qk, H, (head, head), bias=up.linear.bias, values=v, **kinds)
        seen = gdpa(q, k, v, offsets, offsets, 7, 7, **kinds).flatten(1)
        return y + feed(packed, bias, total) + total + seen

    def run(names, late):
        sizes = ((1, T), (2, T + 2))
        x, more = (torch.randn(n, D, generator=torch.Generator().manual_seed(s)).requires_grad_() for s, n in sizes)
        leaves = [*net.parameters(), gain, shift, head]
        for p in leaves:
            p.grad = None
        with Saving(names, Keeper(None, min_bytes=0), least=0, module=net).hooks():
            y = layer(x, more, late)
        y.square().sum().backward()
        return [y.detach(), x.grad, more.grad, *(p.grad for p in leaves if p.grad is not None)]

    args = torch.randn(T, D).requires_grad_(), torch.randn(T + 2, D).requires_grad_()
    found = {
        late: worth.watch(lambda *a: layer(*a, late), args, {}, net, Keeper(None, min_bytes=0), least=0)
        for late in (False, True)
    }
    names = [c.name for c in found[True][1] if c.nbytes]
    print(*sorted(names))
    spared = found[False][0] - found[True][0]
    # rows of four norms, two gates and [q || k]; kept are a bias and two numbers of each head instead
    assert spared == 4 * (T * D * (4 + 2 + 2) - 3 * D - 2 * T * H), spared
    plain, want = run((), False), run((), True)
    for a, b in zip(plain, want, strict=True):
        assert (a - b).norm() <= 1e-5 * a.norm()
    for chosen in (names, names[::2], names[1::2]):
        for a, b in zip(want, run(frozenset(chosen), True), strict=True):
            assert (a - b).norm() <= 1e-5 * a.norm(), chosen
"""


def test_the_kernels_results_are_had_again_beside_it():
    pytest.importorskip("gem_model.projection")
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KERNELS)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[0] == "gate#0 gate#1 gdpa#0 gdpa#1 linear#0 linear#1 linear#2"


def test_beside_recomputed_results_it_is_refused_on_a_card(monkeypatch):
    """Where gradients were seen wrong; see `MIXED_ON_CARDS`."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    for policy in ("uniform", "regions"):
        with pytest.raises(ValueError, match='policy "keep" alone'):
            Regions(model(), ["0"], MemoryConfig(policy=policy, inside="fp8"))
    Regions(model(), ["0"], MemoryConfig(inside="fp8")).close()
    Regions(model(), ["0"], MemoryConfig(policy="regions")).close()
