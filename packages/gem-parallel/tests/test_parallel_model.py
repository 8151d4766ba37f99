"""Sharded training equals single-process training, for every sharding and mesh."""

from __future__ import annotations

import pytest
import torch
from gem_parallel import ParallelConfig, RowWiseAdagrad, parallelize, start
from gem_parallel.dense import units as dense_units
from gem_parallel.selfcheck import compare
from gem_parallel.testing import ROWS, UNITS, SmallModel, full_state, relative_error, run_ranks, small_batch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state
from torch.utils import _pytree as pytree

SPARSE = RowWiseAdagrad(lr=0.05, eps=1e-4)


def build(runtime, config=None, *, model=None, precision="fp32", units=UNITS):
    model = model or SmallModel()
    return parallelize(
        model, model.roles(), config or ParallelConfig(), runtime, sparse=SPARSE, units=units, precision=precision
    )


def train_and_compare(runtime, cases):
    """For every (sharding, group): initial tables, errors against plain PyTorch, the state after 10 steps, the plan."""
    results = []
    for sharding, group in cases:
        config = ParallelConfig(table_sharding=sharding, shard_group=group)
        initial = full_state(build(runtime, config))
        errors, parallel = compare(runtime, config, steps=10)
        results.append((initial, errors, full_state(parallel), [str(row) for row in parallel.describe()]))
    return results


@pytest.fixture(scope="module")
def single():
    with start("cpu", timeout_s=20) as runtime:
        return train_and_compare(runtime, [("auto", 0)])[0]


def check(results, single):
    initial, _, final, _ = single
    for start_state, errors, state, plan in results:
        assert max(errors.values()) < 1e-5, (errors, plan)
        assert errors["loss"] > 0 or errors["tables"] > 0  # the twin is computed, not copied
        for name, value in start_state["model"].items():
            assert torch.equal(value, initial["model"][name]), name
        for part in ("model", "sparse_optimizer"):
            assert state[part].keys() == final[part].keys()
            for name, value in state[part].items():
                assert relative_error(value, final[part][name]) < 1e-5, (name, plan)


def test_a_world_of_one_equals_plain_pytorch(single):
    assert max(single[1].values()) < 1e-5, single[1]


def test_two_ranks_equal_one(tmp_path, single):
    cases = [("table_wise", 0), ("row_wise", 0), ("table_wise", 1), ("auto", 0)]
    ranks = run_ranks(2, __file__, "train_and_compare", tmp_path, cases)
    for results in ranks:
        check(results, single)
    table_wise, row_wise = ranks[0][0][3], ranks[0][1][3]
    assert len(table_wise) == len(ROWS)
    assert {line.split("rank ")[1][0] for line in table_wise} == {"0", "1"}
    assert len(row_wise) == 2 * len(ROWS)
    assert "sequences.item  row_wise  rank 1  rows 30..59  cols 0..8" in row_wise


def test_replicas_of_shards_equal_one(tmp_path, single):
    for results in run_ranks(4, __file__, "train_and_compare", tmp_path, [("row_wise", 2)]):
        check(results, single)


def other_layouts(runtime):
    """Column-wise tables, bfloat16 units, no tables, ranks with other seeds, the plain state after an eval forward."""
    column = full_state(build(runtime, ParallelConfig(table_sharding="column_wise")))["model"]
    batch = small_batch(0).part(runtime.rank, runtime.world)

    half = build(runtime, precision="bf16")
    dtypes = []
    for layer in (half.module.dense.trunk[0].linear, half.module.dense.head):
        layer.register_forward_hook(lambda m, args, out: dtypes.append((m.weight.dtype, out.dtype)))
    half(batch).sum().backward()
    assert {param.dtype for param in half.dense_parameters()} == {torch.float32}
    grads = {name: param.grad.dtype for name, param in half.named_dense_parameters()}

    bare = build(runtime, model=SmallModel(tables=False))
    bare(batch).square().mean().backward()
    bare_norm = bare.clip_grad_norm_(1.0).item()
    bare.set_sparse_lr(0.1)
    bare.load_state_dict(bare.state_dict())

    seeds = build(runtime, model=SmallModel(seed=100 + runtime.rank))
    before = {name: value.clone() for name, value in full_state(seeds)["model"].items()}
    seeds.eval()
    with torch.no_grad():
        seeds(batch)
    after = full_state(seeds)["model"]
    kinds = {type(param).__name__ for param in seeds.dense_parameters()}
    return column, dtypes, grads, bare_norm, before, after, kinds


