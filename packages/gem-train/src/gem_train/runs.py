"""Run folders as they lie on the disk: what state each is in, how far it came, what it found. Imports no torch."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gem_train import recipes
from gem_train.config import differences
from gem_train.errors import UserError
from gem_train.events import read
from gem_train.run_dir import RunDir, read_json

TAIL = 1 << 16  # bytes of metrics.jsonl that hold the last step
# The message that a run ends with, and what it says of the run. None of them: it runs, or it was killed.
STATES = {
    "start": "unfinished",
    "finished": "finished",
    "interrupted": "interrupted",
    "not finite": "not finite",
    "peer lost": "peer lost",
}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One run at a glance; what a run has not got to is None."""

    path: Path
    recipe: str
    state: str
    started: str | None = None
    step: int | None = None
    total: int | None = None
    source: str | None = None
    validation_ne: float | None = None
    ne: dict[str, float | None] = field(default_factory=dict)  # by task, on the test split

    @property
    def progress(self) -> str:
        """ "24/24", "7/?", or nothing."""
        return "" if self.step is None else f"{self.step}/{'?' if self.total is None else self.total}"


def summarize(run: RunDir) -> Summary:
    """The run's state. Raises UserError for a folder whose files can't be understood."""
    try:
        recipe = str(tomllib.loads(run.config_file.read_text(encoding="utf-8")).get("recipe", "custom"))
        messages = [e for e in read(run.events_file) if e.get("event") in STATES]
        env, data, results = (_json(f) for f in (run.env_file, run.data_file, run.eval_file))
        total = next((e["total"] for e in reversed(messages) if e["event"] == "start"), None)
        return Summary(
            path=run.path,
            recipe=recipe,
            state=STATES[messages[-1]["event"]] if messages else "not begun",
            started=env.get("started"),
            step=last_step(run.metrics_file),
            total=total,
            source=data.get("source"),
            validation_ne=results.get("validation_ne"),
            ne={task: f["ne"] for task, f in results.get("model", {}).items()},
        )
    except (OSError, ValueError, KeyError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{run.path} can't be understood: {type(error).__name__}: {error}") from error


def last_step(path: Path) -> int | None:
    """The step of the last whole record of metrics.jsonl, from its end: the file may be long."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
        lines = file.read().split(b"\n")
    for line in reversed(lines[:-1]):  # what follows the last newline is torn or nothing
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError):
            continue
    return None


def find(root: Path) -> Iterator[RunDir]:
    """The run folders in `root`, at any depth, oldest first; checkpoints are not looked into.

    Raises UserError where there is no such folder.
    """
    if not root.is_dir():
        raise UserError(f"there is no folder {root}; runs are made in `runs` unless --out says otherwise")
    found = []
    for folder, inside, files in os.walk(root):
        if "config.toml" in files:
            found.append(Path(folder))
            inside.clear()
    yield from (RunDir(p) for p in sorted(found, key=lambda p: ((p / "config.toml").stat().st_mtime, p)))


def changed_settings(run: RunDir) -> list[str] | None:
    """What the run's configuration changed of its recipe, as lines; None where no recipe of that name is known."""
    config = run.read_config()
    if config.recipe not in recipes.names():
        return None
    return differences(recipes.load(config.recipe), config)


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(path) if path.is_file() else {}
    return found
