"""The training loop: one visible step, validation, checkpoints, and the ways in which a run may end.

What a step computes depends on the weights, the optimizers' state and (seed, step, rank) alone. The random generator is
seeded anew before each forward pass and the learning rates are functions of the step, so that a resumed run continues
with the bits of the uninterrupted one, and there is no random state to save.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
import warnings
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from gem_data import JaggedBatch, Loader
from gem_lowprec import Conversion
from gem_model import GemConfig, ModelInputs
from gem_parallel import (
    Checkpointer,
    CheckpointError,
    ParallelModel,
    Runtime,
    load_optimizer_state,
    optimizer_state,
)
from torch import Tensor

from gem_train import graphs, trouble
from gem_train.averaging import Average
from gem_train.config import RunConfig
from gem_train.data import divided
from gem_train.errors import Interrupted, NonFiniteError, UserError
from gem_train.evaluation import Predictions, figures, mean_ne, predict
from gem_train.events import Events
from gem_train.instruments import Instruments
from gem_train.losses import GlobalLoss, global_loss, total_weights
from gem_train.metrics import Mfu
from gem_train.optimizers import set_lr
from gem_train.position import Position
from gem_train.progress import Progress
from gem_train.progressive import Window
from gem_train.run_dir import RunDir
from gem_train.runs import last_step
from gem_train.schedule import rate
from gem_train.signals import StopRequest
from gem_train.spikes import LossHistory


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the assembly hands over."""

    config: RunConfig
    runtime: Runtime
    run: RunDir
    inputs: ModelInputs
    model: ParallelModel
    model_config: GemConfig
    units: tuple[str, ...]  # names of the submodules that are sharded, and compiled, one by one
    conversion: Conversion
    optimizer: torch.optim.Optimizer
    train: Loader
    validation: Loader
    test: Loader
    precision: str  # "fp32" or "bf16"
    peak: Mfu
    events: Events
    progress: Progress
    counts_flops: bool = True  # those of a baseline are not counted
    layers: str = "launched kernel by kernel"  # or otherwise, and why


