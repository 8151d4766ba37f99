"""Two runs agree within a tolerance, or the tool says where they part."""

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[1] / "compare_runs.py"


def run_folder(path, losses):
    path.mkdir()
    lines = [{"kind": "step", "step": i + 1, "loss": loss} for i, loss in enumerate(losses)]
    (path / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def compare(a, b):
    return subprocess.run([sys.executable, TOOL, a, b, "--tolerance", "1e-3"], capture_output=True, text=True)


def test_finds_the_step_that_differs(tmp_path):
    exact = run_folder(tmp_path / "a", [0.7, 0.6, 0.5])
    close = run_folder(tmp_path / "b", [0.7, 0.6001, 0.5])
    far = run_folder(tmp_path / "c", [0.7, 0.6, 0.6])
    assert compare(exact, close).returncode == 0
    outcome = compare(exact, far)
    assert outcome.returncode != 0
    assert "2.00e-01 at step 3" in outcome.stdout
