"""Out-of-core builds give what in-memory builds give, whatever the memory, the parts, and where they were killed."""

from __future__ import annotations

import dataclasses
import errno
import json
import subprocess
import sys

import gem_data.build.out_of_core
import numpy as np
import pyarrow as pa
import pytest
from gem_data import Collator, EventLog, build_log, prepare, time_split
from gem_data.sources.events import Events, from_table
from gem_data.testing import brute_counter, brute_history, rich_events, rich_schema, small_events, small_schema
from hypothesis import given, settings
from hypothesis import strategies as st


def spoiled(table: pa.Table, schema) -> pa.Table:
    """The same with duplicates and bad rows among it."""
    bad = table.slice(0, 3).set_column(table.column_names.index("time"), "time", pa.array([None, 10**13, 5]))
    return pa.concat_tables([table.slice(0, 5), bad, table.slice(5), table.slice(1, 4)])


def both(tmp_path, table, schema, **options):
    build_log(table, schema, tmp_path / "whole")
    summary = prepare(from_table(table, schema), tmp_path / "parts", **options)
    return summary, EventLog.open(tmp_path / "whole"), EventLog.open(tmp_path / "parts", expect=schema, verify=True)


def same_logs(a: EventLog, b: EventLog) -> None:
    assert len(a) == len(b)
    for name in ("time", *(c.name for c in a.schema.columns)):
        assert a.column(name).tolist() == b.column(name).tolist(), name
    np.testing.assert_array_equal(np.asarray(a.counters), np.asarray(b.counters))
    assert a.users.tolist() == b.users.tolist()
    assert a.user_offsets.tolist() == b.user_offsets.tolist()
    assert a.by_time.tolist() == b.by_time.tolist()
    for source in a.schema.sources:
        assert a.source_rows(source.name).tolist() == b.source_rows(source.name).tolist()
    for key in ("rows", "users", "time", "label_rates", "rejected", "out_of_order", "vocabularies"):
        assert a.manifest[key] == b.manifest[key], key
    for name, values in a.statistics.items():
        for key, value in values.items():
            np.testing.assert_allclose(b.statistics[name][key], value, rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=8)
@given(
    n=st.integers(6, 120),
    seed=st.integers(0, 10**6),
    part_rows=st.sampled_from([1, 20, 10**6]),
    chunk=st.sampled_from([7, 1000]),
    rich=st.booleans(),
    runs=st.booleans(),
    delay=st.sampled_from([0, 15]),
)
def test_the_same_log_as_in_memory(tmp_path_factory, n, seed, part_rows, chunk, rich, runs, delay):
    folder = tmp_path_factory.mktemp("log")
    schema = rich_schema(delay=delay) if rich else dataclasses.replace(small_schema(), delay=delay)
    table = spoiled((rich_events if rich else small_events)(n, seed=seed), schema)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gem_data.sources.events, "CHUNK_ROWS", chunk)
        patch.setattr(Events.chunks, "__defaults__", (chunk,))
        patch.setattr(gem_data.features.streamed, "BYTES_PER_ROW", 1 << 26)  # many buckets of keys
        patch.setattr(gem_data.features.streamed, "CHUNK", 9)
        patch.setattr(gem_data.build.finish, "CHUNK", 9)
        _, whole, parts = both(folder, table, schema, part_rows=part_rows, memory=1 << 28)
    same_logs(whole, parts)
    assert len(parts.manifest["generations"][0]["parts"]) == (
        1 if part_rows == 10**6 else len(parts.generations[0].parts)
    )
    if part_rows == 1:
        assert len(parts.generations[0].parts) == len(parts.users)
    rejects = [
        sorted(json.loads(line)["row"] for line in (log.folder / "rejects.jsonl").read_text().splitlines())
        for log in (whole, parts)
    ]
    assert rejects[0] == rejects[1]
    rows = np.random.default_rng(seed).integers(len(whole), size=9)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LONG_RUN", "LONG_RUN_PARTS"):
            patch.setattr(gem_data.log.event_log, name, -1 if runs else 10**6)  # copies of runs, or a gather
        a, b = (Collator(log, max_history=5)(rows) for log in (whole, parts))
    for source in schema.source_names:
        x, y = a.sequences[source], b.sequences[source]
        assert x.offsets.equal(y.offsets)
        assert x.time.equal(y.time)
        assert all(x.ids[k].equal(y.ids[k]) for k in x.ids)
        assert all(x.floats[k].equal(y.floats[k]) for k in x.floats)
        assert all(x.lists[k].values.equal(y.lists[k].values) for k in x.lists)
        for row, length in zip(rows.tolist(), x.offsets.diff().tolist(), strict=True):
            assert length == len(brute_history(parts, row, 5, source if schema.sources else None))
    assert a.dense.equal(b.dense)
    assert a.labels.equal(b.labels)
    for counter in (c.name for c in schema.counters):
        i = [c.name for c in schema.counters].index(counter)
        assert parts.counters[int(rows[0])][i] == pytest.approx(brute_counter(whole, counter, int(rows[0])), abs=1e-5)


