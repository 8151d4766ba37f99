"""Single results computed again from what is kept: gradients, lifetimes, and what a plan reckons with."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from gem_parallel import MemoryConfig, Recipe, declare_again
from gem_parallel.memory import again, recipes, worth
from gem_parallel.memory import regions as memory_regions
from gem_parallel.memory.again import Saving
from gem_parallel.memory.keeper import Keeper
from gem_parallel.memory.profile import HostCost, count_saved
from gem_parallel.memory.quantise import Fp8Quantiser
from gem_parallel.memory.regions import MEASURED_STEPS, Regions
from gem_parallel.memory.testing import WIDTH, sample, stack, train_step
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

PLAIN = Keeper(None, min_bytes=0)


def costs_of(module: nn.Module, *inputs: torch.Tensor, keeper: Keeper = PLAIN) -> tuple[int, dict[str, worth.Cost]]:
    saved, costs, _ = worth.watch(module, inputs, {}, module, keeper, least=0)
    return saved, {cost.name: cost for cost in costs}


def saving(names, module: nn.Module, keeper: Keeper = PLAIN) -> Saving:
    return Saving(frozenset(names), keeper, least=0, module=module)


@pytest.fixture
def declared(monkeypatch):
    """Recipes of a test go with it."""
    monkeypatch.setattr(recipes, "RECIPES", dict(recipes.RECIPES))
    yield
    recipes._sorts.clear()


class Twice(torch.autograd.Function):
    """2 x, and x where the values are a view of it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x, x.view(-1, 2, WIDTH // 2)[:, 1]

    @staticmethod
    def backward(ctx, dy, dv):
        (x,) = ctx.saved_tensors
        dx = 2 * dy
        dx.view(-1, 2, WIDTH // 2)[:, 1] += dv
        return dx + 0 * x


def test_any_choice_of_results_gives_the_same_bits():
    plain, model = stack(1), stack(1)
    _, costs = costs_of(model, sample())
    # the results of layers that others read, the gelu, and the products of attention by hand
    assert {name.split("#")[0] for name in costs} == {"linear", "gelu", "bmm"}
    draw = torch.Generator().manual_seed(3)
    choices = [[name for name in costs if torch.rand(1, generator=draw) < 0.5] for _ in range(12)]
    for chosen in [*choices, list(costs), []]:
        expected = train_step(plain, 5)
        x = sample(5)
        torch.manual_seed(105)
        with saving(chosen, model).hooks():
            y = model(x)
        model.zero_grad()
        y.square().mean().backward()
        got = [y.detach(), x.grad, torch.rand(1), *(p.grad for p in model.parameters())]
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)), chosen


@pytest.mark.parametrize("budget", [0.75, 0.9])
def test_a_plan_computes_single_results_again(budget, monkeypatch):
    monkeypatch.setattr(memory_regions, "host_cost", lambda *_: HostCost(forward_s=1.0, modes_s=1.0))
    plain, model = stack(dropout=0.0), stack(dropout=0.0)
    config = MemoryConfig(policy="uniform", budget=budget, recompute_min_kib=1)
    regions = Regions(model, ["0", "1", "2"], config)
    for seed in range(MEASURED_STEPS + 2):
        expected, got = train_step(plain, seed), train_step(model, seed, regions)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    points = [row.point for row in regions.plan.regions]
    assert all(point.names is None and point.again for point in points), str(regions.plan)
    assert all(row.point.kept <= budget * row.whole for row in regions.plan.regions)
    assert "all but" in str(regions.plan)
    whole = count_saved(plain[0], (sample(),), {}, plain[0])
    assert all(row.whole == whole for row in regions.plan.regions)


