from __future__ import annotations

import datetime
import errno
import json
import pickle

import gem_data.build.in_memory
import gem_data.build.output
import numpy as np
import pyarrow as pa
import pytest
from gem_data import Column, EventLog, Schema, Task, build_log
from gem_data.build.validate import duplicates, validate
from gem_data.testing import small_events, small_schema
from hypothesis import given, settings
from hypothesis import strategies as st

PLAIN = Schema(
    name="plain",
    columns=(
        Column(name="user", kind="id", role="user", cardinality=4),
        Column(name="score", kind="float", role="context"),
        Column(name="hot", kind="vector", role="context", size=2),
        Column(name="action", kind="id", role="outcome", cardinality=3),
    ),
    tasks=(Task(name="click", column="action", minimum=2),),
)


def plain(**columns) -> pa.Table:
    """Three good events; `columns` replaces some."""
    good = {
        "user": [1, 2, 1],
        "time": [10, 5, 4],
        "score": [0.5, 1.5, 2.5],
        "hot": [[1.0, 0.0]] * 3,
        "action": [2, 1, 0],
    }
    return pa.table({**good, **columns})


def rejects(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "rejects.jsonl").read_text().splitlines()]


@settings(deadline=None, max_examples=25)
@given(n=st.integers(1, 60), seed=st.integers(0, 10**6), times=st.integers(1, 20))
def test_round_trip_of_random_events(tmp_path_factory, n, seed, times):
    folder = tmp_path_factory.mktemp("log") / "log"
    table = small_events(n, seed=seed, times=times)
    summary = build_log(table, small_schema(), folder)
    log = EventLog.open(folder, expect=small_schema(), verify=True)
    assert len(log) == summary.rows == n
    expected = sorted(range(n), key=lambda i: (table["user"][i].as_py(), table["time"][i].as_py()))  # sorted is stable
    for name in table.column_names:
        column = log.column(name)
        assert column.tolist() == [table[name][i].as_py() for i in expected]
        assert not column.flags.writeable
        assert not column.flags.owndata
    assert log.users.tolist() == sorted(set(table["user"].to_pylist()))
    for user, a, b in zip(log.users, log.user_offsets[:-1], log.user_offsets[1:], strict=True):
        assert (log.user[a:b] == user).all()
    assert log.user_offsets[-1] == n


def test_labels_and_their_mask(small_log):
    action, watched = small_log.column("action"), small_log.column("watched")
    labels, mask = small_log.labels(np.arange(len(small_log)))
    assert labels.dtype == np.float32
    assert labels[:, 0].tolist() == (action >= 2).tolist()
    assert labels[:, 1].tolist() == (action == 3).tolist()
    assert labels[:, 2].tolist() == (watched >= 0.5).tolist()
    assert mask[:, 1].tolist() == (action >= 2).tolist()
    assert mask[:, [0, 2]].all()


def test_the_summary_and_the_manifest_tell_what_happened(tmp_path):
    table = plain(extra=[1, 2, 3], action=[2, 1, 7])
    summary = build_log(table, PLAIN, tmp_path / "log")
    assert (summary.rows, summary.users, summary.out_of_order) == (2, 2, 0)
    assert summary.ignored_columns == ("extra",)
    assert summary.rejected == {"out of range": 1}
    assert summary.label_rates == {"click": 0.5}
    for part in ("2 events of 2 users", "extra", "1 out of range", "row 2: action = 7 is out of range"):
        assert part in str(summary)
    manifest = json.loads((tmp_path / "log" / "manifest.json").read_text())
    assert manifest["time"] == [5, 10]
    assert manifest["rejected"] == summary.rejected
    assert build_log(plain(), PLAIN, tmp_path / "again").out_of_order == 1


BAD = [
    ("user", [1, None, 2], "missing"),
    ("user", ["1", "", "2"], "missing"),
    ("user", ["1", " two ", "+2"], "unparsable"),
    ("user", ["1", "1.5", "2"], "not an integer"),
    ("user", [1.0, 1.5, 2.0], "not an integer"),
    ("user", [1, 4, 2], "out of range"),
    ("user", [1, -1, 2], "out of range"),
    ("user", ["1", "99999999999999999999", "2"], "out of range"),
    ("user", pa.array([1, 2**64 - 1, 2], pa.uint64()), "out of range"),
    ("user", [1.0, float("nan"), 2.0], "not finite"),
    ("user", [1.0, 1e300, 2.0], "out of range"),
    ("time", [10, 1_600_000_000_000, 4], "out of range"),
    ("time", ["10", "soon", "4"], "unparsable"),
    ("score", [0.5, float("inf"), 1.0], "not finite"),
    ("score", [0.5, 1e300, 1.0], "not finite"),
    ("score", ["0.5", "NaN", "1e-3"], "not finite"),
    ("score", ["0.5", "1,5", ".5"], "unparsable"),
    ("score", [0.5, None, 1.0], "missing"),
    ("hot", [[1.0, 0.0], [1.0], [0.0, 1.0]], "wrong size"),
    ("hot", [[1.0, 0.0], None, [0.0, 1.0]], "missing"),
    ("hot", [[1.0, 0.0], [None, 1.0], [0.0, 1.0]], "missing"),
    ("hot", [[1.0, 0.0], [0.0, float("nan")], [0.0, 1.0]], "not finite"),
    ("hot", [[1.0, 0.0], [0.0, 1e300], [0.0, 1.0]], "not finite"),
]


