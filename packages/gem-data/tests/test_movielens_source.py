from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gem_data import EventLog, SourceUnavailable, build_log, time_split
from gem_data.sources import movielens

INTER = """user_id:token\titem_id:token\trating:float\ttimestamp:float
1\t10\t5\t100
1\t20\t3\t100
2\t10\t4\t90
2\t10\t4\t90
9\t10\t4\t95
2\t99\t1\t96
2\t20
2\t20\tgood\t97
2\t2000\t4\t97
1\t30\t1\t250.0

"""
USER = """user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token
1\t17\tM\twriter\t85711
2\t56\tF\tastronaut\t94043
"""
ITEM = """item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq
10\tAlpha\t1995\tComedy Children's
20\tBeta\t1939\tNoir unknown
30\tGamma\tV\t
"""


@pytest.fixture
def files(tmp_path) -> Path:
    folder = tmp_path / "ml-100k"
    folder.mkdir()
    for kind, text in (("inter", INTER), ("user", USER), ("item", ITEM)):
        (folder / f"ml-100k.{kind}").write_text(text)
    return folder


def test_parsing_joins_and_malformed_rows_survive(files, tmp_path):
    table, schema = movielens.load(files)
    assert table.num_rows == 10
    summary = build_log(table, schema, tmp_path / "log")
    # User 9 and film 99 have no attributes; one line is cut off; film 2000 is beyond the table.
    assert summary.rejected == {"missing": 3, "unparsable": 1, "out of range": 1, "duplicate": 1}
    log = EventLog.open(tmp_path / "log")
    assert log.user.tolist() == [1, 1, 1, 2]
    assert log.time.tolist() == [100, 100, 250, 90]
    assert log.column("item").tolist() == [10, 20, 30, 10]
    assert log.column("rating").tolist() == [5, 3, 1, 4]
    assert log.column("age").tolist() == [1, 1, 1, len(movielens.AGES) + 1]
    assert log.column("gender").tolist() == [2, 2, 2, 1]
    assert log.column("occupation").tolist() == [21, 21, 21, 0]
    assert log.column("year").tolist() == [
        1 + movielens.YEARS.index(1995) + 1,
        1,
        0,
        1 + movielens.YEARS.index(1995) + 1,
    ]
    hot = [[movielens.GENRES[g] for g in np.flatnonzero(row)] for row in log.column("genres")]
    assert hot == [["Children's", "Comedy"], ["unknown"], [], ["Children's", "Comedy"]]
    labels, _ = log.labels(range(4))
    assert labels.tolist() == [[1, 1], [0, 0], [0, 0], [1, 0]]


def test_a_file_without_a_column_says_so(files):
    (files / "ml-100k.inter").write_text(INTER.replace("timestamp", "timestmp"))
    with pytest.raises(ValueError, match="unknown column 'timestamp'; did you mean 'timestmp'"):
        movielens.load(files)


def test_the_schema_hides_the_rating_from_the_candidate():
    schema = movielens.schema()
    assert "rating" in schema.sequence_ids
    assert "rating" not in schema.sparse
    assert schema.dense_width == 19 + len(schema.counters)
    assert 10 <= len(schema.counters) <= 14


@pytest.fixture
def index(monkeypatch, files):
    """A package index whose wheel holds the made-up files; their checksums are the pinned ones."""

    def run(command, **_):
        folder = Path(command[command.index("-d") + 1])
        with zipfile.ZipFile(folder / "recbole-1.2.1-py3-none-any.whl", "w") as archive:
            for path in sorted(files.iterdir()):
                archive.writestr(zipfile.ZipInfo(f"recbole/dataset_example/ml-100k/{path.name}"), path.read_text())
        state.calls += 1
        return SimpleNamespace(returncode=0, stderr="")

    state = SimpleNamespace(calls=0)
    monkeypatch.setattr(subprocess, "run", run)
    run(["-d", str(files.parent)])
    monkeypatch.setattr(
        movielens, "WHEEL_SHA256", movielens.file_digest(files.parent / "recbole-1.2.1-py3-none-any.whl")
    )
    monkeypatch.setattr(movielens, "FILES", {p.name: movielens.file_digest(p) for p in files.iterdir()})
    state.calls = 0
    return state


def test_fetch_keeps_the_files_and_tells_the_licence(index, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GEM_DATA_CACHE", str(tmp_path / "cache"))
    notes: list[str] = []
    folder = movielens.fetch(notice=notes.append)
    assert folder == tmp_path / "cache" / "ml-100k"
    assert notes == [movielens.LICENCE]
    assert "non-commercial" in movielens.LICENCE
    assert movielens.load(folder)[0].num_rows == 10
    assert movielens.fetch() == folder
    assert index.calls == 1  # the second came from the cache
    assert capsys.readouterr().err == ""
    movielens.fetch(tmp_path / "other")
    assert movielens.LICENCE in capsys.readouterr().err
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == ["ml-100k"]


def test_changed_files_are_refused(index, tmp_path, monkeypatch):
    folder = movielens.fetch(tmp_path / "cache", notice=lambda _: None)
    (folder / "ml-100k.user").write_text(USER + "3\t20\tF\tnone\t1\n")
    with pytest.raises(SourceUnavailable, match=r"ml-100k\.user is not the file that is known"):
        movielens.fetch(tmp_path / "cache", notice=lambda _: None)
    monkeypatch.setattr(movielens, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(SourceUnavailable, match="is not the wheel that is known"):
        movielens.fetch(tmp_path / "fresh", notice=lambda _: None)
    assert list((tmp_path / "fresh").iterdir()) == []


def test_reasons_why_it_is_unavailable(tmp_path, monkeypatch):
    def fetch(cache: Path = tmp_path / "cache") -> str:
        with pytest.raises(SourceUnavailable) as error:
            movielens.fetch(cache, notice=lambda _: None)
        return str(error.value)

    failed = SimpleNamespace(returncode=1, stderr="WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    assert fetch().endswith("failed: ERROR: No matching distribution found")

    def slow(*_, **options):
        raise subprocess.TimeoutExpired("pip", options["timeout"])

    monkeypatch.setattr(subprocess, "run", slow)
    assert fetch().endswith("took more than 120 s")
    (tmp_path / "file").write_text("")
    assert "could not be kept in" in fetch(tmp_path / "file")


@pytest.mark.slow
def test_the_real_data_if_it_is_in_the_cache(tmp_path):
    folder = movielens.default_cache() / "ml-100k"
    if not folder.is_dir():
        pytest.skip(f"MovieLens-100K is not in {folder.parent}")
    assert movielens.fetch(notice=lambda _: None) == folder
    summary = build_log(*movielens.load(folder), tmp_path / "log")
    assert (summary.rows, summary.users, summary.rejected) == (100_000, 943, {})
    assert summary.label_rates == {"likes": 0.55375, "loves": 0.21201}
    log = EventLog.open(tmp_path / "log", verify=True)
    split = time_split(log)
    assert [len(p) for p in (split.train, split.validation, split.test)] == [79_999, 10_001, 10_000]
    assert np.isfinite(log.counters).all()
