from __future__ import annotations

import json

import numpy as np
import pytest
from gem_data import Collator
from gem_data.bench import assembly
from gem_data.bench.__main__ import main
from gem_data.bench.assembly import check
from gem_data.bench.peers import padded_collate


def test_the_benchmark_runs_and_writes_what_it_printed(tmp_path, capsys, monkeypatch):
    def timed(works, batches, rounds):
        """The works run; the k-th takes 2k ms of the processor in 4k."""
        return {
            name: k * np.full_like(t, 1e-3) * [4, 2]
            for k, (name, t) in enumerate(real(works, batches, rounds).items(), 1)
        }

    real = assembly.timed
    monkeypatch.setattr(assembly, "timed", timed)
    out = tmp_path / "data.json"
    main(["--events", "3000", "--batch-size", "64", "--max-history", "8", "--repeats", "2", "--out", str(out)])
    result = json.loads(out.read_text())
    (row,) = result["rows"]
    assert result["suite"] == "data"
    assert (row["ms"], row["cpu_ms"]) == pytest.approx((4, 2))
    assert row["events_per_s"] == pytest.approx(row["events"] / 2e-3)
    assert row["of_copy"] == pytest.approx(2)
    assert [peer["ratio"] for peer in row["peers"].values()] == pytest.approx(range(2, 2 + len(row["peers"])))
    assert 0 < row["filled"] <= 1
    assert "lognormal-8" in capsys.readouterr().out


def test_the_benchmark_refuses_results_that_differ(small_log):
    rows = np.arange(100, 120)
    batch, padded = Collator(small_log, max_history=6)(rows), padded_collate(small_log, rows, 6)
    check(batch, padded)
    padded["item"][5, 0] += 1
    with pytest.raises(AssertionError, match="item"):
        check(batch, padded)


def test_the_other_measurements_run(tmp_path, capsys):
    more = [
        "--first-batch",
        "20000",
        "--prepare",
        "3000",
        "--one-user",
        "2000",
        "--balance",
        "4",
        "--scratch",
        str(tmp_path),
    ]
    main(["--events", "2000", "--batch-size", "16", "--max-history", "4", "--repeats", "1", *more])
    out = capsys.readouterr().out
    for part in ("first-batch-", "worker-", "prepare-kuairand-3000", "one-user-2000", "balance-4  op bbs"):
        assert part in out
    assert list(tmp_path.iterdir()) == []
