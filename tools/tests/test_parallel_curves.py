"""Curves are drawn of what the benchmarks of gem-parallel leave."""

import importlib.util
import json
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[1] / "parallel_curves.py"


def test_both_figures(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("parallel_curves", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert [tool.kind(v) for v in ("regions 0.5", "regions 0.5 + fp8", "uniform 0.5", "full + fp8")] == [
        "regions", "regions + fp8", "uniform", "other",
    ]  # fmt: skip
    common = {"card": "H200", "date": "2026-01-01"}
    kept = [{"variant": v, "ms": ms, "peak_mib": m} for v, ms, m in (("none", 10, 900), ("uniform 0.5", 13, 500))]
    together = [{"case": "alone"}, {"case": "plain", "ms": 10.0, "ratio": 0.9, "plan": {"ms": 9.0}}]
    together.append({"case": "+ SM-free", "failed": "did not end; it was begun with 2 ranks"})
    results = [common | {"suite": "memory", "rows": kept}, common | {"suite": "scaling", "world": 2, "rows": together}]
    files = [tmp_path / f"{result['suite']}.json" for result in results]
    for file, result in zip(files, results, strict=True):
        file.write_text(json.dumps(result))
    tool.main([*map(str, files), "--out", str(tmp_path)])
    assert "uniform 0.5" in (tmp_path / "activation-memory.svg").read_text()
    assert (tmp_path / "scaling-cards.svg").stat().st_size > 1000
    assert "SM-free" not in (tmp_path / "scaling-cards.svg").read_text()
