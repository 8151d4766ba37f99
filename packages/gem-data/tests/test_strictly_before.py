"""Histories and counters see what happened strictly before, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from gem_data import Collator, EventLog, build_log
from gem_data.bench.peers import padded_collate
from gem_data.testing import brute_counter, brute_history, small_events, small_schema
from hypothesis import given, settings
from hypothesis import strategies as st


def make(tmp_path_factory, **options) -> EventLog:
    folder = tmp_path_factory.mktemp("log") / "log"
    build_log(small_events(**options), small_schema(), folder)
    return EventLog.open(folder)


logs = {"n": st.integers(1, 40), "seed": st.integers(0, 10**6), "times": st.integers(1, 15)}


@settings(deadline=None, max_examples=20)
@given(**logs, max_history=st.integers(0, 12))
def test_histories_against_brute_force(tmp_path_factory, n, seed, times, max_history):
    log = make(tmp_path_factory, n=n, seed=seed, times=times)
    rows = np.random.default_rng(seed).permutation(n)
    history = log.history(rows, max_history)
    for row, start, end in zip(rows.tolist(), history.start.tolist(), history.end.tolist(), strict=True):
        assert list(range(start, end)) == brute_history(log, row, max_history)


@settings(deadline=None, max_examples=15)
@given(**logs)
def test_counters_against_brute_force(tmp_path_factory, n, seed, times):
    log = make(tmp_path_factory, n=n, seed=seed, times=times)
    for i, counter in enumerate(log.schema.counters):
        expected = [brute_counter(log, counter.name, row) for row in range(n)]
        np.testing.assert_allclose(log.counters[:, i], expected, rtol=2e-6, atol=1e-6, err_msg=counter.name)


@pytest.mark.parametrize("seed", range(3))
def test_the_future_and_the_present_change_nothing(tmp_path_factory, seed):
    """Other outcomes from some time on leave all features of events up to that time as they were."""
    table = small_events(80, seed=seed)
    now = 1060
    later = table["time"].to_numpy() >= now
    action = np.where(later, 4 - table["action"].to_numpy(), table["action"].to_numpy())
    watched = np.where(later, 1 - table["watched"].to_numpy(), table["watched"].to_numpy()).astype(np.float32)
    changed = table.set_column(6, "action", [action]).set_column(7, "watched", [watched])
    logs = []
    for events in (table, changed):
        folder = tmp_path_factory.mktemp("log") / "log"
        build_log(events, small_schema(), folder)
        logs.append(EventLog.open(folder))
    rows = np.flatnonzero(logs[0].time <= now)
    assert (logs[0].time[rows] == now).any()
    a, b = (Collator(log, max_history=50)(rows) for log in logs)
    assert a.dense.equal(b.dense)
    for name, ids in a.sequences["events"].ids.items():
        assert ids.equal(b.sequences["events"].ids[name])
    after = np.flatnonzero(logs[0].time > now)
    assert not np.array_equal(logs[0].counters[after], logs[1].counters[after])  # the test can see a change


@settings(deadline=None, max_examples=20)
@given(**logs, max_history=st.integers(0, 12))
def test_collate_against_a_padded_one(tmp_path_factory, n, seed, times, max_history):
    log = make(tmp_path_factory, n=n, seed=seed, times=times)
    rows = np.random.default_rng(seed).integers(n, size=9)  # repeats are fine
    sequence = Collator(log, max_history=max_history)(rows).sequences["events"]
    padded = padded_collate(log, rows, max_history)
    lengths = sequence.offsets.diff().numpy()
    assert lengths.tolist() == padded["length"].tolist()
    assert sequence.max_len == lengths.max()
    valid = np.arange(padded["time"].shape[1]) < lengths[:, None]
    for name, values in {"time": sequence.time, **sequence.ids, **sequence.floats}.items():
        expected = padded[name][valid]
        assert np.array_equal(values.numpy().reshape(expected.shape), expected)


def test_a_batch_holds_what_the_schema_promises(small_log):
    schema, rows = small_log.schema, np.array([17, 3, 99, 3])
    batch = Collator(small_log, max_history=5)(rows, padding=[False, False, True, False])
    assert list(batch.sequences) == ["events"]
    sequence = batch.sequences["events"]
    assert tuple(sequence.ids) == schema.sequence_ids
    assert {k: v.shape[1] for k, v in sequence.floats.items()} == schema.sequence_floats
    assert tuple(batch.sparse) == schema.sparse
    assert batch.sparse["item"].values.tolist() == small_log.column("item")[rows].tolist()
    assert batch.sparse["item"].offsets.tolist() == [0, 1, 2, 3, 4]
    assert batch.dense.shape == (4, schema.dense_width)
    for i, name in enumerate(schema.dense_names):
        expected = {
            "age": small_log.column("age"),
            "price": small_log.column("price"),
            **{f"genres[{g}]": small_log.column("genres")[:, g] for g in range(3)},
            **{c.name: small_log.counters[:, k] for k, c in enumerate(schema.counters)},
        }[name]
        assert batch.dense[:, i].tolist() == expected[rows].tolist()
    assert batch.time.tolist() == small_log.time[rows].tolist()
    assert batch.groups.tolist() == small_log.user[rows].tolist()
    assert batch.sample_ids.tolist() == [17, 3, -1, 3]
    assert batch.weights.tolist() == [1, 1, 0, 1]
    labels, mask = small_log.labels(rows)
    assert batch.labels.tolist() == labels.tolist()
    assert batch.label_mask.tolist() == mask.tolist()
    hidden = "truth"
    assert hidden not in (*sequence.ids, *sequence.floats, *batch.sparse, *schema.dense_names)


def test_empty_histories_are_valid(small_log):
    first = small_log.user_offsets[:-1]
    batch = Collator(small_log, max_history=10)(first)
    sequence = batch.sequences["events"]
    assert sequence.max_len == 0
    assert sequence.offsets.tolist() == [0] * (len(first) + 1)
    assert {k: tuple(v.shape) for k, v in sequence.floats.items()} == {
        "price": (0, 1),
        "genres": (0, 3),
        "watched": (0, 1),
    }
    assert Collator(small_log, max_history=10)([]).batch_size == 0
