"""Tables whose ids are without bound, through the whole system: sharded by TorchRec, updated, checkpointed."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
from gem_train.errors import UserError
from gem_train.run_dir import RunDir
from gem_train.testing import assembled, tiny_config


def managed_config(cache, **inputs):
    config = tiny_config(cache)
    return dataclasses.replace(
        config,
        inputs=dataclasses.replace(config.inputs, managed=("item",), managed_rows=40, **inputs),
        train=dataclasses.replace(config.train, max_steps=40, eval_every=0, checkpoint_every=40),
    )


def test_the_maps_are_learned_in_training_and_part_of_a_checkpoint(tmp_path, cache):
    config = managed_config(cache)
    with assembled(config, tmp_path / "run") as (data, trainer):
        table = next(t for t in trainer.parts.inputs.tables if t.name == "item")
        assert (table.rows, table.managed) == (40, True)
        assert data.schema.tables["item"] > 40  # more ids than rows
        before = trainer.model.state_dict()["model"]["tables.shared.embeddings.item.weight"]
        before = before.local_shards()[0].tensor.clone()
        trainer.fit()
        state = trainer.model.state_dict()["model"]
        after = state["tables.shared.embeddings.item.weight"].local_shards()[0].tensor
        assert (after != before).any(dim=1).sum() > 30
        maps = {name: t.clone() for name, t in state.items() if ".slots." in name}
        ids = next(t for name, t in maps.items() if name.endswith("_mch_sorted_raw_ids"))
        assert (ids < 2**62).sum() > 30  # ids that have a row of their own
        trainer.model.eval()
        batch = next(iter(trainer.parts.validation))
        with torch.no_grad():
            told = trainer.forward(batch)
    with assembled(config, tmp_path / "again") as (_, trainer):
        shutil.copytree(RunDir(tmp_path / "run").checkpoints, trainer.parts.run.checkpoints, dirs_exist_ok=True)
        assert trainer.resume() == 40
        trainer.model.eval()
        with torch.no_grad():
            assert torch.equal(trainer.forward(batch), told)


def test_a_column_without_a_table_is_refused(tmp_path, cache):
    config = tiny_config(cache)
    config = dataclasses.replace(config, inputs=dataclasses.replace(config.inputs, managed=("itme",)))
    told = "managed names 'itme', which has no table; did you mean 'item'"
    with pytest.raises(UserError, match=told), assembled(config, tmp_path / "run"):
        pass
