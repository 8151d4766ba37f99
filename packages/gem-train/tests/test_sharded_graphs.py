"""Layers that FSDP2 shards and graphs replay train as those of one process do, whoever replays."""

from __future__ import annotations

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from gem_kernels.nn import RMSNorm
from gem_model import GEM, TowerConfig, preset, replay, sequence
from gem_model.projection import folded
from gem_model.replay_sharded import ShardedReplay
from gem_model.roles import roles
from gem_model.testing import Repeated, example_inputs, random_batch
from gem_model.testing_graphs import CpuGraphs
from gem_parallel import Checkpointer, ParallelConfig, RowWiseAdagrad, parallelize, start
from gem_parallel.comm.payload import Fp8Payload
from gem_parallel.dense.mesh import make_mesh
from gem_parallel.dense.units import shard_dense
from gem_parallel.sparse.sharding import find_tables
from gem_parallel.testing import relative_error, run_ranks
from gem_train import graphs
from torch.distributed.fsdp import FSDPModule

SAMPLES = 12
SHAPES = {
    "plain": {},
    "towers": {
        "layers": 3,
        "towers": (TowerConfig(source="views", layers=1), TowerConfig(source="ratings", width=24)),
    },
    "normed": {"layers": 3, "pma_seeds": 5, "qk_norm": True},
    "hstu": {"layers": 2, "sequence_layer": "hstu"},
    "ensemble": {"experts": ("wukong", "dcn"), "layers": 2, "attention": "gdpa", "pma_seeds": 5},
}


def build(runtime, shape, replayed, payload=False, **layout):
    torch.manual_seed(0)
    inputs = example_inputs()
    model = GEM(preset("tiny", dropout=0.0, **SHAPES[shape]), inputs)
    parallel = parallelize(
        model,
        roles(model),
        ParallelConfig(table_sharding="row_wise", **layout),
        runtime,
        sparse=RowWiseAdagrad(lr=0.05),
        units=model.units(),
        payload=Fp8Payload() if payload else None,
    ).train()
    if runtime.world == 1 and replayed:  # FSDP2 in a world of one, which no run asks for
        tables = [parallel.module.get_submodule(name) for name in find_tables(parallel.module)]
        shard_dense(parallel.module, tables, model.units(), make_mesh(runtime, ParallelConfig()), "fp32")
    if replayed:
        on_cpu = CpuGraphs() if runtime.world == 1 else Repeated()
        recorder = on_cpu if runtime.device.type == "cpu" else None
        parallel.module.layers.replay = ShardedReplay(parallel.module.layers, recorder=recorder)
    return parallel, inputs


def train(runtime, shape="plain", graphs=True, *, last=False, full=(), half=False, steps=3, **layout):
    """Dense parameters and logits after a few steps of two parts each.

    last: gradients are reduced after the last part of a step only. full: ranks that have a single graph. half: under
    autocast.
    """
    if runtime.rank in full:
        replay.GRAPHS = 1
    parallel, inputs = build(runtime, shape, graphs, **layout)
    units = [m for m in parallel.module.modules() if isinstance(m, FSDPModule)]
    optimizer = torch.optim.SGD(parallel.dense_parameters(), lr=0.05)
    share = SAMPLES // runtime.world
    mine = range(runtime.rank * share, (runtime.rank + 1) * share)
    for step in range(steps):
        for part in range(2):
            for unit in units:
                unit.set_requires_gradient_sync(part == 1 or not last)
            batch = random_batch(inputs, SAMPLES, seed=2 * step + part).select(mine).to(runtime.device)
            with torch.autocast(runtime.device.type, dtype=torch.bfloat16, enabled=half):
                logits = parallel(batch)
            ((logits - batch.labels).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    named = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().cpu()
        for name, p in parallel.named_dense_parameters()
    }
    captured = parallel.module.layers.replay
    parallel.eval()
    with torch.no_grad():
        logits = parallel(random_batch(inputs, SAMPLES, seed=99).select(mine).to(runtime.device))
    return named, logits.cpu(), 0 if captured is None else len(captured.graphs)


