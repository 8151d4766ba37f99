"""Saving while training goes on, resuming in another layout of the tables, and tables as Parquet."""

from __future__ import annotations

import threading

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from gem_parallel import (
    Checkpointer,
    CheckpointError,
    ExportError,
    ParallelConfig,
    RowWiseAdagrad,
    export_tables,
    parallelize,
    start,
)
from gem_parallel.checkpoint import background, export
from gem_parallel.checkpoint import save as saving
from gem_parallel.checkpoint.blocks import MomentChange
from gem_parallel.testing import ROWS, UNITS, SmallModel, full_state, run_ranks, small_batch

SPARSE = RowWiseAdagrad(lr=0.05, eps=1e-4)
LAYOUTS = {
    "v1 row": {"table_sharding": "row_wise"},
    "v1 column": {"table_sharding": "column_wise"},
    "v2": {"table_sharding": "row_wise", "table_strategy": "v2", "table_copies": 2},
    "v3": {"table_sharding": "row_wise", "table_strategy": "v3", "table_copies": 2},
    "v3 column": {"table_sharding": "column_wise", "table_strategy": "v3", "table_copies": 2},
}


def build(runtime, layout="v1 row", seed=0, rows=ROWS):
    model = SmallModel(seed=seed, rows=rows)
    config = ParallelConfig(table_seed=seed, **LAYOUTS[layout])
    return parallelize(model, model.roles(), config, runtime, sparse=SPARSE, units=UNITS)


def train(parallel, steps):
    losses = []
    for step in steps:
        batch = small_batch(step).part(parallel.runtime.rank, parallel.runtime.world)
        loss = (parallel(batch) - batch.target).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses


def restore(parallel, folder, **options):
    state = parallel.state_dict()
    Checkpointer(folder, runtime=parallel.runtime).load(state, **options)
    parallel.load_state_dict(state)
    return full_state(parallel)


# --- another layout


def resume_everywhere(runtime, folder):
    """Save every layout after three steps; load all into all."""
    saved = {}
    for layout in LAYOUTS:
        parallel = build(runtime, layout)
        train(parallel, range(3))
        Checkpointer(f"{folder}/{layout}", runtime=runtime).save(3, parallel.state_dict())
        saved[layout] = full_state(parallel)
    loaded = {
        (source, target): restore(build(runtime, target, seed=3), f"{folder}/{source}")
        for source in LAYOUTS
        for target in LAYOUTS
    }
    from_one = {target: restore(build(runtime, target, seed=4), f"{folder}/one") for target in LAYOUTS}
    # and the exact continuation of V3
    first, second = build(runtime, "v3"), build(runtime, "v3", seed=5)
    train(first, range(3))
    restore(second, f"{folder}/v3")
    exact = train(first, range(3, 5)) == train(second, range(3, 5))
    return saved, loaded, from_one, exact


def resume_copies(runtime, folder):
    """Two copies of two shards each, neighbours and not: V2 and V3 into one another."""
    finals = {}
    for inside in (True, False):
        for layout in ("v2", "v3"):
            model = SmallModel()
            config = ParallelConfig(table_copies_inside=inside, **LAYOUTS[layout])
            parallel = parallelize(model, model.roles(), config, runtime, sparse=SPARSE, units=UNITS)
            train(parallel, range(2))
            Checkpointer(f"{folder}/{layout}-{inside}", runtime=runtime).save(2, parallel.state_dict())
            finals[layout, inside] = full_state(parallel)
    return {
        (source, layout): (restore(build(runtime, layout, seed=5), f"{folder}/{source[0]}-{source[1]}"), saved)
        for source, saved in finals.items()
        for layout in ("v2", "v3")
    }


def test_copies_of_shards_resume(tmp_path):
    for results in run_ranks(4, __file__, "resume_copies", tmp_path, str(tmp_path)):
        assert len(results) == 8
        for key, (found, saved) in results.items():
            for part in saved:
                assert found[part].keys() == saved[part].keys()
                for name, value in saved[part].items():
                    assert torch.equal(found[part][name], value), (key, name)


def convert(moment, rows, blocks):
    """[a rows] -> [b rows]: the mean over the table's columns where blocks are joined, else a copy."""
    have = moment.double().view(-1, rows)
    joined = have.mean(0, keepdim=True) if blocks == 1 else have
    return joined.expand(blocks, rows).reshape(-1) if len(joined) == 1 else joined.reshape(-1)


def assert_loaded(source, target, found):
    for name, value in source["model"].items():
        assert torch.equal(found["model"][name], value), (target, name)
    for name, value in source["sparse_optimizer"].items():
        rows = ROWS[name.split(".")[-3]]
        got = found["sparse_optimizer"][name]
        expected = convert(value, rows, len(got) // rows)
        torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=0)


def test_every_layout_resumes_in_every_other(tmp_path):
    with start("cpu", timeout_s=20) as runtime:
        one = build(runtime)
        train(one, range(3))
        Checkpointer(tmp_path / "one").save(3, one.state_dict())
        whole = full_state(one)
        (saved, loaded, from_one, exact), _ = run_ranks(
            2, __file__, "resume_everywhere", tmp_path / "jobs", str(tmp_path)
        )
        assert exact
        assert {len(v) for v in saved["v1 column"]["sparse_optimizer"].values()} == {2 * n for n in ROWS.values()}
        for (source, target), found in loaded.items():
            assert_loaded(saved[source], (source, target), found)
        for target, found in from_one.items():
            assert_loaded(whole, target, found)
        for source in LAYOUTS:  # 2 -> 1
            assert_loaded(saved[source], source, restore(build(runtime, seed=6), tmp_path / source))
        larger = build(runtime, seed=7, rows={**ROWS, "item": 70})
        with pytest.warns(UserWarning, match="item.weight has 59 rows in the checkpoint and 70 now"):
            found = restore(larger, tmp_path / "v3", resize_tables=True)
        name = "sequences.embeddings.item.weight"
        assert torch.equal(found["model"][name][:59], saved["v3"]["model"][name])
        with pytest.raises(CheckpointError, match=r"item\.weight\.momentum1 has shape \(118,\), expected \(70,\)"):
            restore(build(runtime, seed=8, rows={**ROWS, "item": 70}), tmp_path / "v1 column", resize_tables=True)


