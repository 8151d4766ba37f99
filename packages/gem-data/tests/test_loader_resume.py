from __future__ import annotations

import gc
import json
import threading
import time

import numpy as np
import pytest
from gem_data import Loader, LoaderConfig
from gem_data.batches.loader import permutation
from gem_data.prefetch import prefetched
from hypothesis import given, settings
from hypothesis import strategies as st


def config(**options) -> LoaderConfig:
    return LoaderConfig(**{"batch_size": 12, "max_history": 4, "seed": 3, **options})


def ids(batch) -> list[int]:
    return batch.sample_ids.tolist()


def epochs(loader: Loader, n: int) -> list[list[int]]:
    return [ids(batch) for _ in range(n) for batch in loader]


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(1, 150),
    world=st.sampled_from([1, 2, 3, 4, 6, 12]),
    resumed_world=st.sampled_from([1, 2, 3, 4, 6, 12]),
    shuffle=st.booleans(),
    training=st.booleans(),
    stop=st.integers(0, 30),
    prefetch=st.sampled_from([0, 2]),
)
def test_exactly_once_at_any_world_size_and_resume_point(
    small_log, n, world, resumed_world, shuffle, training, stop, prefetch
):
    rows = np.random.default_rng(n).permutation(150)[:n]
    if training and n < 12:
        return
    settings = config(shuffle=shuffle, drop_last=training, prefetch=prefetch)
    expected = epochs(Loader(small_log, rows, settings), 2)

    # Two epochs, stopped after `stop` steps and gone on with at another world size.
    def run(world: int, state: dict | None, limit: int) -> tuple[list[list[int]], dict]:
        loaders = [Loader(small_log, rows, settings, rank=r, world=world) for r in range(world)]
        for loader in loaders if state else []:
            loader.load_state_dict(json.loads(json.dumps(state)))
        got: list[list[int]] = []
        while len(got) < limit and loaders[0].epoch < 2:
            for parts in zip(*loaders, strict=True):
                assert {len(p) for p in parts} == {loaders[0].local_batch_size}
                got.append([i for part in parts for i in ids(part)])
                if len(got) == limit:
                    break
        states = [loader.state_dict() for loader in loaders]
        assert all(s == states[0] for s in states)
        return got, states[0]

    first, state = run(world, None, stop)
    second, _ = run(resumed_world, state, 10**6)
    real = [[i for i in step if i >= 0] for step in first + second]
    assert real == [[i for i in step if i >= 0] for step in expected]

    per_epoch = len(expected) // 2
    for epoch in (0, 1):
        seen = [i for step in real[epoch * per_epoch : (epoch + 1) * per_epoch] for i in step]
        assert len(set(seen)) == len(seen)
        if training:
            assert set(seen) <= set(rows.tolist())
            assert len(seen) == n - n % 12
        else:
            assert sorted(seen) == sorted(rows.tolist())
        if not shuffle:
            assert seen == rows[: len(seen)].tolist()


def test_steps_and_what_is_dropped(small_log):
    training = Loader(small_log, np.arange(100), config())
    assert (len(training), training.steps_per_epoch, training.dropped_per_epoch) == (8, 8, 4)
    evaluation = Loader(small_log, np.arange(100), config(drop_last=False))
    assert (len(evaluation), evaluation.dropped_per_epoch) == (9, 0)


def test_padding_repeats_a_real_row_without_weight(small_log):
    rows = np.arange(50, 63)
    for world in (1, 5):  # 12 samples among 5 ranks: shares of 3, the last rank has nothing real
        parts = [
            list(Loader(small_log, rows, config(shuffle=False, drop_last=False), rank=r, world=world))
            for r in range(world)
        ]
        for step, real in ((0, list(range(50, 62))), (1, [62])):
            batches = [p[step] for p in parts]
            assert {b.batch_size for b in batches} == {12 if world == 1 else 3}
            assert [i for b in batches for i in ids(b) if i >= 0] == real
            for batch in batches:
                assert (batch.weights == (batch.sample_ids >= 0)).all()
                padded = batch.time[batch.sample_ids < 0]
                assert (padded == small_log.time[real[-1]]).all()


def test_epochs_differ_and_seeds_differ(small_log):
    loader = Loader(small_log, np.arange(150), config())
    first, second = (np.concatenate([ids(b) for b in loader]) for _ in range(2))
    other = np.concatenate([ids(b) for b in Loader(small_log, np.arange(150), config(seed=4))])
    assert (first != second).mean() > 0.9
    assert (first != other).mean() > 0.9
    assert loader.state_dict()["epoch"] == 2


