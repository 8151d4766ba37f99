"""The plan against what cards have measured: one card's passes and the collectives in, steps of two cards out."""

from __future__ import annotations

import argparse
import json
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from gem_parallel import Layout, Profile, Topology, predict
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
