"""The steps that tools/scaling_cards.py measures: what each row trains, on which samples, and how it is timed."""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gem_memory
import numpy as np
import torch
from gem_data.balance.methods import LengthCost, assign
from gem_data.balance.simulate import Lognormal
from gem_model import GEM, ModelInputs, preset
from gem_model.flops import batch_flops
from gem_model.replay import Replay
from gem_model.replay_sharded import ShardedReplay
from gem_model.roles import roles
from gem_model.testing import RandomBatch, random_batch
from gem_parallel import (
    ModelSpec,
    ParallelModel,
    RowWiseAdagrad,
    Runtime,
    optimizer_groups,
    parallelize,
    start,
)
from gem_parallel.comm.payload import Fp8Payload
from gem_train.planning import describe
from scaling_rows import Row

WARM_UP, STEPS = 2, 3
RANKS = 8  # whose samples are drawn, at least
Tell = Callable[[str], None]


class Bench:
    """The model, the histories of the global batch, and the steps of one process."""

    def __init__(self, args: argparse.Namespace, world: int) -> None:
        self.args, self.world = args, world
        self.inputs: ModelInputs = gem_memory.inputs(args.model)
        rng, cards = np.random.default_rng(0), max(world, RANKS)
        self.places = np.arange(cards * max(args.parts) * args.batch).reshape(cards, max(args.parts), args.batch)
        self.lengths = {
            s.name: Lognormal(median=s.max_len / 3, sigma=0.8, cap=s.max_len)(rng, self.places.size)
            for s in self.inputs.sources
        }
        width = preset(args.model).width
        cost = LengthCost(quadratic=1, linear=6 * width)
        self.costs = np.sum([cost(n) for n in self.lengths.values()], axis=0)

    def shape(self, experts: int) -> Any:
        """The model's configuration; an ensemble has two experts for every rank of the expert axis."""
        return preset(self.args.model, dropout=0.1, experts=("wukong",) * (2 * experts if experts > 1 else 0))

    def deal(self, share: int, parts: int, balanced: bool, strong: bool = False) -> list[np.ndarray]:
        """Who has which samples of each part: [ranks, share]. A rank's own are the same in every world; what is dealt
        are those of all ranks, or of the first one (strong).
        """
        found = []
        for part in range(parts):
            whole = self.places[0, part, : self.world * share] if strong else self.places[: self.world, part, :share]
            owner = assign(
                self.costs[whole.flatten()],
                self.world,
                method="bbs" if balanced else "none",
                sub_batch=max(1, share // 8),
            )
            found.append(whole.flatten()[owner])
        return found

    def batches(self, dealt: list[np.ndarray], rank: int, device: torch.device) -> list[RandomBatch]:
        """Random samples with the lengths of those that a rank has."""
        found = []
        for part in dealt:
            mine = part[rank]
            lengths = {name: n[mine].tolist() for name, n in self.lengths.items()}
            batch = random_batch(self.inputs, len(mine), seed=int(mine[0]), lengths=lengths, single_valued=True)
            found.append(batch.to(device))
        return found

    def work(self, dealt: list[np.ndarray], experts: int) -> float:
        """FLOPs of each part's heaviest rank over the mean: ranks meet in every part."""
        flops = [
            [
                batch_flops(self.shape(experts), self.inputs, {k: n[mine] for k, n in self.lengths.items()})
                for mine in part
            ]
            for part in dealt
        ]
        return sum(max(part) for part in flops) / sum(statistics.mean(part) for part in flops)

    def make(self, row: Row, runtime: Runtime, experts: int) -> tuple[ParallelModel, Any]:
        """The model laid out and its optimizer; an ensemble for so many ranks of an expert axis."""
        config = row.config
        torch.manual_seed(0)
        model = GEM(self.shape(experts), self.inputs, device=runtime.device)
        units = model.units()
        parallel = parallelize(
            model,
            roles(model),
            replace(config, batch_size=self.args.batch),
            runtime,
            sparse=RowWiseAdagrad(lr=0.01),
            units=units,
            payload=Fp8Payload() if row.payload else None,
        )
        if row.replayed and runtime.device.type == "cuda":
            layers = parallel.module.layers
            layers.replay = (Replay if runtime.world == 1 else ShardedReplay)(layers)
        groups = optimizer_groups([{"params": parallel.dense_parameters()}])
        return parallel.train(), torch.optim.AdamW(groups, lr=1e-3, fused=True)


def step(
    parallel: ParallelModel, optimizer: Any, batches: list[RandomBatch], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """One update, a name and a number (loss, norm) after each phase of each part."""
    for i, batch in enumerate(batches):
        parallel.reduce_gradients(i + 1 == len(batches))
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = parallel.module.loss(parallel(batch), batch) / len(batches)  # type: ignore[operator]
        yield "forward", loss.detach()
        loss.backward()
        yield "backward", loss.detach()
    norm = parallel.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    yield "optimizer", norm


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Of steps on one row's samples."""

    ms: float  # of a step among others, on the slowest rank
    forward_ms: float  # of a step that waits after each phase, on this rank
    backward_ms: float
    loss: float  # of the first step, the mean over ranks
    norm: float


def timed(
    parallel: ParallelModel, optimizer: Any, batches: list[RandomBatch], runtime: Runtime, tell: Tell = lambda _: None
) -> Timing:
    """The first step captures what is to be replayed; `tell` hears how far it has come."""
    device = runtime.device
    loss = norm = 0.0
    for phase, value in step(parallel, optimizer, batches, device):
        loss += float(value) if phase == "forward" else 0.0
        norm = float(value)
        tell(f"first step, {phase}")
    for _ in range(WARM_UP - 1):
        list(step(parallel, optimizer, batches, device))
    began, phases = now(device), {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    for phase, _ in step(parallel, optimizer, batches, device):
        ended = now(device)
        phases[phase] += (ended - began) * 1e3
        began = ended
    runtime.barrier("the other ranks' warm-up")
    tell("warm")
    began = now(device)
    for _ in range(STEPS):
        list(step(parallel, optimizer, batches, device))
    took = (now(device) - began) * 1e3 / STEPS
    return Timing(
        ms=max(runtime.gather(took, "a row's time")),
        forward_ms=phases["forward"],
        backward_ms=phases["backward"],
        loss=statistics.mean(runtime.gather(loss, "a row's loss")),
        norm=norm,
    )


def now(device: torch.device) -> float:
    """Seconds, when the device has caught up."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def clear(device: torch.device) -> None:
    """Forget the last model and its peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@dataclass(frozen=True, kw_only=True)
class Alone:
    """What one card does by itself."""

    ms: dict[tuple[int, int], float]  # of a step, by experts and parts
    rows: list[dict[str, float]]  # a part of each of several sizes, on the first card
    specs: dict[int, ModelSpec]  # the planner's view of the first card's samples, by experts


def alone(bench: Bench, rank: int, experts: list[int], shares: list[int]) -> Alone:
    """In a process that has one card, on the samples of `rank`.

    Ensembles are launched kernel by kernel, as they are where their experts lie on several cards.
    """
    ms, rows, specs = {}, [], {}
    args = bench.args
    with start(args.device) as runtime:
        precision = "bf16" if runtime.device.type == "cuda" else "fp32"
        for count in experts:
            clear(runtime.device)
            row = Row(name="alone", graphs=not args.launched and count == 1)
            parallel, optimizer = bench.make(row, runtime, count)
            for parts in args.parts if count == 1 else args.parts[:1]:
                batches = bench.batches(bench.deal(args.batch, parts, False), rank, runtime.device)
                found = timed(parallel, optimizer, batches, runtime)
                ms[count, parts] = found.ms
            for share in shares if rank == 0 and count == 1 else []:
                batches = bench.batches(bench.deal(share, 1, False), rank, runtime.device)
                found = timed(parallel, optimizer, batches, runtime)
                passes = {"forward_ms": found.forward_ms, "backward_ms": found.backward_ms}
                rows.append({"batch": share, "ms": found.ms, **passes})
            if rank == 0:
                whole = bench.batches(bench.deal(args.batch, 1, False), 0, torch.device("cpu"))[0]
                specs[count] = described(bench, count, whole, precision)
            forget(parallel)
            del parallel, optimizer
    return Alone(ms=ms, rows=rows, specs=specs)


def described(bench: Bench, experts: int, batch: RandomBatch, precision: str) -> ModelSpec:
    """The planner's view."""
    config = bench.shape(experts)
    return describe(bench.args.model, config, bench.inputs, batch, precision=precision, replayed=precision == "bf16")


def forget(parallel: ParallelModel) -> None:
    """Let go of the graphs."""
    if parallel.module.layers.replay is not None:
        parallel.module.layers.replay.forget()
        parallel.module.layers.replay = None


def trace(bench: Bench, parallel: ParallelModel, optimizer: Any, batches: list[RandomBatch], runtime: Runtime) -> None:
    """What the first card does in a step, for chrome://tracing."""
    profiler = torch.profiler.profile() if runtime.is_main else contextlib.nullcontext()
    with profiler as found:
        for _ in range(2):
            list(step(parallel, optimizer, batches, runtime.device))
        now(runtime.device)
    if found is not None:
        found.export_chrome_trace(str(Path(bench.args.out).with_suffix(".trace.json.gz")))
