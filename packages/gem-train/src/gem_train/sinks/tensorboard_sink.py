"""TensorBoard event files in RUN/tensorboard: `tensorboard --logdir runs`."""

from __future__ import annotations

from collections.abc import Mapping

from gem_train.config import RunConfig
from gem_train.run_dir import RunDir
from gem_train.runs import last_step
from gem_train.sinks import Sink, client


class TensorBoard:
    """Scalars called kind/name."""

    def __init__(self, run: RunDir) -> None:
        done = last_step(run.metrics_file)
        # A resumed run writes steps again: TensorBoard then drops what it had beyond the purge step.
        self._writer = client("torch.utils.tensorboard").SummaryWriter(
            str(run.path / "tensorboard"), purge_step=None if done is None else done + 1
        )

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Each value as a scalar."""
        for name, value in values.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Flush and close the files."""
        self._writer.close()


def make(run: RunDir, config: RunConfig, argument: str) -> Sink:
    """The sink; it takes no argument."""
    return TensorBoard(run)
