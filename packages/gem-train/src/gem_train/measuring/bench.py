"""The efficiency of a configuration on this machine: E2E MFU = local MFU x scaling ratio, and what lies between.

    E2E MFU        training FLOPs of all ranks / (ranks x peak x seconds of a step, data wait included)
    local MFU      training FLOPs of the units / (peak x seconds of the units alone)        see alone.py
    scaling ratio  E2E MFU / local MFU = seconds of the units alone, per step / seconds of a step

FLOPs are useful ones: valid events, visible pairs, three forward passes' worth, no recomputation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from gem_data import JaggedBatch
from gem_data.balance import in_even_parts
from gem_lowprec import convert
from gem_model import GEM
from gem_model.layers import Layers, one_by_one
from gem_model.sequence import SequenceLayer
from gem_parallel import Topology
from torch import nn

from gem_train.assemble import lowprec_recipe
from gem_train.data import divided
from gem_train.instruments import TRAINING_FLOPS, forward_flops, memory_in_use
from gem_train.measuring import alone, kernels
from gem_train.measuring.batches import half_filled
from gem_train.measuring.waterfall import PARTS, of_a_step, split, trace_step
from gem_train.planning import planned_units
from gem_train.trainer import Trainer

WARM_UP = 2  # steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Medians of whole steps on this rank, and what one step holds."""

    step_s: float
    data_wait_s: float
    samples_per_s: float  # of all ranks
    flops: float  # training FLOPs of this rank in a step, mean
    memory_bytes: int

    @property
    def seconds(self) -> float:
        """Of a step with its wait for data."""
        return self.step_s + self.data_wait_s


def batches(trainer: Trainer, fill: Mapping[str, int], count: int) -> Iterator[JaggedBatch]:
    """`count` batches of the data, or, with `fill`, one half-filled random batch again and again."""
    if fill:
        local = trainer.parts.train.local_batch_size
        made = half_filled(trainer.parts.inputs, local, fill, seed=trainer.runtime.rank)
        if trainer.config.optim.accumulate > 1:  # as the data's are
            lengths = torch.stack([s.offsets.diff() for s in made.sequences.values()]).numpy()
            made = made.select(torch.from_numpy(in_even_parts(lengths, trainer.config.optim.accumulate)))
        if trainer.runtime.device.type == "cuda":
            made = made.pin_memory()
        return itertools.repeat(made, count)

    def endless() -> Iterator[JaggedBatch]:
        while True:
            yield from trainer.parts.train

    return itertools.islice(endless(), count)


def compile_layers(trainer: Trainer, **options: Any) -> None:
    """Let torch.compile have what works on events: the towers' sequence layers and poolings. Cannot be undone.

    One graph of each serves all layers and sources. Whole interleaved layers take minutes to compile.
    """
    torch._dynamo.reset()
    for name, module in trainer.model.module.named_modules():
        if isinstance(module, SequenceLayer) or name.endswith(".pma"):
            module.compile(**(options or compiling()))


def compiling() -> dict[str, Any]:
    """How torch.compile is asked for here: lengths are no constants, by Inductor.

    Without the fusion of reductions over rows with those over columns: for dynamic lengths torch 2.11 addresses the
    partial sums by an expression whose parentheses are missing, "0 * (-16) + 16*s33 * 512", and the backward pass
    raises (the fusion for such lengths is of https://github.com/pytorch/pytorch/pull/168117).
    """
    from torch._inductor import config

    fused = {"triton.mix_order_reduction": False} if hasattr(config.triton, "mix_order_reduction") else {}
    return {"dynamic": True, "options": fused} if fused else {"dynamic": True}


