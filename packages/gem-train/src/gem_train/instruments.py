"""What is measured of each step, beside what it computes: speed, waiting, memory, FLOPs, phases, stragglers.

Nothing here makes the ranks wait for one another but the gather of the phases, every LOOK_EVERY steps.
"""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING

import torch
from gem_data import JaggedBatch
from gem_model.flops import batch_flops

from gem_train.metrics import model_flops_utilization
from gem_train.phases import StepClock, Stragglers

if TYPE_CHECKING:
    from gem_train.trainer import Parts

LOOK_EVERY = 20  # steps; counting a batch's FLOPs is Python work, gathering the phases a round over the ranks
TRAINING_FLOPS = 3  # forward passes' worth: the backward counts two


class Instruments:
    """Watches the steps of one rank."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.clock = StepClock(parts.runtime.device)
        self._stragglers = Stragglers()

    def begin(self, step: int, batch: JaggedBatch) -> float:
        """Before a step; returns this rank's training FLOPs in it, or 0 where they are not counted."""
        counted = step == 1 or step % LOOK_EVERY == 0
        flops = TRAINING_FLOPS * forward_flops(self.parts, batch) if counted else 0.0
        self.clock.begin(counted)  # last, so that counting is in no phase
        return flops

    def end(self, step: int, *, waited: float, seconds: float, flops: float, mine: float) -> dict[str, float]:
        """What there is to log of a step that took `seconds` after `waited` for data.

        `flops` are those of all ranks, `mine` this rank's; both 0 where they were not counted.
        """
        runtime, both = self.parts.runtime, waited + seconds
        record = {
            "epoch": (step - 1) // self.parts.train.steps_per_epoch,
            "samples_per_s": self.parts.config.data.batch_size / both,
            "data_wait_s": waited,
            "step_s": seconds,
            "memory_bytes": memory_in_use(runtime.device),
        }
        if mine or flops:
            each = flops / runtime.world
            record["tflops"] = each / both / 1e12
            mfu = model_flops_utilization(each, both, self.parts.peak.peak)
            record |= {"mfu": mfu} if mfu is not None else {}
            self._gather_phases(step, waited, mine)
        return record

    def _gather_phases(self, step: int, waited: float, mine: float) -> None:
        phases = [("data", waited), *self.clock.read()]
        found = self.parts.runtime.gather(
            {"phases": phases, "flops": mine, "memory_bytes": memory_in_use(self.parts.runtime.device)},
            "the ranks' phases",
        )
        self.parts.events.message("phases", step=step, ranks=found)
        for late in self._stragglers.look([r["phases"] for r in found]):
            peers = self.parts.runtime.peers
            host = peers[late["rank"]][0] if peers else None
            self.parts.events.message("straggler", step=step, host=host, **late)
            where = f" on {host}" if host else ""
            self.parts.progress.note(
                f"straggler: rank {late['rank']}{where} keeps the others waiting, {late['late_s'] * 1e3:.0f} ms of a "
                f"step of {late['step_s'] * 1e3:.0f} ms (step {step})",
                style="yellow",
            )


def forward_flops(parts: Parts, batch: JaggedBatch) -> int:
    """Useful FLOPs of this rank's forward pass, padding samples left out; 0 where nobody counts them."""
    if not parts.counts_flops:
        return 0
    real = batch.sample_ids >= 0
    requests = getattr(batch, "requests", None)  # batches that share no histories need not speak of them
    if requests is not None:
        lengths = {s.name: batch.sequences[s.name].offsets.diff().tolist() for s in parts.inputs.sources}
        return batch_flops(parts.model_config, parts.inputs, lengths, requests=requests[real].tolist())
    lengths = {s.name: batch.sequences[s.name].offsets.diff()[real].tolist() for s in parts.inputs.sources}
    return batch_flops(parts.model_config, parts.inputs, lengths, batch_size=int(real.sum()))


def memory_in_use(device: torch.device) -> int:
    """The peak so far, in bytes: what CUDA's allocator took from the card, or the process's resident memory.

    What it gave out to tensors leaves out the pool of CUDA graphs, which counts as free once they are captured.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
