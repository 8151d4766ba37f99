"""Batches that should not be trained on: what is left of them for whoever looks for the cause, and how a run ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import torch
from gem_data import JaggedBatch
from torch import Tensor, nn

from gem_train import nonfinite
from gem_train.errors import NonFiniteError
from gem_train.losses import GlobalLoss
from gem_train.run_dir import write_json
from gem_train.spikes import worst_samples

if TYPE_CHECKING:
    from gem_train.trainer import Parts


def stop(
    parts: Parts, what: str, step: int, batch: JaggedBatch, logits: Tensor, loss: GlobalLoss, again: Callable[[], None]
) -> NoReturn:
    """Say where the first non-finite value comes from, leave the samples' ids in the run folder, and stop.

    `again` repeats the forward pass of this rank's batch with the step's random state. Raises NonFiniteError.
    """
    runtime = parts.runtime
    module: nn.Module = parts.model.module
    where = nonfinite.find(module, again, batch)
    mine = {
        "rank": runtime.rank,
        "loss_is_finite": bool(torch.isfinite(loss.sums).all()),
        "where": where,
        "bad_samples": nonfinite.bad_samples(logits, batch),
        "samples": _ids(batch),
    }
    ranks = runtime.gather(mine, "the samples of the bad batch")
    culprit = next((r for r in ranks if not r["loss_is_finite"]), ranks[0])
    file = parts.run.bad_batch_file
    if runtime.is_main:
        write_json(file, {"step": step, "what": what, "ranks": ranks})
        parts.events.message("not finite", step=step, what=what, where=culprit["where"], rank=culprit["rank"])
    count = sum(len(r["samples"]) for r in ranks)
    raise NonFiniteError(
        f"step {step}: {what}. The first non-finite value appears in {culprit['where']}, "
        f"on rank {culprit['rank']}. The ids of the batch's {count} samples are in {file}"
    )


def record(parts: Parts, event: str, step: int, batch: JaggedBatch, logits: Tensor, **more: object) -> None:
    """Put the batch's sample ids, those with the largest losses and those that are not finite, into the events."""
    mine = {
        "rank": parts.runtime.rank,
        "worst": worst_samples(logits, batch),
        "bad_samples": nonfinite.bad_samples(logits, batch),
        "samples": _ids(batch),
    }
    ranks = parts.runtime.gather(mine, "the samples of the step")
    parts.events.message(event, step=step, ranks=ranks, **more)


def _ids(batch: JaggedBatch) -> list[int]:
    return [i for i in batch.sample_ids.tolist() if i >= 0]