def time_steps(
    trainer: Trainer,
    source: Iterator[JaggedBatch],
    *,
    warm_up: int = WARM_UP,
    ready: Callable[[], None] = lambda: None,
) -> StepTimes:
    """Train on every batch of `source`; the first `warm_up` are not timed. Raises ValueError where none is left.

    `ready` is called before the first timed step.
    """
    device = trainer.runtime.device
    steps, waits, flops = [], [], []
    began = _now(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for i, batch in enumerate(source):
        if i == warm_up:
            ready()
        arrived = time.perf_counter()
        trainer.model.train()
        trainer.step(batch)
        ended = _now(device)
        if i >= warm_up:
            waits.append(arrived - began)
            steps.append(ended - arrived)
            flops.append(TRAINING_FLOPS * forward_flops(trainer.parts, batch))
        began = _now(device)
    if not steps:
        raise ValueError(f"no step is left to time after {warm_up} of warm-up")
    step, wait = statistics.median(steps), statistics.median(waits)
    return StepTimes(
        step_s=step,
        data_wait_s=wait,
        samples_per_s=trainer.config.data.batch_size / (step + wait),
        flops=statistics.mean(flops),
        memory_bytes=memory_in_use(device),
    )


def measure(
    trainer: Trainer,
    fill: Mapping[str, int],
    *,
    steps: int = 5,
    warm_up: int = WARM_UP,
    repeats: int = 5,
    by_kernel: bool = False,
) -> dict[str, Any]:
    """Everything that `gem-train bench` prints; called by all ranks, the same result on each but for its own parts."""
    runtime, parts = trainer.runtime, trainer.parts
    peak = parts.peak.peak
    whole = time_steps(trainer, batches(trainer, fill, warm_up + steps), warm_up=warm_up)
    batch = next(batches(trainer, fill, 1))
    part = divided(batch, trainer.config.optim.accumulate)[0]
    seconds = _where_it_goes(trainer, batch, part, whole.step_s)  # before graphs are let go of for the units alone
    copy = None if runtime.world == 1 else plain_copy(trainer)
    units = alone.time_units(trainer, part, repeats=repeats, module=copy)
    share = part.batch_size / batch.batch_size  # a part's units stand for this share of a step's
    in_step = TRAINING_FLOPS * forward_flops(parts, batch)
    local_s = sum(u.seconds for u in units) * in_step / sum(u.flops for u in units)
    cuda, tables = runtime.device.type == "cuda", None
    if by_kernel:
        with _undivided(trainer), _by_module(trainer):
            tables = kernels.tables(trace_step(trainer, lambda: trainer.step(part), shapes=True), cuda=cuda)
    ranks = runtime.gather({"times": dataclasses.asdict(whole), "parts": seconds, "local_s": local_s}, "the timings")
    losses = waterfall(ranks)
    flops, longest = sum(r["times"]["flops"] for r in ranks), max(_seconds(r) for r in ranks)
    end_to_end = None if peak is None else flops / (runtime.world * peak * longest)
    local = alone.local_mfu(units, peak)
    return {
        "recipe": trainer.config.recipe,
        "device": _device_name(runtime.device),
        "world": runtime.world,
        "precision": parts.precision,
        "lowprec": trainer.config.lowprec.recipe,
        "batch_size": trainer.config.data.batch_size,
        "accumulate": trainer.config.optim.accumulate,
        "lengths": f"random, uniform up to {dict(fill)}" if fill else "of the data",
        "peak": {"flops_per_s": peak, "note": parts.peak.note},
        "step": {
            "seconds": longest,
            "samples_per_s": trainer.config.data.batch_size / longest,
            "training_flops": flops,
            "memory_bytes": max(r["times"]["memory_bytes"] for r in ranks),
        },
        "mfu": {
            "end_to_end": end_to_end,
            "local": local,
            "scaling_ratio": sum(r["local_s"] for r in ranks) / len(ranks) / longest,
            "stated": _stated(flops, runtime.world, longest, units, peak),
        },
        "units": [{**dataclasses.asdict(u), "tflops": u.flops / u.seconds / 1e12, "mfu": u.mfu(peak)} for u in units],
        "units_batch": part.batch_size,
        "units_share_of_step": share,
        "waterfall": losses,
        "kernels": tables,
        "ranks": ranks,
        "profile": profile(trainer, units, part, copy),
    }


def _where_it_goes(trainer: Trainer, batch: JaggedBatch, part: JaggedBatch, step_s: float) -> dict[str, float]:
    """Seconds of a step's parts, of a trace: of the whole step where graphs launch its kernels, which then are those
    that it is timed with, else of one part for all.
    """
    cuda = trainer.runtime.device.type == "cuda"
    layers = getattr(trainer.model.module, "layers", None)
    if isinstance(layers, Layers) and layers.replay is not None:
        return of_a_step(split(trace_step(trainer, lambda: trainer.step(batch)), cuda=cuda), 1, step_s)
    with _undivided(trainer):
        trace = trace_step(trainer, lambda: trainer.step(part))
    return of_a_step(split(trace, cuda=cuda), trainer.config.optim.accumulate, step_s)


@contextlib.contextmanager
def _by_module(trainer: Trainer) -> Iterator[None]:
    """Within the block traces say of which module a kernel is: no graph launches it."""
    with one_by_one(trainer.model.module), kernels.marked(trainer.model.module):
        yield


@contextlib.contextmanager
def _undivided(trainer: Trainer) -> Iterator[None]:
    """Within the block a step takes its batch as one part."""
    config = trainer.config
    trainer.config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, accumulate=1))
    try:
        yield
    finally:
        trainer.config = config


