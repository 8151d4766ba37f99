from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from gem_data import Column, EventLog, build_log
from gem_data.features.statistics import Moments
from gem_data.features.vocabulary import Vocabulary, vocabulary_file
from gem_data.testing import rich_events, rich_schema
from hypothesis import given, settings
from hypothesis import strategies as st

FREQUENT = Column(name="x", kind="id", role="context", cardinality=5, vocabulary="frequency", min_count=2)
HASHED = Column(name="x", kind="id", role="context", cardinality=7, vocabulary="hash")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-50, 50), max_size=60))
def test_frequent_keys_against_a_counter(values):
    counts = Counter(values)
    keys = np.array(sorted(counts), np.int64)
    vocabulary = Vocabulary.fit(FREQUENT, keys, np.array([counts[k] for k in keys.tolist()], np.int64))
    ranked = sorted((k for k in counts if counts[k] >= 2), key=lambda k: (-counts[k], k))[:3]
    expected = {k: 2 + i for i, k in enumerate(ranked)}
    assert vocabulary.encode(values).tolist() == [expected.get(v, 1) for v in values]
    assert vocabulary.encode([999]).tolist() == [1]
    assert vocabulary.report["kept"] == len(ranked)
    covered = sum(counts[k] for k in ranked) / max(1, len(values))
    assert vocabulary.report["covered"] == pytest.approx(covered)
    assert vocabulary.decode(range(2, 2 + len(ranked))) == ranked


@settings(deadline=None, max_examples=40)
@given(st.sets(st.integers(-(2**62), 2**62), max_size=30))
def test_hashes_report_their_collisions(values):
    keys = np.array(sorted(values), np.int64)
    vocabulary = Vocabulary.fit(HASHED, keys, np.ones(len(keys), np.int64))
    ids = vocabulary.encode(keys)
    assert all(1 <= i < 7 for i in ids)
    buckets = Counter(ids.tolist())
    assert vocabulary.report["collisions"] == sum(n for n in buckets.values() if n > 1)
    assert vocabulary.report["ids"] == len(buckets)
    assert vocabulary.encode_values([None, *keys.tolist()[:1]]).tolist() == [0, *ids[:1].tolist()]


def test_a_log_keeps_its_vocabularies_and_maps_unseen_keys(tmp_path):
    schema, table = rich_schema(counters=False), rich_events(200)
    build_log(table, schema, tmp_path / "log")
    log = EventLog.open(tmp_path / "log", verify=True)
    items = log.vocabularies["item"]
    assert set(items.texts.values()) <= set(table["item"].to_pylist())
    assert items.encode_values(["item-1", "never seen", None, ""]).tolist() == [
        items.encode_values(["item-1"])[0],
        1,
        0,
        0,
    ]
    assert items.decode(items.encode_values(["item-1"])) == ["item-1"]
    assert log.manifest["vocabularies"]["page"]["distinct"] == 200
    assert log.manifest["vocabularies"]["page"]["collisions"] >= 196
    order = np.lexsort((np.arange(200), table["time"].to_numpy(), table["user"].to_numpy()))
    expected = items.encode_values([table["item"][i].as_py() for i in order])
    assert log.column("item").tolist() == expected.tolist()


def test_numbers_as_text_are_the_numbers():
    vocabulary = Vocabulary.fit(FREQUENT, np.array([-7, 12]), np.array([5, 6]))
    assert (
        vocabulary.encode_values(["12", "-7", "012", "+12"]).tolist()
        == vocabulary.encode([12, -7, 10**9, 10**9]).tolist()
    )
    with pytest.raises(ValueError, match=r"1\.5 is not an integer"):
        vocabulary.encode_values([1.5])


def test_a_damaged_vocabulary_is_refused(tmp_path):
    folder = tmp_path / "log"
    build_log(rich_events(50), rich_schema(counters=False), folder)
    path = folder / vocabulary_file("item")
    data = path.read_bytes()
    path.write_bytes(data[:-8])
    with pytest.raises(ValueError, match="truncated or replaced"):
        EventLog.open(folder)
    path.write_bytes(b"\0" * len(data))
    with pytest.raises(ValueError, match="not a readable vocabulary"):
        EventLog.open(folder)
    Vocabulary.fit(FREQUENT, np.array([1]), np.array([2])).write(path)
    with pytest.raises(ValueError, match="the schema has"):
        Vocabulary.read(path, HASHED)
    table = pa.ipc.open_file(path).read_all()
    table = table.set_column(1, "id", pa.array([9]))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ValueError, match="outside the table"):
        Vocabulary.read(path, FREQUENT)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=2), min_size=1, max_size=40), st.data())
def test_moments_in_parts_are_those_of_all(rows, data):
    x = np.array(rows)
    cut = data.draw(st.integers(0, len(rows)))
    moments = Moments()
    for part in (x[:cut], x[cut:]):
        moments.add(part)
    found = Moments.from_dict(moments.to_dict()).to_dict()
    assert found["count"] == len(rows)
    for key, expected in (("mean", x.mean(0)), ("std", x.std(0)), ("min", x.min(0)), ("max", x.max(0))):
        np.testing.assert_allclose(found[key], expected, rtol=1e-7, atol=1e-7)


def test_statistics_of_a_log(small_log):
    price = small_log.column("price").astype(np.float64)
    assert small_log.statistics["price"]["mean"] == pytest.approx([price.mean()])
    assert small_log.statistics["price"]["std"] == pytest.approx([price.std()])
    assert len(small_log.statistics["genres"]["max"]) == 3
    assert small_log.statistics["item_click"]["min"] == pytest.approx([small_log.counters[:, 2].min()])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s.pop("price"),
        lambda s: s.update(other=s["price"]),
        lambda s: s["price"].update(mean=[float("nan")]),
        lambda s: s["embedding"].update(std=[1.0]),
        lambda s: s["price"].update(max=[s["price"]["mean"][0] - 1]),
        lambda s: s["price"].pop("min"),
    ],
)
def test_statistics_are_checked_when_a_log_is_opened(tmp_path, spoil):
    build_log(rich_events(60), rich_schema(), tmp_path / "log")
    assert set(EventLog.open(tmp_path / "log").statistics) >= {"price", "embedding", "item_click"}
    path = tmp_path / "log" / "manifest.json"
    manifest = json.loads(path.read_text())
    spoil(manifest["statistics"])
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"manifest.json.*(statistics|price)"):
        EventLog.open(tmp_path / "log")
