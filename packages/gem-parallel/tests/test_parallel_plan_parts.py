"""Steps of several parts in the plan: counted by hand, chosen where there is no room for one, simulated one by one."""

from __future__ import annotations

import random
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest
from gem_parallel import LayerSpec, ModelSpec, NothingFitsError, Profile, TableSpec, Tier, Topology, plan, predict
from gem_parallel.planning.__main__ import main
from gem_parallel.planning.cost import Links
from gem_parallel.planning.layout import Layout, memory, place_tables
from gem_parallel.planning.planner import _evaluate, _layouts, hidden_seconds
from gem_parallel.planning.simulator import SHOWN, Disturbance, simulate
from gem_parallel.planning.step import Step
from gem_parallel.planning.timeline import COMPUTE, run

EXACT = Profile(
    link_efficiency=1.0,
    message_us=0.0,
    slowdown=0.0,
    unit_us=0.0,
    lookup_efficiency=1.0,
    memory_efficiency=1.0,
    reserve_bytes=0,
    usable=1.0,
)
CALM = Disturbance(sigma=0.0, stragglers=0.0, jitter=0.0)
PARAMS = 10_000_000


def cluster(hosts=2, gpus=4, memory=100 << 30, latency=0.0):
    tiers = (
        Tier(name="nvlink", size=gpus, bandwidth_gbps=400.0, latency_us=latency),
        Tier(name="network", size=hosts * gpus, bandwidth_gbps=50.0, latency_us=2 * latency),
    )
    return Topology(device="test", device_memory=memory, memory_gbps=4000.0, host_memory=1 << 40, tiers=tiers)


def small(**changes):
    layer = LayerSpec(name="layer", flops=1e9, params=PARAMS, activation_bytes=1e6, count=4)
    tables = (
        TableSpec(name="bags", rows=100_000, dim=64, pooling=10.0, count=8),
        TableSpec(name="sequence", rows=100_000, dim=64, pooling=50.0, pooled=False),
    )
    return replace(ModelSpec(name="small", layers=(layer,), tables=tables, input_bytes=1000.0), **changes)


def sent(model, layout, batch, topology):
    found: dict[str, float] = {}
    for op in Step(model, layout, place_tables(model, layout.table_shard), batch, topology, EXACT).ops(99):
        if op.stream != COMPUTE:
            found[op.kind] = found.get(op.kind, 0.0) + sum(op.sent)
    return found


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("every", [False, True])
def test_what_travels_in_every_part_and_what_once(parts, every):
    model, batch = small(), 64
    layout = Layout(world=8, fsdp=4, table_shard=4, table_copies=2, strategy="v3", parts=parts, reduce_every_part=every)
    dense, reductions = 4 * PARAMS, parts if every else 1
    shard = model.table_params * 4 / 4
    vectors = 4 * batch * 64 * (8 * place_tables(model, 4).row_split + 50)
    assert sent(model, layout, batch, cluster()) == pytest.approx(
        {
            "fsdp all-gather": parts * 2 * 2 * dense * 3 / 4,  # both passes, 2 bytes
            "fsdp reduce-scatter": reductions * 4 * dense * 3 / 4,
            "replica all-reduce": reductions * 2 * 4 * dense / 4 / 2,
            "table all-gather": parts * shard / 2,
            "table reduce-scatter": parts * shard / 2,
            "id all-to-all": 8 * batch * (8 * 10 + 50) * 3 / 4,  # the whole batch's, once
            "embedding all-to-all": 2 * vectors * 3 / 4 * place_tables(model, 4).imbalance,
            **({"gradient sums": 0.0} if every and parts > 1 else {}),  # beside compute, without a link
        },
        rel=0.05,  # row_split of bags and sequences is one number
    )
    kept = replace(model.layers[0], kept_bytes=2e7)  # replayed: gathered once a part
    gathered = sent(small(layers=(kept,)), layout, batch, cluster())["fsdp all-gather"]
    assert gathered == pytest.approx(parts * 2 * dense * 3 / 4)


