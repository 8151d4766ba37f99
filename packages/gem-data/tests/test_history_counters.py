"""Counters that histories show: those of the events' own requests, whatever the log's layout."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
from gem_data import Collator, Column, Counter, EventLog, Schema, Source, Task, build_log

SCHEMA = Schema(
    name="shop",
    columns=(
        Column(name="user", kind="id", role="user", cardinality=9),
        Column(name="item", kind="id", role="context", cardinality=7),
        Column(name="type", kind="id", role="context", cardinality=2),
        Column(name="rating", kind="id", role="outcome", cardinality=6),
    ),
    tasks=(Task(name="likes", column="rating", minimum=4),),
    counters=(
        Counter(name="item_count", kind="count", key=("item",)),
        Counter(name="item_rate", kind="rate", key=("item",), task="likes", in_history=True),
        Counter(name="user_rate", kind="rate", key=("user",), task="likes", in_history=True),
    ),
)


def log_of(folder, schema, seed=0, n=300):
    rng = np.random.default_rng(seed)
    sizes = {"user": 9, "item": 7, "type": 2, "rating": 6, "time": 90}  # many equal times
    table = pa.table({name: rng.integers(size, size=n) for name, size in sizes.items()})
    build_log(table, schema, folder)
    return EventLog.open(folder, expect=schema)


@pytest.mark.parametrize("several", [False, True])
def test_events_show_what_their_own_requests_saw(tmp_path, several):
    sources = (Source(name="views", column="type", values=(0,)), Source(name="buys", column="type", values=(1,)))
    schema = dataclasses.replace(SCHEMA, sources=sources if several else ())
    log = log_of(tmp_path / "log", schema)
    rows = np.random.default_rng(1).integers(len(log), size=40)
    batch = Collator(log, max_history=5)(rows)
    for name, sequence in batch.sequences.items():
        assert set(sequence.floats) == {"item_rate", "user_rate"}
        offsets = sequence.offsets.tolist()
        for b, row in enumerate(rows):
            events, _ = log.events([row], 5, name)
            for i, counter in ((1, "item_rate"), (2, "user_rate")):
                shown = sequence.floats[counter][offsets[b] : offsets[b + 1], 0].tolist()
                assert shown == log.counters[events, i].tolist()
            assert (log.time[events] < log.time[row]).all()


def test_no_outcome_at_or_after_a_request_reaches_its_history(tmp_path):
    log = log_of(tmp_path / "a", SCHEMA)
    cut = int(np.median(log.time))
    columns = {n: np.asarray(log.column(n)).copy() for n in ("user", "item", "type", "rating", "time")}
    columns["rating"] = np.where(columns["time"] >= cut, 5 - columns["rating"], columns["rating"])
    build_log(pa.table(columns), SCHEMA, tmp_path / "b")
    other = EventLog.open(tmp_path / "b")
    assert np.array_equal(other.time, log.time)
    rows = np.flatnonzero(np.asarray(log.time) <= cut)
    before, after = (Collator(one, max_history=8)(rows).sequences["events"] for one in (log, other))
    for name in ("item_rate", "user_rate"):
        assert np.array_equal(before.floats[name].numpy(), after.floats[name].numpy())
    late = np.flatnonzero(np.asarray(log.time) > cut)
    before, after = (Collator(one, max_history=8)(late).sequences["events"] for one in (log, other))
    assert not np.array_equal(before.floats["item_rate"].numpy(), after.floats["item_rate"].numpy())


def test_the_option_is_part_of_the_schema_only_where_it_is_used():
    assert Schema.from_dict(SCHEMA.to_dict()) == SCHEMA
    assert SCHEMA.history_counters == ("item_rate", "user_rate")
    plain = dataclasses.replace(
        SCHEMA, counters=tuple(dataclasses.replace(c, in_history=None) for c in SCHEMA.counters)
    )
    assert plain.history_counters == ()
    assert "in_history" not in str(plain.to_dict())
    assert plain.fingerprint() != SCHEMA.fingerprint()