@pytest.mark.parametrize(("name", "values", "reason"), BAD)
def test_a_bad_row_is_rejected_with_its_reason_and_the_others_stay(tmp_path, name, values, reason):
    folder = tmp_path / "log"
    summary = build_log(plain(**{name: values}), PLAIN, folder)
    assert summary.rejected == {reason: 1}
    assert summary.rows == 2
    (record,) = rejects(folder)
    assert (record["row"], record["column"], record["reason"]) == (1, name, reason)
    assert set(record["event"]) == {"user", "time", "score", "hot", "action"}
    assert f"row 1: {name} = " in summary.samples[0]
    assert len(EventLog.open(folder, verify=True)) == 2


def test_the_first_fault_of_a_row_counts_once(tmp_path):
    summary = build_log(plain(user=[1, 9, 2], score=[None, None, 1.0]), PLAIN, tmp_path / "log")
    assert summary.rejected == {"missing": 1, "out of range": 1}
    assert [r["column"] for r in rejects(tmp_path / "log")] == ["score", "user"]


def test_exact_duplicates_go_and_near_ones_stay(tmp_path):
    rows = [
        (1, 5, 0.5, 2),
        (1, 5, 0.5, 2),
        (1, 5, 0.25, 2),
        (2, 5, 0.5, 2),
        (1, 5, -0.0, 1),
        (1, 5, 0.0, 1),
        (1, 5, 0.5, 2),
    ]
    user, time, score, action = map(list, zip(*rows, strict=True))
    table = pa.table({"user": user, "time": time, "score": score, "hot": [[0.0, 1.0]] * 7, "action": action})
    summary = build_log(table, PLAIN, tmp_path / "log")
    assert summary.rejected == {"duplicate": 3}
    assert [r["row"] for r in rejects(tmp_path / "log")] == [1, 5, 6]
    assert "row 1: is a duplicate" in str(summary)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 0.5]), st.integers(-1, 1)), max_size=30))
def test_duplicates_against_a_set(rows):
    a = np.array([r[0] for r in rows], np.int64)
    b = np.array([[r[1], r[2]] for r in rows], np.float32).reshape(-1, 2)
    seen: set = set()
    expected = [i for i, r in enumerate(rows) if r in seen or seen.add(r)]
    assert duplicates([a, b]).tolist() == expected


def test_a_colliding_hash_rejects_nothing(monkeypatch):
    monkeypatch.setattr("gem_data.build.validate.mix64", lambda x: np.zeros_like(x))
    assert duplicates([np.array([3, 1, 3, 2])]).tolist() == [2]


def test_types_that_hold_numbers(tmp_path):
    stamps = [datetime.datetime(1970, 1, 1, 0, 0, 9, 999_000), datetime.datetime(1970, 1, 1), None]
    table = plain(
        user=pa.array(["1", "2", "1"]).dictionary_encode(),
        time=pa.array(stamps, pa.timestamp("ms")),
        score=pa.array([True, False, True]),
        hot=pa.array([[1, 0]] * 3, pa.list_(pa.int8(), 2)),
    )
    assert build_log(table, PLAIN, tmp_path / "log").rejected == {"missing": 1}
    log = EventLog.open(tmp_path / "log")
    assert log.time.tolist() == [9, 0]
    assert log.column("score").tolist() == [1.0, 0.0]
    with pytest.raises(TypeError, match="'score' has the Arrow type struct"):
        validate(plain(score=[{"a": 1}] * 3), PLAIN)
    with pytest.raises(TypeError, match="'hot' has the Arrow type double; expected a list of 2 numbers"):
        validate(plain(hot=[1.0] * 3), PLAIN)


def test_record_batches_readers_and_slices_are_sources(tmp_path):
    table = small_events(40)
    parts = table.to_batches(max_chunksize=7)
    assert len(parts) > 3
    for i, events in enumerate(
        [table, iter(parts), table.to_reader(max_chunksize=9), pa.concat_tables([table[:13], table[13:]])]
    ):
        build_log(events, small_schema(), tmp_path / str(i))
    assert len({EventLog.open(tmp_path / str(i)).digest for i in range(4)}) == 1
    with pytest.raises(ValueError, match="no record batch"):
        build_log([], small_schema(), tmp_path / "none")


