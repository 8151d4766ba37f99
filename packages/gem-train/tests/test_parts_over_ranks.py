"""Accumulated steps on several ranks: one reduction, the numbers of one process, also when steps are broken off."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path

import pytest
import torch
from gem_parallel.testing import relative_error, run_ranks
from gem_train.testing import assembled, tiny_config

SETTINGS = ("model.dropout=0", "optim.sparse_lr=0", "optim.accumulate=2", "train.bad_batches=skip")
SPREAD = ('model.experts=["wukong", "wukong"]',)


def train(runtime, cache, folder, cases):
    """Dense weights, losses and gradient norms of six steps, of which the second, third and fourth go wrong.

    Tables don't learn: they would part by part, and the parts of two ranks are not those of one.
    """
    found = []
    for i, settings in enumerate(cases):
        out = Path(folder) / f"{i}-{runtime.world if runtime else 1}-{runtime.rank if runtime else 0}"
        with assembled(tiny_config(Path(cache), *SETTINGS, *settings), out) as (_, trainer):
            found.append(_train(trainer))
    return found


def _train(trainer):
    forward, calls, rank = trainer.forward, [], trainer.runtime.rank
    last = trainer.runtime.world - 1

    def spoilt(batch):
        calls.append(trainer.position.step + 1)
        logits = forward(batch)
        if calls.count(calls[-1]) == 2:  # the second part, after the first has gone backward
            if calls[-1] == 2 and rank == last:  # one rank's is enough
                return logits * math.nan
            if calls[-1] == 3:
                raise ArithmeticError("in the middle of a step")
            if calls[-1] == 5 and rank == last:
                trainer.stop.requested = True  # the step is finished first, then the run ends
        return logits

    trainer.forward = spoilt
    rows = []
    for batch in islice(iter(trainer.parts.train), 6):
        trainer.model.train()
        try:
            rows.append(trainer.step(batch))
        except ArithmeticError:
            trainer.position.step += 1
    dense = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in trainer.model.named_dense_parameters()
    }
    return dense, rows


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, [(), (*SPREAD, "parallel.experts=2"), ("parallel.reduce_every_part=true",)]),
        pytest.param(
            4,
            [("parallel.shard_group=2",), (*SPREAD, "parallel.shard_group=2", "parallel.experts=2")],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_accumulated_steps_on_ranks_are_those_of_one_process(cache, tmp_path, world, cases):
    alone = [tuple(s for s in settings if not s.startswith("parallel.")) for settings in cases]
    distinct = list(dict.fromkeys(alone))
    known = dict(zip(distinct, train(None, str(cache), str(tmp_path), distinct), strict=True))
    expected = [known[settings] for settings in alone]
    for results in run_ranks(world, __file__, "train", tmp_path / "ranks", str(cache), str(tmp_path), cases):
        for settings, (dense, rows), (wanted, wanted_rows) in zip(cases, results, expected, strict=True):
            assert len(rows) == 5
            assert [bool(r.get("skipped")) for r in rows] == [False, True, False, False, False]
            assert [r["stop"] for r in rows] == [False, False, False, True, True]
            for row, other in zip(rows, wanted_rows, strict=True):
                if not row.get("skipped"):
                    assert row["loss"] == pytest.approx(other["loss"], rel=1e-5), settings
                    assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4), settings
            here = {name: value for name, value in wanted.items() if name in dense}
            assert len(here) == len(dense)
            for name, value in here.items():
                assert torch.isfinite(value).all()
                assert relative_error(dense[name], value) < 1e-4, (settings, name)
