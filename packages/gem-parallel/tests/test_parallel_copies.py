"""Tables with copies: V3 is one process's training, V2 is that of its formula; nothing is stale; little memory."""

from __future__ import annotations

import itertools
import re
import warnings

import pytest
import torch
from gem_parallel import ParallelConfig, RowWiseAdagrad, SparseSGD, parallelize, start
from gem_parallel.selfcheck import compare
from gem_parallel.sparse import fully_sharded
from gem_parallel.testing import BAGS, ROWS, SEQUENCES, UNITS, SmallModel, full_state, run_ranks, small_batch

SPARSE = RowWiseAdagrad(lr=0.05, eps=1e-4)


def config(sharding, strategy, copies, **options):
    return ParallelConfig(
        table_sharding=sharding, table_strategy=strategy, table_copies=copies if strategy != "v1" else 1, **options
    )


def train(runtime, cases, steps):
    results = []
    for sharding, strategy, copies, options, sgd in cases:
        sparse = SparseSGD(lr=0.05) if sgd else SPARSE
        layout = config(sharding, strategy, copies, **options)
        errors, parallel = compare(runtime, layout, steps=steps, sparse=sparse)
        memory = parallel.fully_sharded.memory() if parallel.fully_sharded else None
        results.append((errors, [str(row) for row in parallel.describe()], memory))
    return results


def check(results, cases):
    for (errors, plan, _), case in zip(results, cases, strict=True):
        assert max(errors.values()) < 1e-5, (case, errors, plan)
        assert errors["loss"] > 0 or errors["tables"] > 0  # the twin is computed, not copied
        tiles(plan, 4, case[2] if case[1] == "v2" else 1)


def tiles(plan, world, copies):
    """The readable plan has every element of every table as often as there are whole copies, on ranks that exist."""
    held = dict.fromkeys(ROWS, 0)
    for line in plan:
        found = re.fullmatch(r"\w+\.(\w+)  \w+  rank (\d+)  rows (\d+)\.\.(\d+)  cols (\d+)\.\.(\d+)", line)
        assert found, line
        rank, first, end, left, right = map(int, found.groups()[1:])
        assert rank < world
        held[found[1]] += (end - first) * (right - left)
    assert held == {name: copies * rows * 8 for name, rows in ROWS.items()}, plan


