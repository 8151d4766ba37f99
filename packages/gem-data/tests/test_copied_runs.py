"""Histories as copies of runs of bytes: the same as a gather of their rows, for every kind of column."""

from __future__ import annotations

import dataclasses

import gem_data.log.event_log
import numpy as np
import pytest
from gem_data import Collator, EventLog, append, build_log, prepare
from gem_data.log.gather import Plan, Spread
from gem_data.log.runs import Runs, copy_runs
from gem_data.ragged import Ragged, spans
from gem_data.sources.events import from_table
from gem_data.testing import rich_events, rich_schema, small_events, small_schema
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    count=st.integers(0, 30),
    kind=st.sampled_from(["int64", "float32", "vector", "lists"]),
    seed=st.integers(0, 10**6),
)
def test_runs_of_several_parts_against_a_gather(sizes, count, kind, seed):
    rng = np.random.default_rng(seed)
    firsts = np.cumsum([0, *sizes])[:-1]

    def part(n):
        if kind == "lists":
            lengths = rng.integers(4, size=n)
            return Ragged(rng.integers(100, size=int(lengths.sum())), np.concatenate([[0], np.cumsum(lengths)]))
        shape = (n, 3) if kind == "vector" else (n,)
        return rng.integers(-100, 100, size=shape).astype("int64" if kind == "int64" else "float32")

    arrays = [part(n) for n in sizes]
    column = arrays[0] if len(arrays) == 1 else Spread(arrays=arrays, firsts=firsts)
    of = rng.integers(len(sizes), size=count)
    local = np.array([rng.integers(sizes[p] + 1) for p in of], np.int64)
    lengths = np.array([rng.integers(sizes[p] - a + 1) for p, a in zip(of, local, strict=True)], np.int64)
    start = firsts[of] + local if count else np.empty(0, np.int64)
    rows, _ = spans(start, lengths)
    taken = Runs.of(start, lengths, firsts).take(column)
    expected = [x for a in arrays for x in a.tolist()]
    assert taken.tolist() == [expected[r] for r in rows.tolist()]
    if kind != "lists":
        assert taken.dtype == arrays[0].dtype
        taken[...] = 0  # a batch may be written to, the log may not change
        assert [x for a in arrays for x in a.tolist()] == expected
    elif len(sizes) > 1:
        assert column.take_plan(Plan.of(rows, firsts)).tolist() == taken.tolist()


def test_a_run_of_everything_and_values_of_no_bytes():
    values = np.arange(12.0).reshape(6, 2)
    zero, whole = np.zeros(1, np.int64), np.array([6])
    assert np.array_equal(copy_runs([values], zero, zero, whole), values)
    assert copy_runs([np.empty((6, 0))], zero, zero, whole).shape == (6, 0)


@pytest.mark.parametrize("grown", [False, True])
@pytest.mark.parametrize("rich", [False, True])
def test_batches_do_not_depend_on_how_histories_are_copied(tmp_path, monkeypatch, rich, grown):
    schema = rich_schema() if rich else small_schema()
    shown = tuple(dataclasses.replace(c, in_history=True) for c in schema.counters)
    schema = dataclasses.replace(schema, sources=(), counters=shown)
    make = rich_events if rich else small_events
    if grown:
        prepare(from_table(make(300), schema), tmp_path / "log", part_rows=60)
        later = make(80, seed=1)
        append(tmp_path / "log", later.set_column(1, "time", [np.arange(80) + 5000]))
    else:
        build_log(make(300), schema, tmp_path / "log")
    log = EventLog.open(tmp_path / "log")
    rows = np.random.default_rng(0).integers(len(log), size=50)
    found = []
    for long in (10**6, -1):
        for name in ("LONG_RUN", "LONG_RUN_PARTS"):
            monkeypatch.setattr(gem_data.log.event_log, name, long)
        found.append(Collator(log, max_history=7)(rows).sequences["events"])
    gathered, copied = found
    assert int(gathered.offsets[-1]) > 100
    assert gathered.offsets.equal(copied.offsets)
    assert gathered.time.equal(copied.time)
    assert gathered.max_len == copied.max_len
    for part in ("ids", "floats"):
        there, here = getattr(gathered, part), getattr(copied, part)
        assert there.keys() == here.keys()
        assert all(there[k].equal(here[k]) for k in there)
    events, _ = log.events(rows, 7)
    for i, counter in enumerate(shown):
        assert copied.floats[counter.name][:, 0].tolist() == log.counters[events][:, i].tolist()
    for name, lists in gathered.lists.items():
        assert lists.values.equal(copied.lists[name].values)
        assert lists.offsets.equal(copied.lists[name].offsets)
