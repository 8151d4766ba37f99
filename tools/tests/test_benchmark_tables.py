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


def loaded():
    spec = importlib.util.spec_from_file_location("benchmark_tables", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_efficiency_has_the_layers_and_the_waterfall(tmp_path):
    unit = {"name": "layers.0", "flops": 3e12, "forward_s": 0.01, "seconds": 0.03, "tflops": 100.0, "mfu": 0.101}
    row = {"name": "matrix products, forward", "seconds": 0.004, "count": 7, "bytes": 0.0, "flops": 0.0}
    result = {"suite": "efficiency", "recipe": "large", "world": 1, "card": "H200", "date": "2026-01-01",
              "commit": "abc", "versions": {"torch": "2"}, "precision": "bf16", "batch_size": 8, "accumulate": 2,
              "lengths": "of the data", "command": "gem-train bench", "units_batch": 4, "units": [unit],
              "step": {"seconds": 0.1, "samples_per_s": 80.0, "memory_bytes": 2**31},
              "mfu": {"end_to_end": 0.2, "local": 0.25, "scaling_ratio": 0.8, "stated": "a / b"},
              "waterfall": {"local": 0.08, "launch gaps": 0.02, "step": 0.1},
              "kernels": {"kernels_s": 0.008, "kinds": [row]}}  # fmt: skip
    (tmp_path / "efficiency.json").write_text(json.dumps(result))
    tool = loaded()
    text = tool.page(tmp_path, tool.MARKER)
    assert "Step 100.0 ms, 80 samples/s, 2.0 GiB." in text
    assert "E2E MFU 20.0% = local MFU 25.0% x scaling ratio 0.800: a / b." in text
    assert "| layers.0 | 10.00 | 30.00 | 100.0 | 10.1% |" in text
    assert "| launch gaps | 20.0 | 20.0% |" in text
    assert "| matrix products, forward | 4.00 | 50.0% | 7 |" in text


def test_a_ladder_has_a_line_for_every_rung(tmp_path):
    row = {"rung": "first", "samples_per_s": 100.0, "step_ms": 10.0, "tflops": 2.0, "mfu": 0.25, "local_mfu": None,
           "memory_gib": 3.0, "ne": None, "same_function": True, "reason": ""}  # fmt: skip
    rows = [row, row | {"rung": "second", "samples_per_s": 250.0}, {"rung": "third", "reason": "no card"}]
    result = {"suite": "ladder", "recipe": "large", "devices": 1, "card": "H200", "date": "2026-01-01", "commit": None,
              "versions": {"torch": "2"}, "batch_size": 8, "accumulate": 2, "lengths": {"a": "uniform in 1..9"},
              "recompute": False, "peak": "against 9 TFLOP/s", "command": "gem-train ladder", "rows": rows}  # fmt: skip
    (tmp_path / "ladder.json").write_text(json.dumps(result))
    tool = loaded()
    text = tool.page(tmp_path, tool.MARKER)
    assert "| second | 250 | 2.50x | 10.0 | 2.0 | 25.0% |  | 3.0 |  | yes |" in text
    assert "| third | not measured: no card |" in text
    assert "8 samples a step in 2 part(s), histories a uniform in 1..9" in text


def test_suites_of_gem_parallel_are_shown_as_they_are(tmp_path):
    common = {"card": "H200", "date": "2026-01-01", "commit": "abc", "versions": {"torch": "2"}, "command": "tool"}
    row = {"case": "+ SM-free", "batch": 96, "ms": 200.0, "samples_per_s": 960.0, "ratio": 0.98, "plan": {"ms": 210.0}}
    scaling = common | {"suite": "scaling", "world": 2, "model": "large", "rows": [row, row | {"plan": None}]}
    comm = common | {"suite": "comm", "rows": [{"case": "32 MiB", "op": "all-gather", "ms": 0.1, "gemm": float("nan")}]}
    for name, result in (("scaling", scaling), ("comm", comm)):
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    tool = loaded()
    text = tool.page(tmp_path, tool.MARKER)
    assert "commit abc; torch 2. model large, world 2." in text
    assert "| + SM-free | 96 |  | 200.0 | 960 | 0.980 |  |  |  |  | 210.0 |  |" in text
    assert "| + SM-free | 96 |  | 200.0 | 960 | 0.980 |  |  |  |  |  |  |" in text
    assert "| 32 MiB | all-gather | 0.100 |  |  |" in text