@pytest.mark.parametrize("steps", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_four_ranks(tmp_path, steps):
    """Both optimizers, bags and sequences, every sharding, copies inside and across."""
    cases = [
        ("row_wise", "v3", 2, {}, False),
        ("table_wise", "v3", 2, {"table_copies_inside": False, "shard_group": 2}, False),
        ("row_wise", "v3", 4, {"shard_group": 1}, False),
        ("column_wise", "v3", 2, {}, False),
        ("row_wise", "v3", 2, {"table_copies_inside": False}, True),
        ("table_wise", "v3", 2, {}, True),
        ("column_wise", "v3", 2, {}, True),
        ("column_wise", "v1", 1, {}, False),
        ("row_wise", "v1", 1, {"shard_group": 2}, True),
        ("row_wise", "v2", 2, {}, True),  # with SGD and n = 1 the average is one process's training
        ("row_wise", "v2", 2, {"table_sync_every": 3}, False),
        ("table_wise", "v2", 2, {"table_copies_inside": False, "table_moment_scaling": False}, False),
        ("column_wise", "v2", 4, {"shard_group": 2}, False),
    ]
    ranks = run_ranks(4, __file__, "train", tmp_path, cases, steps)
    for results in ranks:
        check(results, cases)
    owned = [results[0][2] for results in ranks]
    rows, dim, copies = sum(ROWS.values()), 8, 2
    assert all(memory["working"] == 0 for memory in owned)  # after state_dict nothing is gathered
    assert sum(memory["weights"] for memory in owned) <= 4 * dim * (rows + 4 * 2 * copies)  # a row of padding each
    assert sum(memory["weights"] for memory in owned) >= 4 * dim * rows
    assert max(memory["weights"] for memory in owned) < 0.3 * 4 * dim * rows
    for memory in owned:
        assert memory["moments"] * dim == memory["weights"]
    assert "sequences.item  row_wise  rank 3  rows 47..59  cols 0..8" in ranks[0][0][1]
    copies_of_v2 = ranks[0][9][1]
    assert len(copies_of_v2) == 2 * 2 * len(ROWS)  # both copies are listed
    assert {int(line.split("rank ")[1][0]) for line in copies_of_v2} == {0, 1, 2, 3}


class MixedModel(SmallModel):
    """Tables of two widths in one collection."""

    @staticmethod
    def _table(name, features, rows, dim):
        table = SmallModel._table(name, features, rows, dim)
        return {**table, "embedding_dim": dim * 2 if name == "user" else dim}

    def forward(self, batch):
        bags = self.bags(batch.kjt(BAGS))
        return torch.cat([bags[name] for name in BAGS], dim=1).sum(1) * self.gain


def fail_in_backward(parallel, batch):
    """The sequences' backward has run when that of the bags fails."""

    def fail(gradient):
        raise ArithmeticError("in backward")

    if parallel.fully_sharded:
        parallel.fully_sharded.prefetch()
    bags = parallel.module.bags(batch.kjt(BAGS))["user"]
    bags.register_hook(fail)
    items = parallel.module.sequences(batch.kjt(SEQUENCES))["history"].values()  # later in forward, earlier in backward
    with pytest.raises(ArithmeticError):
        (bags.sum() + items.sum()).backward()


def after_a_failure(runtime):
    """Training after a backward pass that failed half-way, and after a load between gather and lookup."""
    results = []
    batches = [small_batch(step).part(runtime.rank, runtime.world) for step in range(3)]
    for disturbed in (False, True):
        model = SmallModel()
        parallel = parallelize(model, model.roles(), config("row_wise", "v3", 2), runtime, sparse=SPARSE, units=UNITS)
        if disturbed:
            fail_in_backward(parallel, batches[0])
            assert parallel.fully_sharded.memory()["working"] > 0  # a partial gradient
            parallel.fully_sharded.prefetch()
            parallel.load_state_dict({part: dict(values) for part, values in full_state(parallel).items()})
        for batch in batches:
            parallel(batch).square().mean().backward()
        results.append(full_state(parallel))
    model = SmallModel()
    copied = parallelize(model, model.roles(), config("row_wise", "v2", 2), runtime, sparse=SPARSE, units=UNITS)
    fail_in_backward(copied, batches[0])
    for batch in batches:
        copied(batch).square().mean().backward()
    return results, copied.copied.passes


def test_a_failed_step_leaves_no_trace(tmp_path):
    for (calm, disturbed), passes in run_ranks(2, __file__, "after_a_failure", tmp_path):
        assert passes == 3
        for part in calm:
            for name, value in calm[part].items():
                assert torch.equal(value, disturbed[part][name]), name


def mixed(runtime):
    """V3 and V1 end with the same tables."""
    finals = []
    for layout in (config("row_wise", "v1", 1), config("row_wise", "v3", 2)):
        model = MixedModel()
        parallel = parallelize(model, model.roles(), layout, runtime, sparse=SPARSE)
        for step in range(3):
            batch = small_batch(step).part(runtime.rank, runtime.world)
            (parallel(batch) - batch.target).square().mean().backward()
        finals.append(full_state(parallel))
    return finals


def traced(runtime):
    """When the working copies exist, and that gradients of a pass without an update in between are not lost."""
    model = SmallModel()
    parallel = parallelize(model, model.roles(), config("row_wise", "v3", 2), runtime, sparse=SPARSE, units=UNITS)
    engine = parallel.fully_sharded
    full = sum(ROWS.values()) * 8 * 4
    memory = {"after parallelize": engine.memory()["working"]}

    def note(when):
        def hook(*_):
            memory.setdefault(when, engine.memory()["working"])

        return hook

    parallel.module.dense.register_forward_pre_hook(note("in the dense forward"))
    parallel.module.dense.trunk[0].register_full_backward_hook(note("in the dense backward"))
    batches = [small_batch(step).part(runtime.rank, runtime.world) for step in range(3)]
    loss = parallel(batches[0]).square().mean()
    memory["after forward"] = engine.memory()["working"]
    loss.backward()
    memory["while reducing"] = engine.memory()["working"]
    with torch.no_grad():
        first = parallel(batches[1])
        again = parallel(batches[1])
    assert torch.equal(first, again)
    memory["after evaluation"] = engine.memory()["working"]
    losses = [parallel(batch).square().mean() for batch in batches[1:]]  # two forwards, then two backwards
    for loss in losses:
        loss.backward()
    return memory, full, full_state(parallel)


def test_two_ranks(tmp_path):
    (memory, full, state), _ = run_ranks(2, __file__, "traced", tmp_path)
    assert memory.pop("while reducing") >= full
    assert set(memory) == {
        "after parallelize",
        "in the dense forward",
        "in the dense backward",
        "after forward",
        "after evaluation",
    }
    assert not any(memory.values()), memory
    # two gradients of one set of weights are two updates, as with TorchRec's fused optimizer in one process
    with start("cpu", timeout_s=20) as runtime:
        model = SmallModel()
        parallel = parallelize(model, model.roles(), ParallelConfig(), runtime, sparse=SPARSE, units=UNITS)
        parallel(small_batch(0)).square().mean().backward()
        for loss in [parallel(small_batch(step)).square().mean() for step in (1, 2)]:
            loss.backward()
        expected = full_state(parallel)
    for part, name in itertools.product(state, expected["model"]):
        if name in state[part] and name.startswith(("bags", "sequences")):
            torch.testing.assert_close(state[part][name], expected[part][name], rtol=1e-5, atol=1e-6)
    for first, third in run_ranks(2, __file__, "mixed", tmp_path):
        for part in first:
            assert first[part].keys() == third[part].keys()
            for name, value in first[part].items():
                torch.testing.assert_close(third[part][name], value, rtol=1e-5, atol=1e-6)


def test_what_v3_refuses():
    with pytest.raises(ValueError, match='"v1" has one copy'):
        ParallelConfig(table_copies=2)
    with pytest.raises(ValueError, match='"v1" has one copy'):
        ParallelConfig(table_strategy="v3")
    with pytest.raises(ValueError, match="'v4'"):
        ParallelConfig(table_strategy="v4", table_copies=2)
    with start("cpu", timeout_s=20) as runtime:
        model = SmallModel()
        with pytest.raises(ValueError, match="table_copies = 2 does not divide the world of 1"):
            parallelize(model, model.roles(), config("row_wise", "v3", 2), runtime, sparse=SPARSE)


def stale(runtime):
    """What TorchRec's order would give: the owners' updates of the last step are not in the weights."""
    warnings.simplefilter("ignore")
    real = fully_sharded._Kernel.update
    delayed = {}

    def late(self, lr, eps):
        held = self.weight.clone()
        real(self, lr, eps)
        new, self_id = self.weight.clone(), id(self)
        self.weight.copy_(delayed.get(self_id, held))
        delayed[self_id] = new

    fully_sharded._Kernel.update = late
    return compare(runtime, config("row_wise", "v3", 2), steps=5)[0]


def test_a_stale_lookup_would_show(tmp_path):
    errors, _ = run_ranks(2, __file__, "stale", tmp_path)
    assert errors["loss"] > 1e-3
