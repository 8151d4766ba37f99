"""Measure the rungs one after another: speed, local MFU and memory on the same batches, NE after the same training."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gem_model import GEM, ModelInputs
from gem_model.ranker import Ranker
from gem_parallel import Runtime

from gem_train.assemble import assemble
from gem_train.config import RunConfig, override
from gem_train.config.tree import suggest
from gem_train.data import divided
from gem_train.evaluation import figures, mean_ne
from gem_train.events import Events
from gem_train.ladder.hstu import time_hstu
from gem_train.ladder.peers import install
from gem_train.ladder.rungs import RUNGS, Rung, Stand
from gem_train.measuring import alone
from gem_train.measuring.bench import WARM_UP, batches, compile_layers, measure, time_steps
from gem_train.measuring.recompute import recompute
from gem_train.progress import Progress
from gem_train.run_dir import RunDir
from gem_train.trainer import Trainer

FAILURES = (RuntimeError, ValueError, TypeError, NotImplementedError, TimeoutError, torch.OutOfMemoryError)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to climb.

    Attributes:
        fill: longest history of each source, for random half-filled batches; empty takes the data's.
        steps: that are timed, after `warm_up` that are not.
        repeats: of each unit alone; 0 measures no local MFU.
        train_steps: of the training after which the NE is taken; 0 takes none.
        recompute: keep only the inputs of the interleaved layers, on every rung.
        names: of the rungs to measure; empty is all.
        done: of rungs that have been measured before, to be stepped over unless they are in `names`.
        bench: the rung of which everything is measured that `gem-train bench` measures, into `row["efficiency"]`.
        ready_limit: seconds for what comes before a rung's first timed step: assembling, torch.compile, the warm-up.
        limit: seconds for a rung from then on; 0 is no limit, for both. With one process only.
    """

    fill: Mapping[str, int]
    steps: int = 5
    warm_up: int = WARM_UP
    repeats: int = 3
    train_steps: int = 50
    recompute: bool = False
    names: Sequence[str] = ()
    done: Sequence[str] = ()
    ready_limit: float = 0.0
    limit: float = 0.0
    bench: str = ""


def check_names(names: Iterable[str], bench: str = "", rungs: tuple[Rung, ...] = RUNGS) -> None:
    """Raises ValueError for a name that is no rung; `bench` may be empty."""
    known = [rung.name for rung in rungs]
    for name in (*names, *filter(None, [bench])):
        if name not in known:
            raise ValueError(f"{name!r} is no rung{suggest(name, known)} (there are: {', '.join(map(repr, known))})")


def climb(
    config: RunConfig,
    runtime: Runtime,
    options: Options,
    *,
    report: Callable[[dict[str, Any]], None],
    rungs: tuple[Rung, ...] = RUNGS,
) -> list[dict[str, Any]]:
    """A row for every rung, handed to `report` as soon as it is there; those that can't be measured say why.

    Raises ValueError for a name that is no rung.
    """
    check_names(options.names, options.bench, rungs)
    rows: list[dict[str, Any]] = []
    alone_here = runtime.world == 1  # nobody can be called back out of a collective
    limits = Limits(options.ready_limit if alone_here else 0.0, options.limit if alone_here else 0.0)
    below, reached, speed = Stand(), dict[str, Stand](), _Speed(runtime, options, limits.ready)
    for rung in rungs:
        base = below if rung.on is None else reached.get(rung.on, below)
        stand = base.up(rung, config)
        row: dict[str, Any] = {"rung": rung.name, "what": rung.what, "same_function": rung.same}
        here = override(config, stand.settings)
        reason = rung.missing(here, runtime)
        if rung.settings and not (reason or rung.operators or rung.compile) and here == override(config, base.settings):
            reason = "changes nothing of this recipe"
        if options.fill and not reason and here.data.balance != override(config, base.settings).data.balance:
            reason = "--fill makes one batch for each rank, which nobody deals"
        if options.recompute and here.parallel.memory.works:
            reason = "--recompute has its own way of keeping activations"
        chosen = rung.name in options.names if options.names else rung.name not in options.done
        if not chosen:
            below = reached[rung.name] = _above(rung, reason, stand, base, below)
            continue
        began = time.perf_counter()
        if not reason:
            try:
                with limits:
                    if rung.hstu:
                        row |= speed.hstu(stand, here)
                    else:
                        row |= speed(stand, here, max(options.warm_up, rung.warm_up))
                        if rung.name == options.bench:
                            row["efficiency"] = speed.bench()
                    if options.train_steps and not rung.hstu:
                        speed.close()
                        with _trainer(stand, here, runtime, options) as trainer:
                            row["ne"], row["ne_by_task"] = _train(trainer, options.train_steps)
            except FAILURES as error:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                speed.close()
                if runtime.world > 1:  # the others are inside a collective: there is no going on together
                    raise
        below = reached[rung.name] = _above(rung, reason, stand, base, below)
        row["reason"] = reason
        row["took_s"], row["ready_s"] = time.perf_counter() - began, limits.ready_s
        rows.append(row)
        report(row)
    speed.close()
    return rows


def _above(rung: Rung, reason: str, stand: Stand, base: Stand, below: Stand) -> Stand:
    """What the next rung stands on: what can't be measured is stepped over, so that it is what that one stood on."""
    if rung.start:
        return stand
    if rung.aside:
        return below
    return base if reason else stand