def test_a_result_is_not_there_between_the_passes_and_is_computed_once(declared):
    ran = []
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8))
    kept = recipes.RECIPES["GeluBackward0"]
    declare_again("GeluBackward0", Recipe(label="gelu", again=lambda node: (ran.append("gelu"), kept.again(node))[1]))
    seen: dict[str, StorageWeakRef] = {}

    def function(x):
        wide = layer[0](x)
        y = layer[1](wide)
        seen["wide"], seen["y"] = StorageWeakRef(wide.untyped_storage()), StorageWeakRef(y.untyped_storage())
        return layer[2](y) + layer[3](y).sum() + y.square().sum()  # three that save it

    x = sample(1)[0]
    with saving(["gelu#0"], layer).hooks():
        out = function(x)
    assert seen["y"].expired()
    assert not seen["wide"].expired()
    assert not ran
    out.sum().backward()
    assert ran == ["gelu"]
    with saving(["gelu#0", "linear#0"], layer).hooks():
        out = function(x)
    assert seen["wide"].expired()
    out.sum().backward()
    assert ran == ["gelu"] * 2
    del out
    with saving(["gelu#0"], layer).hooks():
        out = function(x)
    for _ in range(2):
        out.sum().backward(retain_graph=True)
    assert ran == ["gelu"] * 4  # a second backward pass has it computed once more


