"""Scaling of a preset on the cards of a host: what every layout and every way to hide communication is worth.

    torchrun --standalone --nproc_per_node N tools/scaling_cards.py --out scaling.json [--profile comm-profile.json]

First every card trains alone, in a process of its own, on its own samples: the mean of these steps is what a step of N
cards is held against. Then a row for each rung and layout:

    weak        ratio = mean step alone / step; every card has `--batch` samples a part, alone and together
    strong      ratio = the first card's step alone / (N x step); its samples are dealt to N

Alone and together the layers are replayed from CUDA graphs, but for rows that say otherwise and those with experts on
other cards. A step has `--parts` parts, whose gradients are reduced after the last, and ends with clipping and AdamW,
tables included; it lasts as long as that of the slowest rank. "lost" is the step's time beyond the mean step alone,
"exposed" what compute stood still for FSDP's units (`gem_parallel.Exposed`), "work" the useful FLOPs of the heaviest
rank over the mean, "loss" and "norm" what the first step of all came to (rows with the same samples agree but for
dropout), "plan" what `gem_parallel.predict` makes of the times alone and the collectives' `--profile`. Lengths of
histories are lognormal; balanced rows deal them by base batch shuffling.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gem_parallel import (
    Exposed,
    Layout,
    ModelSpec,
    Profile,
    Runtime,
    Topology,
    predict,
    start,
)
from gem_parallel.bench.results import write
from gem_parallel.planning.layout import place_tables, step_ops
from scaling_steps import Alone, Bench, Row, alone, clear, forget, step, table, timed, trace


def apart(bench: Bench, rank: int) -> Alone:
    """This card alone, in a process of its own: tables of a world of one lie on the first card that it sees. What
    another world has found and kept is taken.
    """
    kept = bench.args.keep_alone and bench.args.keep_alone / f"alone-{rank}"
    if kept and kept.exists():
        return Alone(**pickle.loads(kept.read_bytes()))
    cards = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "alone"
        one = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
        one |= {"CUDA_VISIBLE_DEVICES": cards[int(os.environ.get("LOCAL_RANK", 0)) % len(cards)], "MASTER_PORT": "0"}
        call = [sys.executable, __file__, *sys.argv[1:], "--alone", str(file), str(rank), str(bench.world)]
        subprocess.run(call, env=os.environ | one, check=True)
        found = file.read_bytes()
    if kept:
        kept.write_bytes(found)
    return Alone(**pickle.loads(found))


def links(files: list[Path], runtime: Runtime) -> Profile:
    """The measured collectives, or assumed ones, which is said."""
    try:
        return Profile.read(*files) if files else Profile()
    except (OSError, ValueError) as error:
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

    The heaviest rank sets the pace: compute counts `work` times. All parts of a step but the last end before the
    optimizer. Without graphs the times alone say nothing.
    """
    config, world = row.config, bench.world
    if config.experts > 1 or not row.replayed:
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
    update = optimizer_seconds(spec, topology, layout, batch, profile)
    parts = row.parts or bench.args.parts[0]
    one = found.step_s + (work - 1) * (found.compute_s - update)
    return {"ms": (parts * (one - update) + update) * 1e3, "memory_gib": found.memory["peak"] / 2**30}


def optimizer_seconds(spec: ModelSpec, topology: Topology, layout: Layout, batch: int, profile: Profile) -> float:
    """Of a predicted step."""
    load = place_tables(spec, layout.table_shard)
    return sum(op.seconds for op in step_ops(spec, layout, load, batch, topology, profile) if op.kind == "optimizer")


