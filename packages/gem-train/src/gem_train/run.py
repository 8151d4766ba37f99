"""One run from a configuration to its figures: the commands `run` and `eval`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gem_data import Schema
from gem_lowprec import watch
from gem_model import ModelInputs
from gem_model.baselines import ConstantRate, LogisticRegression
from gem_model.ranker import Ranker
from gem_parallel import PeerLostError, Runtime, start

from gem_train import sinks
from gem_train.assemble import assemble, build_gem, describe
from gem_train.config import RunConfig
from gem_train.data import Data, without_history
from gem_train.errors import PeerLost, UserError, user_errors
from gem_train.evaluation import Predictions, calibration_curves, figures, intervals, slices
from gem_train.events import Events, truncate
from gem_train.metrics import FEW_USERS
from gem_train.progress import Progress
from gem_train.run_dir import RunDir, new_path, read_json, write_json
from gem_train.slicing import by_columns
from gem_train.slicing import check as check_columns
from gem_train.trainer import Trainer

# What torch, torchrec and fbgemm say of their own affairs, whatever the user does.
NOISE = (
    "torch.distributed is disabled, unavailable or uninitialized",
    "TBE B200 optimization",
    "`_get_pg_default_device` will be deprecated",
    r"`torch\.distributed\.\w+` is deprecated",
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Where the run lies and what eval.json says (None on the ranks other than 0).

    `unsaved` says that the trained weights could not be written, and what to do.
    """

    run: RunDir
    results: dict[str, Any] | None
    unsaved: str = ""


BASELINE_ROWS = 500_000  # the most recent training rows; the regression holds them all in memory


def execute(
    config: RunConfig,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    build: Callable[[RunConfig, ModelInputs], Ranker] = build_gem,
) -> Outcome:
    """Train, test and report `config` in the folder `out` (None: runs/<recipe>-<timestamp>); `build` as in `assemble`.

    Raises:
        UserError: a setting, the data or the folder is not as it should be.
        NonFiniteError: the loss or gradient became NaN or infinite.
        Interrupted: SIGTERM or Ctrl-C; a checkpoint has been written.
        PeerLost: another rank died or hangs.
    """
    with user_errors("start"):
        runtime = start(config.train.device, config.train.timeout_s)
    with runtime, quiet(runtime):
        # The clocks of two ranks may show different seconds: the folder is rank 0's.
        run = RunDir(runtime.gather(out or new_path(config.recipe), "the run folder")[0])
        _on_main(runtime, lambda: run.start(config, resume=resume))
        events = Events(run.path if runtime.is_main else None)
        with Progress(enabled=runtime.is_main) as progress, contextlib.closing(events):
            with _begun(runtime, run, resume=resume):
                data, trainer = assemble(config, runtime, run, events=events, progress=progress, build=build)
                _on_main(runtime, lambda: _check_data(run, data, resume=resume))
                if resume:
                    step = trainer.resume()
                    _on_main(runtime, lambda: truncate(run.metrics_file, step))
                    progress.note(f"resumed at step {step} of {trainer.total}")
                if config.train.sinks:  # on rank 0 alone, but all hear of what is wrong
                    _on_main(runtime, lambda: setattr(events, "sinks", sinks.make(config.train.sinks, run, config)))
                if runtime.is_main:
                    write_json(run.model_file, describe(trainer))
            events.message("start", step=trainer.position.step, total=trainer.total, world=runtime.world)
            progress.note(_opening(trainer, data))
            progress.start(trainer.position.step, trainer.total)
            with _peers(events, run), _numerics(trainer, resume=resume):
                trainer.fit()
                results = test(trainer, data, ())
            events.message("finished", step=trainer.position.step)
        return Outcome(run=run, results=results, unsaved=_unsaved(trainer))


def reevaluate(run: RunDir, *, by: Sequence[str] = ()) -> Outcome:
    """Test a finished or interrupted run again, from its folder alone; also by the columns `by` (slicing.py).

    Raises UserError for a name that is no column.
    """
    with reopened(run) as (data, trainer):
        with user_errors("eval"):
            check_columns(data, by)
        return Outcome(run=run, results=test(trainer, data, by))


