"""Files of every format, whole and damaged, and the layouts of public data sets."""

from __future__ import annotations

import gzip
import json
import re
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from gem_data import Collator, EventLog, SourceUnavailable, build_log, from_table, inspect, prepare
from gem_data.log.inspection import histogram, summary
from gem_data.sources import kuairand, layouts, open_bandit, wheel
from gem_data.sources.files import files
from gem_data.testing import rich_events, rich_schema, small_events, small_schema

PLAIN = small_events(40).drop_columns(["genres"])


def plain_schema():
    import dataclasses

    base = small_schema()
    return dataclasses.replace(base, columns=tuple(c for c in base.columns if c.name != "genres"), counters=())


def write(table: pa.Table, kind: str, path) -> None:
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=7)
    elif kind == "arrow":
        feather.write_feather(table, path, compression="uncompressed", chunksize=9)
    elif kind == "stream":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    elif kind == "csv":
        csv.write_csv(table, path)
    elif kind == "csv.gz":
        with gzip.open(path, "wb") as sink:
            csv.write_csv(table, sink)
    elif kind == "tsv":
        csv.write_csv(table, path, csv.WriteOptions(delimiter="\t"))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream", "csv", "csv.gz", "tsv", "jsonl"])
def test_every_format_gives_the_same_log(tmp_path, kind):
    (tmp_path / "in").mkdir()
    suffix = "arrow" if kind == "stream" else kind
    write(PLAIN.slice(0, 25), kind, tmp_path / "in" / f"a.{suffix}")
    write(PLAIN.slice(25), kind, tmp_path / "in" / f"b.{suffix}")
    prepare(files(tmp_path / "in", plain_schema()), tmp_path / "log")
    log = EventLog.open(tmp_path / "log")
    order = np.lexsort((np.arange(40), PLAIN["time"].to_numpy(), PLAIN["user"].to_numpy()))
    for name in PLAIN.column_names:
        np.testing.assert_allclose(log.column(name), PLAIN[name].to_numpy()[order], rtol=1e-6)
    pattern = files(str(tmp_path / "in" / f"*.{suffix}"), plain_schema())
    assert sum(t.num_rows for t in pattern.tables()) == 40


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl"])
def test_lists_and_vectors_come_from_files(tmp_path, kind):
    write(rich_events(50), kind, tmp_path / f"a.{kind}")
    prepare(files(tmp_path / f"a.{kind}", rich_schema()), tmp_path / "log")
    prepare(files(tmp_path / f"a.{kind}", rich_schema(), rename={}), tmp_path / "again")
    assert len(EventLog.open(tmp_path / "log")) == 50
    assert EventLog.open(tmp_path / "log").digest == EventLog.open(tmp_path / "again").digest


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl", "csv.gz"])
def test_a_truncated_or_foreign_file_is_named(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    write(PLAIN, kind, path)
    data = path.read_bytes()
    for bad in (data[: len(data) // 2], b"\x00\x01garbage" * 20):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=re.escape(str(path)) + " is damaged"):
            prepare(files(path, plain_schema()), tmp_path / "log", restart=True)
        assert not (tmp_path / "log").exists()


def test_bad_cells_and_lines_of_a_csv_are_rejected_one_by_one(tmp_path, monkeypatch):
    import gem_data.sources.files

    monkeypatch.setattr(gem_data.sources.files, "BLOCK", 256)  # the types are guessed from the first few lines
    csv.write_csv(PLAIN, tmp_path / "a.csv")
    lines = (tmp_path / "a.csv").read_text().splitlines()
    lines[30] = lines[30].replace(",", ",x", 1)  # a time that is none, far behind the first block
    lines[35] += ",1,2,3"
    lines.append(",".join(["nan"] * len(PLAIN.column_names)))
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    summary_ = prepare(files(tmp_path / "a.csv", plain_schema()), tmp_path / "log")
    assert summary_.rows == 38
    assert summary_.rejected == {"missing": 1, "not finite": 1, "unparsable": 1}
    kept = [json.loads(line) for line in (tmp_path / "log" / "rejects.jsonl").read_text().splitlines()]
    assert "_text" not in str(summary_)
    assert any(lines[35] == r["event"].get("_text") for r in kept)


def test_what_was_refused_does_not_stand_in_the_way_of_what_is_right(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for bad in ("", ",".join(PLAIN.column_names) + "\n", "a,b\n1,2\n"):
        (folder / "a.csv").write_text(bad)
        with pytest.raises(ValueError, match=r"damaged|is empty|lacks a column"):
            prepare(files(folder, plain_schema()), tmp_path / "log")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    csv.write_csv(PLAIN, folder / "a.csv")
    assert prepare(files(folder, plain_schema()), tmp_path / "log").rows == len(PLAIN)


def test_an_unfinished_build_is_not_gone_on_with_under_other_names(tmp_path, monkeypatch):
    csv.write_csv(PLAIN, tmp_path / "a.csv")
    monkeypatch.setattr("gem_data.build.out_of_core.Engine", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(files(tmp_path / "a.csv", plain_schema()), tmp_path / "log")
    two = PLAIN.column_names[:2]
    swapped = files(tmp_path / "a.csv", plain_schema(), rename=dict(zip(two, two[::-1], strict=True)))
    with pytest.raises(ValueError, match=r"something else \(source differ\).*restart=True \(--restart\)"):
        prepare(swapped, tmp_path / "log")


@pytest.mark.parametrize("build", [lambda *a: prepare(from_table(*a[:2]), a[2]), build_log])
def test_where_no_event_is_valid_the_first_says_why(tmp_path, build):
    late = PLAIN.set_column(PLAIN.column_names.index("time"), "time", pa.array([1_700_000_000_000] * len(PLAIN)))
    says = r"row 0: time = 1700000000000 is out of range \(expected seconds, or a timestamp\)"
    with pytest.raises(
        ValueError, match=f"no valid event .* among {len(PLAIN)} rows: {len(PLAIN)} out of range; {says}"
    ):
        build(late, plain_schema(), tmp_path / "log")


def test_a_folder_as_spark_writes_it(tmp_path):
    """Ranges of users in files numbered in their order, an empty range among them, with marks and checksums beside."""
    ordered = PLAIN.sort_by([("user", "ascending"), ("time", "ascending")])
    folder = tmp_path / "events"
    folder.mkdir()
    pieces = [ordered.slice(0, 17), ordered.slice(0, 0), ordered.slice(17)]
    for number, piece in enumerate(pieces):
        name = f"part-{number:05}-6bd1a5e2-90a0-4a53-8d3e-b0f3d7d1c6a4-c000.snappy.parquet"
        pq.write_table(piece, folder / name, compression="snappy")
        (folder / f".{name}.crc").write_bytes(b"crc")
    (folder / "_SUCCESS").touch()
    source = files(folder, plain_schema())
    assert pa.concat_tables(source.tables()).equals(ordered)
    assert prepare(source, tmp_path / "log").out_of_order == 0
    prepare(files_of(PLAIN, tmp_path), tmp_path / "plain")
    there, here = (EventLog.open(tmp_path / n) for n in ("plain", "log"))
    assert len(there) == len(here) == len(PLAIN)
    assert there.time.tolist() == here.time.tolist()
    assert there.user.tolist() == here.user.tolist()


def files_of(table: pa.Table, folder):
    pq.write_table(table, folder / "plain.parquet")
    return files(folder / "plain.parquet", plain_schema())


@pytest.mark.parametrize("kind", ["parquet", "arrow", "csv", "jsonl"])
def test_only_the_columns_that_are_asked_for_are_read(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    write(PLAIN.append_column("other", pa.array(["x"] * len(PLAIN))), kind, path)
    schema, names = plain_schema(), PLAIN.column_names
    (columns,) = {tuple(sorted(t.column_names)) for t in files(path, schema, columns=names).tables()}
    assert columns == tuple(sorted(names))
    assert prepare(files(path, schema, columns=names), tmp_path / "log").rows == len(PLAIN)
    with pytest.raises(ValueError, match=r"a\..*nothing"):
        list(files(path, schema, columns=["nothing"]).tables())


def test_wrong_paths_and_formats(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file at"):
        files(tmp_path / "*.csv", plain_schema())
    (tmp_path / "a.xyz").touch()
    with pytest.raises(ValueError, match="not known by its suffix"):
        files(tmp_path / "a.xyz", plain_schema())
    with pytest.raises(ValueError, match="did you mean 'parquet'"):
        files(tmp_path / "a.xyz", plain_schema(), format="parkett")


def test_a_file_that_changed_is_not_resumed(tmp_path, monkeypatch):
    import gem_data.build.out_of_core

    csv.write_csv(PLAIN, tmp_path / "a.csv")
    with monkeypatch.context() as patch:
        patch.setattr(gem_data.build.out_of_core, "finish_part", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(files(tmp_path / "a.csv", plain_schema()), tmp_path / "log")
    csv.write_csv(PLAIN.slice(0, 30), tmp_path / "a.csv")
    with pytest.raises(ValueError, match=r"\(source differ\)"):
        prepare(files(tmp_path / "a.csv", plain_schema()), tmp_path / "log")


# Layouts.


def test_kuairand(tmp_path):
    header = (
        "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
        "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab\n"
    )
    rows = "7,100,20220408,1200,1649347200999,1,0,1,0,0,0,1,9000,12000,0,0,0,0,1\n"
    rows += "7,101,20220408,1201,1649347300000,0,0,0,0,0,0,0,0,5000,0,0,1,1,15\n"
    rows += "7,101,20220408,1201,1649347400000,2,0,0,0,0,0,0,0,5000,0,0,1,1,15\n"
    rows += "2000,101,20220408,1201,1649347400000,0,0,0,0,0,0,0,0,5000,0,0,1,1,15\n"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "log_standard_4_22_to_5_08_1k.csv").write_text(header + rows)
    assert "CC BY-SA 4.0" in kuairand.LICENCE
    found = prepare(kuairand.events(tmp_path), tmp_path / "log")
    assert found.rejected == {"missing": 1, "out of range": 1}
    log = EventLog.open(tmp_path / "log")
    assert log.time.tolist() == [1649347200, 1649347300]
    assert log.column("signals").tolist() == [1 | 1 << 2 | 1 << 6, 1 << 7]
    assert log.column("watched").tolist() == pytest.approx([np.log1p(9), 0])
    labels, mask = log.labels([0, 1])
    assert labels.tolist() == [[1, 0, 1, 1], [0, 0, 0, 0]]
    assert mask[:, 3].tolist() == [True, False]
    batch = Collator(log, max_history=5)([1])
    assert batch.sequences["events"].floats["signals"].tolist() == [[1, 0, 1, 0, 0, 0, 1, 0]]
    with pytest.raises(SourceUnavailable, match=r"get it from https://kuairand\.com"):
        kuairand.events(tmp_path / "log")
    with pytest.raises(ValueError, match="did you mean 'pure'"):
        kuairand.schema("pur")


def test_movielens_1m(tmp_path):
    (tmp_path / "ratings.dat").write_text(
        "1::10::5::978300760\n1::20::3::978300760\n2::10::4::978298413\n9::10::4::1\n"
    )
    (tmp_path / "users.dat").write_text("1::F::1::10::48067\n2::M::56::16::70072\n")
    (tmp_path / "movies.dat").write_bytes(
        "10::Caf\xe9 (1995)::Animation|Children's\n20::B (1995)::Drama\n".encode("latin-1")
    )
    assert prepare(layouts.movielens_1m(tmp_path), tmp_path / "log").rejected == {"missing": 1}
    log = EventLog.open(tmp_path / "log")
    names = [[layouts.GENRES[g - 1] for g in row] for row in log.column("genres").tolist()]
    assert names == [["Animation", "Children"], ["Drama"], ["Animation", "Children"]]
    assert log.column("gender").tolist() == [1, 1, 2]
    assert log.labels([0, 1, 2])[0].tolist() == [[1, 1], [0, 0], [1, 0]]
    with pytest.raises(SourceUnavailable, match=r"there is no ratings\.csv.*non-commercial"):
        layouts.movielens_20m(tmp_path)


def test_movielens_20m(tmp_path):
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,2,3.5,1112486027\n1,7,4.0,1112484676\n")
    (tmp_path / "movies.csv").write_text(
        'movieId,title,genres\n2,"A, B (1995)",Adventure|IMAX\n3,C,(no genres listed)\n'
    )
    prepare(layouts.movielens_20m(tmp_path), tmp_path / "log")
    log = EventLog.open(tmp_path / "log")
    assert log.column("item").tolist() == [7, 2]
    assert log.column("genres").tolist() == [[], [2, 12]]
    assert log.column("rating").tolist() == [4.0, 3.5]


def test_taobao(tmp_path):
    rows = [
        "1,2268318,2520377,pv,1511544070",
        "1,2268318,2520377,buy,1511544080",
        "1,5,6,look,1511544080",
        "2,5,6,fav,1511544090",
    ]
    (tmp_path / "UserBehavior.csv").write_text("\n".join(rows) + "\n")
    assert prepare(layouts.taobao(tmp_path), tmp_path / "log").rejected == {"missing": 1}
    log = EventLog.open(tmp_path / "log")
    assert log.column("behaviour").tolist() == [1, 4, 3]
    assert log.labels([0, 1, 2])[0].tolist() == [[0, 0], [1, 1], [1, 0]]
    batch = Collator(log, max_history=5)([1])
    assert batch.sequences["views"].ids["item"].tolist() == [2268318]
    assert batch.sequences["deeds"].max_len == 0


def test_criteo(tmp_path):
    dense, sparse = layouts.CRITEO_DENSE, layouts.CRITEO_SPARSE
    lines = [
        "\t".join(["1", *("3" for _ in range(dense)), *("68fd1e64" for _ in range(sparse))]),
        "\t".join(["0", *("" for _ in range(dense)), *("" for _ in range(sparse))]),
    ]
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    prepare(layouts.criteo(tmp_path, rows=10), tmp_path / "log")
    log = EventLog.open(tmp_path / "log")
    assert log.column("I1").tolist() == pytest.approx([np.log1p(3), -1])
    hashed = log.column("C1")
    assert hashed[1] == 0 < hashed[0] == log.vocabularies["C1"].encode_values(["68fd1e64"])[0]
    assert log.labels([0, 1])[0].tolist() == [[1], [0]]


def test_open_bandit_layout(tmp_path):
    for campaign, items in open_bandit.CAMPAIGNS.items():
        folder = tmp_path / "data" / "bts" / campaign
        folder.mkdir(parents=True)
        names = ["", "timestamp", "item_id", "position", "click", "propensity_score"]
        names += [f"user_feature_{i}" for i in range(4)] + [f"user-item_affinity_{i}" for i in range(items)]
        row = [
            "0",
            "2019-11-24 00:00:34.762830+00:00",
            str(items - 1),
            "3",
            "1",
            "0.5",
            *"abcd",
            *map(str, range(items)),
        ]
        (folder / f"{campaign}.csv").write_text(",".join(names) + "\n" + ",".join(row) + "\n")
    with pytest.raises(SourceUnavailable, match=r"no prior_bts.yaml in"):
        open_bandit.events(tmp_path / "data")
    beta = {"all": 3.0, "men": 4.0, "women": 5.0}
    prior = [
        f"{campaign}:\n  alpha:\n{'    - 2.0' + chr(10)}{('    - 1.0' + chr(10)) * (items - 1)}"
        f"  beta:\n{(f'    - {beta[campaign]}' + chr(10)) * items}"
        for campaign, items in open_bandit.CAMPAIGNS.items()
    ]
    (tmp_path / "data" / "prior_bts.yaml").write_text("\n".join(prior))
    assert open_bandit.prior_log_odds(tmp_path / "data" / "prior_bts.yaml")["men"][:2] == pytest.approx(
        [np.log(0.5), np.log(0.25)]
    )
    prepare(open_bandit.events(tmp_path / "data"), tmp_path / "log")
    log = EventLog.open(tmp_path / "log")
    assert log.column("item").tolist() == [79, 113, 159]
    assert log.column("affinity").tolist() == [79, 33, 45]
    assert log.column("prior").tolist() == pytest.approx(-np.log([3, 4, 5]))
    assert log.time.tolist() == [1574553634] * 3
    assert log.vocabularies["user"].texts.values() == {"a-b-c-d": 0}.keys() or list(
        log.vocabularies["user"].texts.values()
    ) == ["a-b-c-d"]
    assert log.schema.dense_names == ("prior",)
    table, schema = open_bandit.load(tmp_path / "data")  # the same in memory
    build_log(table, schema, tmp_path / "whole")
    whole = EventLog.open(tmp_path / "whole")
    assert whole.column("item").tolist() == [79, 113, 159]
    assert whole.column("affinity").tolist() == [79, 33, 45]
    with pytest.raises(SourceUnavailable, match="no file of the Open Bandit sample"):
        open_bandit.events(tmp_path / "log")
    (tmp_path / "data" / "bts" / "all" / "all.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="is no file of the Open Bandit sample"):
        list(open_bandit.events(tmp_path / "data").tables())
    (tmp_path / "data" / "prior_bts.yaml").write_text(prior[0].replace("alpha", "gamma"))
    with pytest.raises(ValueError, match=r"is no prior_bts.yaml: 'alpha'"):
        open_bandit.events(tmp_path / "data")
    (tmp_path / "data" / "prior_bts.yaml").write_text("\n".join(prior).replace("- 5.0", "- -1", 1))
    with pytest.raises(ValueError, match="one positive number for each of the 46 items of 'women'"):
        open_bandit.events(tmp_path / "data")


@pytest.mark.slow
def test_the_real_open_bandit_sample_if_it_is_in_the_cache(tmp_path):
    folder = wheel.default_cache() / "open-bandit"
    if not folder.is_dir():
        pytest.skip(f"the Open Bandit sample is not in {folder.parent}")
    found = prepare(open_bandit.events(open_bandit.fetch(notice=lambda _: None)), tmp_path / "log")
    assert (found.rows, found.users, found.rejected) == (59_999, 337, {"duplicate": 1})
    assert found.label_rates["click"] == pytest.approx(287 / 59_999, abs=2e-5)
    rate = 1 / (1 + np.exp(-EventLog.open(tmp_path / "log").column("prior").astype(np.float64)))
    assert (rate > 0.0008).all()
    assert (rate < 0.0055).all()


def test_a_wheel_is_fetched_checked_and_kept(tmp_path, monkeypatch, capsys):
    import hashlib
    import subprocess
    from types import SimpleNamespace

    def run(command, **_):
        with zipfile.ZipFile(f"{command[command.index('-d') + 1]}/x.whl", "w") as archive:
            archive.writestr(zipfile.ZipInfo("root/a/b.csv"), "hello")
            archive.writestr(zipfile.ZipInfo("conf/c.yaml"), "far")
        return SimpleNamespace(returncode=0, stderr="")

    run(["-d", str(tmp_path)])
    digest = hashlib.sha256((tmp_path / "x.whl").read_bytes()).hexdigest()
    files_ = {"a/b.csv": hashlib.sha256(b"hello").hexdigest(), "c": hashlib.sha256(b"far").hexdigest()}
    where = {"root": "root", "elsewhere": {"c": "conf/c.yaml"}}
    source = wheel.Wheel(name="x", requirement="x==1", sha256=digest, files=files_, licence="be nice", **where)
    monkeypatch.setattr(subprocess, "run", run)
    folder = source.fetch(tmp_path / "cache")
    assert (folder / "a" / "b.csv").read_text() == "hello"
    assert "be nice" in capsys.readouterr().err
    monkeypatch.setattr(subprocess, "run", None)  # the second comes from the cache
    assert source.fetch(tmp_path / "cache") == folder
    (folder / "a" / "b.csv").write_text("other")
    with pytest.raises(SourceUnavailable, match="is not the file that is known"):
        source.fetch(tmp_path / "cache")


# Inspection.


def test_inspect_tells_what_is_there(tmp_path):
    prepare(files(_parquet(tmp_path), rich_schema()), tmp_path / "log", part_rows=20)
    text = inspect(tmp_path / "log")
    for part in (
        "60 events of",
        "parts and 1 generation, ",
        "1970-01-01",
        "click",
        "tags",
        "history 'orders'",
        "vocabulary of item",
    ):
        assert part in text
    found = summary(tmp_path / "log")
    assert sum(b["users"] for b in found["histogram"]) == found["users"]
    assert sum(b["events"] for b in found["histogram"]) == found["rows"] == 60
    assert found["sharing"] == pytest.approx(
        60 / len(set(zip(*(rich_events(60)[c].to_pylist() for c in ("user", "time")), strict=True)))
    )
    json.dumps(found)
    assert histogram(np.array([1, 2, 3, 4, 9])) == [
        {"from": 1, "to": 1, "users": 1, "events": 1},
        {"from": 2, "to": 3, "users": 2, "events": 5},
        {"from": 4, "to": 7, "users": 1, "events": 4},
        {"from": 8, "to": 15, "users": 1, "events": 9},
    ]


def _parquet(tmp_path):
    pq.write_table(rich_events(60), tmp_path / "a.parquet")
    return tmp_path / "a.parquet"
