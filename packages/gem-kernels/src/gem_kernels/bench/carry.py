"""A kernel that reads where it must not takes the process's use of the GPU with it: what was measured goes to a new
process, which does the cases that are left.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch


def alive() -> bool:
    """Whether the GPU still answers this process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def go_on(words: list[str], ceilings: dict[str, float], rows: list[dict[str, Any]], cases: list[str]) -> int:
    """Run the cases that are left in a new process; the exit code."""
    print("the GPU does not answer this process any more; what is left goes to a new one", flush=True)
    if not cases:
        return 1
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump({"words": words, "ceilings": ceilings, "rows": rows}, file)
    again = [w for i, w in enumerate(words) if w != "--case" and not w.startswith("--case=")
             and (i == 0 or words[i - 1] != "--case")]  # fmt: skip
    command = [sys.executable, "-m", "gem_kernels.bench", *again, "--carry", file.name]
    return subprocess.call([*command, *(word for name in cases for word in ("--case", name))])


def load(path: Path) -> tuple[list[str], dict[str, float], list[dict[str, Any]]]:
    """The command line, ceilings and rows of the process before."""
    kept = json.loads(path.read_text())
    return kept["words"], kept["ceilings"], kept["rows"]