def export(run: RunDir, out: str | Path, *, rows_as: str = "float32") -> dict[str, Any]:
    """Write the weights that the run is tested with to the folder `out`; returns its manifest.

    Raises UserError where the folder exists, or under torchrun: one process writes an export.
    """
    from gem_train.exporting import export as write

    own = run.read_config().build
    if own is not None:
        raise UserError(f"only GEM can be exported, whose parts the scorer knows; the model of {run.path} is {own}")
    with reopened(run) as (data, trainer):
        if trainer.runtime.world > 1:
            raise UserError("export runs in one process, without torchrun; it reads the checkpoints of any number")
        return write(trainer, data, trainer.load_best(), Path(out), rows_as=rows_as)


@contextlib.contextmanager
def _numerics(trainer: Trainer, *, resume: bool) -> Iterator[None]:
    """Log how well the converted layers' operands are represented, on the first rank, if `lowprec.numerics_every`."""
    parts = trainer.parts
    every, log = parts.config.lowprec.numerics_every, parts.run.numerics_file
    if not every or not parts.runtime.is_main or not parts.conversion.modules:
        yield
        return
    if resume and log.exists():
        truncate(log, trainer.position.step)
    with watch(parts.conversion, every=every, log=log):
        yield


@contextlib.contextmanager
def reopened(run: RunDir) -> Iterator[tuple[Data, Trainer]]:
    """A run's data and its trainer at the latest checkpoint, to look at; nothing is written to the events."""
    config = run.read_config()
    with user_errors("start"):
        runtime = start(config.train.device, config.train.timeout_s)
    with runtime, quiet(runtime), Progress(enabled=False) as progress:
        data, trainer = assemble(config, runtime, run, events=Events(None), progress=progress)
        _on_main(runtime, lambda: _check_data(run, data, resume=True))
        trainer.resume()
        yield data, trainer


def test(trainer: Trainer, data: Data, by: Sequence[str]) -> dict[str, Any] | None:
    """Predict the test split once and write eval.json and predictions.parquet (rank 0)."""
    parts, run = trainer.parts, trainer.parts.run
    which = trainer.load_best()
    with parts.events.span("test"):
        predictions = trainer.predict(parts.test)
    if predictions is None:
        return None
    tasks = parts.inputs.tasks
    with parts.events.span("baselines"):
        baselines, notes = baseline_figures(data, predictions)
    users = len(np.unique(predictions.groups))
    if users < FEW_USERS:
        notes.append(f"the test split has only {users} users: the intervals are too narrow")
    results: dict[str, Any] = {
        "split": "test",
        "samples": len(predictions),
        "step": trainer.position.step,
        "weights": which,
        "validation_ne": trainer.position.best_ne,
        "source": data.source,
        "notes": [*data.notes, *notes],
        "model": figures(predictions, tasks),
        "intervals": intervals(predictions, tasks),  # 95 %, by 1000 bootstrap draws of users
        "baselines": baselines,
        "slices": slices(predictions, tasks),
        "calibration_curve": calibration_curves(predictions, tasks),
    }
    if by:
        with user_errors("eval"):
            results["slices"] |= by_columns(data, predictions, tasks, by)
    optimal = data.optimal_ne(parts.test.rows)
    if optimal is not None:
        results["optimal"] = {
            task: {"ne": ne, "excess": results["model"][task]["ne"] / ne - 1.0} for task, ne in optimal.items()
        }
    predictions.write(run.predictions_file, tasks)
    write_json(run.eval_file, results)
    return results


