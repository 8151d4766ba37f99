"""Trackio, which keeps runs in a local database: `trackio` or `trackio:PROJECT`; `trackio show` opens its dashboard."""

from __future__ import annotations

from collections.abc import Mapping

from gem_train.config import RunConfig
from gem_train.config.tree import to_dict
from gem_train.run_dir import RunDir
from gem_train.sinks import Sink, client


class Trackio:
    """One trackio run for a run folder."""

    def __init__(self, run: RunDir, config: RunConfig, project: str) -> None:
        self._trackio = client("trackio")
        self._trackio.init(
            project=project or "gem-train", name=run.path.name, config=to_dict(config), resume="allow", embed=False
        )

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """All values of a record at once."""
        self._trackio.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._trackio.finish()


def make(run: RunDir, config: RunConfig, argument: str) -> Sink:
    """The sink; its argument is the project, "gem-train" by default."""
    return Trackio(run, config, argument)
