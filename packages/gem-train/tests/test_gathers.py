"""The payload "lowprec": weights travel as FP8 with scales, and training is that of plain gathers, bit for bit."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from gem_lowprec.testing import SentBytes
from gem_parallel import Checkpointer
from gem_parallel.testing import run_ranks
from gem_train.assemble import describe
from gem_train.errors import UserError
from gem_train.testing import assembled, tiny_config

PACKED = "parallel.comm.payload=lowprec"
SQUARE = ("lowprec.recipe=mxfp8_square", "lowprec.min_size=32", "model.width=64", "optim.accumulate=2")
BLOCK = ("lowprec.recipe=fp8_block", "lowprec.min_size=64", "model.width=128", "train.precision=bf16")
AGAIN = "parallel.memory.policy=full"  # weights are gathered again while activations are made again


def train(runtime, cache, folder, cases):
    """Of each case: losses and norms of two steps, all weights, bytes of one forward pass, and what is said of it."""
    found = []
    for i, (settings, resumed) in enumerate(cases):
        out = Path(folder) / f"{i}-{runtime.rank}"
        with assembled(tiny_config(Path(cache), *settings), out) as (_, trainer):
            shared = Checkpointer(Path(folder) / "shared", runtime=trainer.runtime)
            if resumed:
                trainer.checkpoints = shared
                trainer.load(1)
            rows = []
            for batch in islice(iter(trainer.parts.train), 2 - trainer.position.step):
                trainer.model.train()
                rows.append(trainer.step(batch))
                if i == 1 and trainer.position.step == 1:
                    shared.save(1, trainer.state())
            trainer.model.eval()
            with SentBytes() as wire, torch.no_grad():
                trainer.forward(batch)
            dense = {n: p.to_local().detach().clone() for n, p in trainer.model.named_dense_parameters()}
            assert all(type(value) is torch.Tensor for value in dense.values())
            gathers = trainer.model.gathers
            said = "\n".join(describe(trainer)["gathers"]), trainer.model.why()
            found.append(([(r["loss"], r["grad_norm"]) for r in rows], dense, wire.sent, gathers, said))
    return found


def test_training_is_that_of_plain_gathers_with_fewer_bytes(cache, tmp_path):
    cases = [(SQUARE, False), ((*SQUARE, PACKED), False), ((*SQUARE, PACKED, AGAIN), True)]
    cases += [(BLOCK, False), ((*BLOCK, PACKED), False)]
    for found in run_ranks(2, __file__, "train", tmp_path / "ranks", str(cache), str(tmp_path), cases):
        for plain, packed, all_of_them in ((found[0], found[1], True), (found[3], found[4], False)):
            (rows, dense, sent, none, _), (their_rows, theirs, fewer, gathers, (described, said)) = plain, packed
            assert none is None
            assert rows == their_rows
            assert dense.keys() == theirs.keys()
            assert all(torch.equal(dense[name], theirs[name]) for name in dense)
            quantised = [row for row in gathers.rows if row.payload is not None]
            assert len(quantised) == len(gathers.rows) if all_of_them else 0 < len(quantised) < len(gathers.rows)
            assert sent - fewer == sum(2 * row.bf16_nbytes - row.nbytes for row in quantised)  # of float32 without it
            assert gathers.ratio <= 0.53
            assert str(gathers) == described
            assert described in said
        resumed, _, _, _, _ = found[2]
        assert resumed == found[1][0][1:]
        assert all(torch.equal(found[1][1][name], value) for name, value in found[2][1].items())


def test_where_nothing_can_travel_so(cache, tmp_path):
    """One process says that it gathers nothing; a recipe without square blocks contradicts the payload."""
    for recipe in ("none", "mxfp8"):
        with (
            pytest.raises(UserError, match=f"payload='lowprec'.*expects.*fp8_block, mxfp8_square, got '{recipe}'"),
            assembled(tiny_config(cache, PACKED, f"lowprec.recipe={recipe}", "lowprec.min_size=16"), tmp_path / recipe),
        ):
            pass
    with (
        pytest.warns(UserWarning, match="packs no weight: this world has one rank"),
        assembled(
            tiny_config(cache, PACKED, "lowprec.recipe=mxfp8_square", "lowprec.min_size=16"), tmp_path / "one"
        ) as (
            _,
            trainer,
        ),
    ):
        assert trainer.model.gathers is None
