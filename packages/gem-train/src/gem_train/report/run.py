"""What a report knows of a run: the files of its folder, read once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gem_train.config import RunConfig
from gem_train.events import read
from gem_train.run_dir import RunDir, read_json

TROUBLE = ("straggler", "loss spike", "loss not finite", "not finite", "checkpoint failed", "peer lost", "interrupted",
           "stopped early")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run's records; what it has not got to is empty or None."""

    folder: RunDir
    name: str
    config: RunConfig
    env: dict[str, Any]
    data: dict[str, Any]
    model: dict[str, Any]
    steps: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    progressive: list[dict[str, Any]]
    phases: list[dict[str, Any]]  # events, of the steps that are still in the curve
    trouble: list[dict[str, Any]]
    numerics: list[dict[str, Any]]  # of the low-precision layers, one for each step that was measured
    results: dict[str, Any] | None
    efficiency: dict[str, Any] | None  # of `gem-train bench RUN`

    @classmethod
    def read(cls, folder: RunDir) -> Run:
        """From the folder alone. Raises UserError where it is not even begun."""
        records, events = read(folder.metrics_file), read(folder.events_file)

        def maybe(path: Any, other: Any) -> Any:
            return read_json(path) if path.exists() else other

        # A resumed run has looked at some steps again: the last look counts.
        looks = {e["step"]: e for e in events if e.get("event") == "phases"}
        return cls(
            folder=folder,
            name=folder.path.name,
            config=folder.read_config(),
            env=read_json(folder.env_file),
            data=maybe(folder.data_file, {}),
            model=maybe(folder.model_file, {}),
            steps=[r for r in records if r["kind"] == "step"],
            evals=[r for r in records if r["kind"] == "eval"],
            progressive=[r for r in records if r["kind"] == "progressive"],
            phases=[looks[step] for step in sorted(looks)],
            trouble=[e for e in events if e.get("event") in TROUBLE],
            numerics=read(folder.numerics_file),
            results=maybe(folder.eval_file, None),
            efficiency=maybe(folder.path / "efficiency.json", None),
        )
