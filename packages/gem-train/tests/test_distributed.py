"""Two processes compute what one computes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.multiprocessing as mp
from gem_data import JaggedBatch
from gem_parallel import start
from gem_train.config import to_toml
from gem_train.evaluation import Predictions, _checked
from gem_train.events import read
from gem_train.losses import global_loss
from gem_train.testing import rank_loss, tiny_config, uneven_batch, uneven_logits, with_steps

WORLD = 2


def by_hand(logits: torch.Tensor, batch: JaggedBatch) -> torch.Tensor:
    """The mean over tasks of the weighted mean log loss, in float64, sample by sample."""
    tasks = []
    for k in range(2):
        loss = total = torch.zeros((), dtype=torch.float64)
        for b in range(12):
            if batch.label_mask[b, k]:
                p = torch.sigmoid(logits[b, k].double())
                w = batch.weights[b].double()
                loss = loss - w * torch.log(p if batch.labels[b, k] == 1 else 1 - p)
                total = total + w
        tasks.append(loss / total)
    return (tasks[0] + tasks[1]) / 2


def test_the_loss_in_a_world_of_one_is_the_models_own(cache):
    from gem_model.heads import log_loss

    batch, logits = uneven_batch(cache), uneven_logits().requires_grad_()
    with start("cpu", 30) as runtime:
        found = global_loss(logits, batch, runtime, flops=5.0)
    assert found.value == pytest.approx(by_hand(logits, batch).item(), rel=1e-6)
    theirs = log_loss(logits, batch.labels, batch.label_mask, batch.weights)
    assert found.backward.item() == pytest.approx(theirs.item(), rel=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(found.backward, logits, retain_graph=True), torch.autograd.grad(theirs, logits)
    )
    assert (found.stop, found.flops) == (False, 5.0)


def test_a_task_without_labels_does_not_count(cache):
    batch, logits = uneven_batch(cache), uneven_logits()
    mask = batch.label_mask.clone()
    mask[:, 1] = False
    one = dataclasses.replace(batch, label_mask=mask)
    none = dataclasses.replace(batch, label_mask=torch.zeros_like(mask))
    with start("cpu", 30) as runtime:
        alone = global_loss(logits[:, :1], _first_task(batch), runtime).value
        assert global_loss(logits, one, runtime).value == pytest.approx(alone, rel=1e-6)
        assert global_loss(logits, none, runtime).value == 0.0


def _first_task(batch):
    return dataclasses.replace(batch, labels=batch.labels[:, :1], label_mask=batch.label_mask[:, :1])


@pytest.mark.slow
def test_the_loss_and_its_gradient_do_not_depend_on_the_division(cache, tmp_path):
    batch, logits = uneven_batch(cache), uneven_logits().requires_grad_()
    expected = by_hand(logits, batch)
    (gradient,) = torch.autograd.grad(expected, logits)
    mp.spawn(rank_loss, args=(WORLD, cache, tmp_path), nprocs=WORLD)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]
    for value, stop, flops, _ in found:
        assert value == pytest.approx(expected.item(), rel=1e-6)
        assert (stop, flops) == (True, 3.0)
    # The gradients are averaged over the ranks; each sample lies on one of them.
    torch.testing.assert_close(torch.cat([f[3] for f in found]), gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.slow
def test_torchrun_with_two_processes_repeats_the_single_run(cache, run_cli, tmp_path):
    """20 steps, then 4 more on one process from the checkpoint of two."""
    settings = (
        "model.dropout=0",
        "optim.schedule=constant",
        "optim.sparse_schedule=constant",
        "data.eval_batch_size=100",
    )
    single, double = tmp_path / "single", tmp_path / "double"
    assert run_cli(single, *settings) == 0
    file = tmp_path / "config.toml"
    file.write_text(to_toml(with_steps(tiny_config(cache, *settings), 20)))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(WORLD)]
    done = subprocess.run(
        [*launch, "-m", "gem_train", "run", "--config", str(file), "--out", str(double)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("logistic") == 2, "only rank 0 prints: one table of two tasks"
    model = json.loads((double / "model.json").read_text())
    assert model["world"] == WORLD
    assert {s for line in model["sharding"] for s in ("rank 0", "rank 1") if s in line} == {"rank 0", "rank 1"}

    _compare(single, double, steps=20)
    ids = [pq.read_table(f / "predictions.parquet")["sample_id"].to_pylist() for f in (single, double)]
    assert ids[0] == ids[1], "padding must not be among the predictions, nor anything be missing"
    assert run_cli(double, *settings, resume=True) == 0
    _compare(single, double, steps=24)
    ones, twos = (json.loads((f / "eval.json").read_text()) for f in (single, double))
    assert ones["samples"] == twos["samples"]
    for task in ("click", "convert"):
        assert ones["model"][task]["ne"] == pytest.approx(twos["model"][task]["ne"], rel=1e-4)


def _compare(single, double, *, steps):
    rows = [
        {(r["kind"], r["step"]): r for r in read(f / "metrics.jsonl") if r["step"] <= steps} for f in (single, double)
    ]
    common = sorted(rows[0].keys() & rows[1].keys())
    assert [step for kind, step in common if kind == "step"] == list(range(1, steps + 1))
    assert [step for kind, step in common if kind == "eval"] == list(range(8, steps + 1, 8))
    for at in common:
        for key in ("loss", "grad_norm", "lr", "sparse_lr") if at[0] == "step" else ("ne",):
            assert rows[0][at][key] == pytest.approx(rows[1][at][key], rel=1e-4), at


# Gathered predictions.


def predictions(ids):
    n = len(ids)
    return Predictions(
        sample_ids=np.array(ids, np.int64),
        groups=np.zeros(n, np.int64),
        time=np.zeros(n, np.int64),
        history=np.zeros(n, np.int64),
        labels=np.zeros((n, 1), np.float32),
        mask=np.ones((n, 1), bool),
        logits=np.array(ids, np.float64)[:, None],
    )


def test_gathered_predictions_come_in_the_order_of_the_log():
    whole = _checked([predictions([7, 2]), predictions([4])], np.array([4, 2, 7]))
    assert whole.sample_ids.tolist() == [2, 4, 7]
    assert whole.logits[:, 0].tolist() == [2.0, 4.0, 7.0]


def test_a_sample_that_comes_twice_or_never_is_an_error():
    with pytest.raises(RuntimeError, match=r"1 came more than once \(first \[2\]\)"):
        _checked([predictions([7, 2]), predictions([2])], np.array([2, 7]))
    with pytest.raises(RuntimeError, match=r"1 never came \(first \[4\]\)"):
        _checked([predictions([7, 2])], np.array([4, 2, 7]))
