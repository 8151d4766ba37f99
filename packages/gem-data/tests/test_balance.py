from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from gem_data.balance import LengthCost, assign, budget_batches, deal, imbalance, in_even_parts, moved
from gem_data.balance.simulate import Lognormal, Observed, main, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

METHODS = ["none", "bbs", "lpt", "karmarkar-karp", "exchange"]


@settings(deadline=None, max_examples=60)
@given(
    ranks=st.integers(1, 9),
    share=st.integers(0, 24),
    sub_batch=st.integers(1, 16),
    method=st.sampled_from(METHODS),
    seed=st.integers(0, 10**6),
    zero=st.booleans(),
)
def test_each_sample_goes_to_exactly_one_rank_in_equal_shares(ranks, share, sub_batch, method, seed, zero):
    rng = np.random.default_rng(seed)
    costs = np.zeros(ranks * share) if zero else rng.lognormal(size=ranks * share)
    chosen = assign(costs, ranks, method=method, sub_batch=sub_batch)
    assert chosen.shape == (ranks, share)
    assert chosen.dtype == np.int64
    assert sorted(chosen.reshape(-1).tolist()) == list(range(ranks * share))
    assert imbalance(costs, chosen) >= 1 - 1e-12
    np.testing.assert_array_equal(assign(costs.copy(), ranks, method=method, sub_batch=sub_batch), chosen)


@settings(deadline=None, max_examples=40)
@given(ranks=st.integers(2, 6), share=st.sampled_from([4, 8, 12]), method=st.sampled_from(METHODS[1:4]))
def test_sub_batches_stay_whole(ranks, share, method):
    costs = np.random.default_rng(share).lognormal(size=ranks * share)
    chosen = assign(costs, ranks, method=method, sub_batch=4).reshape(-1, 4)
    assert (chosen % 4 == np.arange(4)).all()
    assert (chosen // 4 == chosen[:, :1] // 4).all()


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), method=st.sampled_from(["bbs", "lpt", "karmarkar-karp", "exchange"]))
def test_against_the_best_of_all_assignments(seed, method):
    """Two ranks, eight samples: every equal split is tried. Graham's bound holds, and no method beats the best."""
    costs = np.random.default_rng(seed).lognormal(size=8)
    best = min(
        max(costs[list(half)].sum(), costs.sum() - costs[list(half)].sum())
        for half in itertools.combinations(range(8), 4)
    )
    got = imbalance(costs, assign(costs, 2, method=method, sub_batch=1)) * costs.sum() / 2
    assert best - 1e-9 <= got <= best * 4 / 3 + 1e-9


def test_the_target_at_256_ranks_of_1024_samples():
    cost = LengthCost(quadratic=1, linear=4096)
    rows = {r.method: r for r in simulate(Lognormal(), ranks=256, cost=cost, steps=10)}
    assert 1.12 < rows["none"].mean < 1.2
    assert rows["bbs"].mean <= 1.02
    assert rows["bbs"].speed_up > 1.1
    assert rows["exchange"].mean < 1.0001
    assert rows["exchange"].sent > 0.9
    for method in ("lpt", "karmarkar-karp"):
        assert rows[method].mean <= 1.02


@pytest.mark.parametrize("ranks", [8, 64, 1024])
def test_bbs_is_never_worse_than_none_over_the_ranks(ranks):
    rows = {r.method: r for r in simulate(Lognormal(median=200), ranks=ranks, steps=2, methods=("none", "bbs"))}
    assert 1 <= rows["bbs"].mean < rows["none"].mean
    assert rows["none"].sent == rows["bbs"].sent == 0


def test_equal_costs_are_perfect_and_observed_lengths_are_used():
    lengths = Observed(lengths=np.array([7, 7]))
    assert all(r.mean == pytest.approx(1) for r in simulate(lengths, ranks=4, samples=16, sub_batch=4, steps=1))
    assert imbalance(np.array([3.0, 1.0]), np.array([[0], [1]])) == 1.5
    assert moved(np.array([[0, 2], [1, 3]])) == 0.5


@settings(deadline=None, max_examples=60)
@given(costs=st.lists(st.integers(0, 20), max_size=40), budget=st.integers(1, 30))
def test_budget_batches_are_full_and_in_order(costs, budget):
    offsets = budget_batches(costs, budget).tolist()
    assert offsets[0] == 0
    assert offsets[-1] == len(costs)
    for a, b in itertools.pairwise(offsets):
        assert b > a
        assert sum(costs[a:b]) <= budget or b == a + 1
        if b < len(costs):
            assert sum(costs[a : b + 1]) > budget


@settings(deadline=None)
@given(costs=st.lists(st.sampled_from([0, 0, 1, 2, 7, 30]), max_size=60), ranks=st.integers(1, 9))
def test_dealing_gives_each_sample_to_one_rank_and_lpt_its_bound(costs, ranks):
    shares = deal(costs, ranks)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(costs)))
    assert all((np.diff(s) > 0).all() for s in shares)
    if len(costs) >= ranks:
        assert min(map(len, shares)) >= 1
    totals = [sum(costs[i] for i in s) for s in shares]
    assert max(totals) <= sum(costs) / ranks + max(costs, default=0)  # the last one went to the lightest


def test_the_cost_is_its_equation():
    lengths = np.array([0, 1, 5])
    np.testing.assert_array_equal(LengthCost(quadratic=2, linear=3, constant=1)(lengths), [1, 6, 66])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: assign([1.0, 2.0], 2, method="bsb"), "did you mean 'bbs'"),
        (lambda: assign([1.0, 2.0, 3.0], 2), "3 samples in sub-batches of 128 can't be shared by 2 ranks"),
        (lambda: assign([1.0, np.nan], 2), "cost nan of sample 1"),
        (lambda: assign([1.0, -1.0], 2), "cost -1.0 of sample 1"),
        (lambda: budget_batches([1.0], 0), "must be positive"),
        (lambda: LengthCost(linear=0), "not all 0"),
        (lambda: simulate(Lognormal(), ranks=2, steps=0), "steps must be 1 or more"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_command_prints_every_method(capsys):
    main(["--ranks", "4", "--samples", "256", "--steps", "1"])
    out = capsys.readouterr().out
    assert all(f"  {m} " in out for m in METHODS)


@given(st.integers(0, 40), st.integers(1, 7), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_even_parts_are_a_permutation_with_runs_of_the_usual_sizes(count, parts, sources, seed):
    lengths = np.random.default_rng(seed).integers(0, 50, (sources, count))
    order = in_even_parts(lengths, parts)
    assert sorted(order) == list(range(count))
    for a, b in itertools.pairwise(count * i // parts for i in range(parts + 1)):
        assert (np.diff(order[a:b]) > 0).all()  # as they came


@pytest.mark.parametrize("sources", [1, 2, 3])
def test_even_parts_hold_as_many_events_of_every_source(sources):
    rng = np.random.default_rng(random.getrandbits(32))
    lengths = np.stack([rng.integers(1, 2049 >> i, 1024) for i in range(sources)])
    order = in_even_parts(lengths, 4)
    for length in (lengths[0], lengths[1:].sum(0))[:sources]:  # the largest source, and the others together
        even = length[order].reshape(4, -1).sum(1)
        assert even.max() / even.mean() - 1 < 0.004, (length.reshape(4, -1).sum(1), even)


def test_even_parts_refuse_what_they_cannot_deal():
    with pytest.raises(ValueError, match="got \\(3,\\) and 2"):
        in_even_parts([1, 2, 3], 2)