class Limits:
    """A context in which a rung first gets ready and then is measured, each for so many seconds at most; 0 is no limit.

    TimeoutError is raised in it as soon as Python runs again after that, and again every second until the block is
    left: what runs at that moment may be something that swallows exceptions.
    """

    def __init__(self, ready: float, measured: float) -> None:
        self._given = {"--ready-limit": ready, "--limit": measured}
        self._flag, self._began, self._before = "", 0.0, signal.getsignal(signal.SIGALRM)
        self.ready_s: float | None = None  # how long it took to get ready

    def __enter__(self) -> None:
        self._began, self.ready_s = time.perf_counter(), None
        self._before = signal.signal(signal.SIGALRM, self._stop) if any(self._given.values()) else None
        self._arm("--ready-limit")

    def __exit__(self, *_: object) -> None:
        if any(self._given.values()):
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._before)

    def ready(self) -> None:
        """From here on it is measured."""
        self.ready_s = time.perf_counter() - self._began
        self._arm("--limit")

    def _arm(self, flag: str) -> None:
        self._flag = flag
        if any(self._given.values()):
            signal.setitimer(signal.ITIMER_REAL, self._given[flag], 1.0)

    def _stop(self, _signal: int, _frame: Any) -> None:
        doing = "measuring" if self._flag == "--limit" else "getting ready (torch.compile, warm-up)"
        raise TimeoutError(f"{doing} took longer than the {self._given[self._flag]:g} s that {self._flag} gives a rung")


class _Speed:
    """Times rungs one after another on one trainer, for as long as nothing but operators changes between them."""

    def __init__(self, runtime: Runtime, options: Options, ready: Callable[[], None]) -> None:
        self.runtime, self.options, self.ready = runtime, options, ready
        self._trainer: Trainer | None = None
        self._settings: tuple[str, ...] | None = None
        self._held = contextlib.ExitStack()

    def __call__(self, stand: Stand, config: RunConfig, warm_up: int) -> dict[str, Any]:
        options = self.options
        trainer = self._at(stand, config)
        source = batches(trainer, options.fill, warm_up + options.steps)
        times = time_steps(trainer, source, warm_up=warm_up, ready=self.ready)
        peak = trainer.parts.peak.peak
        row = {
            "operators": asdict(stand.operators),
            "compiled": stand.compile,
            "samples_per_s": times.samples_per_s,
            "step_ms": times.step_s * 1e3,
            "data_wait_ms": times.data_wait_s * 1e3,
            "tflops": times.flops / times.seconds / 1e12,
            "mfu": None if peak is None else times.flops / times.seconds / peak,
            "memory_gib": times.memory_bytes / 2**30,
            "local_tflops": None,
            "local_mfu": None,
            "ne": None,
        }
        if options.repeats and self.runtime.world == 1 and not stand.compile:  # alone, layers might be compiled again
            batch = divided(next(batches(trainer, options.fill, 1)), config.optim.accumulate)[0]
            units = alone.time_units(trainer, batch, repeats=options.repeats)
            row["local_tflops"] = sum(u.flops for u in units) / sum(u.seconds for u in units) / 1e12
            row["local_mfu"] = alone.local_mfu(units, peak)
        return row

    def bench(self) -> dict[str, Any]:
        """All of `gem-train bench` for the rung that has just been timed."""
        assert self._trainer is not None
        options = self.options
        repeats = max(1, options.repeats)
        return measure(
            self._trainer, options.fill, steps=options.steps, warm_up=0, repeats=repeats, by_kernel=True
        )  # fmt: skip

    def hstu(self, stand: Stand, config: RunConfig) -> dict[str, Any]:
        """The peer that is another model, on the same batches."""
        options = self.options
        trainer = self._at(dataclasses.replace(stand, compile=False), config)
        return time_hstu(
            trainer,
            options.fill,
            steps=options.steps,
            warm_up=options.warm_up,
            compiled=stand.compile,
            ready=self.ready,
        )

    def _at(self, stand: Stand, config: RunConfig) -> Trainer:
        if self._trainer is None or stand.settings != self._settings or stand.compile:
            self.close()
            self._trainer = self._held.enter_context(_trainer(stand, config, self.runtime, self.options))
            self._settings = None if stand.compile else stand.settings  # a compiled model is not used again
        else:
            install(self._trainer.model.module, stand.operators)
        return self._trainer

    def close(self) -> None:
        """Let the trainer and its memory go."""
        self._trainer = None
        self._held.close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _train(trainer: Trainer, steps: int) -> tuple[float, dict[str, float]]:
    """The validation NE after so many steps from the same weights on the same batches, the mean and by task."""
    for batch in batches(trainer, {}, steps):
        trainer.model.train()
        trainer.step(batch)
    predictions = trainer.predict(trainer.parts.validation)
    found = figures(predictions, trainer.parts.inputs.tasks) if predictions is not None else {}
    ne = trainer.runtime.gather(mean_ne(found) if found else math.nan, "the validation NE")[0]
    return ne, {task: f["ne"] for task, f in found.items()}


@contextlib.contextmanager
def _trainer(stand: Stand, config: RunConfig, runtime: Runtime, options: Options) -> Iterator[Trainer]:
    """The system with the rung's operators, put together as a run is; its folder is a temporary one."""

    def build(config: RunConfig, inputs: ModelInputs) -> Ranker:
        gem = GEM(config.model, inputs, device=runtime.device)  # drawing many weights on the CPU takes long
        install(gem, stand.operators)
        return gem

    with tempfile.TemporaryDirectory() as folder, Progress(enabled=False) as progress:
        run = RunDir(Path(folder))  # a plan of activations is written there
        _, trainer = assemble(config, runtime, run, events=Events(None), progress=progress, build=build)
        layers = [name for name in trainer.parts.units if name.startswith("layers.")]
        if stand.compile:
            compile_layers(trainer)
        if options.recompute:
            recompute(trainer.model.module, layers)
        yield trainer
