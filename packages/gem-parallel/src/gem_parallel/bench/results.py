"""The file that a benchmark leaves."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

from gem_parallel.__about__ import __version__


def write(path: str, suite: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Write rows as one JSON object with date, card, commit, versions and the command."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    result = {
        "suite": suite,
        "date": date.today().isoformat(),
        "card": card,
        "commit": _commit(),
        "versions": {"torch": torch.__version__, "gem-parallel": __version__},
        "command": f"{_program()} {shlex.join(Path(a).name if a.startswith('/') else a for a in sys.argv[1:])}",
        "rows": rows,
        **more,
    }
    Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _program() -> str:
    name = Path(sys.argv[0]).name
    return "python -m gem_parallel.bench" if name in ("__main__.py", "-m") else f"python tools/{name}"


def _commit() -> str:
    """Of this checkout; GEM_COMMIT says it where a copy without history runs."""
    if told := os.environ.get("GEM_COMMIT"):
        return told
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    except OSError:
        return "unknown"
