"""The counter of neighbours: its equation, delays, what is refused, and that nothing later is in it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gem_data import Counter, EventLog, append, from_table, prepare
from gem_data.features.neighbours import neighbour_scores
from gem_data.testing import brute_neighbours, small_events, small_schema


def events(n, seed, users=9, items=6, times=25):
    rng = np.random.default_rng(seed)
    return rng.integers(users, size=n), rng.integers(items, size=n), rng.integers(times, size=n), rng.normal(size=n)


def scores(key, item, value, time, prior=2.0, delay=0):
    """With the running mean of the item that the counter takes off, by brute force."""
    before = time[None] + delay < time[:, None]
    usual = before @ value / np.maximum(before.sum(1), 1)
    same = before & (item[:, None] == item)
    x = value - (same @ value + prior * usual) / (same.sum(1) + prior)
    return neighbour_scores(key, item, time, x, prior=prior, delay=delay)


@pytest.mark.parametrize("delay", [0, 3])
def test_the_equation(delay):
    for seed in range(3):
        key, item, time, value = events(120, seed)
        found = scores(key, item, value, time, delay=delay)
        expected = brute_neighbours(key, item, value, time, prior=2.0, delay=delay)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
        assert (np.abs(expected) > 0.01).sum() > 40  # there is something to compare


def test_what_comes_later_changes_no_bit():
    key, item, time, value = events(300, 5)
    before = scores(key, item, value, time)
    changed = np.where(time >= 15, -3 * value, value)
    after = scores(key, item, changed, time)
    assert np.array_equal(before[time <= 15], after[time <= 15])
    assert not np.allclose(before[time > 15], after[time > 15])


def test_it_finds_what_goes_together():
    """Two kinds of people, two kinds of items: who liked one item of a kind likes another, whom nobody knew before."""
    rng = np.random.default_rng(0)
    key = np.repeat(np.arange(200), 8)
    time = np.arange(len(key))  # one person after another
    item = np.concatenate([rng.permutation(20)[:8] for _ in range(200)])
    value = np.where((key % 2 == item % 2), 1.0, -1.0) + rng.normal(size=len(key))
    found = scores(key, item, value, time, prior=5.0)
    late = (np.arange(len(key)) % 8 > 2) & (key > 100)
    assert np.corrcoef(found[late], value[late])[0, 1] > 0.5


def test_the_same_out_of_core_and_appended(tmp_path):
    table = small_events(200, seed=3, users=15, items=9)
    schema = small_schema(users=15, items=9)
    i = [c.name for c in schema.counters].index("alike")
    late = table["time"].to_numpy() >= 1080
    prepare(from_table(table.filter(~late), schema), tmp_path / "log", part_rows=60)
    append(tmp_path / "log", table.filter(late))
    log = EventLog.open(tmp_path / "log")
    rows = np.arange(len(log))
    columns = (log.column(name)[rows] for name in ("user", "item", "action", "time"))
    expected = brute_neighbours(*columns, prior=2.0)
    np.testing.assert_allclose(log.counters[rows][:, i], expected, rtol=2e-6, atol=1e-6)
    assert np.count_nonzero(expected) > 100
    assert len(log.generations) == 2
    assert len(log.generations[0].parts) > 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"over": "genres"}, "expected an 'id' column of role 'context'"),
        ({"over": "action"}, "expected an 'id' column of role 'context'"),
        ({"value": "item"}, "of role 'outcome'"),
        ({"value": None}, "needs value"),
        ({"task": "click"}, "takes no task"),
    ],
)
def test_what_cannot_be_compared_is_refused(change, says):
    counter = Counter(name="alike", kind="neighbour", key=("user",), over="item", value="action")
    with pytest.raises(ValueError, match=says):
        replace(small_schema(), counters=(replace(counter, **change),))


def test_too_many_items_are_refused():
    with pytest.raises(ValueError, match="at most 8192"):
        small_schema(items=9000)
