"""Results of two runs are compared by their share of each run's own ceiling; what got slower or lost is named."""

import json

import compare_benchmarks


def result(path, *changes):
    row = {
        "case": "a",
        "op": "x",
        "variant": "v",
        "pass": "forward",
        "dtype": "bfloat16",
        "head_dim": 64,
        "error": 1e-3,
    }
    path.write_text(json.dumps({"rows": [row | change for change in changes]}))
    return compare_benchmarks.rows(path)


def test_shares_are_compared_rather_than_times(tmp_path):
    old = result(tmp_path / "old", {"ms": 1.0, "of_gemm": 0.8, "of_copy": 0.1})
    hot_card = result(tmp_path / "hot", {"ms": 1.2, "of_gemm": 0.79, "of_copy": 0.1})
    lines, worse = compare_benchmarks.compare(old, hot_card, 1.05)
    assert not worse
    assert lines[0].startswith("same")
    slower = result(tmp_path / "slow", {"ms": 1.0, "of_gemm": 0.6, "of_copy": 0.1})
    lines, worse = compare_benchmarks.compare(old, slower, 1.05)
    assert worse
    assert lines[0].startswith("slower    0.75x")


def test_memory_bound_rows_missing_rows_and_unchecked_rows(tmp_path):
    old = result(tmp_path / "old", {"ms": 1.0, "of_gemm": 0.1, "of_copy": 0.9}, {"case": "b", "ms": 2.0})
    new = result(tmp_path / "new", {"ms": 1.0, "of_gemm": 0.05, "of_copy": 0.95})
    lines, worse = compare_benchmarks.compare(old, new, 1.05)
    assert worse
    assert lines[0].startswith("faster")
    assert lines[1] == "missing  b x v forward bfloat16 64"
    unchecked = result(tmp_path / "unchecked", {"ms": 0.5, "of_copy": 0.95, "error": None}, {"case": "b", "ms": 1.0})
    lines, worse = compare_benchmarks.compare(old, unchecked, 1.05)
    assert worse
    assert lines[0].startswith("no error")
    assert lines[1].startswith("faster    2.00x")
