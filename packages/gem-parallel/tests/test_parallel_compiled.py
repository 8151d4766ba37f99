"""Compiled regions: budgets of their own, dropout, quantised activations."""

from __future__ import annotations

import warnings

import pytest
import torch
from gem_parallel import MemoryConfig
from gem_parallel.memory import compiled
from gem_parallel.memory.compiled import compile_region, measure
from gem_parallel.memory.keeper import Keeper
from gem_parallel.memory.profile import count_saved
from gem_parallel.memory.quantise import Fp8Quantiser
from gem_parallel.memory.regions import MEASURED_STEPS, Regions
from gem_parallel.memory.testing import WIDTH, Block, sample, stack, train_step
from torch import nn


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
