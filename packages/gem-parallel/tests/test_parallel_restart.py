"""A rank that is killed: the others stop and name it, and the next launch resumes from the checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from gem_parallel import (
    Checkpointer,
    ParallelConfig,
    PeerLostError,
    RowWiseAdagrad,
    load_optimizer_state,
    optimizer_state,
    parallelize,
    start,
)
from gem_parallel.testing import UNITS, SmallModel, full_state, run_ranks, small_batch

STEPS, DIES_AT = 6, 4


def job(runtime, folder, victim=None):
    """Train for STEPS steps with a checkpoint after each; the victim kills itself once, in the middle."""
    model = SmallModel()
    config = ParallelConfig(table_sharding="row_wise", table_strategy="v3", table_copies=2)
    sparse = RowWiseAdagrad(lr=0.05, eps=1e-4)
    parallel = parallelize(model, model.roles(), config, runtime, sparse=sparse, units=UNITS)
    optimizer = torch.optim.AdamW(parallel.dense_parameters(), lr=1e-2)
    checkpointer = Checkpointer(folder, runtime=runtime)

    def state():
        return {"model": parallel.state_dict(), "optimizer": optimizer_state(parallel, optimizer)}

    first = 0
    if checkpointer.latest() is not None:
        loaded = state()
        first = checkpointer.load(loaded)
        parallel.load_state_dict(loaded["model"])
        load_optimizer_state(parallel, optimizer, loaded["optimizer"])
    for step in range(first, STEPS):
        batch = small_batch(step).part(runtime.rank, runtime.world)
        loss = (parallel(batch) - batch.target).square().mean()
        if step == DIES_AT and runtime.rank == victim and first == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        with runtime.waiting(f"the backward pass of step {step}"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.save_async(step + 1, state())
    checkpointer.wait()
    return first, full_state(parallel)


def until_a_rank_dies(runtime, folder):
    """The surviving ranks write what they were told; the victim leaves quietly, so that the launcher waits for them."""
    os.kill = lambda pid, number: os._exit(0)
    try:
        job(runtime, f"{folder}/checkpoints", victim=2)
    except PeerLostError as error:
        with open(f"{folder}/said-{runtime.rank}.txt", "w", encoding="utf-8") as file:
            file.write(str(error))


def test_the_others_name_the_rank_that_died(tmp_path):
    run_ranks(4, __file__, "until_a_rank_dies", tmp_path, str(tmp_path), timeout_s=20)
    for rank in (0, 1, 3):
        said = (tmp_path / f"said-{rank}.txt").read_text()
        assert f"rank {rank} of 4 waited" in said
        # whoever stops after another survivor has left finds that one gone, too
        assert "whose process on this host is gone" in said
        assert "2" in said.split("no answer from rank ")[1].split(", whose")[0]


def main(folder):
    with start("cpu", timeout_s=60) as runtime:
        first, state = job(runtime, f"{folder}/checkpoints", victim=1)
        if runtime.is_main:
            torch.save((first, state), f"{folder}/final.pt")


@pytest.mark.slow
def test_a_job_whose_rank_was_killed_resumes_under_torchrun(tmp_path):
    # Two launches: torchrun's own restart reuses ports, which gloo now and then finds refused (plain torch, too).
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def launch():
        return subprocess.run(
            [*command, __file__, str(tmp_path)],
            capture_output=True,
            text=True,
            env=environment,
            timeout=300,
            check=False,
        )

    assert launch().returncode != 0
    assert not (tmp_path / "final.pt").exists()
    done = launch()
    assert done.returncode == 0, done.stderr[-3000:]
    first, state = torch.load(tmp_path / "final.pt", weights_only=False)
    assert 0 < first <= DIES_AT  # the last save that was whole
    steps = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert steps == [f"step-{STEPS - 1:010d}", f"step-{STEPS:010d}"]
    assert json.loads((tmp_path / "checkpoints" / steps[-1] / "manifest.json").read_text())["world"] == 2
    expected = run_ranks(2, __file__, "job", tmp_path / "jobs", str(tmp_path / "uninterrupted"))[0][1]
    for part, values in expected.items():
        for name, value in values.items():
            assert torch.equal(state[part][name], value), name


if __name__ == "__main__":
    main(sys.argv[1])
