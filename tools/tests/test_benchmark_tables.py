"""The benchmark page holds what the result files hold."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[1] / "benchmark_tables.py"


def test_the_page_is_up_to_date():
    outcome = subprocess.run([sys.executable, TOOL, "--check"], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr


def test_a_ladder_has_a_line_for_every_rung(tmp_path):
    row = {"rung": "first", "samples_per_s": 100.0, "step_ms": 10.0, "tflops": 2.0, "mfu": 0.25, "local_mfu": None,
           "memory_gib": 3.0, "ne": None, "same_function": True, "reason": ""}  # fmt: skip
    rows = [row, row | {"rung": "second", "samples_per_s": 250.0}, {"rung": "third", "reason": "no card"}]
    result = {"suite": "ladder", "recipe": "large", "devices": 1, "card": "H200", "date": "2026-01-01", "commit": None,
              "versions": {"torch": "2"}, "batch_size": 8, "accumulate": 2, "lengths": {"a": "uniform in 1..9"},
              "recompute": False, "peak": "against 9 TFLOP/s", "command": "gem-train ladder", "rows": rows}  # fmt: skip
    (tmp_path / "ladder.json").write_text(json.dumps(result))
    spec = importlib.util.spec_from_file_location("benchmark_tables", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = tool.page(tmp_path, tool.MARKER)
    assert "| second | 250 | 2.50x | 10.0 | 2.0 | 25.0% |  | 3.0 |  | yes |" in text
    assert "| third | not measured: no card |" in text
    assert "8 samples a step in 2 part(s), histories a uniform in 1..9" in text
