"""Scaling of a preset on the cards of a host: what every layout and every way to hide communication is worth.

    torchrun --standalone --nproc_per_node N tools/scaling_cards.py --out scaling.json [--profile comm-profile.json]

First one card trains alone, on the samples of every card in turn: the mean of these steps is what a step of N cards is
held against.
Then a row for each rung and layout:

    weak        ratio = mean step alone / step; every card has `--batch` samples, alone and together
    strong      ratio = mean step alone / (N x step); the same samples as one card has alone are dealt to N

Steps end with clipping and AdamW, tables included; a step lasts as long as that of the slowest rank. "lost" is the
step's time beyond the mean step alone, "exposed" what compute stood still for FSDP's units (`gem_parallel.Exposed`),
"work" the useful FLOPs of the heaviest rank over the mean, "plan" what `gem_parallel.predict` makes of the times alone
and the collectives' `--profile`. Lengths of histories are lognormal; balanced rows deal them by base batch shuffling.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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
from gem_model.roles import roles
from gem_model.testing import RandomBatch, random_batch
from gem_parallel import (
    CommConfig,
    Exposed,
    Layout,
    ModelSpec,
    ParallelConfig,
    ParallelModel,
    Profile,
    RowWiseAdagrad,
    Runtime,
    Topology,
    optimizer_groups,
    parallelize,
    predict,
    start,
)
from gem_parallel.bench.results import write
from gem_parallel.comm.payload import Fp8Payload
from gem_train.planning import describe

WARM_UP, STEPS = 2, 3
SM_FREE = CommConfig(all_gather="auto", reduce_scatter_ctas=8)
ONE_D = ParallelConfig(table_sharding="row_wise", prefetch=2)
PLAIN = replace(ONE_D, prefetch=0)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is trained together; every rung of the ladder adds to the one before."""

    name: str
    config: ParallelConfig
    payload: bool = False
    balanced: bool = True
    strong: bool = False


