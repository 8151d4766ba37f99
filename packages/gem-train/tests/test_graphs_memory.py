"""Layers that compute activations again, or keep them in FP8, and are replayed from CUDA graphs."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from gem_lowprec import Recipe
from gem_model import GEM, preset
from gem_model.replay import Replay, tensors
from gem_model.testing import example_inputs, random_batch
from gem_parallel import MemoryConfig, MemoryPlan, Regions
from gem_parallel.memory import recompute
from gem_train import graphs
from gem_train.config import override
from gem_train.testing import assembled, tiny_config
from torch import nn
from torch.func import functional_call

STEPS = 5  # of which two measure, where something is to be planned
POLICIES = {
    "full": MemoryConfig(policy="full"),
    "results": MemoryConfig(policy="uniform", budget=0.9, recompute_min_kib=0.1),
    "regions": MemoryConfig(policy="regions", budget=0.6, recompute_min_kib=0.1),
    "fp8": MemoryConfig(quantise="fp8", quantise_min_kib=1),
    "results and fp8": MemoryConfig(
        policy="regions", budget=0.9, recompute_min_kib=0.1, quantise="fp8", quantise_min_kib=1
    ),
    "inside": MemoryConfig(inside="exact"),
    "inside fp8": MemoryConfig(inside="fp8"),
    "inside and results": MemoryConfig(policy="uniform", budget=0.8, recompute_min_kib=0.1, inside="exact"),
}
on_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def build(device="cpu"):
    torch.manual_seed(0)
    inputs = example_inputs()
    model = GEM(preset("tiny", layers=3, dropout=0.5), inputs).to(device).train()
    return model, random_batch(inputs, 9, seed=2).to(device)


def with_regions(model, config):
    return None if config is None else Regions(model, model.units(), config)


class Captured:
    """Runs the layers as a capture does: both passes on leaves that nobody has used, with autograd called by hand."""

    def __init__(self, layers, regions):
        self.layers, self.regions, self.ran = layers, regions, 0

    def __call__(self, x, histories, cls):
        if self.regions is not None and self.regions.measuring:
            return self.layers.through(x, histories, cls)
        self.ran += 1
        histories = {source: histories[source] for source in cls}
        own, self.layers.replay = self.layers.replay, None
        out = Passes.apply(self.layers, *tensors(x, histories, cls), histories)
        self.layers.replay = own
        return out

    def forget(self):
        pass


class Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layers, *inputs):
        *inputs, histories = inputs
        ctx.parameters = list(layers.parameters())
        weights = {n: nn.Parameter(p.detach()) for n, p in layers.named_parameters()}
        fixed = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
        ctx.wanted = [i for i, t in enumerate(fixed) if t.requires_grad]
        ctx.leaves = [*(fixed[i] for i in ctx.wanted), *weights.values()]
        at, cls = iter(fixed), {}
        x = next(at)
        for source, history in histories.items():
            tokens, cls[source], offsets, rank, age = (next(at) for _ in range(5))
            histories[source] = replace(history, tokens=tokens, offsets=offsets, rank=rank, age=age)
        with torch.enable_grad():
            ctx.out = functional_call(layers, weights, (x, histories, cls))
        return ctx.out.detach()

    @staticmethod
    def backward(ctx, upstream):
        stands = torch.get_rng_state()
        found = list(torch.autograd.grad(ctx.out, ctx.leaves, upstream, allow_unused=True))
        assert torch.equal(torch.get_rng_state(), stands), "a backward graph draws nothing"
        gradients = {i: found.pop(0) for i in ctx.wanted}
        for p, g in zip(ctx.parameters, found, strict=True):
            p.grad = g
        return None, *(gradients.get(i) for i in range(len(ctx.needs_input_grad) - 2)), None


def trained(config, replay, device="cpu"):
    """Logits and gradients of every step, after those that measure."""
    model, batch = build(device)
    regions = with_regions(model, config)
    model.layers.replay = replay(model.layers, regions)
    rows = []
    for seed in range(STEPS):
        if regions is not None:
            regions.begin()
        model.zero_grad()
        torch.manual_seed(seed)
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(batch)
        model.loss(logits, batch).backward()
        numbers = torch.rand(1, device=device)
        named = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        rows.append({"logits": logits.detach().clone(), "numbers": numbers, **named})
    return rows[2:], model.layers.replay


def compare(rows, wanted, config):
    exact = config.quantise == config.inside == "none"
    limit = 0.1 if config.quantise != "none" or config.inside == "fp8" else 1e-3  # rows that are normed once more
    for want, got in zip(wanted, rows, strict=True):
        assert want.keys() == got.keys()
        assert torch.equal(want["numbers"], got["numbers"])
        if exact:
            assert not [name for name in want if not torch.equal(want[name], got[name])]
        else:
            whole = sum(float(w.double().square().sum()) for w in want.values())
            wrong = sum(float((want[n].double() - got[n].double()).square().sum()) for n in want)
            assert wrong < limit**2 * whole
            assert wrong > 0 or config.policy != "keep" or limit < 0.1, "a plan may have packed nothing"
    assert not torch.equal(rows[0]["logits"], rows[1]["logits"]), "dropout follows the seed"


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_graph_would_capture_has_the_unchecked_gradients(policy, monkeypatch):
    monkeypatch.setattr(recompute, "capturing", lambda: True)
    config = POLICIES[policy]
    wanted, _ = trained(None, Captured)
    rows, replay = trained(config, Captured)
    assert replay.ran >= STEPS - 2
    compare(rows, wanted, config)


def test_graphs_wait_for_the_plan(tmp_path, monkeypatch):
    config = override(tiny_config(tmp_path), ("parallel.memory.policy=regions", "parallel.memory.budget=0.5"))
    model, _ = build()
    memory = with_regions(model, MemoryConfig(policy="regions", budget=0.5))
    monkeypatch.setattr(graphs, "Replay", lambda layers: SimpleNamespace(layers=layers))
    card = SimpleNamespace(device=torch.device("cuda"), world=1)
    plain = SimpleNamespace(recipe=Recipe(name="none"))
    assert graphs.replay_layers(config, model, plain, card, memory) == ""
    assert not memory.launched
    assert not model.layers.replay.ready()
    model.layers.replay, replay = None, model.layers.replay
    monkeypatch.setattr(type(memory), "measuring", property(lambda self: False))
    assert replay.ready()


def test_a_plan_is_told_and_kept_with_the_run(tmp_path):
    settings = ("parallel.memory.policy=regions", "parallel.memory.budget=0.5", "parallel.memory.recompute_min_kib=0.1")
    config = tiny_config(tmp_path / "cache", *settings)
    for resumed in (False, True):
        with assembled(config, tmp_path / "run", resume=resumed) as (_, trainer):
            memory = trainer.parts.model.memory
            assert memory.measuring != resumed
            trainer.model.train()
            for batch, _ in zip(trainer.parts.train, range(3), strict=False):
                trainer.step(batch)
            assert MemoryPlan.read(tmp_path / "run" / "activations.json") == memory.plan
        events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
        assert [e["kept"] for e in events if e["event"] == "memory_plan"] == [memory.plan.kept]


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "inside and results"])  # refused on a card
def test_on_a_card_graphs_compute_again_what_they_would_have_kept(policy):
    config = POLICIES[policy]

    def replay(layers, regions):
        found = Replay(layers)
        if regions is not None:
            regions.launched = False
            found.ready = lambda: not regions.measuring
        return found

    wanted, _ = trained(None, replay, "cuda")
    rows, used = trained(config, replay, "cuda")
    assert len(used.graphs) == 1
    assert used.passes >= STEPS - 2
    compare(rows, wanted, config)
