"""Steps of several parts, whose gradients are reduced once; steps that are broken off leave nothing behind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gem_parallel import ParallelConfig, RowWiseAdagrad, parallelize, start
from gem_parallel.selfcheck import compare
from gem_parallel.testing import UNITS, SmallModel, run_ranks, small_batch

BROKEN = {1: "loss", 2: "forward", 3: "backward"}

TWO = [
    ({}, 0),
    ({"shard_group": 1, "table_strategy": "v3", "table_copies": 2}, 0),
    ({"experts": 2, "prefetch": 1}, 2),
    ({"reduce_every_part": True}, 0),
]
FOUR = [
    ({"shard_group": 2, "table_strategy": "v2", "table_copies": 2, "table_sync_every": 3}, 0),
    ({"shard_group": 2, "experts": 2, "table_strategy": "v3", "table_copies": 2}, 3),
    ({"experts": 4}, 4),
]


def train(runtime, cases):
    """Errors with and without steps that are broken off."""
    found = []
    for options, experts in cases:
        config = ParallelConfig(table_sharding="row_wise", **options)
        broken = BROKEN if hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state") else {1: "loss"}
        for more in ({}, {"broken": broken}):
            found.append(compare(runtime, config, steps=5, experts=experts, count=2, **more)[0])
    return found


@pytest.mark.parametrize(("world", "cases"), [(2, TWO), pytest.param(4, FOUR, marks=pytest.mark.slow)])
def test_parts_reduced_once_train_like_one_process(tmp_path, world, cases):
    for errors in run_ranks(world, __file__, "train", tmp_path, cases):
        for i, error in enumerate(errors):
            assert max(error.values()) < 1e-5, (cases[i // 2], "broken off" if i % 2 else "whole", error)


def test_a_world_of_one_forgets_as_well():
    with start("cpu", timeout_s=20) as runtime:
        error, _ = compare(runtime, ParallelConfig(), steps=4, count=3, broken={1: "loss", 2: "forward"})
    assert max(error.values()) < 1e-5


def count_reductions(runtime, every):
    """Reduce-scatters and all-reduces of gradients in each of three parts, and what is held between them."""
    calls = []
    plain = {name: getattr(dist, name) for name in ("reduce_scatter_tensor", "all_reduce")}
    single = getattr(dist, "reduce_scatter_single", None)  # torch 2.13's name for it

    def counted(function):
        def call(*args, **kwargs):
            calls.append(function)
            return function(*args, **kwargs)

        return call

    model = SmallModel()
    config = ParallelConfig(table_sharding="row_wise", reduce_every_part=every)
    parallel = parallelize(model, model.roles(), config, runtime, sparse=RowWiseAdagrad(lr=0.1), units=UNITS)
    numbers = []
    try:
        for name, function in plain.items():
            setattr(dist, name, counted(function))
        if single is not None:
            dist.reduce_scatter_single = counted(single)
        for part in range(3):
            parallel.reduce_gradients(part == 2)
            loss = parallel(small_batch(part).part(runtime.rank, runtime.world)).sum()
            calls.clear()  # pooled embeddings are sums over ranks, too
            loss.backward()
            sharded = sum(p.grad is not None for p in parallel.dense_parameters())
            numbers.append((len(calls), sharded))
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)
        if single is not None:
            dist.reduce_scatter_single = single
    return numbers, len(parallel.dense_parameters())


@pytest.mark.parametrize("every", [False, True])
def test_only_the_last_part_reduces(tmp_path, every):
    for (first, second, third), parameters in run_ranks(2, __file__, "count_reductions", tmp_path, every):
        assert third[0] >= len(UNITS) + 1
        assert third[1] == parameters
        expected = third if every else (0, 0)
        assert first == second == expected
