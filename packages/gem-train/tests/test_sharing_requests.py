"""A run whose batches share histories learns what one with a history for each sample does."""

from __future__ import annotations

import pytest
from gem_train.errors import UserError
from gem_train.events import read
from gem_train.instruments import forward_flops
from gem_train.testing import assembled, tiny_config


def test_shared_histories_train_alike_and_cost_less(tmp_path, cache):
    told = {}
    for shared in ("false", "true"):
        config = tiny_config(
            cache,
            "data.order=time",
            f"data.share_requests={shared}",
            "model.pffn_tokens=0",  # which would tell the events of all samples of the request
            "model.dropout=0",
            "train.max_steps=6",
            "train.eval_every=0",
            "train.checkpoint_every=0",
        )
        with assembled(config, tmp_path / shared) as (_, trainer):
            batch = next(iter(trainer.parts.train))
            assert (batch.requests is not None) == (shared == "true")
            trainer.fit()
            steps = [r for r in read(trainer.parts.run.metrics_file) if r["kind"] == "step"]
            told[shared] = [r["loss"] for r in steps], batch, forward_flops(trainer.parts, batch)
    assert told["true"][0] == pytest.approx(told["false"][0], rel=2e-4)
    (_, shared, less), (_, each, flops) = told["true"], told["false"]
    assert shared.sharing > 1.2
    assert less < flops
    assert shared.expanded().sequences["events"].offsets.tolist() == each.sequences["events"].offsets.tolist()


def test_parts_of_a_batch_do_not_share(tmp_path, cache):
    config = tiny_config(cache, "data.order=time", "data.share_requests=true", "optim.accumulate=2")
    with (
        pytest.raises(UserError, match=r"optim.accumulate is 2, but samples of different parts share histories"),
        assembled(config, tmp_path) as (_, trainer),
    ):
        trainer.fit()