def test_results_of_functions_and_their_views(declared):
    declare_again(
        f"{Twice.__module__}.Twice", Recipe(label="twice", again=lambda ctx: (2 * ctx.saved_tensors[0], None))
    )
    linear = nn.Linear(WIDTH, WIDTH)
    others = nn.ModuleList([nn.Linear(WIDTH, 4), nn.Linear(WIDTH // 2, 4, bias=False)])
    seen = {}

    def function(x):
        wide = nn.functional.linear(x, linear.weight, linear.bias.detach())  # the node does not know of this bias
        y, v = Twice.apply(wide)
        seen["wide"] = StorageWeakRef(wide.untyped_storage())
        flat = y.view(2, -1, WIDTH)  # a view, then a product of three dimensions
        return others[0](flat).sum() + others[1](v.unflatten(0, (2, -1))).square().sum()

    module = nn.ModuleList([linear, *others])
    grads = []
    for names in ((), ("linear#0",), ("twice#0",), ("linear#0", "twice#0")):
        x = sample(2)[0].detach().requires_grad_()
        module.zero_grad()
        with saving(names, module).hooks():
            out = function(x)
        assert seen["wide"].expired() == ("linear#0" in names)
        out.backward()
        grads.append([x.grad, *(p.grad for p in module.parameters() if p.grad is not None)])
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


def test_a_recipe_that_makes_something_else_is_refused(declared):
    declare_again(
        f"{Twice.__module__}.Twice", Recipe(label="twice", again=lambda ctx: (ctx.saved_tensors[0][1:], None))
    )

    class Net(nn.Module):
        def forward(self, x):
            return Twice.apply(x)[0].square().sum()

    model = Net()
    with saving(("twice#0",), model).hooks():
        y = model(sample())
    with pytest.raises(RuntimeError, match=r"twice#0 of TwiceBackward has 2304 elements .* and had 3072"):
        y.backward()


def test_an_unknown_bias_is_no_linear_layer():
    weight = torch.randn(8, WIDTH, requires_grad=True)
    bias = torch.randn(8)
    module = nn.Module()
    found = []
    with Saving((), PLAIN, least=0, module=module).hooks():
        y = nn.functional.linear(sample(), weight, bias)
        found.append(saving((), module).find(y.flatten(0, 1)))
    assert found == [None]


def test_weights_that_are_cast_together_are_no_activations():
    model, keeper = CastOnce(), Keeper(Fp8Quantiser(), min_bytes=1)
    with torch.autograd.graph.saved_tensors_hooks(keeper.pack_saved, keeper.unpack):
        y = model(sample())
    kept = count_saved(model, (sample(),), {}, model)
    assert keeper.seen == kept, "weights were packed, or counted"
    y.sum().backward()


class CastAll(torch.autograd.Function):
    """Tensors in 16 bits, all at once, as GEM's layers cast their weights."""

    @staticmethod
    def forward(ctx, *tensors):
        return tuple(t.bfloat16() for t in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        return tuple(None if g is None else g.float() for g in gradients)


class CastOnce(nn.Module):
    """Two linear layers whose weights one node casts, and whose biases' gradients another one makes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        layers = (self.up, self.down)
        held = [dict(m._parameters) for m in layers]
        halves = iter(CastAll.apply(*(p for h in held for p in h.values())))
        for m in layers:
            m._parameters.update({name: next(halves) for name in m._parameters})
        try:
            up, down = (lambda y, m=m: nn.functional.linear(y, m.weight, m.bias.detach()) for m in layers)
            y = up(x.flatten(0, 1).bfloat16())
            return down(y * y.sigmoid() + self.up.bias).sigmoid() + self.down.bias
        finally:
            for m, h in zip(layers, held, strict=True):
                m._parameters.update(h)


def test_linear_layers_whose_weights_are_cast_together_are_found():
    model = CastOnce()
    _, costs = costs_of(model, sample())
    assert "linear#0" in costs
    assert costs["linear#0"].nbytes == 4 * 24 * 3 * WIDTH * 2
    grads = []
    for names in ((), ("linear#0",), tuple(costs)):
        model.zero_grad()
        with saving(names, model).hooks():
            y = model(sample())
        y.square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for found in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], found, strict=True))


def test_what_was_changed_after_it_was_saved_is_refused():
    linear = nn.Linear(WIDTH, WIDTH)
    x = sample()
    with saving(["linear#0"], linear).hooks():
        y = x * 2
        z = linear(y).sigmoid() * linear(y)
        y.detach().add_(1)
    with pytest.raises(RuntimeError, match="changed in place after it had been saved"):
        z.sum().backward()


def test_the_most_that_backward_has_computed_at_a_time():
    def cost(name, first, last, nbytes, *reads):
        return worth.Cost(name, first=first, last=last, nbytes=nbytes, reads=set(reads))

    costs = [cost("norm", 1, 1, 10), cost("linear", 2, 2, 50, "norm"), cost("gate", 4, 4, 20, "linear")]
    assert worth.working(costs, ["norm"]) == 10
    assert worth.working(costs, ["norm", "linear"]) == 60
    assert worth.working(costs, ["norm", "linear", "gate"]) == 80
    later = cost("norm2", 7, 9, 30)
    assert worth.working([*costs, later], ["norm", "gate", "norm2"]) == 30  # each by itself
    assert worth.working([], []) == 0


def test_a_curve_of_results():
    saved, costs = costs_of(stack(1), sample())
    for cost in costs.values():
        cost.seconds = cost.host_s = 1.0
    found = worth.curve("0", list(costs.values()), inputs=100, saved=saved, unpacked=saved, forward_s=100.0)
    assert [p.kept for p in found.points] == sorted(p.kept for p in found.points)
    assert [p.seconds for p in found.points] == [100.0, *range(len(costs), -1, -1)]
    assert found.points[0].names == ()
    first = [set(p.again) for p in found.points if p.again]
    largest = max(costs.values(), key=lambda c: c.nbytes).nbytes
    assert first[-1] <= {name for name, c in costs.items() if c.nbytes == largest}
    assert all(p.kept <= p.working <= 2 * saved for p in found.points)
    assert costs["linear#1"].nbytes == 4 * 4 * 24 * 4 * WIDTH
    assert costs["gelu#0"].reads == {"linear#1"}


def test_what_is_computed_again_depends_on_who_holds_the_step_up():
    product = worth.Cost("linear#0", seconds=3.0, host_s=1.0, nbytes=100, first=1, last=2)
    norm = worth.Cost("norm#0", seconds=1.0, host_s=3.0, nbytes=100, first=3, last=4)

    def points(forward_s, host_s):
        found = worth.curve(
            "0", [product, norm], inputs=10, saved=300, unpacked=300, forward_s=forward_s, host_s=host_s
        )
        return [(p.kept, tuple(sorted(p.again)), round(p.seconds, 6)) for p in found.points if p.names is None]

    assert points(100.0, 1.0) == [(100, ("linear#0", "norm#0"), 4.0), (200, ("norm#0",), 1.0), (300, (), 0.0)]
    assert points(1.0, 100.0) == [(100, ("linear#0", "norm#0"), 4.0), (200, ("linear#0",), 1.0), (300, (), 0.0)]
    assert points(2.0, 0.5)[-2:] == [(200, ("norm#0",), 1.0), (300, (), 0.0)]
    assert points(2.0, 2.0)[-2:] == [(200, ("norm#0",), 1.0), (300, (), 0.0)]  # the device by two seconds
    assert points(2.0, 4.0)[-2:] == [(200, ("linear#0",), 1.0), (300, (), 0.0)]  # the host by two


def test_a_step_sees_whichever_takes_longer():
    assert worth.step_seconds(1.0, 0.1, 0.25, 5.0) == pytest.approx(2.2)
    assert worth.step_seconds(1.0, 0.1, 0.25, 0.5) == pytest.approx(0.25)
    assert worth.step_seconds(0.1, 1.0, 0.25, 0.5) == pytest.approx(0.5)


def test_packed_and_again_together():
    plain, model = stack(1, dropout=0.0), stack(1, dropout=0.0)
    keeper = Keeper(Fp8Quantiser(), min_bytes=1024)
    expected = train_step(plain, 1)
    x = sample(1)
    torch.manual_seed(101)
    with saving(costs_of(model, x)[1], model, keeper).hooks():
        y = model(x)
    y.square().mean().backward()
    assert keeper.seen > 0
    for a, b in zip(expected[1:2] + expected[3:], [x.grad, *(p.grad for p in model.parameters())], strict=True):
        assert (a - b).norm() <= 0.05 * a.norm()


def test_nothing_is_left_of_a_graph_that_is_dropped():
    model = stack(1)
    names = list(costs_of(model, sample())[1])
    gc.collect()
    gc.disable()  # counting references alone must do
    try:
        alive = []
        for seed in range(3):
            x = sample(seed)
            with saving(names, model).hooks():
                y = model(x)
            alive.append(StorageWeakRef(y.untyped_storage()))
            if seed:
                y.sum().backward()
            del x, y
        assert all(storage.expired() for storage in alive)
        assert not [o for o in gc.get_objects() if type(o) in (again.Result, again.Place, Saving)]
    finally:
        gc.enable()


KERNELS = """
    import torch
    from gem_kernels import Among, Turn, gated_heads, gdpa, jagged_attention, layer_norm, norm_rows, rms_norm
    from gem_kernels import rotary_heads
    from gem_parallel.memory import worth
    from gem_parallel.memory.again import Saving
    from gem_parallel.memory.keeper import Keeper
    from gem_parallel.memory.quantise import Fp8Quantiser

    torch.manual_seed(0)
    T, D, H = 12, 32, 2
    kinds = {"backend": "triton"}
    net = torch.nn.ModuleDict({"up": torch.nn.Linear(D, 3 * D), "qkv": torch.nn.Linear(D, 3 * D)})
    rows = {"kind": "layer", "eps": 1e-6, **kinds}
    gain, shift, head, head2 = (torch.nn.Parameter(1 + 0.1 * torch.randn(n)) for n in (D, D, D // H, D))
    down = torch.nn.Parameter(torch.randn(D, D) / 6)
    offsets = torch.tensor([0, 7, 12])
    age = torch.rand(T)
    places, others = torch.tensor([i for i in range(14) if i not in (3, 9)]), torch.tensor([3, 9])

    def layer(x, more):
        n, total = layer_norm(x, gain, shift, residual=more, residual_bias=net["up"].bias[:D], **kinds)
        packed = torch.nn.functional.linear(n, net["up"].weight, net["up"].bias.detach())
        h, q = gated_heads(packed, D, H, head, bias=net["up"].bias, **kinds)
        qkv = torch.nn.functional.linear(
            layer_norm(total, gain, shift, **kinds), net["qkv"].weight, net["qkv"].bias.detach()
        )
        y, total, _ = norm_rows(total, gain, shift, residual=h, residual_bias=head2, **rows)
        z, total, latest = norm_rows(total, gain, shift, residual=y @ down, offsets=offsets, recent=2, **rows)
        z = z @ down + norm_rows(total, gain, shift, offsets=offsets, recent=3, **rows)[0] @ down
        turns = [Turn(positions=age, base=100.0)]
        q2, k, v, k2, v2 = rotary_heads(qkv, H, (head, head), turns=turns, readers=2, bias=net["qkv"].bias, **kinds)
        seen = gdpa(q + q2, k, v, offsets, offsets, 7, 7, residual=q2, **kinds).flatten(1) @ down
        among = Among(rows=torch.stack((q[0], q[5])), places=places, others=others)
        q3, k, v = rotary_heads(qkv, H, (head, head), turns=turns, among=among, bias=net["qkv"].bias, **kinds)
        both = gdpa(q3, k, v, offsets + torch.tensor([0, 1, 2]), offsets, 8, 7, **kinds).flatten(1)
        among = Among(rows=rms_norm(torch.stack((q[0], q[5])), head, **kinds), places=places, others=others)
        q4, k4, v4 = rotary_heads(qkv, H, (head, head), turns=turns, among=among, bias=net["qkv"].bias, **kinds)
        both = both + gdpa(q4, k4, v4, offsets + torch.tensor([0, 1, 2]), offsets, 8, 7, **kinds).flatten(1)
        q5, k5, v5 = rotary_heads(qkv, H, (head, head), turns=turns, among=among, **kinds)
        both = both + gdpa(q5, k5, v5, offsets + torch.tensor([0, 1, 2]), offsets, 8, 7, **kinds).flatten(1)
        where = {"residual": both @ down, "places": places, "others": others}
        z2, total, latest2 = norm_rows(z, gain, shift, **where, offsets=offsets, recent=2, **rows)
        z = z2 @ down + (norm_rows(total, gain, shift, **where, **rows)[0] @ down) * latest2.sum()
        return h @ down + seen + (k2 * v2).flatten(1) + z + latest.sum()

    def run(names):
        x, more = (torch.randn(T, D, generator=torch.Generator().manual_seed(s)).requires_grad_() for s in (1, 2))
        leaves = [*net.parameters(), gain, shift, head, head2, down]
        for p in leaves:
            p.grad = None
        with Saving(names, Keeper(None, min_bytes=0), least=0, module=net).hooks():
            y = layer(x, more)
        y.square().sum().backward()
        return [y.detach(), x.grad, more.grad, *(p.grad for p in leaves)]

    args = tuple(torch.randn(T, D).requires_grad_() for _ in range(2))
    saved, costs, _ = worth.watch(layer, args, {}, net, Keeper(None, min_bytes=0), least=0)
    names = [c.name for c in costs if c.nbytes]
    print(*sorted(n.split("#")[0] for n in names))
    want = run(())
    for chosen in (names, names[::2], names[1::2]):
        assert all(torch.equal(a, b) for a, b in zip(want, run(frozenset(chosen)), strict=True)), chosen
    q, k, v = (torch.randn(2, 32, 16).requires_grad_() for _ in range(3))  # LSE [2, 32]: as wide as an activation
    at, keeper = torch.tensor([0, 2]), Keeper(Fp8Quantiser(), min_bytes=1)
    with torch.autograd.graph.saved_tensors_hooks(keeper.pack_saved, keeper.unpack):
        out, lse = jagged_attention(q, k, v, at, at, 2, 2, return_lse=True, **kinds)
    assert keeper.pack_saved(lse) is lse and keeper.pack_saved(out.flatten(1)) is not out
"""


HANDED_ON = """
    import torch
    from gem_kernels import gated_heads, norm_rows
    from gem_kernels.nn import NormLinear
    from gem_kernels.stream import norm_rows_twice
    from gem_model.projection import project_bare
    from gem_parallel.memory import worth
    from gem_parallel.memory.again import Saving
    from gem_parallel.memory.keeper import Keeper, is_weight

    torch.manual_seed(0)
    T, D, H = 12, 32, 2
    kinds = {"backend": "triton"}
    places, others = torch.tensor([i for i in range(14) if i not in (3, 9)]), torch.tensor([3, 9])
    layer = NormLinear(D, 3 * D, norm="layer")
    gain, shift, head = (torch.nn.Parameter(1 + 0.1 * torch.randn(n)) for n in (D, D, D // H))
    for p in layer.norm.parameters():
        torch.nn.init.normal_(p)
    down = torch.nn.Parameter(torch.randn(D, D) / 6)
    where = {"residual": None, "places": places, "others": others}

    def first(x, more):
        how = {"kind": "layer", "eps": 1e-6, "bare_eps": 1e-5, **kinds}
        y, total, _, bare = norm_rows_twice(x, gain, shift, **where | {"residual": more}, **how)
        return y @ down, total, bare

    def second(y, total, bare):
        packed, bias = project_bare(layer, bare)
        h, q = gated_heads(packed, D, H, head, bias=bias, **kinds)
        z, total, _ = norm_rows(total, gain, shift, residual=h @ down + q.flatten(1), kind="layer", eps=1e-6, **kinds)
        return (z * y).square().sum() + total.square().sum()

    def inputs():
        sizes = ((1, T), (2, T + 2))
        return [torch.randn(n, D, generator=torch.Generator().manual_seed(s)).requires_grad_() for s, n in sizes]

    keeper = Keeper(None, min_bytes=0)
    _, costs, _ = worth.watch(first, inputs(), {}, layer, keeper, least=0)
    made = first(*inputs())
    _, more_costs, _ = worth.watch(second, made, {}, layer, keeper, least=0)
    names = [c.name for c in costs if c.nbytes], [c.name for c in more_costs if c.nbytes]
    print(*names[0], "|", *sorted(names[1]))
    grads = []
    for chosen in (((), ()), names, (names[0], ()), ((), names[1]), ((), ["norm#0"]), ((), ["linear#0"])):
        given, leaves = inputs(), [*layer.parameters(), gain, shift, head, down]
        for p in leaves:
            p.grad = None
        with Saving(chosen[0], keeper, least=0, module=layer).hooks():
            made = first(*given)
        with Saving(chosen[1], keeper, least=0, module=layer).hooks():
            out = second(*made)
        out.backward()
        grads.append([out.detach(), *(t.grad for t in (*given, *leaves))])
    for found in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], found, strict=True))
    assert is_weight(layer.linear.weight * layer.norm.weight)
    assert not is_weight(made[2])
"""


def test_a_projection_whose_weight_holds_a_norms_is_had_again():
    """Of rows that the region before has normed, in the pass of a norm of its own."""
    pytest.importorskip("gem_model.projection")
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(HANDED_ON)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[0] == "norm#0 | gate#0 linear#0 norm#0"


def test_the_kernels_results_are_had_again_bit_by_bit():
    """Their names and what their nodes hold are another package's: this fails when they change."""
    pytest.importorskip("gem_kernels")
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
    assert done.stdout.split("\n")[0] == "gate gdpa linear linear mm" + 7 * " norm" + 4 * " rotary"
