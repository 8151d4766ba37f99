"""Several histories, multi-valued ids, bit masks, delays and shared requests, against loops over all rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
import torch
from gem_data import Collator, Column, EventLog, JaggedBatch, Loader, LoaderConfig, Schema, Source, Task, build_log
from gem_data.build.validate import duplicates
from gem_data.ragged import Ragged
from gem_data.testing import brute_counter, brute_history, rich_events, rich_schema
from hypothesis import given, settings
from hypothesis import strategies as st


def make(tmp_path_factory, schema: Schema, **options) -> EventLog:
    folder = tmp_path_factory.mktemp("log") / "log"
    build_log(rich_events(**options), schema, folder)
    return EventLog.open(folder, expect=schema, verify=True)


logs = {"n": st.integers(1, 40), "seed": st.integers(0, 10**6), "times": st.integers(1, 15)}


@settings(deadline=None, max_examples=20)
@given(**logs, max_history=st.integers(0, 6), delay=st.sampled_from([0, 10, 35]), lag=st.sampled_from([0, 25]))
def test_batches_against_loops(tmp_path_factory, n, seed, times, max_history, delay, lag):
    log = make(tmp_path_factory, rich_schema(delay=delay, lag=lag, counters=False), n=n, seed=seed, times=times)
    rows = np.random.default_rng(seed).integers(n, size=7)
    batch = Collator(log, max_history={"views": max_history, "orders": 3})(rows)
    check(log, rows, batch, {"views": max_history, "orders": 3}, lag)


def check(log: EventLog, rows, batch: JaggedBatch, limits: dict[str, int], lag: int) -> None:
    assert list(batch.sequences) == ["views", "orders"]
    for source, limit in limits.items():
        sequence = batch.sequences[source]
        expected = [brute_history(log, int(r), limit, source) for r in rows]
        assert sequence.offsets.diff().tolist() == [len(e) for e in expected]
        assert sequence.max_len == max(map(len, expected), default=0)
        flat = [e for history in expected for e in history]
        known = [log.time[e] + lag < log.time[r] for r, history in zip(rows, expected, strict=True) for e in history]
        assert sequence.time.tolist() == [int(log.time[e]) for e in flat]
        for name in set(log.schema.source_columns(source)):
            column = log.schema.column(name)
            values = [log.column(name)[np.array([e])].tolist()[0] for e in flat]
            if column.role == "outcome":
                values = [v if k else type(v)() for v, k in zip(values, known, strict=True)]
            if column.kind == "ids":
                assert (
                    Ragged(sequence.lists[name].values.numpy(), sequence.lists[name].offsets.numpy()).tolist() == values
                )
            elif column.kind == "bits":
                bits = [[float(v >> b & 1) for b in range(3)] for v in values]
                assert sequence.floats[name].tolist() == bits
            elif column.kind == "id":
                assert sequence.ids[name].tolist() == values
            else:
                assert sequence.floats[name].numpy().reshape(-1).tolist() == np.reshape(values, -1).tolist()
    tags = [log.column("tags").take(np.array([r])).tolist()[0] for r in rows]
    assert Ragged(batch.sparse["tags"].values.numpy(), batch.sparse["tags"].offsets.numpy()).tolist() == tags


@settings(deadline=None, max_examples=12)
@given(**logs, delay=st.sampled_from([0, 10, 35]), lag=st.sampled_from([0, 25]))
def test_counters_with_delays_against_brute_force(tmp_path_factory, n, seed, times, delay, lag):
    log = make(tmp_path_factory, rich_schema(delay=delay, lag=lag), n=n, seed=seed, times=times)
    for i, counter in enumerate(log.schema.counters):
        expected = [brute_counter(log, counter.name, row) for row in range(n)]
        np.testing.assert_allclose(log.counters[:, i], expected, rtol=2e-6, atol=1e-6, err_msg=counter.name)


@settings(deadline=None, max_examples=25)
@given(**logs, data=st.data())
def test_sharing_changes_nothing_but_the_work(tmp_path_factory, n, seed, times, data):
    log = make(tmp_path_factory, rich_schema(counters=False), n=n, seed=seed, times=times)
    rows = data.draw(st.lists(st.integers(0, n - 1), max_size=12))
    plain = Collator(log, max_history=4)(rows)
    shared = Collator(log, max_history=4, share=True)(rows)
    requests = {(int(log.user[r]), int(log.time[r])) for r in rows}
    assert shared.sequences["views"].offsets.numel() - 1 == len(requests)
    assert shared.sharing == pytest.approx(len(rows) / max(1, len(requests)))
    same(shared.expanded(), plain)
    b = data.draw(st.integers(0, len(rows)))
    a = data.draw(st.integers(0, b))
    same(shared.slice(a, b).expanded(), plain.slice(a, b))
    same(JaggedBatch.concat([shared.slice(0, a), shared.slice(a, len(rows))]).expanded(), plain)
    same(JaggedBatch.concat([shared.slice(0, a), plain.slice(a, len(rows))]), plain)
    if rows:
        index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
        chosen = shared.select(index)
        same(chosen.expanded(), plain.select(index))
        assert chosen.sequences["views"].offsets.numel() - 1 == len(
            {(int(log.user[rows[i]]), int(log.time[rows[i]])) for i in index}
        )


def tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for k in sorted(value) for t in tensors(value[k])]
    if dataclasses.is_dataclass(value):
        return [t for f in dataclasses.fields(value) for t in tensors(getattr(value, f.name))]
    return []


def same(a: JaggedBatch, b: JaggedBatch) -> None:
    x, y = tensors(a), tensors(b)
    assert len(x) == len(y) > 20
    for s, t in zip(x, y, strict=True):
        torch.testing.assert_close(s, t, rtol=0, atol=0)
    assert [s.max_len for s in a.sequences.values()] == [s.max_len for s in b.sequences.values()]


def test_lists_follow_select_slice_and_concat(tmp_path_factory):
    log = make(tmp_path_factory, rich_schema(counters=False), n=60)
    collate = Collator(log, max_history=5)
    rows = np.arange(20, 35)
    batch = collate(rows)
    same(batch.slice(3, 9), collate(rows[3:9]))
    same(batch.select([4, 4, 0]), collate(rows[[4, 4, 0]]))
    same(JaggedBatch.concat([batch.slice(0, 6), batch.slice(6, 15)]), batch)
    assert all(t.device.type == "meta" for t in tensors(batch.to("meta")))


def test_the_rows_of_a_source_are_the_samples(tmp_path_factory):
    log = make(tmp_path_factory, rich_schema(counters=False), n=60)
    rows = log.source_rows("orders")
    assert rows.tolist() == [r for r in range(60) if log.column("type")[r] in (1, 3)]
    loader = Loader(log, rows, LoaderConfig(batch_size=8, max_history={"views": 3, "orders": 2}))
    assert all(set(b.sample_ids.tolist()) <= set(rows.tolist()) for b in loader)
    with pytest.raises(ValueError, match="unknown source 'viewz'; did you mean 'views'"):
        Collator(log, max_history={"viewz": 3})
    with pytest.raises(ValueError, match="says nothing of source 'orders'"):
        Collator(log, max_history={"views": 3})
    with pytest.raises(ValueError, match="unknown source"):
        log.events([1], 3, "events")


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=30))
def test_lists_and_their_duplicates(rows):
    offsets = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int64)
    ragged = Ragged(np.array([v for r in rows for v in r], np.int64), offsets)
    seen: set = set()
    expected = [i for i, r in enumerate(rows) if tuple(r) in seen or seen.add(tuple(r))]
    assert duplicates([ragged]).tolist() == expected
    assert ragged.tolist() == rows
    assert ragged[::2].tolist() == rows[::2]
    assert ragged[1:3].tolist() == rows[1:3]
    assert Ragged.concat([ragged[:2], ragged[2:]]).tolist() == rows


BASE = rich_schema(counters=False)
ROW = {k: v[:3] for k, v in rich_events(3).to_pydict().items()}


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("tags", [[1], [2, 9], [3]], "out of range"),
        ("tags", [[1], [2, -1], [3]], "out of range"),
        ("tags", [[1], [2, None], [3]], "missing"),
        ("replies", [[1], None, [3]], "missing"),
        ("did", [1, 8, 2], "out of range"),
        ("item", ["a", None, "b"], "missing"),
        ("item", ["a", " ", "b"], "missing"),
        ("page", [1, None, 2], "missing"),
        ("page", [1.0, float("inf"), 2.0], "not finite"),
        ("embedding", [[1.0, 2.0], [float("nan"), 1.0], [0.0, 0.0]], "not finite"),
    ],
)
def test_bad_lists_masks_and_keys_are_rejected(tmp_path, name, values, reason):
    summary = build_log(pa.table({**ROW, "time": [1, 2, 3], name: values}), BASE, tmp_path / "log")
    assert summary.rejected == {reason: 1}
    assert summary.rows == 2


def test_defaults_fill_what_is_missing(tmp_path):
    table = pa.table({**ROW, "time": [1, 2, 3], "tags": [None] * 3, "price": [None, 2.0, None]})
    assert build_log(table, BASE, tmp_path / "log").rejected == {}
    log = EventLog.open(tmp_path / "log")
    assert sorted(log.column("price").tolist()) == [-1, -1, 2]
    assert log.column("tags").tolist() == [[], [], []]


USER = Column(name="user", kind="id", role="user", cardinality=5)
TYPE = Column(name="type", kind="id", role="context", cardinality=3)
DID = Column(name="did", kind="bits", role="outcome", size=3)
CLICK = Task(name="click", column="did", bit=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Column(name="x", kind="bits", role="outcome", size=63), "at most 62"),
        (lambda: Column(name="x", kind="ids", role="context"), "needs cardinality"),
        (lambda: Column(name="x", kind="float", role="context", vocabulary="hash"), "takes no vocabulary"),
        (lambda: Column(name="x", kind="id", role="context", cardinality=2, vocabulary="hash"), "cardinality >= 3"),
        (lambda: Column(name="x", kind="id", role="context", cardinality=9, min_count=2), "needs a 'frequency'"),
        (lambda: Column(name="x", kind="id", role="context", cardinality=9, delay=2), "needs role 'outcome'"),
        (lambda: Column(name="x", kind="id", role="context", cardinality=9, default=9), "outside"),
        (lambda: Source(name="s", column="type", values=()), "at least one value"),
        (
            lambda: Schema(name="s", columns=(USER, DID), tasks=(Task(name="t", column="did", minimum=1),)),
            "has bit None",
        ),
        (lambda: Schema(name="s", columns=(USER, DID), tasks=(Task(name="t", column="did", bit=3),)), "has bit 3"),
        (lambda: Schema(name="s", columns=(USER, DID), tasks=(CLICK,), delay=-1), "delay must be 0 or more"),
        (
            lambda: Schema(
                name="s",
                columns=(USER, TYPE, DID),
                tasks=(CLICK,),
                sources=(Source(name="a", column="type", values=(3,)),),
            ),
            "expected values in",
        ),
    ],
)
def test_wrong_declarations(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_schema_survives_json():
    assert Schema.from_dict(BASE.to_dict()) == BASE
    other = dataclasses.replace(BASE, delay=5, sources=BASE.sources[:1])
    assert other.fingerprint() != BASE.fingerprint()
    assert {"source 'orders': only there", "delay: 5 here, 0 there"} <= set(other.differences(BASE))
