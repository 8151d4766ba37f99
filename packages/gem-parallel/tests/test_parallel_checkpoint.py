"""Checkpoints: exact, atomic, and never a damaged one."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import warnings

import pytest
import torch
from gem_parallel import (
    Checkpointer,
    CheckpointError,
    ParallelConfig,
    PeerLostError,
    PerRank,
    optimizer_state,
    start,
)
from gem_parallel.checkpoint import save as saving
from gem_parallel.testing import ROWS, SmallJob, run_ranks


def job_of(runtime, sharding="auto", *, seed=0, rows=ROWS, group=0):
    return SmallJob(runtime, ParallelConfig(table_sharding=sharding, shard_group=group), seed=seed, rows=rows)


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.fixture
def runtime():
    with start("cpu", timeout_s=20) as runtime:
        yield runtime


# --- exactness


def test_resumed_training_is_bitwise_the_same(runtime, tmp_path):
    job = job_of(runtime)
    job.train(range(3))
    Checkpointer(tmp_path).save(3, job.state())
    saved = job.whole()
    losses = job.train(range(3, 6))
    fresh = job_of(runtime, seed=9)
    assert fresh.restore(Checkpointer(tmp_path)) == 3
    assert_same(fresh.whole(), saved)
    assert fresh.train(range(3, 6)) == losses
    assert_same(fresh.whole(), job.whole())


def save_and_reshard(runtime, folder):
    """Two ranks: save table-wise, resume exactly, load into row-wise, into a (2, 1) mesh, and from one rank's save."""
    job = job_of(runtime, "table_wise")
    job.train(range(3))
    two = Checkpointer(f"{folder}/two", runtime=runtime)
    two.save(3, {**job.state(), "seed": PerRank([runtime.rank, 10]), "epoch": runtime.rank})
    saved, losses = job.whole(), job.train(range(3, 5))
    resumed = job_of(runtime, "table_wise", seed=5)
    state = {"seed": PerRank(None), "epoch": -1}
    two.load(state)
    resumed.restore(two)
    exact = resumed.train(range(3, 5)) == losses
    others = {}
    for name, layout in {
        "row_wise": {"sharding": "row_wise"},
        "replicas": {"sharding": "row_wise", "group": 1},
    }.items():
        other = job_of(runtime, seed=6, **layout)
        other.restore(two)
        others[name] = other.whole()
    from_row_wise = Checkpointer(f"{folder}/two-row-wise", runtime=runtime)
    other.train(range(3, 4))
    from_row_wise.save(4, other.state())
    column = job_of(runtime, "column_wise")
    column.train(range(2))
    Checkpointer(f"{folder}/columns").save(2, column.state())  # finds the ranks by itself
    again = job_of(runtime, "column_wise", seed=8)
    again.restore(Checkpointer(f"{folder}/columns"))
    others["columns"], others["columns again"] = column.whole(), again.whole()
    grown = job_of(runtime, "row_wise", seed=7)
    grown.restore(Checkpointer(f"{folder}/one", runtime=runtime))
    return saved, exact, state, others, grown.whole(), other.whole()


def test_another_world_and_another_sharding(runtime, tmp_path):
    one = job_of(runtime)
    one.train(range(4))
    Checkpointer(tmp_path / "one").save(4, one.state())
    first, second = run_ranks(2, __file__, "save_and_reshard", tmp_path / "jobs", str(tmp_path))
    saved, exact, state, others, grown, row_wise = first
    assert exact
    assert second[1]
    assert state["seed"].value == [0, 10]
    assert second[2]["seed"].value == [1, 10]
    assert state["epoch"] == second[2]["epoch"] == 0
    assert_same(others["row_wise"], saved)
    assert_same(others["replicas"], saved)
    assert_same(others["columns"], others["columns again"])
    assert_same(grown, one.whole())  # 1 -> 2
    for folder, expected in {"two": saved, "two-row-wise": row_wise}.items():  # 2 -> 1
        back = job_of(runtime, seed=4)
        back.restore(Checkpointer(tmp_path / folder))
        assert_same(back.whole(), expected)


