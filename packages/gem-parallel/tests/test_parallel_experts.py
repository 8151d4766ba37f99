"""Experts spread over ranks by activations: equal to one process; what cannot be spread is refused."""

from __future__ import annotations

import pytest
import torch
from gem_parallel import (
    Checkpointer,
    ParallelConfig,
    RowWiseAdagrad,
    parallelize,
    start,
)
from gem_parallel.dense import expert
from gem_parallel.selfcheck import compare
from gem_parallel.testing import SmallJob, SmallModel, full_state, run_ranks, small_batch

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


def job_of(runtime, seed=0, ranks=1):
    """Two experts on the ranks of an expert axis."""
    config = ParallelConfig(table_sharding="row_wise", experts=ranks)
    # foreach refuses DTensors of several meshes, so that this tests the groups
    return SmallJob(runtime, config, seed=seed, experts=2, adam={"weight_decay": 0.1, "foreach": True})


def save_spread(runtime, folder):
    """Save with an expert axis, go on, resume; resume what one rank without an axis saved; whole state dicts."""
    job = job_of(runtime, ranks=2)
    job.train(range(3))
    Checkpointer(f"{folder}/spread", runtime=runtime).save(3, job.state())
    saved = full_state(job.parallel)
    losses = job.train(range(3, 6))
    again = job_of(runtime, seed=4, ranks=2)
    again.restore(Checkpointer(f"{folder}/spread", runtime=runtime))
    assert again.train(range(3, 6)) == losses
    from_one = job_of(runtime, seed=5, ranks=2)
    from_one.restore(Checkpointer(f"{folder}/one", runtime=runtime))
    whole = job_of(runtime, seed=6, ranks=2)
    whole.parallel.load_state_dict(saved)
    reloaded = full_state(whole.parallel)
    same = all(torch.equal(saved[part][name], value) for part in saved for name, value in reloaded[part].items())
    return saved, losses, from_one.train(range(3, 6)), same, len(job.optimizer.param_groups)


def test_checkpoints_of_experts(tmp_path):
    with start("cpu", timeout_s=20) as runtime:
        one = job_of(runtime)
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
        back = job_of(runtime, seed=7)
        back.restore(Checkpointer(tmp_path / "spread", runtime=runtime))
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