def test_splits_of_parts_are_those_of_the_whole(tmp_path):
    _, whole, parts = both(tmp_path, small_events(150), small_schema(), part_rows=30)
    for name in ("train", "validation", "test"):
        assert getattr(time_split(whole), name).tolist() == getattr(time_split(parts), name).tolist()
    assert parts.column("item")[5] == whole.column("item")[5]
    assert parts.column("item")[-1] == whole.column("item")[-1]
    assert parts.column("genres")[3:7].tolist() == whole.column("genres")[3:7].tolist()
    assert parts.column("action")[parts.column("action")[:] > 1].tolist() == [
        a for a in whole.column("action") if a > 1
    ]
    assert parts.column("price").shape == (150,)


@pytest.mark.parametrize(
    ("victim", "after"),
    [
        *(("write_json", n) for n in (0, 2, 6, 11)),
        *(("finish_part", n) for n in (0, 2)),
        ("partition", 0),
        ("merge_indices", 0),
        ("stream_counters", 0),
    ],
)
def test_a_killed_build_goes_on_where_it_stopped(tmp_path, monkeypatch, victim, after):
    import gem_data.build.engine
    import gem_data.build.finish

    schema, table = rich_schema(), spoiled(rich_events(100), rich_schema())
    home = {
        "partition": gem_data.build.engine.Engine,
        "merge_indices": gem_data.build.finish,
        "stream_counters": gem_data.build.finish,
    }
    owner = home.get(victim, gem_data.build.out_of_core)
    real, calls = getattr(owner, victim), []

    def kill(*args, **kwargs):
        calls.append(1)
        if len(calls) == after + 1:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(Events.chunks, "__defaults__", (30,))
    read = []
    source = from_table(table, schema)
    counted = dataclasses.replace(source, tables=lambda: (read.append(1), source.tables())[1])
    with monkeypatch.context() as patch:
        patch.setattr(owner, victim, kill)
        with pytest.raises(KeyboardInterrupt):
            prepare(counted, tmp_path / "parts", part_rows=30)
    assert not (tmp_path / "parts").exists()
    prepare(counted, tmp_path / "parts", part_rows=10**6 if victim == "finish_part" else 30)
    assert len(read) == (2 if victim == "write_json" and after in (2, 6) else 1)  # finished chunks are not read again
    build_log(table, schema, tmp_path / "whole")
    same_logs(EventLog.open(tmp_path / "whole"), EventLog.open(tmp_path / "parts", verify=True))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["parts", "whole"]