def test_the_permutation_is_the_same_in_every_version():
    """Against SplitMix64 (Steele, Lea and Flood, 2014) in Python's integers, and one result written out."""
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1

    def mix(x: int) -> int:
        x &= mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    for seed, epoch, n in [(0, 0, 1000), (12345, 7, 64), (2**63, 10**6, 33)]:
        start = mix(mix(seed) + golden * (epoch + 1))
        expected = sorted(range(n), key=lambda i, start=start: mix(start + golden * (i + 1)))
        assert permutation(n, seed=seed, epoch=epoch).tolist() == expected
    assert permutation(10, seed=1, epoch=2).tolist() == [4, 2, 9, 7, 5, 6, 1, 0, 3, 8]


def test_permutations_look_uniform():
    """Where the first of 8 goes, over 4,000 epochs: chi-squared with 7 degrees of freedom, 0.1% point 24.3."""
    n = 8
    where = [int(np.flatnonzero(permutation(n, seed=11, epoch=e) == 0)[0]) for e in range(4000)]
    counts = np.bincount(where, minlength=n)
    assert ((counts - 500) ** 2 / 500).sum() < 24.3


def test_a_state_of_other_data_or_settings_is_refused(small_log):
    state = Loader(small_log, np.arange(100), config()).state_dict()
    with pytest.raises(ValueError, match="batch_size 12 there, 24 here; seed 3 there, 5 here"):
        Loader(small_log, np.arange(100), config(batch_size=24, seed=5)).load_state_dict(state)
    with pytest.raises(ValueError, match="rows '"):
        Loader(small_log, np.arange(1, 101), config()).load_state_dict(state)
    loader = Loader(small_log, np.arange(100), config(prefetch=3))
    loader.load_state_dict(state)  # prefetching is no part of the order
    with pytest.raises(ValueError, match="step 8\\) is outside epochs of 8 steps"):
        loader.load_state_dict({**state, "step": 8})
    with pytest.raises(ValueError, match="lacks 'step'; it has epoch"):
        loader.load_state_dict({"epoch": 1})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda log: Loader(log, [], config()), "no rows"),
        (lambda log: Loader(log, [0, 150], config()), "row 150 is outside"),
        (lambda log: Loader(log, range(11), config()), "11 rows do not fill one global batch of 12"),
        (lambda log: Loader(log, range(50), config(), rank=2, world=2), "rank 2 is not one of a world of 2"),
        (
            lambda log: Loader(log, range(50), config(), world=5),
            "12 does not divide among 5 ranks; the next that does is 15",
        ),
        (lambda log: Loader(log, range(50), config()).batch(0, 4), "step 4 is outside an epoch of 4 steps"),
        (lambda log: config(batch_size=0), "batch_size must be 1 or more, not 0"),
        (lambda log: config(seed=2**64), "seed must be under"),
        (lambda log: config(prefetch=-1), "prefetch must be 0 or more, not -1"),
    ],
)
def test_wrong_settings_say_what_was_expected(small_log, make, message):
    with pytest.raises(ValueError, match=message):
        make(small_log)


# The background thread.


def threads() -> int:
    return sum(t.name == "gem-data-prefetch" for t in threading.enumerate())


def test_prefetching_changes_nothing_and_counts_what_is_consumed(small_log):
    plain, ahead = (Loader(small_log, np.arange(150), config(prefetch=p)) for p in (0, 4))
    for a, b in zip(plain, ahead, strict=True):
        assert ids(a) == ids(b)
        assert plain.state_dict() == ahead.state_dict()
    assert threads() == 0


def test_leaving_the_loop_ends_the_thread_and_keeps_the_position(small_log):
    loader = Loader(small_log, np.arange(150), config(prefetch=2))
    for i, _ in enumerate(loader):
        if i == 2:
            assert threads() == 1
            break
    gc.collect()
    assert threads() == 0
    assert loader.state_dict()["step"] == 3
    assert ids(next(iter(loader))) == ids(loader.batch(0, 3))


def test_an_exception_comes_where_its_item_would_have():
    def items():
        yield 1
        yield 2
        raise OSError("the disk is gone")

    ahead = prefetched(items(), 5)
    assert next(ahead) == 1
    time.sleep(0.05)  # by now the thread has failed
    assert next(ahead) == 2
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)
    assert threads() == 0


def test_the_thread_runs_no_further_ahead_than_asked():
    made = []

    def items():
        for i in range(20):
            made.append(i)
            yield i

    ahead = prefetched(items(), 3)
    assert next(ahead) == 0
    deadline = time.monotonic() + 60
    while len(made) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(made) == 5  # one taken, three ready, one in hand
    ahead.close()
    assert threads() == 0