def test_a_table_may_grow_and_shrink(runtime, tmp_path):
    job = job_of(runtime)
    job.train(range(3))
    Checkpointer(tmp_path).save(3, job.state())
    old = job.whole()
    larger = job_of(runtime, seed=1, rows={**ROWS, "item": ROWS["item"] + 7, "user": ROWS["user"] - 5})
    initial = larger.whole()
    with pytest.raises(CheckpointError, match=r"item\.weight has shape \(59, 8\), expected \(66, 8\)"):
        larger.restore(Checkpointer(tmp_path))
    assert_same(larger.whole(), initial)
    with pytest.warns(UserWarning, match=r"item\.weight has 59 rows in the checkpoint and 66 now; the first 59"):
        larger.restore(Checkpointer(tmp_path), resize_tables=True)
    new = larger.whole()
    for name in old:
        if "item" in name:
            assert torch.equal(new[name][:59], old[name])
            assert torch.equal(new[name][59:], initial[name][59:])
        elif "user" in name:
            assert torch.equal(new[name], old[name][:36])
        else:
            assert torch.equal(new[name], old[name])


def test_values_that_are_not_tensors(runtime, tmp_path):
    state = {
        "trainer": {"step": 5, "note": "é", "loader": {"buffer": {"3": [1, 2]}, "where": (1, 2.5)}},
        "rng": {"torch": torch.get_rng_state(), "list": [torch.arange(3)]},
        "mine": {"deep": PerRank({"a": 1})},
        "none": None,
    }
    Checkpointer(tmp_path).save(1, state)
    drawn = torch.rand(3)
    target = {
        "trainer": {"step": 0, "note": "", "loader": {"buffer": {"7": [0]}, "other": 1}},
        "rng": {"torch": torch.get_rng_state(), "list": []},
        "mine": {"deep": PerRank(None)},
    }
    Checkpointer(tmp_path).load(target)
    assert target["trainer"] == state["trainer"]  # a dict of plain values is replaced, not merged
    assert target["mine"]["deep"].value == {"a": 1}
    assert torch.equal(target["rng"]["list"][0], torch.arange(3))
    torch.set_rng_state(target["rng"]["torch"])
    assert torch.equal(torch.rand(3), drawn)
    assert "none" not in target


def test_only_what_is_asked_for_is_loaded(runtime, tmp_path):
    Checkpointer(tmp_path).save(1, {"a": {"x": torch.ones(2), "y": torch.ones(2)}, "b": torch.ones(3)})
    target = {"b": torch.zeros(3)}
    Checkpointer(tmp_path).load(target)
    assert target["b"].tolist() == [1, 1, 1]
    with pytest.warns(UserWarning, match="1 saved tensors are not asked for, the first is a/y"):
        Checkpointer(tmp_path).load({"a": {"x": torch.zeros(2)}})
    with pytest.raises(CheckpointError, match="holds no tensor c"):
        Checkpointer(tmp_path).load({"c": torch.zeros(2)})
    with pytest.warns(UserWarning, match="no value for d; left as it was"):
        Checkpointer(tmp_path).load({"d": 5})


def test_optimizer_state_before_the_first_step_is_a_start(runtime):
    job, twin = job_of(runtime), job_of(runtime)
    before = job.whole()
    assert all(not value.any() for name, value in before.items() if name.startswith("optimizer/"))
    assert job.train(range(3)) == twin.train(range(3))
    other = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="not a dense parameter"):
        optimizer_state(job.parallel, other)


# --- atomicity


def small(value):
    return {"x": torch.full((4,), float(value)), "epoch": value}


def loaded(folder, **options):
    target = small(-1)
    step = Checkpointer(folder).load(target, **options)
    assert target["x"].tolist() == [float(target["epoch"])] * 4
    return step, target["epoch"]


def test_keep_last(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step in (1, 2, 10):
        checkpointer.save(step, small(step))
    assert checkpointer.steps() == [2, 10]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000000002", "step-0000000010"]
    checkpointer.save(5, small(5))  # after going back: newest is what was written last
    assert checkpointer.steps() == [10, 5]
    assert loaded(tmp_path) == (5, 5)
    assert loaded(tmp_path, step=10) == (10, 10)
    checkpointer.save(5, small(50))  # the same step again
    assert checkpointer.steps() == [10, 5]
    assert loaded(tmp_path) == (5, 50)


def test_nothing_to_load(tmp_path):
    assert Checkpointer(tmp_path / "none").latest() is None
    assert Checkpointer(tmp_path / "none").steps() == []
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        Checkpointer(tmp_path).load(small(0))
    with pytest.raises(CheckpointError, match=r"step 3 cannot be loaded.*manifest\.json"):
        Checkpointer(tmp_path).load(small(0), step=3)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize("damage", [flip, cut, os.remove])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "plain.pt", "manifest.json"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, damage, name):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, small(1))
    checkpointer.save(2, small(2))
    path = tmp_path / "step-0000000002" / name
    if name == "manifest.json" and damage is flip:
        manifest = json.loads(path.read_text())
        manifest["files"]["plain.pt"]["sha256"] = "0" * 64
        path.write_text(json.dumps(manifest))
        name = "plain.pt"
    else:
        damage(path)
    for opened in (checkpointer, Checkpointer(tmp_path)):
        with pytest.warns(UserWarning, match=f"step 2 is damaged and passed over: .*{name}: "):
            assert opened.latest() == 1
    with pytest.warns(UserWarning, match="passed over"):
        assert loaded(tmp_path) == (1, 1)
    with pytest.raises(CheckpointError, match=name):
        loaded(tmp_path, step=2)
    Checkpointer(tmp_path).save(2, small(20))  # written again
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert loaded(tmp_path) == (2, 20)