def test_memory_is_that_of_one_part_and_of_the_sums():
    experts = {"experts": 4, "expert_params": 1_000_000, "expert_flops": 1e6, "expert_io_bytes": 100.0}
    model = small(layers=(replace(small().layers[0], **experts),))
    one = Layout(world=8, fsdp=4, ep=2, table_shard=8)
    load = place_tables(model, 8)
    alone = memory(model, one, load, 64, EXACT)
    parts = memory(model, replace(one, parts=4), load, 256, EXACT)
    every = memory(model, replace(one, parts=4, reduce_every_part=True), load, 256, EXACT)
    assert every == alone  # shards' gradients are in the state
    # 3/4 of a dense parameter's gradients are others', half of the 8 experts' that a rank has
    sums = 4 * (4 * PARAMS * 3 / 4 + 4 * 2 * 1_000_000 / 2)
    assert parts.pop("gradient sums") == sums
    assert parts.pop("peak") == alone.pop("peak") + sums
    assert parts == alone
    uneven = memory(model, replace(one, parts=5), load, 256, EXACT)
    assert uneven["activations"] == 52 / 64 * alone["activations"]  # the largest of 256 in five


def test_one_device_counts_its_parts_and_the_sums():
    model, topology = small(tables=()), cluster(1, 1)
    found = plan(model, topology, 64, parts=4, world=1, profile=EXACT).best
    flops, adam = 3 * 64 * 4 * 1e9 / 350e12, 2 * 16 * 4 * PARAMS / 4e12
    sums = 3 * 3 * 4 * 4 * PARAMS / 4e12  # three more parts read, read and write four bytes
    assert found.step_s == pytest.approx(flops + adam + sums)
    assert found.layout.parts == 4


def test_a_part_begins_when_the_one_before_has_ended():
    """V3 by hand: the next part's gathers of tables wait for the owners' update, the lookup for ids and weights."""
    model = small()
    layout = Layout(world=8, fsdp=8, table_shard=4, table_copies=2, strategy="v3", parts=2)
    ops = Step(model, layout, place_tables(model, 4), 64, cluster(latency=5.0), EXACT).ops()
    kinds = [(op.part, op.kind) for op in ops]
    gather, lookup = kinds.index((1, "table all-gather")), kinds.index((1, "lookup"))
    assert {gather, kinds.index((1, "id all-to-all"))} <= set(ops[lookup].after)
    owners = max(i for i, kind in enumerate(kinds) if kind == (0, "table update"))
    assert owners in ops[gather].after
    assert ops[owners].after == (kinds.index((0, "table reduce-scatter")),)
    first = kinds.index((1, "fsdp all-gather"))
    assert owners in ops[first].after
    assert [part for part, kind in kinds if kind == "optimizer"] == [1]
    assert {part for part, kind in kinds if kind == "fsdp reduce-scatter"} == {1}