def table(world: int) -> list[Row]:
    """The rows of a world of this size."""
    fast = replace(ONE_D, comm=SM_FREE)
    small = replace(fast, table_exchange="bf16")
    rows = [
        Row(name="plain", config=PLAIN, balanced=False),
        Row(name="+ prefetch", config=ONE_D, balanced=False),
        Row(name="+ SM-free", config=fast, balanced=False),
        Row(name="+ quantised", config=small, payload=True, balanced=False),
        Row(name="+ balanced", config=small, payload=True),
        Row(name="strong, 1-D", config=fast, strong=True),
        Row(name="strong, 1-D, SMs", config=ONE_D, strong=True),
        Row(name="2-D FSDP", config=replace(fast, shard_group=world // 2)),
        Row(name="tables v2", config=replace(fast, table_strategy="v2", table_copies=world)),
        Row(name="tables v3", config=replace(fast, table_strategy="v3", table_copies=world)),
        Row(name="tables v3, SMs", config=replace(ONE_D, table_strategy="v3", table_copies=world)),
        Row(name="2-D FSDP, EP", config=replace(fast, experts=2, shard_group=max(2, world // 2))),
    ]
    if world >= 4:
        rows += [
            Row(name=f"tables {v}, 2 copies", config=replace(fast, table_copies=2, table_strategy=v))
            for v in ("v2", "v3")
        ]
    return rows


class Bench:
    """The model, the histories of the global batch, and the steps of one process."""

    def __init__(self, args: argparse.Namespace, world: int) -> None:
        self.args, self.world = args, world
        self.inputs: ModelInputs = gem_memory.inputs(args.model)
        rng = np.random.default_rng(0)
        self.lengths = {
            s.name: Lognormal(median=s.max_len / 3, sigma=0.8, cap=s.max_len)(rng, world * args.batch)
            for s in self.inputs.sources
        }
        width = preset(args.model).width
        cost = LengthCost(quadratic=1, linear=6 * width)
        self.costs = np.sum([cost(n) for n in self.lengths.values()], axis=0)

    def shape(self, experts: int) -> Any:
        """The model's configuration; an ensemble has two experts for every rank of the expert axis."""
        return preset(self.args.model, dropout=0.1, experts=("wukong",) * (2 * experts if experts > 1 else 0))

    def deal(self, samples: int, balanced: bool) -> np.ndarray:
        """Who has which of the first `samples` samples: [ranks, share]."""
        return assign(
            self.costs[:samples],
            self.world,
            method="bbs" if balanced else "none",
            sub_batch=max(1, samples // self.world // 8),
        )

    def batch(self, mine: np.ndarray, device: torch.device) -> RandomBatch:
        """Random samples with the lengths of those."""
        lengths = {name: n[mine].tolist() for name, n in self.lengths.items()}
        return random_batch(self.inputs, len(mine), seed=int(mine[0]), lengths=lengths, single_valued=True).to(device)

    def work(self, dealt: np.ndarray, experts: int) -> float:
        """FLOPs of the heaviest rank over the mean."""
        flops = [
            batch_flops(self.shape(experts), self.inputs, {k: n[mine] for k, n in self.lengths.items()})
            for mine in dealt
        ]
        return max(flops) / statistics.mean(flops)

    def make(self, config: ParallelConfig, runtime: Runtime, payload: bool = False) -> tuple[ParallelModel, Any]:
        """The model laid out and its optimizer."""
        torch.manual_seed(0)
        model = GEM(self.shape(config.experts), self.inputs, device=runtime.device)
        units = model.units()
        parallel = parallelize(
            model,
            roles(model),
            replace(config, batch_size=self.args.batch),
            runtime,
            sparse=RowWiseAdagrad(lr=0.01),
            units=units,
            payload=Fp8Payload() if payload else None,
        )
        groups = optimizer_groups([{"params": parallel.dense_parameters()}])
        return parallel.train(), torch.optim.AdamW(groups, lr=1e-3, fused=True)


def step(parallel: ParallelModel, optimizer: Any, batch: RandomBatch, device: torch.device) -> Iterator[str]:
    """One update, a name after each phase."""
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        loss = parallel.module.loss(parallel(batch), batch)  # type: ignore[operator]
    yield "forward"
    loss.backward()
    yield "backward"
    parallel.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    yield "optimizer"


def timed(parallel: ParallelModel, optimizer: Any, batch: RandomBatch, runtime: Runtime) -> tuple[float, list[float]]:
    """Milliseconds of a step among others on the slowest rank; of forward and backward of one that waits in between."""
    device = runtime.device
    for _ in range(WARM_UP):
        list(step(parallel, optimizer, batch, device))
    began = now(device)
    phases = []
    for _ in step(parallel, optimizer, batch, device):
        phases.append((now(device) - began) * 1e3)
    runtime.barrier("the other ranks' warm-up")
    began = now(device)
    for _ in range(STEPS):
        list(step(parallel, optimizer, batch, device))
    took = (now(device) - began) * 1e3 / STEPS
    return max(runtime.gather(took, "a row's time")), [phases[0], phases[1] - phases[0]]


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
    """What the first card does by itself."""

    rows: list[dict[str, float]]  # its own samples, for each of several batch sizes
    mean_ms: float  # of a step, over the samples of all cards
    spec: ModelSpec  # the planner's view of its first batch


def alone(bench: Bench, experts: int, shares: list[int]) -> Alone:
    """Called by the first rank alone: tables of a world of one lie on the first card."""
    rows, steps = [], []
    dealt = bench.deal(bench.world * bench.args.batch, False)
    with start(bench.args.device) as runtime:
        clear(runtime.device)
        parallel, optimizer = bench.make(replace(PLAIN, experts=1), runtime)
        for rank, share in [*((0, share) for share in shares), *((rank, shares[0]) for rank in range(1, bench.world))]:
            mine = dealt[rank][:share]
            batch = bench.batch(mine, runtime.device)
            ms, (forward, backward) = timed(parallel, optimizer, batch, runtime)
            if rank == 0:
                rows.append({"batch": len(mine), "ms": ms, "forward_ms": forward, "backward_ms": backward})
            if share == shares[0]:
                steps.append(ms)
        whole = bench.batch(dealt[0], torch.device("cpu"))
        precision = "bf16" if runtime.device.type == "cuda" else "fp32"
        spec = describe(bench.args.model, bench.shape(experts), bench.inputs, whole, precision=precision)
    return Alone(rows=rows, mean_ms=statistics.mean(steps), spec=spec)


def apart(world: int) -> dict[int, Alone]:
    """The first card alone, in a process of its own: all ranks of a world must have made equally many groups."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "alone"
        one = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
        call = [sys.executable, __file__, *sys.argv[1:], "--alone", str(file), "--alone-of", str(world)]
        subprocess.run(call, env=os.environ | one, check=True)
        return {experts: Alone(**single) for experts, single in pickle.loads(file.read_bytes()).items()}


def links(files: list[Path], runtime: Runtime) -> Profile:
    """The measured collectives, or assumed ones, which is said."""
    try:
        return Profile.read(*files) if files else Profile()
    except ValueError as error:
        say(runtime, f"the plan reckons with assumed links: {error}")
        return Profile()


def units_profile(spec: ModelSpec, rows: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Measured units for `Profile`: the passes alone, dealt to the units by their FLOPs."""
    return [
        {
            "name": unit.name,
            "batch": row["batch"],
            "forward_ms": row["forward_ms"] * unit.flops / spec.flops,
            "backward_ms": row["backward_ms"] * unit.flops / spec.flops,
        }
        for row in rows
        for unit in spec.units
        if unit.flops
    ]


def predicted(
    bench: Bench, row: Row, spec: ModelSpec, profile: Profile, work: float, topology: Topology
) -> dict[str, float] | None:
    """Step and memory by the planner; no prediction for expert layouts, whose experts the description counts as dense.

    The heaviest rank sets the pace: compute counts `work` times.
    """
    config, world = row.config, bench.world
    if config.experts > 1:
        return None
    layout = Layout(
        world=world,
        fsdp=config.shard_group or world,
        strategy=config.table_strategy,
        table_shard=world // config.table_copies,
        table_copies=config.table_copies,
        sync_every=config.table_sync_every,
    )
    batch = bench.args.batch // (world if row.strong else 1)
    if row.payload:
        spec = replace(spec, gather_bytes=1)
    found = predict(spec, topology, layout, batch, profile=profile)
    return {
        "ms": (found.step_s + (work - 1) * found.compute_s) * 1e3,
        "memory_gib": found.memory["peak"] / 2**30,
    }


def run_row(bench: Bench, row: Row, runtime: Runtime) -> dict[str, Any]:
    """Measure one row; called by all ranks."""
    clear(runtime.device)
    share = bench.args.batch // (bench.world if row.strong else 1)
    dealt = bench.deal(share * bench.world, row.balanced)
    parallel, optimizer = bench.make(row.config, runtime, row.payload)
    batch = bench.batch(dealt[runtime.rank], runtime.device)
    ms, _ = timed(parallel, optimizer, batch, runtime)
    with Exposed(parallel.module) as meter:
        list(step(parallel, optimizer, batch, runtime.device))
    exposed = {k: sum(unit[k] for unit in meter.seconds().values()) * 1e3 for k in ("forward", "backward", "reduce")}
    held = parallel.table_memory()
    peak = torch.cuda.max_memory_allocated() if runtime.device.type == "cuda" else 0
    chosen = "; ".join(f"{c.what}: {c.how}" for c in parallel.collectives.choices) if parallel.collectives else ""
    return {
        "case": row.name,
        "op": "train",
        "pass": "step",
        "scaling": "strong" if row.strong else "weak",
        "batch": share,
        "ms": ms,
        "samples_per_s": share * bench.world / ms * 1e3,
        "exposed_ms": max(runtime.gather(sum(exposed.values()), "exposed communication")),
        "exposed": exposed,
        "work": bench.work(dealt, row.config.experts),
        "memory_gib": peak / 2**30,
        "tables_mib": (held["weights"] + held["moments"]) / 2**20,
        "collectives": chosen,
    }


def main() -> int:
    """Print a row per layout and write them all; every rank runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--model", default="large")
    parser.add_argument("--batch", type=int, default=96, help="samples of a card (weak), of all (strong)")
    parser.add_argument("--rows", nargs="+", help="only rows whose names contain one of these")
    parser.add_argument("--profile", type=Path, nargs="+", default=[], help="measured collectives, for the plan")
    parser.add_argument("--alone", type=Path, help="measure one card alone, for a world of --alone-of, into this file")
    parser.add_argument("--alone-of", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=540, help="no row begins after this many")
    parser.add_argument("--out", required=True, help="JSON file, written again after every row")
    args = parser.parse_args()
    began = time.perf_counter()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    bench = Bench(args, args.alone_of or world)
    every = table(bench.world) if bench.world > 1 else []
    rows = [r for r in every if not args.rows or any(part in r.name for part in args.rows)]
    shares = [args.batch, max(1, args.batch // max(2, bench.world))]  # the plan is fitted to these
    held_out = [max(1, args.batch * 3 // 4)]
    found: dict[int, Alone] = {}
    if args.alone is not None:
        for experts in sorted({1, *(r.config.experts for r in rows)}):
            found[experts] = alone(bench, experts, [*shares, *held_out] if experts == 1 else shares[:1])
        args.alone.write_bytes(pickle.dumps({experts: vars(single) for experts, single in found.items()}))
        return 0
    if rank == 0:
        found = apart(world)
    store = Path(tempfile.gettempdir()) / f"scaling-{os.environ.get('MASTER_PORT', 0)}-{os.getppid()}"
    with start(args.device, init_method=f"file://{store}" if world > 1 else None) as runtime:
        found = runtime.gather(found, "the steps of the first card alone")[0]
        steps = {experts: single.mean_ms for experts, single in found.items()}
        topology = Topology.detect(runtime.device.type)
        mine, spec = found[1].rows, found[1].spec
        profile = links(args.profile, runtime).measured(units=units_profile(spec, mine[: len(shares)]))
        one_card = Layout(world=1, fsdp=1, table_shard=1)
        plans = {row["batch"]: predict(spec, topology, one_card, int(row["batch"]), profile=profile) for row in mine}
        single = plans[args.batch]
        first = {
            "case": "alone", "op": "train", "pass": "step", "batch": args.batch, "ms": mine[0]["ms"], "ratio": 1.0,
            "samples_per_s": args.batch / steps[1] * 1e3, "mean_ms": steps[1], "batches": mine,
            "plan": {"ms": single.step_s * 1e3, "memory_gib": single.memory["peak"] / 2**30},
            "plans": [{"batch": batch, "ms": plan.step_s * 1e3, "compute_ms": plan.compute_s * 1e3}
                      for batch, plan in plans.items()],
        }  # fmt: skip
        results: list[dict[str, Any]] = [first]
        say(runtime, f"{args.model}, {args.batch} samples a card, {world} x {topology.device}")
        say(runtime, f"{'row':22} {'step ms':>9} {'samples/s':>10} {'ratio':>6} {'lost':>7} {'exposed':>8} {'work':>6} "
                     f"{'GiB':>6} {'tables':>8} {'plan ms':>8}")  # fmt: skip
        say(runtime, f"{'alone':22} {steps[1]:9.2f} {first['samples_per_s']:10.0f} {1:6.3f} {'':34} "
                     f"{'':6} {single.step_s * 1e3:8.2f}")  # fmt: skip
        for measured in mine[1:]:
            fitted = "" if measured["batch"] in shares else ", held out"
            say(runtime, f"{'alone, ' + format(measured['batch'], '.0f') + fitted:22} {measured['ms']:9.2f} {'':49} "
                         f"{plans[measured['batch']].step_s * 1e3:8.2f}")  # fmt: skip
        for row, number in zip(rows, itertools.count()):
            late = max(runtime.gather(time.perf_counter() - began, "the clock")) > args.seconds
            if late:
                say(runtime, f"no time for {', '.join(r.name for r in rows[number:])}")
                break
            result = run_row(bench, row, runtime)
            one = steps[row.config.experts]
            fair = one / (world if row.strong else 1)  # a perfect step
            result |= {"ratio": fair / result["ms"], "lost_ms": result["ms"] - fair}
            result["plan"] = predicted(bench, row, spec, profile, result["work"], topology)
            results.append(result)
            plan = f"{result['plan']['ms']:8.2f}" if result["plan"] else f"{'-':>8}"
            say(
                runtime,
                f"{row.name:22} {result['ms']:9.2f} {result['samples_per_s']:10.0f} {result['ratio']:6.3f} "
                f"{result['lost_ms']:7.2f} {result['exposed_ms']:8.2f} {result['work']:6.3f} "
                f"{result['memory_gib']:6.1f} {result['tables_mib']:8.1f} {plan}",
            )
            if runtime.is_main:
                write(args.out, "scaling", results, world=world, model=args.model)
        runtime.barrier("the end")
        if runtime.is_main:
            write(args.out, "scaling", results, world=world, model=args.model)
    return 0


def say(runtime: Runtime, text: str) -> None:
    """Rank 0 speaks."""
    if runtime.is_main:
        print(text, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
