"""What gem-train's instruments cost: the processor time of a run's main thread inside them, over that of its steps.

    python tools/instrument_cost.py [RECIPE] [--steps N] [--set KEY=VALUE ...]

Processor time, not the clock's: the figure holds on a machine that others use, too. It counts the phases' clock, FLOPs,
the records of metrics.jsonl and events.jsonl, the spike watch and what is printed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gem_parallel import start
from gem_train import recipes
from gem_train.assemble import assemble
from gem_train.config import override
from gem_train.events import Events
from gem_train.instruments import Instruments
from gem_train.phases import StepClock
from gem_train.progress import Progress
from gem_train.run_dir import RunDir
from gem_train.spikes import LossHistory
from gem_train.trainer import Trainer

WATCHED = (
    (Instruments, "begin"),
    (Instruments, "end"),
    (StepClock, "mark"),
    (Events, "metric"),
    (Events, "message"),
    (Progress, "step"),
    (LossHistory, "is_spike"),
    (LossHistory, "add"),
)


class Meter:
    """Adds up the outermost calls of what it watches."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def watch(self, kind: type, name: str) -> None:
        """Count the time of every call of `kind.name` from now on."""
        plain: Callable[..., Any] = getattr(kind, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            began = time.thread_time()
            try:
                return plain(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.thread_time() - began

        setattr(kind, name, timed)


def main() -> None:
    """Train and print the share."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", nargs="?", default="ml100k")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    settings = [f"train.max_steps={arguments.steps}", "train.eval_every=0", "train.checkpoint_every=0", *arguments.set]
    config = override(recipes.load(arguments.recipe), settings)
    inside, whole = Meter(), Meter()
    whole.watch(Trainer, "_timed_step")
    for kind, name in WATCHED:
        inside.watch(kind, name)
    with tempfile.TemporaryDirectory() as folder, start(config.train.device) as runtime:
        run = RunDir(Path(folder) / "run")
        run.start(config, resume=False)
        events = Events(run.path)
        with Progress() as progress:
            _, trainer = assemble(config, runtime, run, events=events, progress=progress)
            trainer.validate = lambda: False  # type: ignore[method-assign]
            progress.start(0, trainer.total)
            trainer.fit()
        events.close()
    each = 1e3 / arguments.steps
    print(
        f"{arguments.recipe}, {arguments.steps} steps: {inside.seconds * each:.3f} ms of {whole.seconds * each:.1f} ms "
        f"a step, {inside.seconds / whole.seconds:.3%} of the main thread's processor time"
    )


if __name__ == "__main__":
    main()