def train_all(runtime, cases):
    """One after the other, in the same processes."""
    kept = replay.GRAPHS
    found = []
    for case in cases:
        found.append(train(runtime, **case))
        replay.GRAPHS = kept
    return found


def same(found, wanted, tolerance):
    error, name = max((relative_error(found[name], value), name) for name, value in wanted.items())
    assert found.keys() == wanted.keys()
    assert error < tolerance, name
    assert math.isfinite(error)


@pytest.fixture(scope="module")
def single():
    with start("cpu", timeout_s=20) as runtime:
        return {shape: train(runtime, shape, graphs=False)[:2] for shape in SHAPES}


CASES = [
    {"shape": "hstu", "prefetch": 1},
    {"shape": "plain", "prefetch": 2},
    {"shape": "plain", "last": True},
    {"shape": "plain", "full": (1,), "prefetch": 1},  # the other rank replays where this one cannot
    {"shape": "towers", "prefetch": 1},
    {"shape": "ensemble", "last": True},
    {"shape": "plain", "shard_group": 1},
]


def test_a_world_of_one(single):
    with start("cpu", timeout_s=20) as runtime:
        found = train(runtime, "ensemble", half=True, steps=1)
        same(found[0], train(runtime, "ensemble", graphs=False, half=True, steps=1)[0], 1e-6)
        assert found[2] > 0


def rows_twice(self, x, residual, residual_bias, offsets, recent, places, others, bare_eps):
    """What `norm_rows_twice` is, of plain operators: the reference leaves the second norm to the next layer."""
    found = self.rows(x, residual, residual_bias, offsets, recent, places, others)
    return *found, F.layer_norm(found[1], found[1].shape[1:], eps=bare_eps)


def test_what_a_layer_has_normed_goes_to_the_next(monkeypatch):
    used = []
    monkeypatch.setattr(RMSNorm, "rows_twice", rows_twice)
    reader = sys.modules[sequence.read.__module__]
    monkeypatch.setattr(reader, "folded", lambda *a: used.append(1) or folded(*a))
    with start("cpu", timeout_s=20) as runtime:
        wanted = train(runtime, "normed", graphs=False)
        assert used
        used.clear()
        found = train(runtime, "normed")
        assert used
        same(found[0], wanted[0], 1e-5)
        parallel, inputs = build(runtime, "normed", True)
        parallel(random_batch(inputs, SAMPLES, seed=1))
        (chain,) = parallel.module.layers.replay.graphs.values()
        assert chain.units[1].bare.keys() == {"ratings", "views"}
        assert len(chain.kept) == 2  # where CLS tokens stand is found once for each source


def test_two_ranks_that_replay_are_one_process(tmp_path, single):
    ranks = run_ranks(2, __file__, "train_all", tmp_path, CASES)
    for i, case in enumerate(CASES):
        wanted, logits = single[case["shape"]]
        for rank, found in enumerate(ranks):
            same(found[i][0], wanted, 2e-5)
            assert found[i][2] == 1 if rank in case.get("full", ()) else found[i][2] > 0
        together = torch.cat([found[i][1] for found in ranks])
        assert relative_error(together, logits) < 1e-4, case


@pytest.mark.slow
def test_four_ranks_and_payloads(tmp_path, single):
    """Two copies of two shards; and gathers that carry FP8, which are the same with graphs as without."""
    cases = [{"shape": "plain", "shard_group": 2, "prefetch": 1}]
    payloads = [{"shape": "plain", "payload": True, "graphs": graphs} for graphs in (False, True)]
    ranks = run_ranks(4, __file__, "train_all", tmp_path, cases + payloads)
    for exact, without, with_graphs in ranks:
        same(exact[0], single["plain"][0], 2e-5)
        same(with_graphs[0], without[0], 2e-5)
        assert max(relative_error(without[0][n], p) for n, p in single["plain"][0].items()) > 1e-4  # FP8 is not exact


