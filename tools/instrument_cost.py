"""What gem-train's instruments cost a step, in two ways that do not share their errors.

    python tools/instrument_cost.py [RECIPE] [--rounds N] [--fill SOURCE=LENGTH ...] [--set KEY=VALUE ...] [--out FILE]

inside   the main thread's processor time inside them: it holds on a machine that others use
clock    the clock's time of a step with them less that of a step without: what a card waits for shows here, and what
         others do on the machine, too

A step is made without them, with them, and with them and a look at the phases, in turn and in turning order; a round is
one of each. What training pays is 19 steps of the second kind and one of the third:

    cost = ((LOOK_EVERY - 1) with + looked at) / LOOK_EVERY - without

The device is waited for after every step, so that none pays for the one before. With --fill all steps train on the same
random batch, as in `gem-train bench`. The instruments are the phases' clock, FLOPs, the records of metrics.jsonl and
events.jsonl, the spike watch and what is printed. The result is written after every round, so that a run that is cut
short has its rounds; --seconds ends it by itself.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gem_parallel import Runtime, start
from gem_train import recipes
from gem_train.assemble import assemble, build_gem
from gem_train.cli.measure import on_device
from gem_train.config import override
from gem_train.events import Events
from gem_train.instruments import LOOK_EVERY, Instruments
from gem_train.ladder.results import circumstances
from gem_train.measuring.bench import batches
from gem_train.phases import StepClock
from gem_train.progress import Progress
from gem_train.run_dir import RunDir, write_json
from gem_train.spikes import LossHistory
from gem_train.trainer import Trainer

BEGAN = time.perf_counter()
WARM_UP = 2  # steps; kernels are built and graphs captured in the first
ALLOWED = 0.01  # of a step
KINDS = ("without", "with", "looked at")

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
    """Adds up the processor time of the outermost calls of what it watches."""

    def __init__(self) -> None:
        self.seconds, self.kind, self._depth = 0.0, KINDS[0], 0

    def watch(self, owner: type, name: str, nothing: Callable[[], Any]) -> None:
        """Count every call of `owner.name` from now on; in a step without instruments `nothing` takes its place."""
        plain: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.kind == "without":
                return nothing()
            if name == "begin":  # the step's number decides whether it is looked at, and here nothing else
                args = (args[0], LOOK_EVERY if self.kind == "looked at" else LOOK_EVERY + 1, *args[2:])
            self._depth += 1
            began = time.thread_time()
            try:
                return plain(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.thread_time() - began

        setattr(owner, name, timed)


class Rounds:
    """Seconds of the steps of every kind, a round at a time."""

    def __init__(self) -> None:
        self.clock: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.processor: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.inside: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def add(self, kind: str, clock: float, processor: float, inside: float) -> None:
        """A step."""
        self.clock[kind].append(clock)
        self.processor[kind].append(processor)
        self.inside[kind].append(inside)

    def result(self, cuda: bool) -> dict[str, Any]:
        """Medians of the steps, the instruments' shares of a step and whether they are allowed.

        A card's step is its clock's; on a CPU, which others may use, it is the main thread's processor time, and the
        clock has no say.
        """
        without = statistics.median((self.clock if cuda else self.processor)["without"])
        inside = _trained(statistics.mean(self.inside["with"]), statistics.mean(self.inside["looked at"]))
        by_round = [
            _trained(plain, looked) / none - 1
            for none, plain, looked in zip(*(self.clock[kind] for kind in KINDS), strict=True)
        ]
        clock = statistics.median(by_round)
        return {
            "rounds": len(by_round),
            "rows": [
                {"case": kind} | {f"{k}_ms": statistics.median(v[kind]) * 1e3 for k, v in vars(self).items()}
                for kind in KINDS
            ],
            "inside_share": inside / without,
            "clock_share": clock,
            "clock_shares": by_round,
            "allowed": ALLOWED,
            "ok": inside / without < ALLOWED and (not cuda or clock < ALLOWED),
        }


def _trained(plain: float, looked: float) -> float:
    return ((LOOK_EVERY - 1) * plain + looked) / LOOK_EVERY


def render(result: dict[str, Any]) -> str:
    """The result in lines."""
    rows = [f"{'step':<10} {'clock ms':>9} {'processor ms':>13} {'inside ms':>10}"]
    rows += [
        f"{r['case']:<10} {r['clock_ms']:>9.2f} {r['processor_ms']:>13.2f} {r['inside_ms']:>10.3f}"
        for r in result["rows"]
    ]
    low, high = min(result["clock_shares"]), max(result["clock_shares"])
    return "\n".join(
        (
            *rows,
            f"inside {result['inside_share']:.3%} of a step; by the clock {result['clock_share']:+.2%} "
            f"(median of {result['rounds']} rounds, {low:+.2%} to {high:+.2%})",
            f"less than {result['allowed']:.0%} of a step: {'yes' if result['ok'] else 'NO'}",
        )
    )


def measure(trainer: Trainer, runtime: Runtime, options: argparse.Namespace, more: dict[str, Any]) -> dict[str, Any]:
    """Train, round by round, until there are enough or the time is over."""
    fill = {name: int(length) for name, _, length in (text.partition("=") for text in options.fill)}
    meter, rounds, result = Meter(), Rounds(), dict[str, Any]()
    for watched in WATCHED:
        meter.watch(*watched)
    cuda = runtime.device.type == "cuda"
    source = batches(trainer, fill, WARM_UP + len(KINDS) * options.rounds)

    def step(kind: str) -> tuple[float, float, float]:
        batch = next(source)
        meter.kind = kind
        began = time.perf_counter(), time.thread_time(), meter.seconds
        trainer._timed_step(batch, 0.0)
        if cuda:
            torch.cuda.synchronize()
        clock, processor, inside = time.perf_counter(), time.thread_time(), meter.seconds
        return clock - began[0], processor - began[1], inside - began[2]

    for _ in range(WARM_UP):
        longest = step("looked at")[0]
    print(f"second {time.perf_counter() - BEGAN:.0f}: ready, {longest * 1e3:.1f} ms a step", flush=True)
    for i in range(options.rounds):
        if i >= 2 and time.perf_counter() - BEGAN + 3.3 * longest > options.seconds:
            print(f"the time is over after {i} of {options.rounds} rounds", flush=True)
            break
        for kind in (*KINDS[i % 3 :], *KINDS[: i % 3]):
            rounds.add(kind, *step(kind))
        result = more | rounds.result(cuda)
        if options.out:
            write_json(Path(options.out), result)
    return result


def main() -> None:
    """Train, print the shares and exit with 1 where they are too large."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", nargs="?", default="ml100k")
    parser.add_argument("--rounds", type=int, default=8, help="of three steps (8)")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no round that would end later (600)")
    parser.add_argument("--fill", metavar="SOURCE=LENGTH", action="append", default=[], help="as in gem-train bench")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[])
    parser.add_argument("--out", metavar="FILE", help="where to write the result as JSON")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: expected 2 or more")
    config = override(recipes.load(options.recipe), options.set)
    with tempfile.TemporaryDirectory() as folder, start(config.train.device) as runtime:
        run = RunDir(Path(folder) / "run")
        run.start(config, resume=False)
        events = Events(run.path)
        with Progress() as progress:
            build = on_device(runtime) if options.fill else build_gem
            _, trainer = assemble(config, runtime, run, events=events, progress=progress, build=build)
            progress.start(0, WARM_UP + len(KINDS) * options.rounds)
            more = circumstances("instruments") | {
                "command": f"python tools/instrument_cost.py {shlex.join(_plain(sys.argv[1:]))}",
                "recipe": config.recipe,
                "batch": config.data.batch_size,
                "accumulate": config.optim.accumulate,
                "layers": trainer.parts.layers,
                "fill": options.fill or "lengths of the data",
            }
            result = measure(trainer, runtime, options, more)
        events.close()
    print(render(result))
    raise SystemExit(0 if result["ok"] else 1)


def _plain(arguments: list[str]) -> list[str]:
    return [Path(a).name if a.startswith("/") else a for a in arguments]


if __name__ == "__main__":
    main()
