"""What the planner is told of a recipe's model, and the command that asks it."""

from __future__ import annotations

import dataclasses
import json
import time

import numpy as np
import pytest
import torch
from gem_lowprec import convert
from gem_model import GEM, ModelInputs, Source, Table, preset
from gem_model.config import TowerConfig
from gem_model.flops import batch_flops
from gem_model.presets import workload
from gem_model.replay_sharded import ShardedReplay
from gem_model.roles import roles
from gem_model.testing import example_inputs, random_batch
from gem_model.testing_graphs import CpuGraphs
from gem_parallel import Layout, ModelSpec, ParallelConfig, Profile, RowWiseAdagrad, parallelize, plan, start
from gem_parallel.dense.mesh import make_mesh
from gem_parallel.dense.units import shard_dense
from gem_parallel.planning.layout import memory, place_tables
from gem_parallel.sparse.sharding import find_tables
from gem_train.assemble import lowprec_recipe
from gem_train.cli import main
from gem_train.cli.plan import topology
from gem_train.config import RunConfig, override, to_toml
from gem_train.data import open_data
from gem_train.inputs import model_inputs
from gem_train.planning import INPUTS, activations, as_toml, describe, describe_model, sample, settings
from gem_train.testing import tiny_config

HOST = """
device = "Card"
device_memory = {memory}
memory_gbps = 4800.0
host_memory = 2000000000000
[[tiers]]
name = "nvlink"
size = 4
bandwidth_gbps = 450.0
latency_us = 3.0
"""


@pytest.fixture(scope="module")
def described(cache):
    config = tiny_config(cache, "model.layers=2")
    with start("cpu") as runtime:
        data = open_data(config.data, runtime)
    return config, data, describe_model(config, data, precision="fp32")


def test_parameters_and_flops_are_those_of_the_model_itself(described):
    config, data, spec = described
    inputs = model_inputs(data.schema, config.inputs, max_history=config.data.max_history)
    model = GEM(config.model, inputs)
    role = roles(model)
    dense = sum(p.numel() for name, p in model.named_parameters() if role[name] == "dense")
    assert spec.dense_params == dense
    assert spec.table_params == sum(t.rows * t.dim for t in inputs.tables)
    for layer in spec.layers:
        if layer.name != INPUTS:
            assert layer.params == sum(p.numel() for p in model.get_submodule(layer.name).parameters())
    assert [layer.name for layer in spec.layers] == [INPUTS, *model.units()]

    batch = sample(data, config.data.max_history)
    lengths = {s.name: batch.sequences[s.name].offsets.diff().tolist() for s in inputs.sources}
    assert spec.flops == pytest.approx(batch_flops(config.model, inputs, lengths) / batch.batch_size)


def test_tables_know_how_many_ids_a_sample_looks_up(described):
    config, data, spec = described
    rows = sample(data, config.data.max_history).sample_ids.numpy()
    assert len(np.unique(rows)) == len(rows) > 500
    events = data.log.history_lengths(rows, config.data.max_history).mean()
    tables = {t.name: t for t in spec.tables}
    assert tables["item"].pooling == pytest.approx(events + 1)  # the history's and the candidate's own
    assert tables["action"].pooling == pytest.approx(events)
    assert tables["segment"].pooling == 1
    assert [tables[n].pooled for n in ("item", "segment")] == [False, True]
    assert spec.input_bytes > 8 * events * 3  # three ids an event, int64


def test_the_description_survives_as_toml(described, tmp_path):
    spec = described[2]
    (tmp_path / "model.toml").write_text(as_toml(spec))
    assert ModelSpec.from_toml(tmp_path / "model.toml") == spec