def test_a_build_that_is_killed_by_the_system_is_resumed(tmp_path):
    """A real SIGKILL, in the middle of the parts."""
    code = (
        "import os, sys, gem_data.build.out_of_core as p\n"
        "from gem_data.sources.events import from_table\n"
        "from gem_data.testing import small_events, small_schema\n"
        "real = p.finish_part\n"
        "def kill(*a, **k):\n"
        "    out = real(*a, **k)\n"
        "    if a[-1] == 2: os.kill(os.getpid(), 9)\n"
        "    return out\n"
        "p.finish_part = kill\n"
        "p.prepare(from_table(small_events(200), small_schema()), sys.argv[1], part_rows=40)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "parts")], check=False)
    assert done.returncode == -9
    _, whole, parts = both(tmp_path, small_events(200), small_schema(), part_rows=40)
    same_logs(whole, parts)


def test_an_unfinished_build_of_something_else_is_not_mixed_in(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(gem_data.build.out_of_core, "finish_part", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(from_table(small_events(50), small_schema()), tmp_path / "log")
    other = from_table(rich_events(50), rich_schema())
    with pytest.raises(ValueError, match=r"unfinished build of something else \(fingerprint, source differ\)"):
        prepare(other, tmp_path / "log")
    assert prepare(other, tmp_path / "log", restart=True).rows == 50


def test_two_processes_do_not_prepare_the_same_log(tmp_path):
    source = from_table(small_events(50), small_schema())

    def tables():
        with pytest.raises(BlockingIOError, match="another process"):
            prepare(source, tmp_path / "log")
        return source.tables()

    assert prepare(dataclasses.replace(source, tables=tables), tmp_path / "log").rows == 50


def test_a_full_disk_says_how_to_go_on(tmp_path, monkeypatch):
    source = from_table(small_events(50), small_schema())
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(gem_data.build.out_of_core, "finish_part", full)
        with pytest.raises(OSError, match="make room and prepare again to go on") as error:
            prepare(source, tmp_path / "log")
    assert error.value.errno == errno.ENOSPC
    assert not (tmp_path / "log").exists()
    assert prepare(source, tmp_path / "log").rows == 50


@pytest.mark.parametrize("call", range(4))
def test_room_for_mapped_files_is_claimed_before_they_are_written(tmp_path, monkeypatch, call):
    """Writing through a map on a full disk would be a SIGBUS, so the claim has to fail instead, and does."""
    import os

    source, calls, real = from_table(small_events(50), small_schema()), [], os.posix_fallocate

    def claim(*args):
        calls.append(1)
        if len(calls) == call + 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", claim)
        with pytest.raises(OSError, match="make room and prepare again") as error:
            prepare(source, tmp_path / "log", part_rows=20)
    assert error.value.errno == errno.ENOSPC
    prepare(source, tmp_path / "log", part_rows=20)
    build_log(small_events(50), small_schema(), tmp_path / "whole")
    same_logs(EventLog.open(tmp_path / "whole"), EventLog.open(tmp_path / "log", verify=True))


def test_a_user_of_many_events_has_a_part_of_its_own(tmp_path):
    table = small_events(400)
    heavy = np.where(np.arange(400) % 5 > 0, 3, table["user"].to_numpy())
    table = table.set_column(0, "user", pa.array(heavy))
    _, whole, parts = both(tmp_path, table, small_schema(), part_rows=50)
    same_logs(whole, parts)
    sizes = {p["rows"] for p in parts.manifest["generations"][0]["parts"]}
    assert max(sizes) > 300
    last = parts.user_offsets[np.searchsorted(parts.users, 3) + 1] - 1
    assert Collator(parts, max_history=100)([last]).sequences["events"].max_len == 100


def test_refusals(tmp_path):
    schema = small_schema()
    with pytest.raises(ValueError, match=r"no valid event .* among 5 rows: 5 out of range"):
        prepare(
            from_table(small_events(5, users=6).set_column(0, "user", pa.array([99] * 5)), schema), tmp_path / "log"
        )
    with pytest.raises(ValueError, match="the source is empty"):
        prepare(from_table(small_events(5)[:0], schema), tmp_path / "log")
    assert list(tmp_path.iterdir()) == []
    prepare(from_table(small_events(5), schema), tmp_path / "log")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        prepare(from_table(small_events(5), schema), tmp_path / "log")
    assert prepare(from_table(small_events(9), schema), tmp_path / "log", overwrite=True).rows == 9


def test_progress_and_licence(tmp_path, capsys):
    seen = []
    source = dataclasses.replace(from_table(small_events(50), small_schema()), licence="for tests alone")
    prepare(source, tmp_path / "log", part_rows=10, progress=seen.append)
    assert "for tests alone" in capsys.readouterr().err
    stages = list(dict.fromkeys(p.stage for p in seen))
    assert stages == ["checked", "dealt", "sorted", "ordered", "counters"]
    assert seen[-1].done == seen[-1].total == 1
    gem_data.build.out_of_core.print_progress(seen[-1])
    assert "counters: 100%" in capsys.readouterr().err


def test_keys_that_come_later_are_unseen(tmp_path):
    schema = rich_schema(counters=False)
    table = rich_events(40)
    late = (
        table.slice(0, 2).set_column(1, "time", pa.array([9000, 9001])).set_column(3, "item", pa.array(["new", "new"]))
    )
    prepare(from_table(pa.concat_tables([table, late]), schema), tmp_path / "log", vocabulary_until=8000)
    log = EventLog.open(tmp_path / "log")
    assert log.column("item")[log.by_time[-2:]].tolist() == [1, 1]
    assert log.vocabularies["item"].encode_values(["new"]).tolist() == [1]


def test_users_by_name_stay_apart(tmp_path):
    base = rich_schema(counters=False)
    user = dataclasses.replace(base.column("user"), vocabulary="frequency", cardinality=20)
    schema = dataclasses.replace(base, columns=(user, *base.columns[1:]))
    names = pa.array([f"u{i}" for i in rich_events(60)["user"].to_pylist()])
    table = rich_events(60).set_column(0, "user", names)
    _, whole, parts = both(tmp_path, table, schema, part_rows=20)
    same_logs(whole, parts)
    assert len(parts.users) == len(set(names.to_pylist()))
    small = dataclasses.replace(schema, columns=(dataclasses.replace(user, cardinality=4), *base.columns[1:]))
    for build in (
        lambda: prepare(from_table(table, small), tmp_path / "x"),
        lambda: build_log(table, small, tmp_path / "y"),
    ):
        with pytest.raises(ValueError, match="must keep all 6 users apart"):
            build()


def test_a_damaged_part_is_refused(tmp_path):
    prepare(from_table(small_events(80), small_schema()), tmp_path / "log", part_rows=20)
    for path in sorted((tmp_path / "log").glob("*")):
        if path.name in ("manifest.json", "rejects.jsonl"):
            continue
        data = path.read_bytes()
        path.write_bytes(data[:-3])
        with pytest.raises(ValueError, match="truncated or replaced"):
            EventLog.open(tmp_path / "log")
        path.write_bytes(data[:-3] + b"abc")
        with pytest.raises(ValueError, match=r"SHA-256|not a readable"):
            EventLog.open(tmp_path / "log", verify=True)
        path.write_bytes(data)
    EventLog.open(tmp_path / "log", verify=True)