def killed_while_saving(folder):
    saving._publish = lambda partial, final: os._exit(7)
    Checkpointer(folder).save(2, small(2))


def test_a_kill_before_the_rename_leaves_the_old_one(tmp_path):
    Checkpointer(tmp_path).save(1, small(1))
    process = multiprocessing.get_context("fork").Process(target=killed_while_saving, args=(tmp_path,))
    process.start()
    process.join(30)
    assert process.exitcode == 7
    assert (tmp_path / ".saving-0000000002" / "manifest.json").exists()  # complete, but not published
    assert Checkpointer(tmp_path).steps() == [1]
    assert loaded(tmp_path) == (1, 1)
    Checkpointer(tmp_path).save(3, small(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000000001", "step-0000000003"]


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["tensors", "values", "manifest", "folder"])
def test_a_full_disk(tmp_path, monkeypatch, where):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, small(1))
    with monkeypatch.context() as patch:
        if where == "tensors":
            patch.setattr(torch, "save", full)  # what FileSystemWriter writes every tensor with
        elif where == "folder":
            patch.setattr(type(tmp_path), "mkdir", lambda self, **options: None if options else full())
        else:
            real = saving.write_bytes
            wanted = {"values": "plain.pt", "manifest": "manifest.json"}[where]
            patch.setattr(saving, "write_bytes", lambda p, value: full() if p.name == wanted else real(p, value))
        with pytest.raises(CheckpointError, match="the disk is full"):
            checkpointer.save(2, small(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000000001"]
    assert loaded(tmp_path) == (1, 1)


def test_what_cannot_be_saved_is_named(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(CheckpointError, match=r"rank 0: .*pickle"):
        checkpointer.save(1, {"x": torch.ones(1), "f": lambda: 0})
    with pytest.raises(TypeError, match="'a/b'"):
        checkpointer.save(1, {"a": {"b": torch.ones(1)}, "a/b": torch.ones(1)})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="keep"):
        Checkpointer(tmp_path, keep=0)
    with pytest.raises(ValueError, match="step"):
        checkpointer.save(-1, {})


def fail_on_one_rank(runtime, folder):
    """Rank 1's disk is full; later rank 1 dies in the middle of a save."""
    checkpointer = Checkpointer(folder, runtime=runtime)
    checkpointer.save(1, small(1))
    real = saving.dcp.FileSystemWriter.write_data
    if runtime.rank == 1:
        saving.dcp.FileSystemWriter.write_data = full
    try:
        checkpointer.save(2, small(2))
        error = None
    except CheckpointError as caught:
        error = str(caught)
    saving.dcp.FileSystemWriter.write_data = real
    runtime.barrier("the folder to be read")
    names = sorted(os.listdir(folder))
    target = small(-1)
    step = checkpointer.load(target)
    if runtime.rank == 1:
        saving.dcp.FileSystemWriter.write_data = lambda *args: os._exit(0)
    torch.save((error, names, step, target), f"{folder}/../report-{runtime.rank}.pt")
    try:
        checkpointer.save(3, small(3))
    except (CheckpointError, PeerLostError) as caught:
        return f"{type(caught).__name__}: {caught}"
    return "no error"


def test_one_rank_fails(tmp_path):
    folder = tmp_path / "checkpoints"
    lost, _ = run_ranks(2, __file__, "fail_on_one_rank", tmp_path / "jobs", str(folder))
    for rank in (0, 1):
        error, names, step, target = torch.load(tmp_path / f"report-{rank}.pt", weights_only=False)
        assert "rank 1: the disk is full" in error
        assert names == ["step-0000000001"]
        assert (step, target["epoch"]) == (1, 1)
    assert "write the tensors of step 3" in lost
    assert loaded(folder) == (1, 1)
