"""A teacher's predictions in the training of a whole run."""

from __future__ import annotations

import dataclasses

import pytest
from gem_model.config import Teacher
from gem_train.testing import assembled, tiny_config


@pytest.mark.parametrize("parts", [1, 2])
def test_what_a_teacher_adds_to_the_loss_is_trained_on(tmp_path, cache, parts):
    config = tiny_config(cache)
    model = dataclasses.replace(config.model, teachers=(Teacher(task="click", column="price"),))
    config = dataclasses.replace(
        config,
        model=model,
        optim=dataclasses.replace(config.optim, accumulate=parts),
        train=dataclasses.replace(config.train, max_steps=2, eval_every=0, checkpoint_every=0),
    )
    with assembled(config, tmp_path / "run") as (_, trainer):
        named = {n: p for n, p in trainer.model.named_dense_parameters() if n.startswith("distillation.")}
        before = {n: p.detach().clone() for n, p in named.items()}
        trainer.fit()
        assert named
        assert all((p != before[n]).any() for n, p in named.items() if n.endswith("weight"))
        assert trainer.validate() in (True, False)
        assert trainer.model.module.auxiliary is None