def test_other_layouts(tmp_path, single):
    first, second = run_ranks(2, __file__, "other_layouts", tmp_path)
    column, dtypes, grads, bare_norm, before, after, kinds = first
    for name, value in column.items():
        assert torch.equal(value, single[0]["model"][name]), name
    assert dtypes == [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)]
    assert set(grads.values()) == {torch.float32}
    assert bare_norm == pytest.approx(second[3], rel=1e-6)
    assert bare_norm > 0
    reference = SmallModel(seed=100)
    for name, value in before.items():
        assert torch.equal(value, second[4][name])  # the ranks hold shards of one model
        assert torch.equal(value, after[name])
        if name.startswith("dense.") and "offset" not in name:
            assert torch.equal(value, reference.get_parameter(name))  # which is rank 0's
    assert kinds == {"DTensor"}


def with_an_fsdp_that_sees_pytrees_only(runtime):
    """FSDP2 as it was before torch 2.12."""

    def collect(tree):
        return tuple(t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor) and t.requires_grad)

    def replace(tree, tensors):
        grad = [isinstance(t, torch.Tensor) and t.requires_grad for t in pytree.tree_leaves(tree)]
        wanted = iter(grad)
        return pytree.tree_map(lambda t: next(tensors) if next(wanted) else t, tree)

    for module in (_fsdp_state, _fsdp_param_group):
        for name, function in (("collect_grad_tensors", collect), ("replace_grad_tensors", replace)):
            if hasattr(module, name):
                setattr(module, name, function)
    dense_units.fsdp_sees_dataclasses = lambda: False
    return compare(runtime, ParallelConfig(table_sharding="row_wise"), steps=2)[0]


def test_gradients_inside_dataclasses_arrive(tmp_path):
    for errors in run_ranks(2, __file__, "with_an_fsdp_that_sees_pytrees_only", tmp_path):
        assert max(errors.values()) < 1e-5


def test_sparse_learning_rate_zero_freezes_the_tables():
    with start("cpu", timeout_s=20) as runtime:
        parallel = build(runtime)
        before = full_state(parallel)["model"]
        parallel.set_sparse_lr(0.0)
        parallel(small_batch(0)).sum().backward()
        after = full_state(parallel)
        assert all(torch.equal(before[name], value) for name, value in after["model"].items())
        assert any(moment.any() for moment in after["sparse_optimizer"].values())


def test_clip_grad_norm_is_the_norm_before_clipping():
    with start("cpu", timeout_s=20) as runtime:
        parallel = build(runtime)
        parallel(small_batch(0)).square().sum().backward()
        grads = [param.grad.double().clone() for param in parallel.dense_parameters()]
        expected = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        norm = parallel.clip_grad_norm_(0.5)
        assert norm.dtype == torch.float32
        assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
        clipped = (
            torch.stack([param.grad.double().square().sum() for param in parallel.dense_parameters()]).sum().sqrt()
        )
        assert clipped.item() == pytest.approx(0.5, rel=1e-4)


def test_a_model_built_on_a_real_device_is_the_same():
    with start("cpu", timeout_s=20) as runtime:
        meta, real = build(runtime), build(runtime, model=SmallModel(device="cpu"))
        for name, value in full_state(meta)["model"].items():
            assert torch.equal(value, full_state(real)["model"][name])


