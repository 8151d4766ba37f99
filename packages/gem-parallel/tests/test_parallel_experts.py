"""Experts spread over ranks by activations: equal to one process; what cannot be spread is refused."""

from __future__ import annotations

import pytest
import torch
from gem_parallel import (
    Checkpointer,
    ParallelConfig,
    RowWiseAdagrad,
    load_optimizer_state,
    optimizer_groups,
    optimizer_state,
    parallelize,
    start,
)
from gem_parallel.dense import expert
from gem_parallel.selfcheck import compare
from gem_parallel.testing import UNITS, SmallModel, full_state, run_ranks, small_batch

SPARSE = RowWiseAdagrad(lr=0.05, eps=1e-4)


def train(runtime, cases):
    results = []
    for experts, options, steps in cases:
        config = ParallelConfig(table_sharding="row_wise", **options)
        errors, parallel = compare(runtime, config, steps=steps, experts=experts)
        mine = [name for name, _ in parallel.named_dense_parameters() if ".experts." in name]
        meshes = {tuple(p.device_mesh.mesh.flatten().tolist()) for p in parallel.dense_parameters()}
        results.append((errors, sorted({int(name.split(".experts.")[1][0]) for name in mine}), meshes))
    return results


CASES = [
    (4, {"experts": 4}, 3),
    (2, {"experts": 2}, 3),  # efsdp 2
    (2, {"experts": 2, "shard_group": 2}, 4),  # replicate 2
    (4, {"experts": 2, "shard_group": 2, "table_strategy": "v3", "table_copies": 2}, 4),  # two experts a rank
    (4, {"experts": 4, "table_strategy": "v2", "table_copies": 2}, 3),
    (3, {"experts": 2}, 3),  # one expert on rank 0 of the axis, two on rank 1
    (5, {"experts": 4, "table_strategy": "v3", "table_copies": 2}, 3),
    (3, {}, 3),  # no expert axis: like dense parameters
]


def test_four_ranks_equal_one(tmp_path):
    ranks = run_ranks(4, __file__, "train", tmp_path, CASES)
    for rank, results in enumerate(ranks):
        for (errors, _, _), case in zip(results, CASES, strict=True):
            assert max(errors.values()) < 1e-5, (case, errors)
        assert [held for _, held, _ in results] == [
            [rank],
            [rank % 2],
            [rank % 2],
            [2 * (rank % 2), 2 * (rank % 2) + 1],
            [rank],
            [[0], [1, 2]][rank % 2],
            [[0], [1], [2], [3, 4]][rank],
            [0, 1, 2],
        ]
        assert results[1][2] == {(0, 1, 2, 3), (rank % 2, rank % 2 + 2)}  # dense mesh, expert mesh


class Job:
    def __init__(self, runtime, seed=0, **options):
        model = SmallModel(seed=seed, experts=2)
        config = ParallelConfig(table_sharding="row_wise", table_seed=seed, **options)
        self.runtime = runtime
        self.parallel = parallelize(model, model.roles(), config, runtime, sparse=SPARSE, units=UNITS)
        groups = optimizer_groups([{"params": self.parallel.dense_parameters(), "weight_decay": 0.1}])
        self.groups = len(groups)
        # foreach refuses DTensors of several meshes, so that this tests the groups
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=True)

    def train(self, steps):
        losses = []
        for step in steps:
            batch = small_batch(step).part(self.runtime.rank, self.runtime.world)
            loss = (self.parallel(batch) - batch.target).square().mean()
            loss.backward()
            self.parallel.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(sum(self.runtime.gather(loss.item(), "loss")) / self.runtime.world)
        return losses

    def state(self):
        return {"model": self.parallel.state_dict(), "optimizer": optimizer_state(self.parallel, self.optimizer)}

    def restore(self, folder):
        state = self.state()
        Checkpointer(folder, runtime=self.runtime).load(state)
        self.parallel.load_state_dict(state["model"])
        load_optimizer_state(self.parallel, self.optimizer, state["optimizer"])


