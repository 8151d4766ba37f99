"""Rows of the scaling on cards, and who has which samples."""

import argparse
import itertools

import numpy as np
import pytest
import torch
from gem_model import GEM
from gem_model.flops import batch_flops
from gem_model.roles import roles
from scaling_rows import Kept, Row, chosen, table
from scaling_steps import Bench, described


@pytest.mark.parametrize("world", [2, 4, 8])
def test_rows_have_names_of_their_own_and_divide_the_world(world):
    rows = table(world, [1, 4])
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    assert "balanced, 4 parts" in names
    for row in rows:
        assert world % (row.config.shard_group or world) == 0
        assert world % row.config.table_copies == 0
        assert row.replayed == (row.graphs and row.config.experts == 1)


@pytest.mark.parametrize("balanced", [False, True])
def test_every_sample_is_in_one_part_of_one_rank(balanced):
    bench = Bench(argparse.Namespace(model="tiny", batch=16, parts=[1, 3]), 4)
    dealt = bench.deal(16, 3, balanced)
    assert [part.shape for part in dealt] == [(4, 16)] * 3
    own = np.arange(8 * 3 * 16).reshape(8, 3, 16)
    for number, part in enumerate(dealt):
        assert np.array_equal(np.sort(part, axis=None), own[:4, number].flatten())
        if not balanced:
            assert np.array_equal(part, own[:4, number])  # as in any other world
    (strong,) = bench.deal(4, 1, balanced, strong=True)
    assert np.array_equal(np.sort(strong, axis=None), own[0, 0])
    assert bench.work(dealt, 1) >= 1
    if balanced:
        assert bench.work(dealt, 1) < bench.work(bench.deal(16, 3, False), 1)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_whatever_is_asked_of_the_scaling_is_a_row(world):
    rows = {row.name: row for row in table(world, [1, 4])}
    assert list(rows)[:6] == ["plain", "balanced", "+ SM-free", "tables v3", "2-D FSDP", "strong, 1-D"]
    for scaling in (False, True):  # weak and strong: the three layouts, the three strategies, both switches
        mine = [row for row in rows.values() if row.strong == scaling]
        layouts = {(r.config.shard_group or world, r.config.experts) for r in mine if r.balanced}
        assert {(world, 1), (world // 2, 1), (max(2, world // 2), 2)} <= layouts
        assert {r.config.table_strategy for r in mine} == {"v1", "v2", "v3"}
        assert {r.config.comm.all_gather for r in mine} == {"default", "auto"}
        assert {r.balanced for r in mine} == {False, True}
    ladder = [rows[name] for name in ("plain", "+ prefetch", "+ SM-free", "+ quantised", "+ balanced")]
    seen = [(r.config.prefetch, r.config.comm.all_gather, r.config.table_exchange, r.balanced) for r in ladder]
    assert all(sum(a != b for a, b in zip(x, y, strict=True)) == 1 for x, y in itertools.pairwise(seen))


def test_rows_are_chosen_by_name():
    rows = table(4, [1])
    assert [r.name for r in chosen(rows, None, ["tables v2", "plain"])] == ["tables v2", "plain"]
    assert {r.name for r in chosen(rows, ["strong", "v2"], None)} >= {"strong, 1-D", "tables v2, 2 copies"}
    assert chosen(rows, None, None) == rows
    with pytest.raises(ValueError, match=r"no row is called fast; there are plain"):
        chosen(rows, None, ["fast"])


def test_rows_are_kept_and_one_that_did_not_end_is_passed_over(tmp_path):
    first, second, third = (Row(name=name) for name in ("+ SM-free", "SM-free, written", "tables v3"))
    kept = Kept(tmp_path / "rows")
    assert kept.found(first) is None
    assert kept.fits(0.1)  # nothing is known yet
    kept.begin(first, "it was begun")
    kept.end(first, {"case": first.name, "ms": 1.5, "seconds": 10.0})
    kept.begin(second, "it was begun with 2 ranks")
    again = Kept(tmp_path / "rows")
    assert again.found(first) == {"case": "+ SM-free", "ms": 1.5, "seconds": 10.0}
    assert again.found(second) == {"case": "SM-free, written", "failed": "did not end; it was begun with 2 ranks"}
    assert again.found(third) is None
    assert (kept.fits(12.1), kept.fits(11.9)) == (True, False)


def test_the_plan_is_told_of_experts_what_they_cost():
    bench = Bench(argparse.Namespace(model="tiny", batch=8, parts=[1]), 2)
    batch = bench.batches(bench.deal(8, 1, False), 0, torch.device("cpu"))[0]
    spec = described(bench, 2, batch, "fp32")
    model = GEM(bench.shape(2), bench.inputs)
    role = roles(model)
    of = {kind: sum(p.numel() for n, p in model.named_parameters() if role[n] == kind) for kind in ("dense", "expert")}
    assert (spec.dense_params, spec.expert_params) == (of["dense"], of["expert"])
    assert {u.experts for u in spec.units} == {0, 4}
    lengths = {s.name: batch.sequences[s.name].offsets.diff().tolist() for s in bench.inputs.sources}
    assert spec.flops == pytest.approx(batch_flops(bench.shape(2), bench.inputs, lengths) / 8)