def waterfall(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of a step, averaged over the ranks: the layers as they are alone, and each loss; they add up to "step".

    "beside" is what the layers take in the step beyond what they take alone (negative where they take less).
    """
    busy = [sum(r["parts"][p] for p in PARTS if p not in ("communication", "gaps")) for r in ranks]
    found: dict[str, list[float]] = {}
    for rank, own in zip(ranks, busy, strict=True):
        imbalance = min(rank["parts"]["communication"], max(busy) - own)
        row = {
            "local": rank["local_s"],
            "beside": rank["parts"]["layers"] - rank["local_s"],
            "exposed communication": rank["parts"]["communication"] - imbalance,
            "imbalance": imbalance,
            "recomputation": rank["parts"]["recomputation"],
            "tables": rank["parts"]["tables"],
            "optimizer": rank["parts"]["optimizer"],
            "launch gaps": rank["parts"]["gaps"],
            "data wait": rank["times"]["data_wait_s"],
        }
        row["step"] = sum(row.values())
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    return {name: statistics.mean(values) for name, values in found.items()}


def profile(
    trainer: Trainer, units: list[alone.UnitTime], batch: JaggedBatch, copy: nn.Module | None
) -> dict[str, Any]:
    """What `gem_parallel.Profile` can take: measured rates in the place of assumed ones."""
    model: Any = trainer.model.module
    one = alone.time_units(trainer, batch.slice(0, 1), repeats=5, module=copy)
    device = trainer.runtime.device
    tables = model.get_submodule("tables")
    moved = batch.to(device)

    def look_up() -> None:
        rows = tables(moved)
        sum(float(t.flatten()[:1].sum()) for t in alone.tensors(rows) if t.numel())

    with torch.no_grad():
        seconds = alone.timed(look_up, device, 5)
        rows = tables(moved)
        size = 2 * sum(t.nbytes for t in alone.tensors(rows))  # rows are read and written
    share = size / seconds / (Topology.detect(device.type).memory_gbps * 1e9)
    measured = (
        {
            "name": u.name,
            "batch": size,
            "forward_ms": u.forward_s * 1e3,
            "backward_ms": max(0.0, u.seconds - u.forward_s) * 1e3,
        }
        for size, times in ((1, one), (batch.batch_size, units))
        for u in times
    )
    return {
        "tflops": sum(u.flops for u in units) / sum(u.seconds for u in units) / 1e12,
        "unit_us": statistics.median(u.forward_s for u in one) * 1e6,
        "lookup_efficiency": min(1.0, share),
        "units": planned_units(measured, model.units()),
        "source": f"gem-train bench {trainer.config.recipe} on {_device_name(device)}",
    }


def plain_copy(trainer: Trainer) -> nn.Module:
    """The model unsharded on this rank, without its tables: for units that are to run alone. No rank waits."""
    inputs = trainer.parts.inputs
    small = dataclasses.replace(inputs, tables=tuple(dataclasses.replace(t, rows=1) for t in inputs.tables))
    gem = GEM(trainer.parts.model_config, small, device=trainer.runtime.device)
    convert(gem, lowprec_recipe(trainer.config), seed=0)
    return gem


def _stated(flops: float, world: int, seconds: float, units: list[alone.UnitTime], peak: float | None) -> str:
    """The numerators and denominators of both figures in words."""
    alone_flops, alone_s = sum(u.flops for u in units), sum(u.seconds for u in units)
    if peak is None:
        return (
            f"no MFU without a peak; useful training FLOPs: {flops:.4g} in a step of {seconds:.4g} s, alone "
            f"{alone_flops:.4g} in {alone_s:.4g} s"
        )
    return (
        f"end to end {flops:.4g} useful training FLOPs / ({world} x {peak:.4g} FLOP/s x {seconds:.4g} s); local "
        f"{alone_flops:.4g} / ({peak:.4g} FLOP/s x {alone_s:.4g} s)"
    )


def _seconds(rank: dict[str, Any]) -> float:
    return float(rank["times"]["step_s"] + rank["times"]["data_wait_s"])


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