def run_row(bench: Bench, row: Row, runtime: Runtime) -> dict[str, Any]:
    """Measure one row; called by all ranks."""
    clear(runtime.device)
    share = bench.args.batch // (bench.world if row.strong else 1)
    parts = row.parts or bench.args.parts[0]
    dealt = bench.deal(share, parts, row.balanced, row.strong)
    parallel, optimizer = bench.make(row, runtime, row.config.experts)
    batches = bench.batches(dealt, runtime.rank, runtime.device)
    found = timed(parallel, optimizer, batches, runtime)
    with Exposed(parallel.module) as meter:
        list(step(parallel, optimizer, batches, runtime.device))
    if row.name == bench.args.trace:
        trace(bench, parallel, optimizer, batches, runtime)
    exposed = {k: sum(unit[k] for unit in meter.seconds().values()) * 1e3 for k in ("forward", "backward", "reduce")}
    held = parallel.table_memory()
    peak = torch.cuda.max_memory_allocated() if runtime.device.type == "cuda" else 0
    chosen = "; ".join(f"{c.what}: {c.how}" for c in parallel.collectives.choices) if parallel.collectives else ""
    forget(parallel)
    return {
        "case": row.name,
        "op": "train",
        "pass": "step",
        "scaling": "strong" if row.strong else "weak",
        "batch": share,
        "parts": parts,
        "graphs": row.replayed and runtime.device.type == "cuda",
        "ms": found.ms,
        "phases": {"forward_ms": found.forward_ms, "backward_ms": found.backward_ms},
        "samples_per_s": share * parts * bench.world / found.ms * 1e3,
        "exposed_ms": max(runtime.gather(sum(exposed.values()), "exposed communication")),
        "exposed": exposed,
        "work": bench.work(dealt, row.config.experts),
        "loss": found.loss,
        "norm": found.norm,
        "memory_gib": peak / 2**30,
        "tables_mib": (held["weights"] + held["moments"]) / 2**20,
        "collectives": chosen,
    }


