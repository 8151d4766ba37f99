"""Whether CUDA graphs run the layers, and what a run makes of them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from gem_lowprec import Recipe
from gem_lowprec.recipe import Rule
from gem_model import GEM, preset
from gem_model.testing import example_inputs
from gem_train.config import override
from gem_train.errors import UserError
from gem_train.graphs import replay_layers, why_not
from gem_train.ladder.peers import Operators, install
from gem_train.testing import assembled, tiny_config
from torch import nn

CARD = SimpleNamespace(device=torch.device("cuda"), world=1)
CARDS = SimpleNamespace(device=torch.device("cuda"), world=8)
PLAIN = SimpleNamespace(recipe=Recipe(name="none"))


def recipe(**rule):
    return SimpleNamespace(recipe=Recipe(name="mine", rules=(Rule(wgrad="mxfp8", **rule),)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"runtime": SimpleNamespace(device=torch.device("cpu"), world=1)}, "need a CUDA device; this run is on cpu"),
        ({"runtime": CARDS}, ""),
        ({"runtime": CARDS, "settings": ("parallel.experts=2",)}, "parallel.experts is 2"),
        ({"runtime": CARDS, "settings": ("parallel.comm.payload=lowprec",)}, "payload is 'lowprec': graphs read"),
        ({"settings": ("parallel.comm.payload=lowprec",)}, ""),
        ({"model": nn.Linear(2, 2)}, "this model is a Linear"),
        ({"settings": ("parallel.memory.policy=full",)}, ""),
        ({"settings": ("parallel.memory.quantise=fp8",)}, ""),
        ({"runtime": CARDS, "settings": ("parallel.memory.quantise=fp8",)}, "go together on one device only"),
        ({"settings": ("parallel.memory.engine=compile",)}, "parallel.memory.engine is 'compile'"),
        ({"settings": ("parallel.memory.offload_min_mib=64",)}, "parallel.memory.offload_min_mib moves"),
        ({"conversion": recipe(stochastic=True)}, "'mine' does something else in each step"),
        ({"conversion": recipe(wgrad_every=2)}, "'mine' does something else in each step"),
        ({"conversion": recipe()}, ""),
        ({}, ""),
    ],
)
def test_what_stands_in_the_way_is_named(tmp_path, change, reason):
    config = override(tiny_config(tmp_path), change.pop("settings", ()))
    model = GEM(preset("tiny"), example_inputs())
    given = {"model": model, "conversion": PLAIN, "runtime": CARD} | change
    found = why_not(config, **given)
    assert reason in found
    assert bool(reason) == bool(found)


def test_off_is_off_and_auto_says_why_not(tmp_path):
    runtime = SimpleNamespace(device=torch.device("cpu"), world=1)
    model = GEM(preset("tiny"), example_inputs())
    off = override(tiny_config(tmp_path), ("train.cuda_graphs=off",))
    assert replay_layers(off, model, PLAIN, CARD) == "train.cuda_graphs is off"
    auto = override(tiny_config(tmp_path), ("train.cuda_graphs=auto",))
    assert "CUDA device" in replay_layers(auto, model, PLAIN, runtime)
    assert model.layers.replay is None


def test_graphs_that_are_asked_for_and_cant_be_had_stop_the_run(tmp_path):
    config = tiny_config(tmp_path / "cache", "train.cuda_graphs=on")
    with pytest.raises(UserError, match=r"train\.cuda_graphs is on, but CUDA graphs need a CUDA device"):
        assembled(config, tmp_path / "run").__enter__()


def test_other_operators_drop_what_was_captured_with_the_last():
    model = GEM(preset("tiny"), example_inputs())
    forgotten = []
    model.layers.replay = SimpleNamespace(forget=lambda: forgotten.append(1))
    install(model, Operators(attention="padded"))
    assert forgotten == [1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_card_a_run_with_graphs_learns_what_one_without_does(tmp_path):
    losses = {}
    for graphs in ("off", "on"):
        settings = (f"train.cuda_graphs={graphs}", "train.device=cuda", "model.dropout=0", "optim.accumulate=2")
        config = tiny_config(tmp_path / "cache", *settings, "train.precision=fp32")
        config = dataclasses.replace(config, recipe=graphs)
        with assembled(config, tmp_path / graphs) as (_, trainer):
            assert ("replayed" in trainer.parts.layers) == (graphs == "on")
            trainer.model.train()
            rows = [trainer.step(batch) for batch, _ in zip(trainer.parts.train, range(12), strict=False)]
            losses[graphs] = [(row["loss"], row["grad_norm"]) for row in rows]
    torch.testing.assert_close(torch.tensor(losses["on"]), torch.tensor(losses["off"]), rtol=2e-3, atol=1e-5)
