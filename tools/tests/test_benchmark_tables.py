"""The benchmark page holds what the result files hold."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[1] / "benchmark_tables.py"


def test_the_page_is_up_to_date():
    outcome = subprocess.run([sys.executable, TOOL, "--check"], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