def test_layers_that_are_no_units_are_refused():
    model = GEM(preset("tiny"), example_inputs())
    with pytest.raises(ValueError, match="layer 0 must be an FSDP2 unit"):
        ShardedReplay(model.layers, recorder=Repeated())


def out_of_turn(runtime):
    """A backward pass after another forward pass, and what is left when graphs are let go of."""
    parallel, inputs = build(runtime, "plain", True)
    batch = random_batch(inputs, 4, seed=runtime.rank)
    first = parallel(batch).sum()
    parallel(batch).sum().backward()
    refused = ""
    try:
        first.backward()
    except RuntimeError as error:
        refused = str(error)
    return refused


def test_a_backward_pass_out_of_turn_is_refused(tmp_path):
    for refused in run_ranks(2, __file__, "out_of_turn", tmp_path):
        assert "comes after forward pass 2, which has overwritten what it needs" in refused


def at_rest(runtime):
    """Gradients with graphs, then of the same layers called one by one, then with graphs again."""
    from gem_model.layers import one_by_one

    parallel, inputs = build(runtime, "plain", True, prefetch=1)
    batch, found = random_batch(inputs, 4, seed=runtime.rank), []
    parallel.set_sparse_lr(0.0)
    for alone in (False, True, False):
        if alone:
            with one_by_one(parallel.module):
                parallel(batch).square().sum().backward()
        else:
            parallel(batch).square().sum().backward()
        found.append([p.grad.to_local().clone() for p in parallel.dense_parameters() if p.grad is not None])
        for p in parallel.dense_parameters():
            p.grad = None
    return [max(relative_error(a, b) for a, b in zip(found[0], other, strict=True) if b.numel()) for other in found[1:]]


def test_layers_may_be_called_one_by_one_in_between(tmp_path):
    for errors in run_ranks(2, __file__, "at_rest", tmp_path):
        assert max(errors) < 1e-4


def saved_rooms(runtime, folder):
    """The rooms before a checkpoint, and of another model after it; each rank's batches are its own."""
    parallel, inputs = build(runtime, "plain", True)
    lengths = {"ratings": [1 + 11 * runtime.rank] * 12, "views": [2] * 12}
    parallel(random_batch(inputs, 12, lengths=lengths)).sum().backward()
    files, step = Checkpointer(folder, runtime=runtime), 1
    files.save(step, {"position": {"step": step, "rooms": graphs.state(parallel.module)}})
    other, _ = build(runtime, "plain", True)
    state = {"position": {"step": 0, "rooms": graphs.state(other.module)}}
    files.load(state, step)
    graphs.load(other.module, state["position"]["rooms"])
    return state["position"]["step"], parallel.module.layers.replay.rooms, other.module.layers.replay.rooms


def test_a_checkpoint_holds_the_rooms_of_every_rank(tmp_path):
    ranks = run_ranks(2, __file__, "saved_rooms", tmp_path, tmp_path / "files")
    for step, before, after in ranks:
        assert step == 1
        assert before == after
    assert ranks[0][1] != ranks[1][1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("world", [1, 2])
def test_on_cards_replayed_layers_are_the_same_layers(tmp_path, world):
    if world > torch.cuda.device_count():
        pytest.skip(f"needs {world} CUDA devices")
    cases = [
        {"shape": shape, "graphs": graphs, "half": half, "last": half}
        for shape in ("plain", "normed", "ensemble")
        for half in (False, True)
        for graphs in (False, True)
    ]
    for found in run_ranks(world, __file__, "train_all", tmp_path, cases, device="cuda"):
        for case, without, with_graphs in zip(cases[::2], found[::2], found[1::2], strict=True):
            same(with_graphs[0], without[0], 3e-2 if case["half"] else 3e-3)
            assert with_graphs[2] > 0 == without[2]