@pytest.mark.parametrize(
    ("name", "length", "changes"),
    [
        ("tiny", 20, {}),
        ("small", 40, {}),
        ("small", 5, {}),
        ("small", 10, {"experts": ("wukong", "dcn", "attention"), "pma_seeds": 8}),
        ("small", 20, {"towers": (TowerConfig(source="events", width=24, layers=1),)}),
    ],
)
def test_the_estimate_of_kept_activations_is_near_what_autograd_keeps(name, length, changes):
    """Measured on the reference kernels, which also keep attention's scores: a little more than is estimated."""
    inputs = ModelInputs(
        tables=(Table(name="item", rows=100, dim=16), Table(name="segment", rows=9, dim=16)),
        sources=(Source(name="events", ids=(("item", "item"),), floats=(("price", 2),), max_len=length),),
        sparse=(("item", "item"), ("segment", "segment")),
        dense=7,
        tasks=("a", "b"),
    )
    config, count = preset(name, dropout=0.0, **changes), 8
    model = GEM(config, inputs)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(t):
        if t.is_floating_point() and t.untyped_storage().data_ptr() not in weights:
            kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(random_batch(inputs, count, lengths={"events": [length] * count}, single_valued=True))
    measured = sum(t.untyped_storage().nbytes() / 4 for t in kept.values()) / count
    estimated = sum(activations(config, inputs, {"events": float(length)}).values())
    assert 0.6 < estimated / measured < 1.25


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_plan_knows_the_copies_that_replayed_layers_keep(precision):
    """Counted after the layers have run sharded by FSDP2, with a CPU's stand-in for graphs."""
    inputs = example_inputs()
    config = preset("tiny", dropout=0.0, experts=("wukong", "dcn"), layers=2)
    batch = random_batch(inputs, 6, seed=1)
    spec = describe("tiny", config, inputs, batch, precision=precision, replayed=True)
    with start("cpu", 30) as runtime:
        model = GEM(config, inputs)
        parallel = parallelize(
            model, roles(model), ParallelConfig(), runtime, sparse=RowWiseAdagrad(lr=0.1), units=model.units()
        ).train()
        tables = [parallel.module.get_submodule(name) for name in find_tables(parallel.module)]
        shard_dense(parallel.module, tables, model.units(), make_mesh(runtime, ParallelConfig()), "fp32")
        replay = parallel.module.layers.replay = ShardedReplay(parallel.module.layers, recorder=CpuGraphs())
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            parallel(batch).sum().backward()
        held = [{t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in w.fixed} for w in replay.weights]
    counted = {f"layers.{i}": sum(buffers.values()) for i, buffers in enumerate(held)}
    assert {u.name: u.kept_bytes for u in spec.units if u.kept_bytes} == counted
    share = sum(counted.values()) / (
        4 * sum(u.params + u.experts * u.expert_params for u in spec.units if u.name in counted)
    )
    assert (0.5 if precision == "bf16" else 1) < share < (0.75 if precision == "bf16" else 1.1)
    layout = Layout(world=4, fsdp=2, table_shard=4)
    found = memory(spec, layout, place_tables(spec, 4), 8, Profile())
    plain = memory(
        describe("tiny", config, inputs, batch, precision=precision), layout, place_tables(spec, 4), 8, Profile()
    )
    assert found["peak"] - plain["peak"] == sum(counted.values()) == found["kept parameters"]


@pytest.mark.parametrize("experts", [("wukong", "wukong"), ("wukong", "dcn", "attention")])
def test_the_plan_knows_experts_and_may_spread_them(experts):
    """Of several kinds they count as equal ones; together they are what the model has and does."""
    inputs = example_inputs()
    config = preset("small", dropout=0.0, experts=experts)
    batch = random_batch(inputs, 6, seed=1)
    spec = describe("small", config, inputs, batch, precision="fp32")
    model = GEM(config, inputs, device="meta")
    of: dict[str, int] = dict.fromkeys(("dense", "expert", "table"), 0)
    for name, role in roles(model).items():
        of[role] += model.get_parameter(name).numel()
    assert spec.dense_params + spec.expert_params == of["dense"] + of["expert"]
    assert 0 <= of["expert"] - spec.expert_params < len(experts) * config.layers  # what does not divide
    assert {u.experts for u in spec.units} == {0, len(experts)}
    lengths = {s.name: batch.sequences[s.name].offsets.diff().tolist() for s in inputs.sources}
    assert spec.flops == pytest.approx(batch_flops(config, inputs, lengths) / 6)
    one = describe("small", dataclasses.replace(config, experts=experts[:1]), inputs, batch, precision="fp32")
    if len(set(experts)) == 1:
        assert [u.flops for u in spec.units] == pytest.approx([u.flops for u in one.units])
        assert [u.expert_flops for u in spec.units] == pytest.approx([u.expert_flops for u in one.units])
    assert not describe("small", preset("small"), inputs, batch, precision="fp32").expert_params
    layout = Layout(world=6, fsdp=6, ep=len(experts), table_shard=6)
    assert f"parallel.experts={len(experts)}" in settings(layout)


