"""Counting what the Hopper forward has to do, against figures made by hand."""

from __future__ import annotations

import json

import pytest
from gem_kernels.bench import cases, count


def test_a_case_whose_tiles_are_known():
    figures = count.count("self-full-1024", 128, 1.0)  # 16 blocks: four tiles of three and two of two
    assert figures["useful"] == 1.0
    assert figures["slots"] == pytest.approx(16 / 18)
    assert figures["tiles"] == pytest.approx(256 * 4 * 6 / 132)
    assert (figures["wholes"], figures["shorts"]) == (8, 0)
    assert figures["tensor"] == pytest.approx(256 * 4 * 1024 * 1024 * 2 * 128 / 2048 / 132 / 1e6)
    keys, queries = 256 * 4 * 6 * 1024, 256 * 4 * 1024
    assert figures["L2"] == pytest.approx((keys + queries) * 2 * 128 * 2 / count.L2_BYTES / 132 / 1e6)


@pytest.mark.parametrize("step", count.COSTS)
def test_padding_is_that_of_64_rows_and_64_keys(step):
    lengths = cases.case("self-half-512").q
    blocks = -(-lengths // 64) * 64
    expected = (lengths * lengths).sum() / (blocks * blocks).sum()
    assert count.count("self-half-512", step, 1.0)["useful"] == pytest.approx(expected)


def test_tail():
    assert count.tail([1.0] * 8, 3, programs=4) == 1.0
    assert count.tail([], 3, programs=4) == 1.0
    # The first program, busy with 9, has taken one tile more (ahead 1), or two with the last one of 6 (ahead 3).
    costs = [9.0, 1.0, 1.0, 1.0, 6.0]
    assert count.tail(costs, 1, programs=2) == pytest.approx(10 / 9)
    assert count.tail(costs, 3, programs=2) == pytest.approx(16 / 9)


def test_the_table(tmp_path, capsys):
    row = {"case": "pma", "pass": "forward", "variant": "hopper", "ms": 0.5}
    rows = [{**row, "op": "gdpa:silu"}, {**row, "op": "gdpa:silu_poly", "ms": 7.0}]
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"rows": rows}))
    count.main(["--measured", str(path)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| pma")]
    assert len(lines) == 2
    assert all("| 0.500 |" in line for line in lines)