class Trainer:
    """Trains the parts to the end, or to the end of their luck."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.config, self.runtime, self.model = parts.config, parts.runtime, parts.model
        self.position = Position()
        self.stop = StopRequest()
        self.instruments = Instruments(parts)
        decay = self.config.optim.ema_decay
        self.average = Average(self.model, decay) if decay is not None else None
        train, data = self.config.train, parts.train
        self.total = min(train.epochs * data.steps_per_epoch, train.max_steps or sys.maxsize)
        self.checkpoints = Checkpointer(parts.run.checkpoints, keep=train.keep_checkpoints, runtime=self.runtime)
        # Two, so that the best one that the latest checkpoint speaks of outlives a kill between the two saves.
        self.best = Checkpointer(parts.run.best, keep=2, runtime=self.runtime)

    # The step.

    def step(self, batch: JaggedBatch, flops: float = 0.0) -> dict[str, Any]:
        """One update on this rank's part of a global batch; returns what there is to log.

        Dense gradients are reduced over the ranks once, in the last part. A step that ends before it (a part that is
        not trained on, an exception) leaves none behind; tables keep what they learned in the parts before.

        Raises NonFiniteError, before anything is updated if it is the loss that is not finite.
        """
        step, clock = self.position.step + 1, self.instruments.clock
        rates = self._set_rates(step)
        parts = divided(batch, self.config.optim.accumulate)
        whole = total_weights(batch, self.runtime) if len(parts) > 1 else None
        losses: list[GlobalLoss] = []
        good, norm = True, math.nan
        try:
            for i, part in enumerate(parts):
                self.model.reduce_gradients(i + 1 == len(parts))
                self._seed(step, i)
                part = part.to(self.runtime.device, non_blocking=True)
                logits = self.forward(part)
                clock.mark("forward")
                stop = self.stop.requested
                first = flops if i == 0 else 0
                losses.append(global_loss(logits, part, self.runtime, whole=whole, stop=stop, flops=first))
                clock.mark("loss")
                good = self._accepts(step, i, part, logits, losses[-1])
                if not good:
                    break
                self._backward(losses[-1].backward, len(parts))
                clock.mark("backward")
            if good:
                norm = float(self.model.clip_grad_norm_(self.config.optim.clip_norm or math.inf))
                if not math.isfinite(norm):
                    what = f"the gradient's norm is {norm} (the loss is {losses[-1].value})"
                    self._fail(what, step, i, part, logits, losses[-1])
                self.parts.optimizer.step()
                if self.average is not None:
                    self.average.update()
        finally:
            self.model.forget_gradients()
        clock.mark("optimizer")

        self.position.step = step
        if self.config.data.order == "time" and step <= self.parts.train.steps_per_epoch:
            self._validate_progressively(step, losses)
        record = {"loss": sum(x.value for x in losses), "grad_norm": norm, **rates} | ({} if good else {"skipped": 1})
        return {**record, "stop": any(x.stop for x in losses), "flops": losses[0].flops}

    def _backward(self, loss: Tensor, parts: int) -> None:
        """The backward pass of one of so many parts; updates the tables, too."""
        auxiliary = getattr(self.model.module, "auxiliary", None)  # see gem_model.ranker.Ranker
        if auxiliary is not None:
            loss = loss + auxiliary / parts
        with self.runtime.waiting("the backward pass"):
            loss.backward()

    def forward(self, batch: JaggedBatch) -> Tensor:
        """Logits [B, K] in the run's precision; `batch` is on any device."""
        batch = batch.to(self.runtime.device, non_blocking=True)
        bf16 = self.parts.precision == "bf16"
        with torch.autocast(self.runtime.device.type, dtype=torch.bfloat16, enabled=bf16):
            logits: Tensor = self.model(batch)
        return logits

    # The loop.

    def fit(self) -> None:
        """Train up to the last step, validating and saving on the way. Raises Interrupted, NonFiniteError."""
        train = self.config.train
        if self.position.step == 0:
            self.save()  # before the first step: what the disk has to say shows now, and any later kill can be resumed
        with self.stop, contextlib.closing(self._batches()) as batches:
            for batch, waited in batches:
                stop = self._timed_step(batch, waited)
                step = self.position.step
                last = step == self.total
                better = False
                if last or (train.eval_every and step % train.eval_every == 0):
                    better = self.validate()
                if (
                    last
                    or stop
                    or better
                    or self.is_stale
                    or (train.checkpoint_every and step % train.checkpoint_every == 0)
                ):
                    self.save()
                if self.is_stale and not last:
                    self.parts.events.message("stopped early", step=step, best=self.position.best_step)
                    self.parts.progress.note(
                        f"stopped early at step {step}: {self.position.stale} validations without a gain"
                    )
                    return
                if stop and not last:
                    saved = self.checkpoints.latest() == step
                    how = "a checkpoint was written" if saved else "its checkpoint could NOT be written"
                    self.parts.events.message("interrupted", step=step, signal=self.stop.name, saved=saved)
                    more = f"--out {self.parts.run.path} --resume"
                    raise Interrupted(f"stopped at step {step} of {self.total} as asked; {how}; go on with {more}")

    def _batches(self) -> Generator[tuple[JaggedBatch, float], None, None]:
        """Batches from the loader's position to the last step, with the seconds that each one kept us waiting."""
        left = 0 if self.is_stale else self.total - self.position.step
        while left > 0:
            epoch = iter(self.parts.train)
            began = time.perf_counter()
            for batch in epoch:
                yield batch, time.perf_counter() - began
                left -= 1
                if left == 0:
                    break
                began = time.perf_counter()

    @property
    def is_stale(self) -> bool:
        """Whether as many validations in a row as `patience` allows have brought nothing."""
        patience = self.config.train.patience
        return patience is not None and self.position.stale >= patience

    def _timed_step(self, batch: JaggedBatch, waited: float) -> bool:
        """Make the step and log it; returns whether a rank was asked to stop."""
        step = self.position.step + 1
        mine = self.instruments.begin(step, batch)
        began = time.perf_counter()
        self.model.train()
        record = self.step(batch, mine)
        seconds = time.perf_counter() - began
        stop, flops = bool(record.pop("stop")), record.pop("flops")
        record |= self.instruments.end(step, waited=waited, seconds=seconds, flops=flops, mine=mine)
        self.parts.events.metric("step", step, **record)
        self.parts.progress.step(step, record)
        return stop

    def _seed(self, step: int, part: int = 0) -> None:
        """Everything random in a part of a step on this rank (dropout, stochastic rounding) follows from these."""
        torch.manual_seed((self.config.train.seed * 1_000_003 + step) * 65_537 + self.runtime.rank + (part << 48))
        self.parts.conversion.set_step(step, part)

    def _set_rates(self, step: int) -> dict[str, float]:
        o = self.config.optim
        shared: dict[str, Any] = {"total": self.total, "warmup": o.warmup_steps, "final_ratio": o.final_ratio}
        dense = o.lr * rate(step, schedule=o.schedule, **shared)
        sparse = o.sparse_lr * rate(step, schedule=o.sparse_schedule, **shared)
        set_lr(self.parts.optimizer, dense)
        self.model.set_sparse_lr(sparse)
        return {"lr": dense, "sparse_lr": sparse}

    # Evaluation.

    def predict(self, loader: Loader) -> Predictions | None:
        """Predictions for all rows of an evaluation loader, on rank 0. Raises NonFiniteError."""
        self.model.eval()
        try:
            return predict(self.forward, loader, self.runtime)
        except NonFiniteError as error:
            raise NonFiniteError(f"the weights of step {self.position.step}: {error}") from error

    def validate(self) -> bool:
        """Evaluate the validation split; keeps the weights if they are the best so far, and says whether they are."""
        step, train = self.position.step, self.config.train
        averaged = self.average.in_place() if self.average is not None else contextlib.nullcontext()
        with averaged:
            with self.parts.events.span("validation", step=step):
                predictions = self.predict(self.parts.validation)
            found = figures(predictions, self.parts.inputs.tasks) if predictions is not None else {}
            ne = self.runtime.gather(mean_ne(found) if found else math.nan, "the validation NE")[0]
            self.parts.events.metric("eval", step, split="validation", ne=ne, tasks=found)
            self.parts.progress.evaluated(step, ne, found)
            position = self.position
            position.evaluated = step
            gained = ne < position.usual_ne - train.min_delta
            position.stale = 0 if gained else position.stale + 1
            position.usual_ne = ne if gained else position.usual_ne
            if not (train.keep_best and ne < position.best_ne):
                return False
            position.best_ne, position.best_step = ne, step
            self._save_to(self.best, {"model": self.model.state_dict()["model"]})
            return True

    def _validate_progressively(self, step: int, losses: list[GlobalLoss]) -> None:
        window = Window(self.position.window)
        for loss in losses:
            if math.isfinite(loss.value):
                window.add(loss.tasks)
        every = self.config.train.eval_every or self.parts.train.steps_per_epoch
        if step % every == 0 or step in (self.total, self.parts.train.steps_per_epoch):
            found = window.close(self.parts.inputs.tasks)
            self.parts.events.metric("progressive", step, ne=mean_ne(found) if found else math.nan, tasks=found)
            self.parts.progress.streamed(step, found)
        self.position.window = window.sums

    def load_best(self) -> str:
        """Put the weights to be tested into the model and say which they are."""
        best, last = self.position.best_step, self.position.step
        if best is None or best == last:
            if self.average is not None:
                self.average.swap()
                return f"the averaged ones of step {last}"
            return f"the last ones, step {last}"
        try:
            state = {"model": self.model.state_dict()["model"]}
            self.best.load(state, best)
        except CheckpointError as error:
            self._warn(
                f"the weights of the best validation NE (step {best}) can't be read, the last are tested: {error}"
            )
            return f"the last ones, step {last}; the best (step {best}) could not be read"
        self.model.load_state_dict({**self.model.state_dict(), **state})
        return f"the best by validation NE, step {best}"

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        """Everything that a step depends on; the tensors are the live ones."""
        position = {**vars(self.position), "losses": vars(self.position.losses)}
        position["rooms"] = graphs.state(self.model.module)
        return {
            **self.model.state_dict(),
            "optimizer": optimizer_state(self.model, self.parts.optimizer),
            "position": {**position, "loader": self.parts.train.state_dict()},
            **({} if self.average is None else {"average": self.average.state()}),
        }

    def save(self) -> None:
        """Write a checkpoint. Where that fails, training goes on with the earlier ones, and says so."""
        with self.parts.events.span("checkpoint", step=self.position.step):
            self._save_to(self.checkpoints, self.state())

    def resume(self) -> int:
        """Continue from the latest intact checkpoint; returns its step. Raises UserError where all were lost."""
        step = self.checkpoints.latest()
        if step is None and not self.checkpoints.steps() and last_step(self.parts.run.metrics_file) is None:
            return 0  # it was killed before it could save anything: there is nothing to lose
        if step is None:
            raise UserError(
                f"no checkpoint to resume from in {self.parts.run.checkpoints}; start the run again in another folder"
            )
        self.load(step)
        return step

    def load(self, step: int) -> None:
        """Load weights, optimizers and position from the checkpoint of `step`."""
        state = self.state()
        try:
            self.checkpoints.load(state, step)
            self.model.load_state_dict({k: state[k] for k in ("model", "sparse_optimizer")})
            load_optimizer_state(self.model, self.parts.optimizer, state["optimizer"])
            position = dict(state["position"])
            self.parts.train.load_state_dict(position.pop("loader"))
            if self.average is not None:
                self.average.updates = state["average"]["updates"]
        except (CheckpointError, ValueError) as error:
            raise UserError(f"cannot resume {self.parts.run.path} from step {step}: {error}") from error
        self.position = Position(**position | {"losses": LossHistory(**position.get("losses", {}))})
        graphs.load(self.model.module, self.position.rooms)

    def _save_to(self, checkpointer: Checkpointer, state: dict[str, Any]) -> None:
        try:
            checkpointer.save(self.position.step, state)
        except CheckpointError as error:
            self.parts.events.message("checkpoint failed", step=self.position.step, reason=str(error))
            self._warn(f"step {self.position.step}: {error}. Training goes on; earlier checkpoints are intact.")

    # Trouble.

    def _accepts(self, step: int, i: int, batch: JaggedBatch, logits: Tensor, loss: GlobalLoss) -> bool:
        """Whether to train on part `i` of a step. All ranks say the same, since the loss is that of all of them."""
        train, position = self.config.train, self.position
        skip, finite = train.bad_batches == "skip", math.isfinite(loss.value)
        if finite and not position.losses.is_spike(loss.mean, train.spike_sigmas):
            position.losses.add(loss.mean)
            return True
        if not finite and not (skip and position.skipped < train.max_skipped):
            self._fail(f"the loss is {loss.value}", step, i, batch, logits, loss)
        event = "loss spike" if finite else "loss not finite"
        skip = skip and position.skipped < train.max_skipped
        usual = {"mean": position.losses.mean, "std": math.sqrt(position.losses.variance)}
        trouble.record(self.parts, event, step, batch, logits, loss=loss.mean, skipped=skip, **usual)
        self.parts.progress.note(f"{event} at step {step}: {loss.mean:.4f}, usual {usual['mean']:.4f}", style="yellow")
        if skip:
            position.skipped += 1
            return False
        position.losses.add(loss.mean)
        return True

    def _fail(self, what: str, step: int, i: int, batch: JaggedBatch, logits: Tensor, loss: GlobalLoss) -> None:
        def again() -> None:
            self._seed(step, i)
            self.forward(batch)

        trouble.stop(self.parts, what, step, batch, logits, loss, again)

    def _warn(self, message: str) -> None:
        if self.runtime.is_main:
            warnings.warn(message, stacklevel=3)
