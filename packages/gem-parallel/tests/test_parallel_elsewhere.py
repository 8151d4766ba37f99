"""A job goes on in another world, on other axes, with other table strategies and shardings, and loses no state."""

from __future__ import annotations

import pytest
import torch
from gem_parallel import Checkpointer, ParallelConfig, export_tables, start
from gem_parallel.testing import SmallJob, relative_error, run_ranks

BEFORE = {"shard_group": 2, "experts": 2, "table_sharding": "row_wise", "table_strategy": "v3", "table_copies": 2}
AFTER = {  # world -> where the checkpoint of four ranks (2 x 2, two expert ranks, v3) is loaded
    1: [{"table_sharding": "table_wise"}],
    2: [
        {"experts": 2, "table_sharding": "table_wise"},
        {"shard_group": 1, "table_sharding": "row_wise", "table_strategy": "v3", "table_copies": 2},
    ],
    4: [
        {"experts": 4, "table_sharding": "table_wise"},
        {"shard_group": 1, "table_sharding": "row_wise", "table_strategy": "v3", "table_copies": 4},
    ],
}


def job_of(runtime, seed, options):
    return SmallJob(runtime, ParallelConfig(**options), seed=seed, experts=4, adam={"eps": 1e-4})


def save(runtime, folder):
    job = job_of(runtime, 0, BEFORE)
    losses = job.train(range(3))
    Checkpointer(f"{folder}/checkpoint", runtime=runtime).save(3, job.state())
    names = export_tables(job.parallel, f"{folder}/tables")
    return job.whole(), losses, names


def go_on(runtime, folder):
    """In every layout of this world: what was loaded, and the losses of what follows."""
    found = []
    for seed, options in enumerate(AFTER[runtime.world], start=5):
        job = job_of(runtime, seed, options)
        job.restore(Checkpointer(f"{folder}/checkpoint", runtime=runtime))
        loaded = job.whole()
        found.append((loaded, job.train(range(3, 6)), job.whole()))
    return found


@pytest.mark.slow
def test_four_ranks_go_on_as_one_two_or_four(tmp_path):
    with start("cpu", timeout_s=20) as runtime:
        uninterrupted = job_of(runtime, 0, AFTER[1][0])
        first = uninterrupted.train(range(3))
        middle = uninterrupted.whole()
        last, final = uninterrupted.train(range(3, 6)), uninterrupted.whole()
        saved, losses, names = run_ranks(4, __file__, "save", tmp_path / "four", str(tmp_path))[0]
        assert losses == pytest.approx(first, rel=1e-5)
        assert saved.keys() == middle.keys()
        assert any(".experts.3." in name and "exp_avg_sq" in name for name in saved)
        for name, value in middle.items():
            assert relative_error(saved[name], value) < 2e-5, name
        assert len(names) == 4
        results = {1: [go_on(runtime, str(tmp_path))]}
    for world in (2, 4):
        results[world] = run_ranks(world, __file__, "go_on", tmp_path / str(world), str(tmp_path))
    for world, ranks in results.items():
        for layouts in ranks:
            for options, (loaded, following, end) in zip(AFTER[world], layouts, strict=True):
                assert loaded.keys() == saved.keys()
                for name, value in saved.items():
                    assert torch.equal(loaded[name], value), (world, options, name)
                assert following == pytest.approx(last, rel=1e-5), (world, options)
                for name, value in final.items():
                    assert relative_error(end[name], value) < 5e-5, (world, options, name)