def test_the_trillion_parameter_preset_is_planned_for_4096_within_two_seconds():
    work = workload("gem-1t")
    few = {source: lengths[:4] for source, lengths in work.lengths().items()}
    batch = random_batch(work.inputs, 4, lengths=few, single_valued=True)
    spec = describe("gem-1t", preset("gem-1t"), work.inputs, batch, precision="bf16")
    assert spec.table_params + spec.expert_params > 1.2e12
    machine = topology("cluster-4096")
    began = time.process_time()
    found = plan(spec, machine, 256, strategies=("v1", "v3"))
    assert time.process_time() - began < 2
    assert found.layout.ep == 8  # experts for the cards of a host
    assert found.layout.parts > 1
    assert found.best.memory["peak"] <= found.budget
    dense = dataclasses.replace(
        spec,
        layers=tuple(
            dataclasses.replace(
                u,
                params=u.params + u.experts * u.expert_params,
                flops=u.flops + u.experts * u.expert_flops,
                **dict.fromkeys(("experts", "expert_params", "expert_flops", "expert_io_bytes"), 0),
            )
            for u in spec.layers
        ),
    )
    assert plan(dense, machine, 256, strategies=("v1", "v3")).best.step_s > 2 * found.best.step_s


def test_only_configurations_that_cards_replay_keep_copies(described):
    config, data, spec = described
    assert not any(u.kept_bytes for u in spec.units)  # fp32: a machine without cards
    on_cards = describe_model(config, data, precision="bf16")
    assert [u.name for u in on_cards.units if u.kept_bytes] == ["layers.0", "layers.1"]
    packed = describe_model(override(config, ["parallel.comm.payload=fp8"]), data, precision="bf16")
    assert packed == dataclasses.replace(on_cards, gather_bytes=1)
    changes = ("model.width=64", "lowprec.recipe=mxfp8_square", "lowprec.min_size=32")
    config_64 = override(config, changes)
    inputs = model_inputs(data.schema, config_64.inputs, max_history=config_64.data.max_history)
    rows = convert(GEM(config_64.model, inputs, device="meta"), lowprec_recipe(config_64)).rows
    squares = [row.shape for row in rows if row.converted and row.shape[0] % 32 == 0]
    wide = describe_model(config_64, data, precision="bf16")
    packed = describe_model(override(config_64, ["parallel.comm.payload=lowprec"]), data, precision="bf16")
    sent = [sum(spec.gather_bytes_of(u) * u.params for u in spec.units) for spec in (wide, packed)]
    assert sent[0] - sent[1] == pytest.approx(sum(3 * n * k - n // 32 * -(-k // 32) for n, k in squares))
    assert len(squares) > 10
    assert not any(u.kept_bytes for u in packed.units)  # graphs read whole weights
    for change in ("train.cuda_graphs=off", "lowprec.numerics_every=5", "parallel.memory.policy=full"):
        other = describe_model(override(config, [change]), data, precision="bf16")
        assert not any(u.kept_bytes for u in other.units), change


def test_large_models_are_described_without_their_memory(described):
    config, data, _ = described
    large = dataclasses.replace(config, model=preset("large"))
    large = override(large, ["inputs.table_dim=4096"])
    spec = describe_model(large, data, precision="bf16")
    assert spec.dense_params > 3e8
    assert sum(u.activation_bytes for u in spec.units) > 1e6


# The command.


@pytest.fixture
def recipe(cache, tmp_path):
    file = tmp_path / "tiny.toml"
    file.write_text(to_toml(tiny_config(cache)))
    return str(file)


def test_plan_prints_a_layout_and_how_to_run_it(recipe, tmp_path, capsys):
    host = tmp_path / "host.toml"
    host.write_text(HOST.format(memory=80_000_000_000))
    arguments = ["plan", "--config", recipe, "--topology", str(host), "--spec", str(tmp_path / "model.toml")]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "tiny on 4 x Card, 8 samples per device" in text
    (line,) = [line for line in text.splitlines() if line.startswith("run it")]
    launcher, more = line.split(" run --config ")
    assert launcher.endswith("  torchrun --standalone --nproc_per_node 4 -m gem_train")
    assert more.split()[0] == recipe
    config = override(RunConfig(), [a for a in more.split()[1:] if a != "--set"])
    assert config.parallel.shard_group in (1, 2, 4)
    assert config.optim.accumulate == 1  # all eight samples leave room
    assert config.parallel.table_strategy != "v2"  # which computes something else than one process
    assert ModelSpec.from_toml(tmp_path / "model.toml").name == "tiny"

    assert main([*arguments, "--gpus", "2", "--batch", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["world"], found["batch"]) == (2, 64)


def test_the_command_of_a_plan_starts_every_device_with_its_samples(recipe, tmp_path, capsys):
    hosts = tmp_path / "hosts.toml"
    more = '[[tiers]]\nname = "racks"\nsize = 8\nbandwidth_gbps = 50.0\nlatency_us = 8.0\n'
    hosts.write_text(HOST.format(memory=80_000_000_000) + more)
    change = ["--set", "optim.accumulate=1", "--set", "optim.lr=0.1"]
    assert main(["plan", "--config", recipe, "--topology", str(hosts), "--batch", "64", *change]) == 0
    run = f"torchrun --nnodes 2 --nproc_per_node 4 -m gem_train run --config {recipe} --set optim.lr=0.1 "
    text = capsys.readouterr().out
    assert run + "--set data.batch_size=512 " in text
    assert text.count("optim.accumulate") == 1
    assert main(["plan", "--config", recipe, "--topology", str(hosts), "--gpus", "1", "--batch", "32"]) == 0
    assert f"run it     gem-train run --config {recipe} --set optim.accumulate=1 " in capsys.readouterr().out


def test_a_batch_that_leaves_no_room_comes_in_parts(recipe, tmp_path, capsys):
    """As few as fit, unless the recipe, the command or what samples share says how many."""
    host = tmp_path / "host.toml"
    host.write_text(HOST.format(memory=8_000_000_000))
    arguments = ["plan", "--config", recipe, "--topology", str(host), "--batch", "4096"]

    def planned(*more: str) -> RunConfig:
        assert main([*arguments, *more]) == 0
        text = capsys.readouterr().out
        assert "  - parts " in text
        (line,) = [line for line in text.splitlines() if line.startswith("run it")]
        words = line.split()
        return override(RunConfig(), [word for word in words[words.index("--set") :] if word != "--set"])

    assert planned().optim.accumulate == 1
    for more in (["--parts", "8"], ["--set", "optim.accumulate=8"]):
        config = planned(*more)
        assert (config.optim.accumulate, config.parallel.reduce_every_part) == (8, False)
    arguments[-1] = str(1 << 20)
    assert planned().optim.accumulate > 1
    for more in (["--parts", "1"], ["--set", "data.order=time", "--set", "data.share_requests=true"]):
        assert main([*arguments, *more]) == 1
        assert "more parts than 1 leave more room" in capsys.readouterr().err


def test_copies_for_graphs_that_leave_no_room_are_done_without(recipe, tmp_path, capsys):
    host = tmp_path / "host.toml"
    host.write_text(HOST.format(memory=13_000_000_000))
    arguments = ["plan", "--config", recipe, "--topology", str(host), "--batch", "1"]
    arguments += [f"--set={s}" for s in ("model.width=2048", "model.heads=16", "model.layers=6")]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "note: copies of parameters for CUDA graphs leave no room: planned without graphs" in text
    assert text.rstrip().endswith("--set train.cuda_graphs=off")
    assert main([*arguments, "--set", "train.cuda_graphs=off"]) == 0
    assert "leave no room" not in capsys.readouterr().out


def test_nothing_fits_is_exit_code_1(recipe, tmp_path, capsys):
    host = tmp_path / "host.toml"
    host.write_text(HOST.format(memory=1_000_000_000))
    assert main(["plan", "--config", recipe, "--topology", str(host)]) == 1
    said = capsys.readouterr()
    assert "no layout of tiny fits on 4 x Card" in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--topology", "h300-host"], "no example of that name: cluster-4096, h200-host"),
        (["--topology", "h200-host", "--gpus", "9", "--batch", "1"], "world must be in 1..8"),
        (["--topology", "h200-host", "--gpus", "3"], "3 devices can't share evenly"),
        (["--topology", "h200-host", "--profile", "absent.toml"], "absent.toml"),
        (["--set", "inputs.exclude=usr"], "did you mean 'user'"),
    ],
)
def test_mistakes_in_a_plan_are_one_line(recipe, arguments, says, capsys):
    assert main(["plan", "--config", recipe, *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith("gem-train: error: ")


def test_this_machine_is_planned_for_where_no_other_is_named(recipe, capsys):
    assert main(["plan", "--config", recipe, "--gpus", "1"]) == 0
    assert "tiny on 1 x" in capsys.readouterr().out
