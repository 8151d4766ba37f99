from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from gem_data import EventLog, build_log, time_split
from gem_data.testing import small_events, small_schema
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 60), seed=st.integers(0, 10**6), times=st.integers(1, 60), first=st.floats(0.05, 0.9))
def test_parts_are_whole_in_order_and_share_no_time(tmp_path_factory, n, seed, times, first):
    folder = tmp_path_factory.mktemp("log") / "log"
    build_log(small_events(n, seed=seed, times=times), small_schema(), folder)
    log = EventLog.open(folder)
    rest = (1 - first) / 2
    ordered = sorted(log.time.tolist())
    first_cut, second_cut = (ordered[min(round(share * n), n - 1)] for share in (first, first + rest))
    empty = [name for name, no in (("train", ordered[0] == first_cut), ("validation", first_cut == second_cut)) if no]
    if empty:
        with pytest.raises(ValueError, match=f"the {empty[0]} part of .* is empty: {n} events"):
            time_split(log, (first, rest, rest))
        return
    split = time_split(log, (first, rest, rest))
    parts = [split.train, split.validation, split.test]
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    spans = [(log.time[p].min(), log.time[p].max()) for p in parts]
    assert spans[0][1] < spans[1][0]
    assert spans[1][1] < spans[2][0]
    for part in parts:
        assert (np.diff(log.time[part]) >= 0).all()
    # A part is off its fraction by no more than the events that share the boundary's time.
    largest = np.unique(log.time, return_counts=True)[1].max()
    assert abs(len(split.train) - first * n) <= largest


def test_the_fractions_are_kept_without_ties(tmp_path):
    table = small_events(100)
    build_log(
        table.set_column(1, "time", pa.array(np.random.default_rng(0).permutation(100))),
        small_schema(),
        tmp_path / "log",
    )
    split = time_split(EventLog.open(tmp_path / "log"))
    assert (len(split.train), len(split.validation), len(split.test)) == (80, 10, 10)


def test_wrong_fractions_and_empty_parts(small_log, tmp_path):
    for fractions in [(0.8, 0.2), (0.8, 0.1, 0.2), (1.0, 0.0, 0.0)]:
        with pytest.raises(ValueError, match="three positive numbers"):
            time_split(small_log, fractions)
    build_log(small_events(30, times=1), small_schema(), tmp_path / "log")
    with pytest.raises(ValueError, match=r"the train part of .* is empty: 30 events with 1 distinct times"):
        time_split(EventLog.open(tmp_path / "log"))
