"""The optimizers of the dense parameters: who gets what, at which rate, and that a run with them goes on bit by bit."""

from __future__ import annotations

import dataclasses
import math
import shutil

import pytest
import torch
from gem_model.scaling import Ratios
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
    optimizer = dense_optimizer(model, config, CPU, ratios=Ratios(fan_in={"wide": 4.0}))
    set_lr(optimizer, 0.02)
    found = {name: g for g in optimizer.param_groups for name, p in model.named.items() if p is g["params"][0]}
    assert found["wide"]["lr"] == pytest.approx(0.005)
    assert found["stack"]["lr"] == found["bias"]["lr"] == 0.02
    assert found["wide"]["lr"] * found["wide"]["weight_decay"] == pytest.approx(0.01)
    assert found["bias"]["weight_decay"] == 0.0
    muon = dense_optimizer(
        holder(),
        dataclasses.replace(config, optimizer="muon"),
        CPU,
        ratios=Ratios(fan_in={"wide": 4.0}),
        matrices=frozenset({"wide"}),
    )
    assert {g["scale"] for g in muon.param_groups} == {0.5, 1.0}


def test_muon_without_a_matrix_says_so():
    with pytest.warns(UserWarning, match="no matrix for it"):
        dense_optimizer(holder(), OptimConfig(optimizer="muon"), CPU)


def test_branches_learn_more_slowly_by_the_same_with_either_optimizer():
    ratios = Ratios(fan_in={"wide": 4.0}, branch={"wide": 3.0, "bias": 2.0})
    for name, expected in (("adamw", [1 / 12, 1 / 2, 1.0]), ("muon", [1 / 6, 1 / 2, 1.0])):
        config = OptimConfig(optimizer=name, weight_decay=0.5)
        optimizer = dense_optimizer(holder(), config, CPU, ratios=ratios, matrices=frozenset({"wide"}))
        assert sorted({g["scale"] for g in optimizer.param_groups}) == pytest.approx(expected)
        for group in optimizer.param_groups:
            assert group["weight_decay"] * group["scale"] in (0.0, pytest.approx(0.5))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"base_shape": "tinny"}, "preset 'tinny'"),
        ({"base_shape": "tiny+wdith=8"}, "field 'wdith'"),
        ({"base_shape": "tiny+width"}, "expected a field and a number"),
        ({"base_shape": "tiny", "base_width": 8}, "expected one of them"),
    ],
)
def test_where_a_rate_was_found_is_one_known_shape(wrong, told):
    with pytest.raises(ValueError, match=told):
        OptimConfig(**wrong)


def test_a_run_with_a_base_shape_starts_and_learns_as_it_says(tmp_path, cache):
    config = tiny_config(cache)
    base = f"tiny+pffn_tokens={config.model.pffn_tokens}+heads=1"
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, pffn_tokens=3 * config.model.pffn_tokens)
    )
    shaped = dataclasses.replace(config, optim=dataclasses.replace(config.optim, base_shape=base))
    found = []
    for number, one in enumerate((config, shaped)):
        with assembled(one, tmp_path / str(number)) as (_, trainer):
            parameters = dict(trainer.parts.model.named_dense_parameters())
            name = next(n for n in parameters if n.endswith("sequence.ffn.out.weight"))
            scale = next(
                g["scale"]
                for g in trainer.parts.optimizer.param_groups
                if any(p is parameters[name] for p in g["params"])
            )
            found.append((parameters[name].detach().clone(), scale))
    (plain, one), (smaller, less) = found
    torch.testing.assert_close(smaller, plain / 3)
    assert less == pytest.approx(one / (3 * config.model.width / 16))


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
