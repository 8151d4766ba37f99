"""The planner's arithmetic against counting by hand, and its promises: fast, honest about memory, reasons."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import time
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest
from gem_parallel import LayerSpec, ModelSpec, NothingFitsError, Profile, TableSpec, Tier, Topology, plan, predict
from gem_parallel.planning.__main__ import main
from gem_parallel.planning.cost import Group, Links
from gem_parallel.planning.layout import Layout, memory, place_tables
from gem_parallel.planning.planner import _evaluate, _layouts
from gem_parallel.planning.simulator import Disturbance, scaling_curve, simulate
from gem_parallel.planning.step import Step
from gem_parallel.planning.timeline import COMPUTE, Op, run

EXAMPLES = files("gem_parallel") / "examples"
EXACT = Profile(
    link_efficiency=1.0, message_us=0.0, slowdown=0.0, unit_us=0.0, lookup_efficiency=1.0, memory_efficiency=1.0
)


def cluster(hosts=8, gpus=4, zone=None, memory=100 << 30, **options):
    tiers = [Tier(name="nvlink", size=gpus, bandwidth_gbps=400.0, latency_us=0.0)]
    if hosts > 1:
        tiers.append(Tier(name="zone", size=hosts * gpus, bandwidth_gbps=50.0, latency_us=0.0, **options))
    if zone:
        tiers.append(Tier(name="zones", size=zone, bandwidth_gbps=50.0, latency_us=0.0, oversubscription=4.0))
    return Topology(device="test", device_memory=memory, memory_gbps=4000.0, host_memory=1 << 40, tiers=tuple(tiers))


def small(**changes):
    layer = LayerSpec(name="layer", flops=1e9, params=10_000_000, activation_bytes=100_000, count=4)
    tables = (
        TableSpec(name="big", rows=1_000_000, dim=64, pooling=10.0),
        TableSpec(name="sequence", rows=10_000, dim=64, pooling=50.0, pooled=False),
        TableSpec(name="small", rows=1000, dim=64, count=20),
    )
    return replace(ModelSpec(name="small", layers=(layer,), tables=tables), **changes)


def tier_between(topology, first, second):
    return next(i for i, tier in enumerate(topology.tiers) if first // tier.size == second // tier.size)


@pytest.mark.parametrize("group", [Group(8, 1), Group(4, 4), Group(2, 32), Group(8, 8), Group(64, 1), Group(3, 1)])
def test_an_all_to_all_sends_what_counting_pairs_gives(group):
    topology = cluster(zone=64)
    ranks = [group.stride * i for i in range(group.size)]
    mean = np.zeros(3)
    for first, second in itertools.permutations(ranks, 2):
        mean[tier_between(topology, first, second)] += 1e9 / group.size / group.size
    if group.size == 3:  # does not straddle a host, so that every rank sees the same
        assert {first // 4 for first in ranks} == {0}
    cost = Links(topology, EXACT).all_to_all(group, 1e9)
    np.testing.assert_allclose(cost.sent, mean)
    seconds = max(mean[0] / 400e9, mean[1] / 50e9, mean[2] / 12.5e9)
    assert cost.seconds == pytest.approx(seconds)


@pytest.mark.parametrize("group", [Group(8, 1), Group(4, 4), Group(2, 32), Group(8, 8), Group(64, 1)])
def test_an_all_gather_brings_every_block_once(group):
    """Blocks are passed on host by host: first between equal places of different domains, then inside."""
    topology = cluster(zone=64)
    ranks = [group.stride * i for i in range(group.size)]
    held = {rank: {rank} for rank in ranks}
    received = np.zeros((len(ranks), 3))
    for tier in (2, 1, 0):
        before = {rank: set(blocks) for rank, blocks in held.items()}
        inner = 1 if tier == 0 else topology.tiers[tier - 1].size
        for i, rank in enumerate(ranks):
            for peer in ranks:
                same_domain = rank // topology.tiers[tier].size == peer // topology.tiers[tier].size
                if peer != rank and same_domain and (rank - peer) % inner == 0 and rank // inner != peer // inner:
                    received[i, tier] += len(before[peer] - held[rank])
                    held[rank] |= before[peer]
    assert all(blocks == set(ranks) for blocks in held.values())
    cost = Links(topology, EXACT).all_gather(group, 8e8)
    np.testing.assert_allclose(cost.sent, received.mean(0) * 8e8 / group.size)
    assert sum(cost.sent) == pytest.approx(8e8 * (1 - 1 / group.size))


def test_the_clock():
    ops = [
        Op("gather", "link", 2.0),
        Op("first", COMPUTE, 3.0, (0,)),
        Op("gather", "link", 4.0),  # ends at 6, hides 3 of its seconds
        Op("second", COMPUTE, 1.0, (2,)),
        Op("reduce", "link", 5.0, (1,)),  # in order: begins at 6, ends at 11
        Op("third", COMPUTE, 1.0, (3,)),
    ]
    clock = run(ops)
    assert clock.end == 11
    assert clock.compute == 5
    assert clock.waits == {"gather": 2 + 1, "reduce": 3}
    assert clock.end == clock.compute + sum(clock.waits.values())


def test_a_collective_waits_for_its_group_only():
    ops = [Op("work", COMPUTE, 1.0, load="samples"), Op("sum", "link", 0.5, (0,), group=Group(2, 1))]
    factor = np.array([1.0, 3.0, 1.0, 1.0])

    def meet(group, start):
        pairs = np.broadcast_to(start, (4,)).reshape(2, 2)
        return np.repeat(pairs.max(1), 2)

    clock = run(ops, maximum=np.maximum, scale=lambda op: op.seconds * (factor if op.load else 1.0), meet=meet)
    assert clock.end.tolist() == [3.5, 3.5, 1.5, 1.5]


def test_tables_are_spread_evenly():
    model = small()
    load = place_tables(model, 8)
    assert load.splits == 2  # one table has most of the rows, another most of the lookups
    assert 1.0 <= load.imbalance < 1.3
    total = sum(t.rows * (t.dim * 4 + 4) * t.count for t in model.tables)
    assert total / 8 <= load.bytes_max < 1.3 * total / 8
    one = place_tables(model, 1)
    assert (one.imbalance, one.row_split, one.splits) == (1.0, 1.0, 0)
    assert one.bytes_max == pytest.approx(total)
    assert place_tables(model, 8) == load


def test_more_ranks_than_tables_can_fill_are_imbalanced():
    """Why 1-D table parallelism stops: tables of a few rows cannot be cut among many ranks."""
    tables = (TableSpec(name="hot", rows=2, dim=64, pooling=100.0), TableSpec(name="cold", rows=1000, dim=64))
    model = small(tables=tables)
    imbalance = [place_tables(model, ranks).imbalance for ranks in (1, 4, 16, 64)]
    assert imbalance[0] == 1.0
    assert imbalance[-1] > 10


def test_memory_by_hand():
    model = small()
    profile = replace(EXACT, reserve_bytes=1000)
    load = place_tables(model, 4)
    layout = Layout(world=16, fsdp=8, table_shard=4, table_copies=4, strategy="v3")
    items = memory(model, layout, load, 32, profile)
    assert items["dense state"] == 16 * 40_000_000 / 8
    assert items["tables and moments"] == load.bytes_max / 4
    assert items["table working copy"] == load.bytes_max
    assert items["activations"] == 4 * 100_000 * 32
    assert items["gathered units"] == 10_000_000 * (2 + 2 + 4)
    assert items["embeddings"] == 2 * 4 * 32 * 64 * (1 + 50 + 20)
    fixed = items["dense state"] + items["tables and moments"] + items["embeddings"] + 1000
    assert items["peak"] == fixed + max(items["activations"] + items["gathered units"], load.bytes_max)
    packed = replace(model, layers=tuple(replace(u, gather_bytes=1.5) for u in model.layers))
    assert memory(packed, layout, load, 32, profile)["gathered units"] == 10_000_000 * (1.5 + 1.5 + 4)
    sent = [
        sum(sum(op.sent) for op in Step(m, layout, load, 32, cluster(4), profile).ops() if "fsdp all" in op.kind)
        for m in (model, packed)
    ]
    assert sent[1] == pytest.approx(0.75 * sent[0])
    copies = memory(model, replace(layout, strategy="v2"), load, 32, profile)
    assert copies["tables and moments"] == load.bytes_max
    assert copies["table working copy"] == 0


def test_replayed_layers_keep_a_copy_and_gather_once():
    (layer,) = small().layers
    unit = replace(layer, kept_bytes=2e7)  # one kind of unit, not all
    again, once = (small(layers=(replace(layer, name="head", count=1), kind)) for kind in (layer, unit))
    layout, topology = Layout(world=8, fsdp=8, table_shard=8), cluster(2)
    gathers = [
        sum(op.kind == "fsdp all-gather" for op in Step(m, layout, place_tables(m, 8), 32, topology, EXACT).ops())
        for m in (again, once)
    ]
    assert gathers == [10, 10 - unit.count]
    items = [memory(model, layout, place_tables(model, 8), 32, EXACT) for model in (again, once)]
    assert items[1]["kept parameters"] == 2e7 * unit.count
    assert items[1]["peak"] - items[0]["peak"] == 2e7 * unit.count
    whole = memory(once, replace(layout, fsdp=1), place_tables(once, 8), 32, EXACT)  # replicas are replayed as well
    assert whole["kept parameters"] == 2e7 * unit.count
    for other in (Layout(world=1, fsdp=1, table_shard=1), replace(layout, ep=2)):
        assert "kept parameters" not in memory(once, other, place_tables(once, 1), 32, EXACT)


def test_one_device_computes_and_nothing_else():
    model = small(tables=())
    result = plan(model, cluster(hosts=1, gpus=1), 16, profile=EXACT)
    flops = 3 * 16 * 4 * 1e9
    adam = 2 * 16 * 40_000_000 / 4e12
    assert result.best.step_s == pytest.approx(flops / 350e12 + adam)
    assert not any(result.best.waits_s.values())
    assert result.runner_up is None


def test_the_search_finds_the_exhaustive_optimum():
    model = small(
        layers=(
            LayerSpec(
                name="x",
                flops=1e9,
                params=80_000_000,
                activation_bytes=1e5,
                count=3,
                experts=4,
                expert_params=20_000_000,
                expert_flops=1e8,
                expert_io_bytes=10_000,
            ),
        )
    )
    topology, profile = cluster(hosts=8, zone=64), Profile(reserve_bytes=0)
    result = plan(model, topology, 64, profile=profile)
    links = Links(topology, profile)
    best = min(
        _evaluate(model, x, place_tables(model, x.table_shard), 64, topology, profile, links).step_s
        for x in _layouts(model, topology, 64, ("v1", "v2", "v3"), 10)
    )
    assert result.fitting == result.considered > 64
    assert result.best.step_s <= best * 1.01
    assert result.runner_up is not None
    assert result.runner_up.step_s >= result.best.step_s


def test_a_step_is_compute_and_waits():
    result = plan(small(), cluster(), 64)
    best = result.best
    assert best.step_s == pytest.approx(best.compute_s + sum(best.waits_s.values()))
    assert any("fsdp" in reason for reason in result.reasons)
    assert any("runner-up" in reason for reason in result.reasons)


def test_a_layout_that_was_chosen_already():
    best = plan(small(), cluster(), 64).best
    assert predict(small(), cluster(), best.layout, 64) == best


def test_a_trillion_parameters_on_4096_gpus_in_two_seconds():
    model = ModelSpec.from_toml(EXAMPLES / "model-trillion.toml")
    topology = Topology.from_toml(EXAMPLES / "cluster-4096.toml")
    assert model.table_params > 0.99e12
    began = time.process_time()
    result = plan(model, topology, 1024)
    assert time.process_time() - began < 2
    assert result.best.memory["peak"] <= result.budget
    assert result.best.memory["tables and moments"] * 4096 >= model.table_params * 4
    text = str(result)
    for word in ("GiB", "why", "runner-up", "waits for", "tables v"):
        assert word in text


def test_nothing_fits():
    model = ModelSpec.from_toml(EXAMPLES / "model-trillion.toml")
    with pytest.raises(NothingFitsError, match=r"most goes to tables and moments .* GiB") as error:
        plan(model, Topology.from_toml(EXAMPLES / "h200-host.toml"), 64)
    assert error.value.closest.layout.table_shard == 8
    with pytest.raises(ValueError, match=r"world must be in 1\.\.8"):
        plan(model, Topology.from_toml(EXAMPLES / "h200-host.toml"), 64, world=16)
    with pytest.raises(ValueError, match="strategies"):
        plan(model, cluster(), 64, strategies=("v4",))


def test_exit_status(tmp_path, capsys):
    model, host, many = (str(EXAMPLES / f"{name}.toml") for name in ("model-trillion", "h200-host", "cluster-4096"))
    assert main([model, many, "--batch", "1024", "--strategies", "v1", "v3", "--curve", "8", "4096"]) == 0
    printed = capsys.readouterr().out
    assert "scaling ratio" in printed
    assert "tables v2: " not in printed
    assert "       8 no layout of trillion fits on 8 x H200" in printed
    assert any(line.split()[:1] == ["4096"] for line in printed.splitlines())
    assert main([model, host, "--batch", "64"]) == 1
    assert "nothing fits" in capsys.readouterr().err
    assert main([model, str(tmp_path / "absent.toml"), "--batch", "64"]) == 2
    (tmp_path / "m.toml").write_text('name = "x"\n[[layers]]\nname = "a"\nflop = 1.0\n')
    assert main([str(tmp_path / "m.toml"), host, "--batch", "64"]) == 2
    assert "m.toml: not a model: unknown key 'flop'; did you mean 'flops'? (LayerSpec has: " in capsys.readouterr().err
    assert main([model, str(tmp_path / "m.toml"), "--batch", "64"]) == 2
    assert "m.toml: not a topology: unknown key 'name'" in capsys.readouterr().err
    (tmp_path / "t.toml").write_text('device = "x"\n[[tiers]]\nname = "a"\nsize = 2\n')
    assert main([model, str(tmp_path / "t.toml"), "--batch", "64"]) == 2
    assert "t.toml: not a topology: Tier needs bandwidth_gbps" in capsys.readouterr().err


def test_planning_needs_no_torch():
    code = (
        "import sys, gem_parallel.planning.planner, gem_parallel.planning.simulator; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- the simulator


def test_without_disturbance_the_simulation_is_the_plan():
    result = plan(small(), cluster(), 64, strategies=("v3",))
    calm = simulate(result, Disturbance(sigma=0.0, stragglers=0.0, jitter=0.0))
    assert calm.step_s == pytest.approx(result.best.step_s, rel=1e-12)
    assert calm.lost_s["imbalance"] == calm.lost_s["slow ranks"] == pytest.approx(0.0, abs=1e-12)


def test_losses_add_up_and_balance_helps():
    result = plan(small(), cluster(), 64)
    wild = simulate(result, Disturbance(stragglers=0.1, slow=0.5))
    assert wild.step_s == pytest.approx(wild.ideal_s + sum(wild.lost_s.values()))
    assert all(value >= 0 for value in wild.lost_s.values())
    assert wild.lost_s["slow ranks"] > 0.2 * wild.ideal_s
    balanced = simulate(result, Disturbance(balanced=0.9, stragglers=0.1, slow=0.5))
    assert balanced.lost_s["imbalance"] < 0.2 * wild.lost_s["imbalance"]
    assert balanced.imbalance - 1 == pytest.approx(0.1 * (wild.imbalance - 1))
    assert "lost to imbalance" in str(wild)


def test_work_is_the_mean_of_log_normal_samples():
    work = Disturbance(sigma=1.0).samples(2000, 256)
    assert work.mean() == pytest.approx(1.0, abs=1e-12)
    assert work.std() == pytest.approx(np.sqrt((np.e - 1) / 256), rel=0.1)
    with pytest.raises(ValueError, match="balanced"):
        Disturbance(balanced=2.0)


def test_1d_tables_break_where_sharded_copies_go_on():
    """More ranks in one all-to-all cost more messages and more imbalance; V3 keeps its group small."""
    topology = Topology.from_toml(EXAMPLES / "cluster-4096.toml")
    tables = (
        TableSpec(name="a", rows=4_000_000, dim=128, pooling=200.0, count=4),
        TableSpec(name="b", rows=100_000, dim=128, pooling=2.0, count=200),
    )
    layer = LayerSpec(name="l", flops=2e9, params=20_000_000, activation_bytes=1e6, count=6)
    model = ModelSpec(name="m", layers=(layer,), tables=tables)
    calm = Disturbance(sigma=0.0, stragglers=0.0, jitter=0.0)
    worlds = (8, 512, 4096)
    first = scaling_curve(model, topology, 512, worlds, strategies=("v1",), disturbance=calm)
    third = scaling_curve(model, topology, 512, worlds, strategies=("v1", "v3"), disturbance=calm)
    v1, v3 = ([row.scaling for _, row in rows] for rows in (first, third))
    assert v1[0] == pytest.approx(v3[0])
    assert v1[2] < v1[1] < v1[0]
    assert v3[2] > 2 * v1[2]
    huge = ModelSpec.from_toml(EXAMPLES / "model-trillion.toml")
    (_, row), *_ = scaling_curve(huge, topology, 64, (8,))
    assert "no layout" in row


def test_the_curve_of_the_documentation():
    """Copies of shards scale to thousands of devices as published; tables in one dimension break beyond a zone."""
    model = ModelSpec.from_toml(EXAMPLES / "model-scaling.toml")
    topology = Topology.from_toml(EXAMPLES / "cluster-4096.toml")
    ratios = {}
    for strategies in (("v1",), ("v1", "v3")):
        rows = scaling_curve(
            model, topology, 1024, (512, 4096), strategies=strategies, disturbance=Disturbance(balanced=0.9)
        )
        ratios[strategies[-1]] = [row.scaling for _, row in rows]
    assert ratios["v1"] == pytest.approx([0.837, 0.509], abs=0.005)  # docs/parallel.md
    assert ratios["v3"] == pytest.approx([0.848, 0.819], abs=0.005)


def test_every_op_lists_what_it_sends():
    model, topology = small(), cluster(zone=64)
    layout = Layout(world=64, fsdp=8, table_shard=16, table_copies=4, strategy="v3")
    ops = Step(model, layout, place_tables(model, 16), 64, topology, EXACT).ops()
    by_kind: dict[str, np.ndarray] = {}
    for op in ops:
        if op.stream != COMPUTE:
            by_kind[op.kind] = by_kind.get(op.kind, np.zeros(3)) + np.array(op.sent)
    size = 40_000_000
    np.testing.assert_allclose(by_kind["fsdp all-gather"].sum(), 2 * 2 * size * 7 / 8)
    np.testing.assert_allclose(by_kind["fsdp reduce-scatter"].sum(), 4 * size * 7 / 8)
    np.testing.assert_allclose(by_kind["replica all-reduce"].sum(), 2 * 4 * size / 8 * 7 / 8)
    shard = model.table_params * 4 / 16
    np.testing.assert_allclose(by_kind["table all-gather"], [shard * 3 / 4, 0, 0])
    np.testing.assert_allclose(by_kind["table reduce-scatter"], [shard * 3 / 4, 0, 0])


# --- a measured profile


def measured_machine(rng, world):
    """(profile as a file's contents, seconds of a step): a machine whose rates nobody tells the planner."""
    batches, true = (64, 256), {}
    units, collectives = [], []
    for name in ("a", "b"):
        forward, fixed = rng.uniform(2e-6, 9e-6), rng.uniform(1e-5, 8e-5)
        true[name] = (fixed, forward)
        units += [
            {
                "name": name,
                "batch": batch,
                "forward_ms": 1e3 * (fixed + forward * batch) * rng.uniform(0.98, 1.02),
                "backward_ms": 1e3 * (2 * fixed + 2.2 * forward * batch) * rng.uniform(0.98, 1.02),
            }
            for batch in batches
        ]
    rate = {kind: rng.uniform(2e11, 4e11) for kind in ("all_gather", "reduce_scatter")}
    latency = rng.uniform(5e-6, 2e-5)
    for kind, speed in rate.items():
        collectives += [
            {
                "tier": "nvlink",
                "kind": kind,
                "size": 2,
                "bytes": size,
                "ms": 1e3 * (latency + size / 2 / speed) * rng.uniform(0.98, 1.02),
            }
            for size in (2**22, 2**26, 2**28)
        ]
    data = {"source": "synthetic", "slowdown": 0.0, "units": units, "collectives": collectives}
    params, batch = 40_000_000, 128
    compute = sum(fixed + forward * batch + 2 * fixed + 2.2 * forward * batch for fixed, forward in true.values())
    if world == 1:
        return data, compute
    gather = latency + 2 * params / 2 / rate["all_gather"]
    reduce = latency + 4 * params / 2 / rate["reduce_scatter"]
    forward = {name: fixed + slope * batch for name, (fixed, slope) in true.items()}
    backward = {name: 2 * fixed + 2.2 * slope * batch for name, (fixed, slope) in true.items()}
    # one stream of links beside one of compute, two units: written out by hand
    a_ready = gather
    b_ready = 2 * gather
    a_done = a_ready + forward["a"]
    b_done = max(a_done, b_ready) + forward["b"]
    b_again = b_done + gather
    a_again = b_again + gather
    b_back = b_again + backward["b"]
    b_reduced = max(a_again, b_back) + reduce
    a_back = max(a_again, b_back) + backward["a"]
    return data, max(b_reduced, a_back) + reduce


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("ending", ["json", "toml"])
def test_a_measured_profile_predicts_the_step_within_fifteen_percent(tmp_path, world, ending):
    rng = random.Random(world)
    tier = Tier(name="nvlink", size=2, bandwidth_gbps=10.0, latency_us=500.0)  # wrong, and replaced
    machine = Topology(device="x", device_memory=10**11, memory_gbps=1e9, host_memory=10**12, tiers=(tier,))
    layers = tuple(LayerSpec(name=name, flops=1e12, params=40_000_000, activation_bytes=1e3) for name in ("a", "b"))
    for attempt in range(5):
        data, truth = measured_machine(rng, world)
        path = tmp_path / f"profile-{attempt}.{ending}"
        if ending == "json":
            path.write_text(json.dumps(data))
        else:
            lines = [f"{key} = {value!r}" for key, value in data.items() if not isinstance(value, list)]
            for key in ("units", "collectives"):
                for row in data[key]:
                    lines += [f"[[{key}]]", *(f"{k} = {json.dumps(v)}" for k, v in row.items())]
            path.write_text("\n".join(lines).replace("'", '"'))
        profile = Profile.read(path)
        layout = Layout(world=world, fsdp=world, table_shard=world)
        model = ModelSpec(name="two units", layers=layers)
        load = place_tables(model, world)
        found = run(Step(model, layout, load, 128, machine, profile).ops()).end
        assert found == pytest.approx(truth, rel=0.15)
        assumed = run(Step(model, layout, load, 128, machine, Profile(slowdown=0.0)).ops()).end
        assert abs(assumed / truth - 1) > 0.5


def test_measurements_that_say_nothing_are_refused():
    collective = {"tier": "nvlink", "kind": "all_gather", "size": 2, "bytes": 1000, "ms": 1.0}
    for wrong, message in (
        ({"kind": "gossip"}, "kind must be one of all_gather"),
        ({"size": 1}, "at least 2 ranks"),
        ({"ms": 0}, "ms must be > 0, got 0"),
        ({"bytes": None}, "bytes must be > 0, got None"),
    ):
        with pytest.raises(ValueError, match=message):
            Profile().measured(collectives=[{**collective, **wrong}])
    with pytest.raises(ValueError, match="larger sizes took no longer"):
        Profile().measured(collectives=[collective, {**collective, "bytes": 2000, "ms": 0.9}])
    one = Profile().measured(units=[{"name": "a", "batch": 10, "forward_ms": 2.0, "backward_ms": 3.0}])
    assert one.unit("a").seconds(20, backward=True) == pytest.approx(6e-3)
    assert one.unit("b") is None