def main() -> int:
    """Print a row per layout and write them all; every rank runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--model", default="large")
    parser.add_argument("--batch", type=int, default=256, help="samples of a card and part (weak), of all (strong)")
    parser.add_argument("--parts", type=int, nargs="+", default=[1], help="of a step; the first for all rows")
    parser.add_argument("--launched", action="store_true", help="one card alone without CUDA graphs")
    parser.add_argument("--rows", nargs="+", help="only rows whose names contain one of these")
    parser.add_argument("--only", nargs="+", help="only rows of these names, in this order")
    parser.add_argument("--trace", help="the row of which rank 0 traces a step, into a file beside --out")
    parser.add_argument("--profile", type=Path, nargs="+", default=[], help="measured collectives, for the plan")
    parser.add_argument("--alone", nargs=3, metavar=("FILE", "RANK", "WORLD"), help="measure one card alone, into FILE")
    parser.add_argument("--keep-alone", type=Path, help="folder of the cards' steps alone, for several worlds")
    parser.add_argument("--seconds", type=float, default=540, help="no row begins after this many")
    parser.add_argument("--out", required=True, help="JSON file, written again after every row")
    args = parser.parse_args()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    began = time.perf_counter()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    bench = Bench(args, int(args.alone[2]) if args.alone else world)
    every = table(bench.world, args.parts) if bench.world > 1 else []
    rows = [r for r in every if not args.rows or any(part in r.name for part in args.rows)]
    if args.only:
        rows = sorted((r for r in rows if r.name in args.only), key=lambda r: args.only.index(r.name))
    shares = [args.batch, max(1, args.batch // 4)]  # the plan is fitted to these
    held_out = [max(1, args.batch * 3 // 4)]
    if args.alone:
        single = alone(bench, int(args.alone[1]), sorted({1, *(r.config.experts for r in rows)}), [*shares, *held_out])
        Path(args.alone[0]).write_bytes(pickle.dumps(vars(single)))
        return 0
    mine_alone = apart(bench, rank)
    store = Path(tempfile.gettempdir()) / f"scaling-{os.environ.get('MASTER_PORT', 0)}-{os.getppid()}"
    with start(args.device, init_method=f"file://{store}" if world > 1 else None) as runtime:
        everyone = runtime.gather(mine_alone, "the steps of the cards alone")
        steps = {key: statistics.mean(single.ms[key] for single in everyone) for key in everyone[0].ms}
        topology = Topology.detect(runtime.device.type)
        mine, spec = everyone[0].rows, everyone[0].spec
        assert spec is not None
        profile = links(args.profile, runtime).measured(units=units_profile(spec, mine[: len(shares)]))
        one_card = Layout(world=1, fsdp=1, table_shard=1)
        plans = {row["batch"]: predict(spec, topology, one_card, int(row["batch"]), profile=profile) for row in mine}
        own, parts = plans[args.batch], args.parts[0]
        mean_ms = steps[1, parts]
        first = {
            "case": "alone", "op": "train", "pass": "step", "batch": args.batch, "parts": parts, "ratio": 1.0,
            "graphs": not args.launched and runtime.device.type == "cuda", "ms": mean_ms,
            "samples_per_s": args.batch * parts / mean_ms * 1e3, "batches": mine,
            "cards": [single.ms[1, parts] for single in everyone],
            "of_parts": {n: steps[1, n] for n in args.parts},
            "plan": {"ms": own.step_s * 1e3, "memory_gib": own.memory["peak"] / 2**30},
            "plans": [{"batch": batch, "ms": plan.step_s * 1e3, "compute_ms": plan.compute_s * 1e3}
                      for batch, plan in plans.items()],
        }  # fmt: skip
        results: list[dict[str, Any]] = [first]
        say(
            runtime,
            f"{args.model}, {args.batch} samples a card and part, {parts} parts a step, {world} x {topology.device}",
        )
        say(runtime, f"{'row':24} {'step ms':>9} {'samples/s':>10} {'ratio':>6} {'lost':>7} {'exposed':>8} {'work':>6} "
                     f"{'loss':>7} {'norm':>7} {'GiB':>6} {'tables':>8} {'plan ms':>8}")  # fmt: skip
        for n in args.parts:
            cards = " ".join(f"{single.ms[1, n]:.1f}" for single in everyone)
            rate = args.batch * n / steps[1, n] * 1e3
            say(runtime, f"{f'alone, {n} parts':24} {steps[1, n]:9.2f} {rate:10.0f} {1:6.3f}   by card: {cards}")
        for measured in mine:
            fitted = "" if measured["batch"] in shares else ", held out"
            say(runtime, f"{'alone, ' + format(measured['batch'], '.0f') + fitted:24} {measured['ms']:9.2f} {'':66} "
                         f"{plans[measured['batch']].step_s * 1e3:8.2f}")  # fmt: skip
        for row, number in zip(rows, itertools.count()):
            late = max(runtime.gather(time.perf_counter() - began, "the clock")) > args.seconds
            if late:
                say(runtime, f"no time for {', '.join(r.name for r in rows[number:])}")
                break
            result = run_row(bench, row, runtime)
            one = steps[row.config.experts, result["parts"]]
            if row.strong:
                one = everyone[0].ms[row.config.experts, result["parts"]]
            fair = one / (world if row.strong else 1)  # a perfect step
            result |= {"ratio": fair / result["ms"], "lost_ms": result["ms"] - fair}
            result["plan"] = predicted(bench, row, spec, profile, result["work"], topology)
            results.append(result)
            plan = f"{result['plan']['ms']:8.2f}" if result["plan"] else f"{'-':>8}"
            say(
                runtime,
                f"{row.name:24} {result['ms']:9.2f} {result['samples_per_s']:10.0f} {result['ratio']:6.3f} "
                f"{result['lost_ms']:7.2f} {result['exposed_ms']:8.2f} {result['work']:6.3f} {result['loss']:7.4f} "
                f"{result['norm']:7.3f} {result['memory_gib']:6.1f} {result['tables_mib']:8.1f} {plan}",
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