def test_moments_take_the_overlap():
    change = MomentChange(rows=5, saved=(0, 8, 12), wanted=(0, 4, 8, 12))
    assert [change.weights(i) for i in range(3)] == [[(0, 1.0)], [(0, 1.0)], [(1, 1.0)]]
    change = MomentChange(rows=5, saved=(0, 8, 12), wanted=(0, 12))
    assert change.weights(0) == [(0, pytest.approx(2 / 3)), (1, pytest.approx(1 / 3))]


# --- saving in the background


def test_what_is_saved_is_what_was_there(tmp_path, monkeypatch):
    gate = threading.Event()
    real = saving._publish
    monkeypatch.setattr(saving, "_publish", lambda *paths: (gate.wait(20), real(*paths)))
    checkpointer = Checkpointer(tmp_path, keep=3)
    state = {"x": torch.ones(4), "nested": {"list": [1, 2]}}
    checkpointer.save_async(1, state)
    state["x"].zero_()
    state["nested"]["list"].append(3)
    assert checkpointer.steps() == []  # not there before it is whole
    gate.set()
    checkpointer.wait()
    target = {"x": torch.zeros(4), "nested": {"list": []}}
    assert Checkpointer(tmp_path).load(target) == 1
    assert target["x"].tolist() == [1, 1, 1, 1]
    assert target["nested"]["list"] == [1, 2]
    for step in (2, 3, 4):
        checkpointer.save_async(step, {"x": torch.full((4,), float(step))})
    assert checkpointer.latest() == 4  # waits by itself
    assert checkpointer.steps() == [2, 3, 4]


def test_an_error_in_the_background_is_raised_later(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save_async(1, {"x": torch.ones(2)})
    checkpointer.wait()

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_bytes", full)
        checkpointer.save_async(2, {"x": torch.ones(2)})
        with pytest.raises(CheckpointError, match="the disk is full"):
            checkpointer.wait()
    checkpointer.wait()
    assert checkpointer.latest() == 1
    with pytest.raises(ValueError, match="step"):
        checkpointer.save_async(-1, {})


def train_while_saving(runtime, folder):
    parallel = build(runtime, "v3")
    train(parallel, range(3))
    expected = full_state(parallel)
    checkpointer = Checkpointer(folder, runtime=runtime)
    real, gate = saving.write_bytes, threading.Event()
    saving.write_bytes = lambda *args: (gate.wait(), real(*args))
    checkpointer.save_async(3, parallel.state_dict())
    train(parallel, range(3, 6))  # its collectives run beside those of the thread
    runtime.barrier("beside the save")
    writing = checkpointer.steps() == []
    gate.set()
    checkpointer.wait()
    second = background.second_control(runtime)
    assert second.control is not runtime.control
    return expected, writing, restore(build(runtime, "v1 row", seed=2), folder)


def test_training_goes_on_while_two_ranks_save(tmp_path):
    for expected, writing, found in run_ranks(2, __file__, "train_while_saving", tmp_path, str(tmp_path / "c")):
        assert writing
        for part in expected:
            for name, value in expected[part].items():
                assert torch.equal(found[part][name], value), name


# --- Parquet


def read_table(folder):
    table = pq.read_table(folder).sort_by("row")
    rows = table["row"].to_numpy()
    values = np.stack([np.asarray(v.as_py(), dtype=np.float32) for v in table["embedding"]])
    return rows, values


def export_layouts(runtime, folder):
    finals = {}
    for layout in LAYOUTS:
        parallel = build(runtime, layout)
        train(parallel, range(2))
        rows = export_tables(parallel, f"{folder}/{layout}")
        finals[layout] = (rows, full_state(parallel)["model"])
    real = export._write
    export._write = lambda *args: (_ for _ in ()).throw(OSError("no room")) if runtime.rank else real(*args)
    try:
        export_tables(parallel, f"{folder}/v1 row", ["bags.embedding_bags.user"])
    except ExportError as error:
        return finals, str(error)
    return finals, "no error"


def test_tables_as_parquet(tmp_path):
    (finals, error), (_, other) = run_ranks(2, __file__, "export_layouts", tmp_path / "jobs", str(tmp_path))
    assert error == other
    assert "could not export table bags.embedding_bags.user" in error
    assert "rank 1: OSError: no room" in error
    for layout, (rows, model) in finals.items():
        assert sorted(path.name for path in (tmp_path / layout).iterdir()) == sorted(rows)  # nothing half-written
        assert set(rows.values()) == set(ROWS.values())
        for name, count in rows.items():
            index, values = read_table(tmp_path / layout / name)
            np.testing.assert_array_equal(index, np.arange(count))
            np.testing.assert_array_equal(values, model[f"{name}.weight"].numpy(), err_msg=f"{layout} {name}")


def test_export_of_an_unknown_table(tmp_path):
    with start("cpu", timeout_s=20) as runtime, pytest.raises(ValueError, match=r"no tables \['nobody'\]"):
        export_tables(build(runtime), tmp_path, ["nobody"])
