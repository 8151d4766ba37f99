from __future__ import annotations

import dataclasses
import os
import time

import pytest
import torch
import torch.distributed as dist
from gem_parallel import ParallelConfig, PeerLostError, make_mesh, start
from gem_parallel.testing import run_ranks


def test_world_of_one_needs_no_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with start("cpu", timeout_s=20) as runtime:
        assert (runtime.rank, runtime.world, runtime.local_rank, runtime.backend) == (0, 1, 0, "gloo")
        assert runtime.device == torch.device("cpu")
        assert runtime.gather("a", "test") == ["a"]
        runtime.barrier("test")
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [1, 1, 1]
    assert not dist.is_initialized()
    runtime.close()


def test_start_adopts_the_group_that_exists():
    with start("cpu", timeout_s=20):
        with start("cpu", timeout_s=20) as second:
            assert second.world == 1
        assert dist.is_initialized()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "tpu"}, "'tpu'"),
        ({"device": "cpu", "timeout_s": 0}, "timeout_s"),
        ({"device": "cpu", "rank": 2, "world": 2}, "rank=2"),
        ({"device": "cpu", "rank": 0}, "world=None"),
    ],
)
def test_start_names_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        start(**arguments)


def test_start_without_torchruns_address(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        start("cpu")


def test_shard_group_must_divide_the_world():
    with start("cpu", timeout_s=20) as runtime:
        other = dataclasses.replace(runtime, world=6)
        with pytest.raises(ValueError, match=r"shard_group = 4 .* 6 ranks; choose one of \[1, 2, 3, 6\]"):
            make_mesh(other, ParallelConfig(shard_group=4))


def test_waiting_leaves_other_errors_alone():
    with start("cpu", timeout_s=20) as runtime:
        with pytest.raises(RuntimeError, match="mat1 and mat2") as error, runtime.waiting("a product"):
            torch.ones(2, 3) @ torch.ones(2, 3)
        assert not isinstance(error.value, PeerLostError)


def lose_a_rank(runtime, how, done):
    runtime.barrier("a first meeting")
    if runtime.rank == 1:
        if how == "dies":
            os._exit(0)
        while not done.exists():  # hangs until the other has given up
            time.sleep(0.05)
        return None
    runtime = dataclasses.replace(runtime, timeout_s=2.0)
    try:
        runtime.barrier("the end of epoch 7")
    except PeerLostError as error:
        return str(error)
    finally:
        done.touch()
    return "no error"


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_lost_rank_stops_the_other(tmp_path, how):
    message, _ = run_ranks(2, __file__, "lose_a_rank", tmp_path, how, tmp_path / "done")
    assert "rank 0 of 2 waited" in message
    assert "the end of epoch 7" in message
    if how == "hangs":
        assert "1 failed to pass" in message  # rank 0 names the missing ranks