def save_spread(runtime, folder):
    """Save with an expert axis, go on, resume; resume what one rank without an axis saved; whole state dicts."""
    job = Job(runtime, experts=2)
    job.train(range(3))
    Checkpointer(f"{folder}/spread", runtime=runtime).save(3, job.state())
    saved = full_state(job.parallel)
    losses = job.train(range(3, 6))
    again = Job(runtime, seed=4, experts=2)
    again.restore(f"{folder}/spread")
    assert again.train(range(3, 6)) == losses
    from_one = Job(runtime, seed=5, experts=2)
    from_one.restore(f"{folder}/one")
    whole = Job(runtime, seed=6, experts=2)
    whole.parallel.load_state_dict(saved)
    reloaded = full_state(whole.parallel)
    same = all(torch.equal(saved[part][name], value) for part in saved for name, value in reloaded[part].items())
    return saved, losses, from_one.train(range(3, 6)), same, job.groups


def test_checkpoints_of_experts(tmp_path):
    with start("cpu", timeout_s=20) as runtime:
        one = Job(runtime)
        one.train(range(3))
        Checkpointer(tmp_path / "one", runtime=runtime).save(3, one.state())
        expected = one.train(range(3, 6))
        (saved, losses, from_one, same, groups), _ = run_ranks(
            2, __file__, "save_spread", tmp_path / "jobs", str(tmp_path)
        )
        assert same
        assert groups == 2
        assert from_one == pytest.approx(expected, rel=1e-5)
        assert losses == pytest.approx(expected, rel=1e-5)
        back = Job(runtime, seed=7)
        back.restore(tmp_path / "spread")
        for name, value in full_state(back.parallel)["model"].items():
            assert torch.equal(value, saved["model"][name]), name


def with_a_wrong_scale(runtime):
    """Without the division by ep: the gradient of every expert is ep times too large."""
    expert._Gather.backward = staticmethod(
        lambda ctx, grad: (expert._reduce_scatter(grad, ctx.group, ctx.size), None, None)
    )
    expert._Scatter.backward = staticmethod(
        lambda ctx, grad: (expert._all_gather(grad, ctx.group, ctx.size), None, None)
    )
    return compare(runtime, ParallelConfig(table_sharding="row_wise", experts=2), steps=3, experts=2)[0]


def test_a_wrong_scale_would_show(tmp_path):
    for errors in run_ranks(2, __file__, "with_a_wrong_scale", tmp_path):
        assert errors["grad norm"] > 1e-2
        assert errors["dense"] > 1e-4


def uneven(runtime):
    messages = []

    def attempt(model, roles, experts):
        try:
            parallelize(model, roles, ParallelConfig(experts=experts), runtime, sparse=SPARSE)
        except ValueError as error:
            messages.append(str(error))

    model = SmallModel(experts=1)
    attempt(model, model.roles(), 2)
    model = SmallModel(experts=2)
    attempt(model, {**model.roles(), "gain": "expert"}, 2)
    model = SmallModel(experts=2)
    model.dense.ensemble.norm = torch.nn.LayerNorm(16)
    attempt(model, model.roles(), 2)
    model = SmallModel()
    attempt(model, model.roles(), 2)
    model = SmallModel(experts=2)
    parallel = parallelize(model, model.roles(), ParallelConfig(experts=2), runtime, sparse=SPARSE)
    batch = small_batch(0).part(0, 4 if runtime.rank else 2)
    try:
        parallel(batch)
    except ValueError as error:
        messages.append(str(error))
    return messages


def test_what_is_refused(tmp_path):
    for messages in run_ranks(2, __file__, "uneven", tmp_path):
        count, outside, beside, none, batch = messages
        assert "'dense.ensemble' has 1 experts, fewer than the 2 ranks of the expert axis" in count
        assert "'gain' has role 'expert' but is not called" in outside
        assert "found children ['experts', 'norm']" in beside
        assert "no parameter has the role 'expert'" in none
        assert "brought [8, 4] samples" in batch
    with start("cpu", timeout_s=20) as runtime:
        model = SmallModel(experts=2)
        with pytest.raises(ValueError, match="experts = 2 does not divide the shard group of 1"):
            parallelize(model, model.roles(), ParallelConfig(experts=2), runtime, sparse=SPARSE)
