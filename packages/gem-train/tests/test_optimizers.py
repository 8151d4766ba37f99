"""The optimizers of the dense parameters: who gets what, at which rate, and that a run with them goes on bit by bit."""

from __future__ import annotations

import dataclasses
import math
import shutil

import pytest
import torch
from gem_train.config import OptimConfig
from gem_train.errors import Interrupted
from gem_train.events import read
from gem_train.optimizers import Muon, dense_optimizer, set_lr
from gem_train.run_dir import RunDir
from gem_train.testing import assembled, tiny_config


class Holder:
    """What the optimizer asks of a parallel model."""

    def __init__(self, **parameters):
        self.named = {name: torch.nn.Parameter(value) for name, value in parameters.items()}

    def named_dense_parameters(self):
        return list(self.named.items())


def holder():
    generator = torch.Generator().manual_seed(3)
    made = {name: torch.randn(*shape, generator=generator) for name, shape in SHAPES.items()}
    model = Holder(**made)
    for p in model.named.values():
        p.grad = torch.randn(p.shape, generator=generator)
    return model


SHAPES = {"wide": (12, 8), "stack": (3, 4, 5), "bias": (8,)}
CPU = torch.device("cpu")


def test_muon_moves_a_matrix_along_the_orthogonal_part_of_its_gradient():
    model = holder()
    before = {name: p.detach().clone() for name, p in model.named.items()}
    config = OptimConfig(optimizer="muon", lr=0.01, weight_decay=0.0)
    optimizer = dense_optimizer(model, config, CPU, matrices=frozenset({"wide"}))
    assert isinstance(optimizer, Muon)
    optimizer.step()
    step = (before["wide"] - model.named["wide"].detach()).double() / (0.01 * 0.2 * 12**0.5)
    u, _, v = torch.linalg.svd(model.named["wide"].grad.double(), full_matrices=False)
    s = torch.linalg.svdvals(step)
    assert ((s > 0.6) & (s < 1.3)).all()  # five iterations in bfloat16 bring the singular values near 1, not to it
    assert torch.nn.functional.cosine_similarity(step.flatten(), (u @ v).flatten(), dim=0) > 0.97
    for name in ("stack", "bias"):  # AdamW's first step: the sign of the gradient
        moved = before[name] - model.named[name].detach()
        torch.testing.assert_close(moved, 0.01 * model.named[name].grad.sign(), rtol=1e-4, atol=1e-6)


def test_wider_matrices_learn_more_slowly_and_are_decayed_as_before():
    config = OptimConfig(lr=0.01, weight_decay=0.5)
    plain = dense_optimizer(holder(), config, CPU)
    assert {g["scale"] for g in plain.param_groups} == {1.0}
    model = holder()
    optimizer = dense_optimizer(model, config, CPU, ratios={"wide": 4.0})
    set_lr(optimizer, 0.02)
    found = {name: g for g in optimizer.param_groups for name, p in model.named.items() if p is g["params"][0]}
    assert found["wide"]["lr"] == pytest.approx(0.005)
    assert found["stack"]["lr"] == found["bias"]["lr"] == 0.02
    assert found["wide"]["lr"] * found["wide"]["weight_decay"] == pytest.approx(0.01)
    assert found["bias"]["weight_decay"] == 0.0
    muon = dense_optimizer(
        holder(), dataclasses.replace(config, optimizer="muon"), CPU, ratios={"wide": 4.0}, matrices=frozenset({"wide"})
    )
    assert {g["scale"] for g in muon.param_groups} == {0.5, 1.0}


def test_muon_without_a_matrix_says_so():
    with pytest.warns(UserWarning, match="no matrix for it"):
        dense_optimizer(holder(), OptimConfig(optimizer="muon"), CPU)


def test_a_run_with_muon_and_a_base_width_learns_and_goes_on_bit_by_bit(tmp_path, cache):
    config = tiny_config(cache)
    optim = dataclasses.replace(config.optim, optimizer="muon", base_width=config.model.width // 2)
    config = dataclasses.replace(
        config, optim=optim, train=dataclasses.replace(config.train, max_steps=6, eval_every=0, checkpoint_every=2)
    )
    with assembled(config, tmp_path / "whole") as (_, trainer):
        muon = trainer.parts.optimizer
        assert isinstance(muon, Muon)
        assert len(muon.parts) == 2
        scales = sorted({g["scale"] for g in muon.param_groups})
        assert scales[0] == 0.5  # AdamW's, of the map that makes logits
        assert any(scale == pytest.approx(math.sqrt(0.5)) for scale in scales)  # Muon's
        assert scales[-1] == 1.0
        trainer.fit()
    with assembled(config, tmp_path / "part") as (_, trainer):
        step = trainer.step

        def asked_to_stop(batch, flops=0.0):
            trainer.stop.requested = trainer.position.step == 2
            return step(batch, flops)

        trainer.step = asked_to_stop
        with pytest.raises(Interrupted):
            trainer.fit()
    with assembled(config, tmp_path / "again") as (_, trainer):
        shutil.copytree(RunDir(tmp_path / "part").checkpoints, trainer.parts.run.checkpoints, dirs_exist_ok=True)
        assert trainer.resume() == 3
        trainer.fit()
    whole, part, again = (
        [(r["step"], r["loss"]) for r in read(RunDir(tmp_path / name).metrics_file) if r["kind"] == "step"]
        for name in ("whole", "part", "again")
    )
    assert [step for step, _ in whole] == [1, 2, 3, 4, 5, 6]
    assert whole == part + again
