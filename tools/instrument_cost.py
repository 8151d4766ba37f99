"""What gem-train's instruments cost, in two ways that do not share their errors.

    python tools/instrument_cost.py [RECIPE] [--steps N] [--set KEY=VALUE ...]

inside   the processor time of the main thread inside them over that of its steps: it holds on a machine that others use
on, off  the clock's time of a step with them and without, in blocks of as many steps as lie between two looks at the
         phases, on and off in turn: what a card waits for shows here, and what others do on the machine, too

The instruments are the phases' clock, FLOPs, the records of metrics.jsonl and events.jsonl, the spike watch and what is
printed.
"""

from __future__ import annotations

import argparse
import statistics
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
from gem_train.instruments import LOOK_EVERY, Instruments
from gem_train.phases import StepClock
from gem_train.progress import Progress
from gem_train.run_dir import RunDir
from gem_train.spikes import LossHistory
from gem_train.trainer import Trainer

# What is watched, and what it answers while it is off.
WATCHED: tuple[tuple[type, str, Callable[[], Any]], ...] = (
    (Instruments, "begin", float),
    (Instruments, "end", dict),
    (StepClock, "mark", lambda: None),
    (Events, "metric", lambda: None),
    (Events, "message", lambda: None),
    (Progress, "step", lambda: None),
    (LossHistory, "is_spike", bool),
    (LossHistory, "add", lambda: None),
)


class Meter:
    """Adds up the outermost calls of what it watches."""

    def __init__(self) -> None:
        self.seconds, self.on, self._depth = 0.0, True, 0

    def watch(self, kind: type, name: str, nothing: Callable[[], Any] = lambda: None) -> None:
        """Count the time of every call of `kind.name` from now on; while it is not `on`, `nothing` takes its place."""
        plain: Callable[..., Any] = getattr(kind, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return nothing()
            self._depth += 1
            began = time.thread_time()
            try:
                return plain(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.thread_time() - began

        setattr(kind, name, timed)


class Blocks:
    """Steps in blocks, the instruments on and off in turn; the first block warms up and is not counted."""

    def __init__(self, inside: Meter, whole: Meter) -> None:
        self.inside, self.whole = inside, whole
        self.seconds: dict[bool, list[float]] = {True: [], False: []}  # of a step, by whether they were on
        self.processor = [0.0, 0.0]  # inside them and in all, of the blocks in which they were on
        self._began = (0.0, 0.0, 0.0)

    def watch(self) -> None:
        """Count the steps from now on."""
        step = Trainer._timed_step

        def counted(trainer: Trainer, *args: Any) -> bool:
            block, at = divmod(trainer.position.step, LOOK_EVERY)  # the last step of a block looks at the phases
            if at == 0:
                self.inside.on = block % 2 == 1
                self._began = self._now()
            stop = step(trainer, *args)
            if at == LOOK_EVERY - 1 and block:
                clock, inside, whole = (b - a for a, b in zip(self._began, self._now(), strict=True))
                self.seconds[self.inside.on].append(clock / LOOK_EVERY)
                if self.inside.on:
                    self.processor[0] += inside
                    self.processor[1] += whole
            return stop

        Trainer._timed_step = counted  # type: ignore[assignment, method-assign]

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), self.inside.seconds, self.whole.seconds

    def __str__(self) -> str:
        inside, whole = (s / (len(self.seconds[True]) * LOOK_EVERY) * 1e3 for s in self.processor)
        on, off = (statistics.median(self.seconds[which]) * 1e3 for which in (True, False))
        each = [[round(s * 1e3, 2) for s in self.seconds[which]] for which in (True, False)]
        return (
            f"inside  {inside:.3f} of {whole:.1f} ms of the main thread's processor time a step, {inside / whole:.3%}\n"
            f"on, off {on:.2f} and {off:.2f} ms a step, {on / off - 1:+.2%}; blocks {each[0]} and {each[1]}"
        )


def main() -> None:
    """Train and print the shares."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", nargs="?", default="ml100k")
    parser.add_argument("--steps", type=int, default=5 * LOOK_EVERY, help=f"{3 * LOOK_EVERY} or more")
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    if arguments.steps < 3 * LOOK_EVERY:
        parser.error(f"--steps {arguments.steps}: expected {3 * LOOK_EVERY} or more")
    settings = [f"train.max_steps={arguments.steps}", "train.eval_every=0", "train.checkpoint_every=0", *arguments.set]
    config = override(recipes.load(arguments.recipe), settings)
    inside, whole = Meter(), Meter()
    blocks = Blocks(inside, whole)
    whole.watch(Trainer, "_timed_step")
    blocks.watch()
    for kind, name, nothing in WATCHED:
        inside.watch(kind, name, nothing)
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
    print(f"{arguments.recipe}, {arguments.steps} steps of {config.data.batch_size}\n{blocks}")


if __name__ == "__main__":
    main()
