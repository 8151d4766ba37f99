"""The roofline plot: where a case lies, and that a figure comes out."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[1] / "roofline.py"
ROW = {
    "case": "a", "pass": "forward", "variant": "hopper", "tflops": 400.0, "gbps": 2000.0,
    "peers": {"fa3": 300.0, "other": 350.0},
}  # fmt: skip
RESULT = {
    "suite": "attention", "card": "a card", "date": "2026-01-01",
    "ceilings": {"gemm_bf16_tflops": 700.0, "copy_tbps": 4.0},
    "rows": [ROW, ROW | {"variant": "triton"}, ROW | {"pass": "backward", "case": "b"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def roofline() -> ModuleType:
    spec = importlib.util.spec_from_file_location("roofline", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_case_lies_at_its_flops_per_byte(roofline: ModuleType) -> None:
    (point,) = roofline.points(RESULT, "forward", "hopper")
    assert point == {"case": "a", "intensity": 200.0, "ours": 400.0, "peer": ("other", 350.0)}


def test_a_figure_for_each_pass_that_was_timed(roofline: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "x.json"
    file.write_text(json.dumps(RESULT))
    roofline.main([str(file), "--out", str(tmp_path)])
    drawn = sorted(p.name for p in tmp_path.glob("*.svg"))
    assert drawn == ["roofline-attention-backward.svg", "roofline-attention-forward.svg"]
    assert all((tmp_path / name).stat().st_size > 5000 for name in drawn)