@pytest.mark.parametrize("strategy", ["v1", "v2", "v3"])
@pytest.mark.parametrize("every", [False, True])
def test_many_parts_are_three_and_more_of_the_middle_one(strategy, every):
    model, topology, profile = small(), cluster(latency=5.0), Profile(reserve_bytes=0)
    copies = 1 if strategy == "v1" else 2
    tables = {"table_shard": 8 // copies, "table_copies": copies, "strategy": strategy}
    layout = Layout(world=8, fsdp=4, **tables, parts=9, reduce_every_part=every)
    ops = Step(model, layout, place_tables(model, layout.table_shard), 288, topology, profile).ops(9)
    assert {op.part for op in ops} == set(range(9))
    clock = run(ops, 9)
    found = predict(model, topology, layout, 288, profile=profile)
    assert found.compute_s == pytest.approx(clock.compute)
    assert found.step_s == pytest.approx(clock.end + hidden_seconds(ops, clock.waits, 9) * profile.slowdown)
    assert sum(found.sent.values()) == pytest.approx(sum(sum(op.sent) for op in ops))
    assert found.step_s == pytest.approx(found.compute_s + sum(found.waits_s.values()))


def test_as_few_parts_as_leave_room():
    model, profile = small(layers=(replace(small().layers[0], params=100_000),), tables=()), EXACT
    topology = cluster(memory=int(4e6 * 300))  # four layers keep 1 MB of a sample each
    roomy = plan(model, topology, 200, profile=profile)
    assert roomy.layout.parts == 1
    assert roomy.reasons[0] == "parts 1: all 200 samples at once leave room"
    tight = plan(model, topology, 1000, profile=profile)
    assert tight.layout.parts == 4
    assert tight.best.memory["peak"] <= tight.budget
    assert tight.best.memory["activations"] == 4e6 * 250
    halved = predict(model, topology, replace(tight.layout, parts=2), 1000, profile=profile).memory["peak"]
    assert halved > tight.budget
    text = str(tight)
    assert "1000 samples per device in 4 parts of 250" in text
    assert f"parts 4 of 250 samples: 2 would need {halved / 2**30:.1f} GiB of {tight.budget / 2**30:.1f}" in text
    assert "gradients are reduced once a step" in text
    assert tight.samples_per_s == pytest.approx(8 * 1000 / tight.best.step_s)

    asked = plan(model, topology, 1000, parts=8, profile=profile)
    assert asked.layout.parts == 8
    assert asked.best.step_s > tight.best.step_s
    assert asked.reasons[0].startswith("parts 8 of 125 samples: as asked")
    with pytest.raises(NothingFitsError, match=r"most goes to activations .* more parts than 2 leave more room"):
        plan(model, topology, 1000, parts=2, profile=profile)
    for wrong in (0, 1001):
        with pytest.raises(ValueError, match=rf"parts must be in 1\.\.1000 .*, got {wrong}"):
            plan(model, topology, 1000, parts=wrong, profile=profile)
    with pytest.raises(ValueError, match="parts must be >= 1, got 0"):
        replace(tight.layout, parts=0)


def test_gradients_are_reduced_in_every_part_where_whole_ones_leave_no_room():
    layer = replace(small().layers[0], params=500_000_000, activation_bytes=1e8)
    model = small(layers=(layer,), tables=())
    layout = Layout(world=8, fsdp=8, table_shard=8, parts=64, reduce_every_part=True)
    least = memory(model, layout, place_tables(model, 8), 64, EXACT)["peak"]
    tight = plan(model, cluster(memory=int(least + 1e6)), 64, profile=EXACT)
    assert tight.layout == layout
    sums = 4 * 4 * 500_000_000 * 7 / 8
    said = f"gradients are reduced in each, since sums of whole ones would need {(least + sums) / 2**30:.1f} GiB"
    assert said in str(tight)
    assert "64 parts (each reduced)" in str(tight.layout)
    # with room for sums, or for 16 more samples, both are tried
    either = plan(model, cluster(memory=int(least + sums + 1e6)), 64, profile=EXACT)
    ways = [replace(layout, reduce_every_part=False), replace(layout, parts=4)]
    assert either.best.step_s == min(predict(model, either.topology, x, 64, profile=EXACT).step_s for x in ways)
    with pytest.raises(NothingFitsError, match=r"the closest .*fsdp 8.*, 64 parts \(each reduced\)"):
        plan(model, cluster(memory=int(least - 1e6)), 64, profile=EXACT)


@pytest.mark.parametrize("seed", range(4))
def test_the_search_finds_the_best_layout_in_little_memory(seed):
    """Room couples the axes: copies of tables take that of a batch, which then comes in more parts."""
    rng = random.Random(seed)
    layer = LayerSpec(
        name="x", flops=10 ** rng.uniform(8, 10), params=int(10 ** rng.uniform(6, 8.5)), count=2,
        activation_bytes=10 ** rng.uniform(4, 6.5), experts=4, expert_params=20_000_000, expert_flops=1e8,
        expert_io_bytes=1e4,
    )  # fmt: skip
    tables = (
        TableSpec(name="big", rows=int(10 ** rng.uniform(4, 7)), dim=64, pooling=10.0),
        TableSpec(name="sequence", rows=10_000, dim=64, pooling=10 ** rng.uniform(0, 2.5), pooled=False),
    )
    model, batch = ModelSpec(name="m", layers=(layer,), tables=tables), 64
    profile, everything = Profile(reserve_bytes=0), ("v1", "v2", "v3")
    topology = cluster(hosts=8)
    tried = [(x, place_tables(model, x.table_shard)) for x in _layouts(model, topology, 32, everything, 10)]
    needs = [
        sorted(memory(model, replace(x, **parts), load, batch, profile)["peak"] for x, load in tried)
        for parts in ({"parts": batch, "reduce_every_part": True}, {"parts": 1})
    ]
    least, much = needs[0][0], needs[1][len(tried) // 2]  # what one layout needs at least, and half of them at once
    room = least * 1.01 + rng.uniform(0.0, 0.5) * max(0.0, much - least)
    topology = cluster(hosts=8, memory=int(room / profile.usable))
    result = plan(model, topology, batch, profile=profile)
    links = Links(topology, profile)
    best = min(
        _evaluate(model, variant, load, batch, topology, profile, links).step_s
        for x, load in tried
        for n in (1, 2, 4, 8, 16, 32, 64)
        for variant in (replace(x, parts=n), replace(x, parts=n, reduce_every_part=n > 1))
        if memory(model, variant, load, batch, profile)["peak"] <= result.budget
    )
    assert result.best.step_s <= best * 1.01


def test_a_trillion_parameters_in_parts_within_two_seconds():
    import time

    examples = files("gem_parallel") / "examples"
    model = ModelSpec.from_toml(examples / "model-trillion.toml")
    topology = Topology.from_toml(examples / "cluster-4096.toml")
    began = time.process_time()
    result = plan(model, topology, 16_384)
    assert time.process_time() - began < 2
    assert result.layout.parts > 1
    assert result.best.memory["peak"] <= result.budget


@pytest.mark.parametrize("parts", [2, SHOWN + 5])
def test_without_disturbance_the_simulation_of_parts_is_the_plan(parts):
    result = plan(small(), cluster(latency=5.0), 16 * parts, parts=parts, strategies=("v3",))
    calm = simulate(result, CALM)
    assert calm.step_s == pytest.approx(result.best.step_s)
    assert calm.imbalance == 1
    assert calm.step_s == pytest.approx(calm.ideal_s + sum(calm.lost_s.values()))


def test_ranks_meet_in_every_part():
    """Only compute, which meets once a part in the reductions: the step is the sum of the parts' heaviest ranks."""
    layer = LayerSpec(name="x", flops=1e9, params=1000, activation_bytes=1.0)
    model = ModelSpec(name="m", layers=(layer,), state_bytes=0)
    result = plan(model, cluster(), 60, parts=3, profile=EXACT)
    wild = Disturbance(sigma=1.0, stragglers=0.0, jitter=0.0)
    work = wild.samples(8 * 3, 20).reshape(3, 8)
    found = simulate(replace(result, best=replace(result.best, layout=replace(result.layout, fsdp=8, ep=1))), wild)
    one = 20 * 1e9 / 350e12  # seconds of a part's forward
    # ranks meet before each pass: the first gathers of both, and the reduction at the end
    assert found.imbalance == pytest.approx(work.max(1).mean() / work.mean())
    assert found.step_s == pytest.approx(one * 3 * (work.max(1)).sum(), rel=0.01)
    whole = simulate(plan(model, cluster(), 60, profile=EXACT), wild)
    assert whole.imbalance < found.imbalance  # sixty samples are more alike than twenty
    assert np.isfinite(whole.step_s)


def test_the_command_takes_parts(capsys):
    model, many = (
        str(files("gem_parallel") / "examples" / f"{name}.toml") for name in ("model-scaling", "cluster-4096")
    )
    assert main([model, many, "--batch", "1024", "--world", "64", "--parts", "4"]) == 0
    assert "1024 samples per device in 4 parts of 256" in capsys.readouterr().out
    assert main([model, many, "--batch", "8192", "--world", "64"]) == 0
    assert "8192 samples per device in 4 parts of 2048" in capsys.readouterr().out
    assert main([model, many, "--batch", "8192", "--world", "64", "--parts", "1"]) == 1
    assert main([model, many, "--batch", "8", "--world", "64", "--parts", "9"]) == 2
