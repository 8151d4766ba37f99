"""Weights & Biases: `wandb` or `wandb:PROJECT`. With WANDB_MODE=offline everything stays in RUN/wandb."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from gem_train.config import RunConfig
from gem_train.config.tree import to_dict
from gem_train.run_dir import RunDir
from gem_train.sinks import Sink, client


class WeightsAndBiases:
    """One wandb run for a run folder; resuming the folder resumes it."""

    def __init__(self, run: RunDir, config: RunConfig, project: str) -> None:
        self._run = client("wandb").init(
            project=project or "gem-train",
            name=run.path.name,
            id=hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:16],
            resume="allow",
            dir=str(run.path),
            config=to_dict(config),
        )

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """All values of a record at once, against its step."""
        self._run.log({f"{kind}/{name}": value for name, value in values.items()} | {"step": step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def make(run: RunDir, config: RunConfig, argument: str) -> Sink:
    """The sink; its argument is the project, "gem-train" by default."""
    return WeightsAndBiases(run, config, argument)