def test_load_state_dict_takes_whole_tensors():
    with start("cpu", timeout_s=20) as runtime:
        parallel, other = build(runtime), build(runtime, ParallelConfig(table_seed=3), model=SmallModel(seed=3))
        whole = full_state(parallel)
        assert not torch.equal(whole["model"]["dense.head.weight"], full_state(other)["model"]["dense.head.weight"])
        other.load_state_dict(whole)
        for name, value in full_state(other)["model"].items():
            assert torch.equal(value, whole["model"][name])
        whole["model"]["dense.head.weight"] = torch.zeros(2, 2)
        with pytest.raises(ValueError, match=r"dense\.head\.weight: expected shape \(1, 16\), got \(2, 2\)"):
            other.load_state_dict(whole)
        del whole["model"]["dense.head.weight"]
        with pytest.raises(ValueError, match=r"missing \['dense\.head\.weight'\]"):
            other.load_state_dict(whole)


class TestMistakes:
    @pytest.fixture(autouse=True)
    def _runtime(self):
        with start("cpu", timeout_s=20) as self.runtime:
            yield

    def parallelize(self, model, roles, **options):
        return parallelize(model, roles, ParallelConfig(), self.runtime, sparse=SPARSE, **options)

    def test_a_role_is_missing(self):
        model = SmallModel()
        roles = model.roles()
        del roles["dense.head.bias"]
        with pytest.raises(ValueError, match=r"'dense\.head\.bias' has role None"):
            self.parallelize(model, roles)

    def test_a_table_outside_a_collection(self):
        model = SmallModel()
        with pytest.raises(ValueError, match=r"'gain' has role 'table', but does not lie in"):
            self.parallelize(model, {**model.roles(), "gain": "table"})

    def test_a_table_called_dense(self):
        model = SmallModel()
        name = "bags.embedding_bags.user.weight"
        with pytest.raises(ValueError, match="has role 'dense', but lies in"):
            self.parallelize(model, {**model.roles(), name: "dense"})

    def test_a_role_too_many(self):
        model = SmallModel()
        with pytest.raises(ValueError, match=r"\['nobody'\]"):
            self.parallelize(model, {**model.roles(), "nobody": "dense"})

    def test_a_scalar_parameter(self):
        model = SmallModel()
        model.scale = torch.nn.Parameter(torch.ones(()))
        with pytest.raises(ValueError, match="'scale' is a scalar"):
            self.parallelize(model, model.roles())

    def test_a_unit_that_is_a_list(self):
        model = SmallModel()
        with pytest.raises(ValueError, match=r"unit 'dense\.trunk' is a ModuleList"):
            self.parallelize(model, model.roles(), units=["dense.trunk"], precision="bf16")

    def test_a_unit_that_does_not_exist(self):
        model = SmallModel()
        with pytest.raises(ValueError, match="unit 'tower' is not a submodule"):
            self.parallelize(model, model.roles(), units=["tower"])

    def test_a_table_that_is_too_large(self):
        model = SmallModel(rows={**ROWS, "user": 1 << 45})
        with pytest.raises(ValueError, match="no sharding plan"):
            self.parallelize(model, model.roles())

    @pytest.mark.parametrize("options", [{"table_sharding": "diagonal"}, {"shard_group": -1}, {"table_std": 0.0}])
    def test_a_configuration(self, options):
        with pytest.raises(ValueError, match=next(iter(options))):
            ParallelConfig(**options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_plain_pytorch(tmp_path):
    worlds = [1, 2] if torch.cuda.device_count() > 1 else [1]
    for world in worlds:
        results = run_ranks(
            world, __file__, "train_and_compare", tmp_path, [("table_wise", 0), ("row_wise", 0)], device="cuda"
        )
        for _, errors, _, plan in results[0]:
            assert max(errors.values()) < 2e-5, (errors, plan)