def baseline_figures(data: Data, predictions: Predictions) -> tuple[dict[str, Any], list[str]]:
    """What the base rate and a logistic regression on the dense features achieve on the same samples."""
    rows = data.split.train[-BASELINE_ROWS:]
    notes = []
    if len(rows) < len(data.split.train):
        notes.append(f"the baselines were fitted on the latest {len(rows)} of {len(data.split.train)} training rows")
    fitted: dict[str, Any] = {"constant": ConstantRate().fit(without_history(data, rows))}
    if data.schema.dense_width:
        fitted["logistic"] = LogisticRegression().fit(without_history(data, rows))
    else:
        notes.append("no logistic regression: the data has no dense features")
    results = {}
    for name, baseline in fitted.items():
        batches = without_history(data, predictions.sample_ids)
        logits = [baseline(batch).double().numpy() for batch in batches]
        said = dataclasses.replace(predictions, logits=np.concatenate(logits))
        results[name] = figures(said, data.schema.task_names)
    return results, notes


def _opening(trainer: Trainer, data: Data) -> str:
    parts = trainer.parts
    described = describe(trainer)["parameters"]
    split = data.manifest()["split"]
    train, validation, test = (f"{split[name]:,}" for name in ("train", "validation", "test"))
    return (
        f"{data.source}: {train} training, {validation} validation, {test} test samples; "
        f"{described['dense']:,} dense and {described['tables']:,} table parameters; {trainer.total:,} steps of "
        f"{parts.config.data.batch_size} on {parts.runtime.world} x {parts.runtime.device.type}, {parts.precision}; "
        f"run folder {parts.run.path}"
    )


def _unsaved(trainer: Trainer) -> str:
    """What there is to say where the last checkpoint could not be written."""
    step, saved = trainer.position.step, max(trainer.checkpoints.steps(), default=0)
    if saved == step:
        return ""
    return (
        f"the weights of step {step} could not be written, the last ones on the disk are those of step {saved}; make "
        f"room, then go on with --out {trainer.parts.run.path} --resume"
    )


def _check_data(run: RunDir, data: Data, *, resume: bool) -> None:
    """Write data.json, or refuse to go on with other data than the run began with."""
    manifest = data.manifest()
    if resume and run.data_file.exists():
        before = read_json(run.data_file)
        if before["fingerprint"] != manifest["fingerprint"]:
            lines = "; ".join(Schema.from_dict(before["schema"]).differences(data.schema))
            raise UserError(f"cannot resume {run.path}: the data has another schema than the run began with: {lines}")
        changed = [k for k in ("source", "rows", "digest", "split") if before[k] != manifest[k]]
        if changed:
            lines = "; ".join(f"{k} was {before[k]}, is {manifest[k]}" for k in changed)
            raise UserError(f"cannot resume {run.path}: the data is not what the run began with: {lines}")
    else:
        write_json(run.data_file, manifest)


def _on_main(runtime: Runtime, work: Callable[[], Any]) -> None:
    """Do `work` on rank 0; its UserError is everyone's, so that no rank waits for one that has left."""
    error: str | None = None
    if runtime.is_main:
        try:
            work()
        except (UserError, OSError) as problem:
            error = str(problem)
    error = runtime.gather(error, "rank 0's run folder")[0]
    if error is not None:
        raise UserError(error)


@contextlib.contextmanager
def _begun(runtime: Runtime, run: RunDir, *, resume: bool) -> Iterator[None]:
    """A run that is refused or left before its first step leaves no folder: the command that is right finds it free."""
    try:
        yield
    except (UserError, KeyboardInterrupt):
        if runtime.is_main and not resume:
            run.forget()
        raise


@contextlib.contextmanager
def _peers(events: Events, run: RunDir) -> Iterator[None]:
    """A rank that is gone ends the run with a line and a code of its own, not with the traceback of a collective."""
    try:
        yield
    except PeerLostError as error:
        events.message("peer lost", reason=str(error))
        raise PeerLost(f"{error}; go on with --out {run.path} --resume") from error


@contextlib.contextmanager
def quiet(runtime: Runtime) -> Iterator[None]:
    """Only rank 0 speaks of what is the same on all of them; what libraries say of their own affairs is left out."""
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        for noise in NOISE:
            warnings.filterwarnings("ignore", message=noise)
        if not runtime.is_main:
            warnings.simplefilter("ignore")
        yield
