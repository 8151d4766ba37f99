"""The plan against what cards have measured: one card's passes and the collectives in, steps of two cards out."""

from __future__ import annotations

import argparse
import json
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from gem_model import preset
from gem_model.presets import workload
from gem_model.testing import random_batch
from gem_parallel import Layout, Profile, Topology, predict
from gem_train.planning import describe, planned_units
from scaling_cards import units_profile
from scaling_predict import links
from scaling_steps import Bench, described

BENCHMARKS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


@pytest.fixture(scope="module")
def measured():
    rows = json.loads((BENCHMARKS / "scaling-2-h200-2026-11-30.json").read_text())["rows"]
    return {row["case"]: row for row in rows}


@pytest.fixture(scope="module")
def told(measured):
    """What the planner knows: the model, the machine, and the passes alone of 256 and 64 samples."""
    batch = measured["alone"]["batch"]
    bench = Bench(argparse.Namespace(model="large", batch=batch, parts=[1, 4]), 2)
    first = bench.batches(bench.deal(batch, 1, False), 0, torch.device("cpu"))[0]
    spec = described(bench, 1, first, "bf16")
    topology = Topology.from_toml(files("gem_parallel") / "examples" / "h200-host.toml")
    profile = links(BENCHMARKS / "comm-2-h200-2026-11-30.json", topology.tiers[0].name)
    return spec, topology, profile.measured(units=units_profile(spec, measured["alone"]["batches"][:2])), batch


@pytest.mark.parametrize(
    ("cards", "parts", "row"),
    [(1, 1, "alone"), (1, 4, "alone"), (2, 1, "plain"), (2, 1, "balanced, SMs"), (2, 4, "balanced, SMs, 4 parts")],
)
def test_the_plan_is_within_fifteen_percent_of_what_was_measured(measured, told, cards, parts, row):
    """Reduced once a step, as those steps were; in every part it is a plan for another step, but as near."""
    spec, topology, profile, batch = told
    assert cards == 1 or measured[row]["parts"] == parts
    ms = measured["alone"]["of_parts"][str(parts)] if cards == 1 else measured[row]["ms"]
    for every in (False, True):
        layout = Layout(world=cards, fsdp=cards, table_shard=cards, parts=parts, reduce_every_part=every)
        found = predict(spec, topology, layout, batch * parts, profile=profile)
        assert found.step_s * 1e3 == pytest.approx(ms, rel=0.15)
    assumed = predict(spec, topology, layout, batch * parts, profile=Profile(tflops=100.0))
    assert abs(assumed.step_s * 1e3 / ms - 1) > 0.5  # it is the measurements that know


def test_four_parts_need_the_memory_of_one_and_the_sums(measured, told):
    """The plan's state has a shard's gradients at all times, so that whole ones are 0.9 GiB more on two cards. On cards
    none were there at the peak of one part; four took 2.7 GiB more, of which whole gradients are 1.9."""
    spec, topology, profile, batch = told
    one, four = (
        predict(spec, topology, Layout(world=2, fsdp=2, table_shard=2, parts=n), batch * n, profile=profile).memory
        for n in (1, 4)
    )
    shard = 4 * spec.dense_params / 2
    assert four["peak"] - one["peak"] == four["gradient sums"] == pytest.approx(shard)
    seen = {n: measured[row]["memory_gib"] for n, row in ((1, "balanced, SMs"), (4, "balanced, SMs, 4 parts"))}
    assert 2 * shard < (seen[4] - seen[1]) * 2**30 < 3 * shard
    assert four["peak"] / 2**30 == pytest.approx(seen[4], rel=0.15)


@pytest.mark.parametrize("when", ["", "-b", "-c"])
def test_the_profile_of_the_bench_is_within_fifteen_percent_of_its_own_step(when):
    """What `gem-train bench large` measured on one card: parts of the model alone, and a step of four parts of 256."""
    found = json.loads(next(BENCHMARKS.rglob(f"efficiency-h200-2026-11-30{when}.json")).read_text())
    parts, batch = found["accumulate"], found["batch_size"]
    assert (found["world"], parts, batch, found["units_batch"]) == (1, 4, 1024, 256)
    work = workload("large")
    rng = torch.Generator().manual_seed(0)  # "random, uniform up to"
    lengths = {s: torch.randint(1, n + 1, (256,), generator=rng).tolist() for s, n in work.longest.items()}
    samples = random_batch(work.inputs, 256, lengths=lengths, single_valued=True)
    spec = describe("large", preset("large"), work.inputs, samples, precision="bf16")
    rates = {key: found["profile"][key] for key in ("tflops", "unit_us", "lookup_efficiency")}
    names = [unit.name for unit in spec.units]
    profile = Profile(**rates).measured(units=planned_units(found["profile"]["units"], names))
    topology = Topology.from_toml(files("gem_parallel") / "examples" / "h200-host.toml")
    layout = Layout(world=1, fsdp=1, table_shard=1, parts=parts)
    predicted = predict(spec, topology, layout, batch, profile=profile).step_s
    assert predicted == pytest.approx(found["step"]["seconds"], rel=0.15)