def test_a_source_that_lacks_a_column_or_every_row(tmp_path):
    with pytest.raises(
        ValueError, match=r"lacks a column of schema 'plain': unknown column 'score'; did you mean 'scor'"
    ):
        build_log(plain().rename_columns(["user", "time", "scor", "hot", "action"]), PLAIN, tmp_path / "log")
    with pytest.raises(ValueError, match=r"no valid event .* among 3 rows: 3 out of range"):
        build_log(plain(user=[7, 8, 9]), PLAIN, tmp_path / "log")
    with pytest.raises(ValueError, match="the source is empty"):
        build_log(plain()[:0], PLAIN, tmp_path / "log")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept_unless_overwritten(tmp_path):
    folder = tmp_path / "log"
    build_log(plain(), PLAIN, folder)
    old = EventLog.open(folder)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        build_log(plain(), PLAIN, folder)
    build_log(plain(action=[0, 0, 2]), PLAIN, folder, overwrite=True)
    assert EventLog.open(folder, verify=True).column("action").tolist() == [2, 0, 0]
    assert old.column("action").tolist() == [0, 2, 1]  # a reader of the old one keeps it
    assert [p.name for p in tmp_path.iterdir()] == ["log"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(FileExistsError, match="not an event log"):
        build_log(plain(), PLAIN, tmp_path / "mine", overwrite=True)


@pytest.mark.parametrize("victim", ["_write_events", "_write_rejects", "file_digest", "_sync"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch, victim, overwrite):
    folder = tmp_path / "log"
    if overwrite:
        build_log(plain(), PLAIN, folder)
        before = EventLog.open(folder).digest
    home = gem_data.build.output if victim == "_sync" else gem_data.build.in_memory
    real = getattr(home, victim)

    def full(path, *rest):
        if victim.startswith("_write"):
            real(path, *rest)
            path.write_bytes(path.read_bytes()[:10])  # some of it had been written
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(home, victim, full)
    with pytest.raises(OSError, match=r"no space left on the disk while building .*nothing was left in place") as error:
        build_log(plain(score=[1.0, 1.0, 1.0]), PLAIN, folder, overwrite=overwrite)
    assert error.value.errno == errno.ENOSPC
    assert [p.name for p in tmp_path.iterdir()] == (["log"] if overwrite else [])
    if overwrite:
        assert EventLog.open(folder, verify=True).digest == before


def test_an_interrupted_build_leaves_nothing(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(gem_data.build.in_memory, "_write_rejects", stop)
    with pytest.raises(KeyboardInterrupt):
        build_log(plain(), PLAIN, tmp_path / "log")
    assert list(tmp_path.iterdir()) == []


def test_truncated_foreign_and_changed_logs_are_refused(tmp_path):
    folder = tmp_path / "log"
    with pytest.raises(FileNotFoundError, match="no event log"):
        EventLog.open(folder)
    build_log(plain(), PLAIN, folder)
    events, manifest = folder / "events.arrow", folder / "manifest.json"
    data, text = events.read_bytes(), manifest.read_text()

    events.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=f"has {len(data) - 1} bytes, but {len(data)} were written: truncated"):
        EventLog.open(folder)
    events.write_bytes(b"x" * len(data))
    with pytest.raises(ValueError, match="not a readable Arrow file"):
        EventLog.open(folder)
    at = data.index(np.array([0, 2, 1], np.int64).tobytes())  # the actions
    events.write_bytes(data[:at] + b"\x01" + data[at + 1 :])
    EventLog.open(folder)
    with pytest.raises(ValueError, match="SHA-256"):
        EventLog.open(folder, verify=True)
    events.unlink()
    with pytest.raises(FileNotFoundError, match=r"no events\.arrow"):
        EventLog.open(folder)
    events.write_bytes(data)

    changes = [
        ("{", "is not the manifest"),
        ("[]", "is not the manifest"),
        (text.replace('"format": 1', '"format": 99'), "has format 99"),
        (text.replace('"rows": 3', '"rows": 4'), "3 rows of columns"),
        (text.replace('"cardinality": 4', '"cardinality": 5'), "declares fingerprint"),
        (text.replace('"fingerprint"', '"print"'), "lacks fingerprint"),
    ]
    for changed, message in changes:
        assert changed != text
        manifest.write_text(changed)
        with pytest.raises(ValueError, match=message):
            EventLog.open(folder)


def test_a_log_of_another_schema_is_refused(small_log):
    with pytest.raises(ValueError, match="column 'item': cardinality 8 here, 7 there"):
        EventLog.open(small_log.folder, expect=small_schema(items=8))


def test_unknown_columns_and_rows(small_log):
    with pytest.raises(ValueError, match="did you mean 'genres'"):
        small_log.column("genre")
    with pytest.raises(ValueError, match="unknown column '_history_end'"):
        small_log.column("_history_end")
    with pytest.raises(ValueError, match="row 150 is outside the log, which has rows 0 to 149"):
        small_log.rows([0, 150])


def test_pickling_sends_the_folder(small_log):
    data = pickle.dumps(small_log)
    assert len(data) < 500
    assert pickle.loads(data).digest == small_log.digest
