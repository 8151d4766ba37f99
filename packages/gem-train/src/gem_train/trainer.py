"""The training loop: one visible step, validation, checkpoints, and the ways in which a run may end.

What a step computes depends on the weights, the optimizers' state and (seed, step, rank) alone. The random generator is
seeded anew before each forward pass and the learning rates are functions of the step, so that a resumed run continues
with the bits of the uninterrupted one, and there is no random state to save.
"""

from __future__ import annotations

import contextlib
import math
import resource
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
from gem_model.flops import batch_flops
from gem_parallel import (
    Checkpointer,
    CheckpointError,
    ParallelModel,
    Runtime,
    load_optimizer_state,
    optimizer_state,
)
from torch import Tensor

from gem_train import nonfinite
from gem_train.config import RunConfig
from gem_train.errors import Interrupted, NonFiniteError, UserError
from gem_train.evaluation import Predictions, figures, mean_ne, predict
from gem_train.events import Events
from gem_train.losses import GlobalLoss, global_loss
from gem_train.metrics import Mfu, model_flops_utilization
from gem_train.progress import Progress
from gem_train.run_dir import RunDir, write_json
from gem_train.schedule import rate
from gem_train.signals import StopRequest

FLOPS_EVERY = 20  # steps; counting a batch's FLOPs is Python work
TRAINING_FLOPS = 3  # forward passes' worth: the backward counts two


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the assembly hands over."""

    config: RunConfig
    runtime: Runtime
    run: RunDir
    inputs: ModelInputs
    model: ParallelModel
    model_config: GemConfig
    conversion: Conversion
    optimizer: torch.optim.Optimizer
    train: Loader
    validation: Loader
    test: Loader
    precision: str  # "fp32" or "bf16"
    peak: Mfu
    events: Events
    progress: Progress


@dataclass(kw_only=True)
class Position:
    """How far the run is; goes into every checkpoint."""

    step: int = 0  # updates made
    best_step: int | None = None  # of the best validation NE
    best_ne: float = math.inf
    evaluated: int | None = None  # the step of the last validation


class Trainer:
    """Trains the parts to the end, or to the end of their luck."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.config, self.runtime, self.model = parts.config, parts.runtime, parts.model
        self.position = Position()
        self.stop = StopRequest()
        train, data = self.config.train, parts.train
        self.total = min(train.epochs * data.steps_per_epoch, train.max_steps or sys.maxsize)
        self.checkpoints = Checkpointer(parts.run.checkpoints, keep=train.keep_checkpoints, runtime=self.runtime)
        # Two, so that the best one that the latest checkpoint speaks of outlives a kill between the two saves.
        self.best = Checkpointer(parts.run.best, keep=2, runtime=self.runtime)

    # The step.

    def step(self, batch: JaggedBatch, flops: float = 0.0) -> dict[str, float]:
        """One update on this rank's part of a global batch; returns what there is to log.

        Raises NonFiniteError, before anything is updated if it is the loss that is not finite.
        """
        step, optim = self.position.step + 1, self.config.optim
        self._seed(step)
        rates = self._set_rates(step)
        batch = batch.to(self.runtime.device, non_blocking=True)

        logits = self.forward(batch)
        loss = global_loss(logits, batch, self.runtime, stop=self.stop.requested, flops=flops)
        if not math.isfinite(loss.value):
            self._fail(f"the loss is {loss.value}", step, batch, logits, loss)
        loss.backward.backward()  # updates the tables, too
        norm = float(self.model.clip_grad_norm_(optim.clip_norm or math.inf))
        if not math.isfinite(norm):
            self._fail(f"the gradient's norm is {norm} (the loss is {loss.value})", step, batch, logits, loss)
        self.parts.optimizer.step()
        self.parts.optimizer.zero_grad(set_to_none=True)

        self.position.step = step
        return {"loss": loss.value, "grad_norm": norm, "stop": loss.stop, "flops": loss.flops, **rates}

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
                if last or stop or better or (train.checkpoint_every and step % train.checkpoint_every == 0):
                    self.save()
                if stop and not last:
                    saved = self.checkpoints.latest() == step
                    how = "a checkpoint was written" if saved else "its checkpoint could NOT be written"
                    self.parts.events.message("interrupted", step=step, signal=self.stop.name, saved=saved)
                    raise Interrupted(f"stopped at step {step} of {self.total} as asked; {how}; go on with --resume")

    def _batches(self) -> Generator[tuple[JaggedBatch, float], None, None]:
        """Batches from the loader's position to the last step, with the seconds that each one kept us waiting."""
        left = self.total - self.position.step
        while left > 0:
            epoch = iter(self.parts.train)
            began = time.perf_counter()
            for batch in epoch:
                yield batch, time.perf_counter() - began
                left -= 1
                if left == 0:
                    break
                began = time.perf_counter()

    def _timed_step(self, batch: JaggedBatch, waited: float) -> bool:
        """Make the step and log it; returns whether a rank was asked to stop."""
        step = self.position.step + 1
        counted = step == 1 or step % FLOPS_EVERY == 0
        flops = TRAINING_FLOPS * self.flops(batch) if counted else 0
        began = time.perf_counter()
        self.model.train()
        record = self.step(batch, flops)
        seconds = time.perf_counter() - began
        stop, useful = bool(record.pop("stop")), record.pop("flops")
        record |= {
            "epoch": (step - 1) // self.parts.train.steps_per_epoch,
            "samples_per_s": self.config.data.batch_size / (waited + seconds),
            "data_wait_s": waited,
            "step_s": seconds,
            "memory_bytes": memory_in_use(self.runtime.device),
        }
        if counted:
            each = useful / self.runtime.world
            record["tflops"] = each / (waited + seconds) / 1e12
            mfu = model_flops_utilization(each, waited + seconds, self.parts.peak.peak)
            record |= {"mfu": mfu} if mfu is not None else {}
        self.parts.events.metric("step", step, **record)
        self.parts.progress.step(step, record)
        return stop

    def _seed(self, step: int) -> None:
        """Everything random in step `step` on this rank (dropout, stochastic rounding) follows from these numbers."""
        torch.manual_seed((self.config.train.seed * 1_000_003 + step) * 65_537 + self.runtime.rank)
        self.parts.conversion.set_step(step)

    def _set_rates(self, step: int) -> dict[str, float]:
        o = self.config.optim
        shared: dict[str, Any] = {"total": self.total, "warmup": o.warmup_steps, "final_ratio": o.final_ratio}
        dense = o.lr * rate(step, schedule=o.schedule, **shared)
        sparse = o.sparse_lr * rate(step, schedule=o.sparse_schedule, **shared)
        for group in self.parts.optimizer.param_groups:
            group["lr"] = dense
        self.model.set_sparse_lr(sparse)
        return {"lr": dense, "sparse_lr": sparse}

    def flops(self, batch: JaggedBatch) -> int:
        """Useful FLOPs of this rank's forward pass, padding samples left out."""
        real = batch.sample_ids >= 0
        lengths = {s.name: batch.sequences[s.name].offsets.diff()[real].tolist() for s in self.parts.inputs.sources}
        return batch_flops(self.parts.model_config, self.parts.inputs, lengths, batch_size=int(real.sum()))

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
        step = self.position.step
        with self.parts.events.span("validation", step=step):
            predictions = self.predict(self.parts.validation)
        found = figures(predictions, self.parts.inputs.tasks) if predictions is not None else {}
        ne = self.runtime.gather(mean_ne(found) if found else math.nan, "the validation NE")[0]
        self.parts.events.metric("eval", step, split="validation", ne=ne, tasks=found)
        self.parts.progress.evaluated(step, ne, found)
        self.position.evaluated = step
        if not (self.config.train.keep_best and ne < self.position.best_ne):
            return False
        self.position.best_ne, self.position.best_step = ne, step
        self._save_to(self.best, {"model": self.model.state_dict()["model"]})
        return True

    def load_best(self) -> str:
        """Put the weights to be tested into the model and say which they are."""
        best, last = self.position.best_step, self.position.step
        if best is None or best == last:
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
        return {
            **self.model.state_dict(),
            "optimizer": optimizer_state(self.model, self.parts.optimizer),
            "position": {**vars(self.position), "loader": self.parts.train.state_dict()},
        }

    def save(self) -> None:
        """Write a checkpoint. Where that fails, training goes on with the earlier ones, and says so."""
        with self.parts.events.span("checkpoint", step=self.position.step):
            self._save_to(self.checkpoints, self.state())

    def resume(self) -> int:
        """Continue from the latest intact checkpoint; returns its step. Raises UserError where there is none."""
        step = self.checkpoints.latest()
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
        except (CheckpointError, ValueError) as error:
            raise UserError(f"cannot resume {self.parts.run.path} from step {step}: {error}") from error
        self.position = Position(**position)

    def _save_to(self, checkpointer: Checkpointer, state: dict[str, Any]) -> None:
        try:
            checkpointer.save(self.position.step, state)
        except CheckpointError as error:
            self.parts.events.message("checkpoint failed", step=self.position.step, reason=str(error))
            self._warn(f"step {self.position.step}: {error}. Training goes on; earlier checkpoints are intact.")

    # Trouble.

    def _fail(self, what: str, step: int, batch: JaggedBatch, logits: Tensor, loss: GlobalLoss) -> None:
        """Say where the first non-finite value comes from, leave the samples' ids in the run folder, and stop."""
        self._seed(step)
        where = nonfinite.find(self.model.module, lambda: self.forward(batch), batch)
        mine = {
            "rank": self.runtime.rank,
            "loss_is_finite": bool(torch.isfinite(loss.sums).all()),
            "where": where,
            "bad_samples": nonfinite.bad_samples(logits, batch),
            "samples": [i for i in batch.sample_ids.tolist() if i >= 0],
        }
        ranks = self.runtime.gather(mine, "the samples of the bad batch")
        culprit = next((r for r in ranks if not r["loss_is_finite"]), ranks[0])
        file = self.parts.run.bad_batch_file
        if self.runtime.is_main:
            write_json(file, {"step": step, "what": what, "ranks": ranks})
            self.parts.events.message("not finite", step=step, what=what, where=culprit["where"], rank=culprit["rank"])
        count = sum(len(r["samples"]) for r in ranks)
        raise NonFiniteError(
            f"step {step}: {what}. The first non-finite value appears in {culprit['where']}, "
            f"on rank {culprit['rank']}. The ids of the batch's {count} samples are in {file}"
        )

    def _warn(self, message: str) -> None:
        if self.runtime.is_main:
            warnings.warn(message, stacklevel=3)


def memory_in_use(device: torch.device) -> int:
    """The peak so far, in bytes: what CUDA's allocator gave out, or the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
