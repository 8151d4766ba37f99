"""Scaling of a preset on the cards of a host: what every layout and every way to hide communication is worth.

    torchrun --standalone --nproc_per_node N tools/scaling_cards.py --out scaling.json [--profile comm-profile.json]

First every card trains alone, in a process of its own, on its own samples: the mean of these steps is what a step of N
cards is held against. Then a row for each rung and layout, in order of importance (tools/scaling_rows.py):

    weak        ratio = mean step alone / step; every card has `--batch` samples a part, alone and together
    strong      ratio = the first card's step alone / (N x step); its samples are dealt to N

Alone and together the layers are replayed from CUDA graphs, but for rows that say otherwise and ensembles, whose
experts lie on other cards: those are launched kernel by kernel, alone as well. A step has `--parts` parts, whose
gradients are reduced after the last, and ends with clipping and AdamW, tables included; it lasts as long as that of the
slowest rank.
"lost" is the step's time beyond the mean step alone, "exposed" what compute stood still for FSDP's units
(`gem_parallel.Exposed`), "work" the useful FLOPs of the heaviest rank over the mean, "loss" and "norm" what the first
step of all came to (rows with the same samples agree but for dropout), "tables" tables and moments on the fullest rank,
"plan" what `gem_parallel.predict` makes of the times alone and the collectives' `--profile`. Lengths of histories are
lognormal; balanced rows deal them by base batch shuffling.

Rows for which `--seconds` do not suffice are dropped, which is said. Every row is kept in a file of its own as it is
measured (the folder `--out` with ".rows"): `--resume` goes on behind them, and passes over a row that did not end.
A row that lasts longer than `--row-seconds` ends the run with where every thread is.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import os
import pickle
import shutil
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
from gem_parallel.planning.layout import place_tables
from gem_parallel.planning.step import Step
from scaling_rows import Kept, Row, chosen, table
from scaling_steps import Alone, Bench, Tell, alone, clear, forget, step, timed, trace


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
    bench: Bench, row: Row, specs: dict[int, ModelSpec], profiles: dict[int, Profile], work: float, topology: Topology
) -> dict[str, float] | None:
    """Step and memory by the planner; without graphs the times alone say nothing, but for ensembles, which have none.

    The heaviest rank sets the pace: compute counts `work` times.
    """
    config, world = row.config, bench.world
    if not row.graphs:
        return None
    spec, profile = specs[config.experts], profiles[config.experts]
    layout = Layout(
        world=world,
        fsdp=config.shard_group or world,
        ep=config.experts,
        strategy=config.table_strategy,
        table_shard=world // config.table_copies,
        table_copies=config.table_copies,
        sync_every=config.table_sync_every,
        parts=row.parts or bench.args.parts[0],
        reduce_every_part=config.reduce_every_part,
    )
    batch = bench.args.batch // (world if row.strong else 1) * layout.parts
    if row.payload:
        spec = replace(spec, gather_bytes=1)
    found = predict(spec, topology, layout, batch, profile=profile)
    load = place_tables(spec, layout.table_shard)
    ops = Step(spec, layout, load, batch, topology, profile).ops(layout.parts)
    uneven = sum(op.seconds for op in ops if op.load == "samples")
    return {"ms": (found.step_s + (work - 1) * uneven) * 1e3, "memory_gib": found.memory["peak"] / 2**30}


def run_row(bench: Bench, row: Row, runtime: Runtime, tell: Tell) -> dict[str, Any]:
    """Measure one row; called by all ranks."""
    began = time.perf_counter()
    clear(runtime.device)
    share = bench.args.batch // (bench.world if row.strong else 1)
    parts = row.parts or bench.args.parts[0]
    dealt = bench.deal(share, parts, row.balanced, row.strong)
    parallel, optimizer = bench.make(row, runtime, row.config.experts)
    batches = bench.batches(dealt, runtime.rank, runtime.device)
    tell("laid out")
    found = timed(parallel, optimizer, batches, runtime, tell)
    with Exposed(parallel.module) as meter:
        list(step(parallel, optimizer, batches, runtime.device))
    if row.name == bench.args.trace:
        trace(bench, parallel, optimizer, batches, runtime)
    exposed = {k: sum(unit[k] for unit in meter.seconds().values()) * 1e3 for k in ("forward", "backward", "reduce")}
    ranks = runtime.gather(parallel.table_memory(), "the tables' memory")
    fullest = max(ranks, key=lambda held: held["weights"] + held["moments"])
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
        "balanced": row.balanced,
        "ms": found.ms,
        "phases": {"forward_ms": found.forward_ms, "backward_ms": found.backward_ms},
        "samples_per_s": share * parts * bench.world / found.ms * 1e3,
        "exposed_ms": max(runtime.gather(sum(exposed.values()), "exposed communication")),
        "exposed": exposed,
        "work": bench.work(dealt, row.config.experts),
        "loss": found.loss,
        "norm": found.norm,
        "memory_gib": max(runtime.gather(peak / 2**30, "the peak of memory")),
        "tables_mib": (fullest["weights"] + fullest["moments"]) / 2**20,
        "tables_of_all": sum(held["weights"] + held["moments"] for held in ranks) / 2**20,
        "collectives": chosen,
        "seconds": time.perf_counter() - began,
    }


def age() -> float:
    """Seconds since this process was started: imports count."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def options() -> argparse.ArgumentParser:
    """Of the command line."""
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
    parser.add_argument("--seconds", type=float, default=540, help="of this process; rows that do not fit are dropped")
    parser.add_argument("--row-seconds", type=float, default=120, help="a row that lasts longer ends the run")
    parser.add_argument("--resume", action="store_true", help="go on behind the rows that are kept")
    parser.add_argument("--out", type=Path, required=True, help="JSON file, written again after every row")
    return parser


def main() -> int:
    """Print a row per layout and write them all; every rank runs it."""
    args = options().parse_args()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    began = time.perf_counter() - age()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    bench = Bench(args, int(args.alone[2]) if args.alone else world)
    rows = chosen(table(bench.world, args.parts), args.rows, args.only) if bench.world > 1 else []
    shares = [args.batch, max(1, args.batch // 4)]  # the plan is fitted to these
    held_out = [max(1, args.batch * 3 // 4)]
    if args.alone:
        single = alone(bench, int(args.alone[1]), sorted({1, *(r.config.experts for r in rows)}), [*shares, *held_out])
        Path(args.alone[0]).write_bytes(pickle.dumps(vars(single)))
        return 0
    mine_alone = apart(bench, rank)
    store = Path(tempfile.gettempdir()) / f"scaling-{os.environ.get('MASTER_PORT', 0)}-{os.getppid()}"
    with start(
        args.device, max(60.0, args.row_seconds), init_method=f"file://{store}" if world > 1 else None
    ) as runtime:
        measured = Measured(bench, runtime, runtime.gather(mine_alone, "the steps of the cards alone"), shares)
        measured.say_alone()
        kept = Kept(args.out.with_suffix(".rows"))
        if runtime.is_main and not args.resume:
            shutil.rmtree(kept.folder, ignore_errors=True)
        runtime.barrier("the folder of rows")
        for row, number in zip(rows, itertools.count()):
            result = runtime.gather(kept.found(row), "what is kept")[0]
            if result is None:
                left = args.seconds - max(runtime.gather(time.perf_counter() - began, "the clock"))
                if not runtime.gather(kept.fits(left), "whether there is time")[0]:
                    measured.drop(rows[number:], left)
                    break
                result = measured.try_row(row, kept)
            measured.add(row, result)
        runtime.barrier("the end")
        measured.write()
    return 0


class Measured:
    """The rows so far, and what they are held against."""

    def __init__(self, bench: Bench, runtime: Runtime, everyone: list[Alone], shares: list[int]) -> None:
        self.bench, self.runtime, self.everyone, self.args = bench, runtime, everyone, bench.args
        self.steps = {key: statistics.mean(single.ms[key] for single in everyone) for key in everyone[0].ms}
        self.topology = Topology.detect(runtime.device.type)
        self.shares = shares
        first = everyone[0]
        assumed = links(self.args.profile, runtime)
        self.profiles = {1: assumed.measured(units=units_profile(first.specs[1], first.rows[: len(shares)]))}
        for experts, spec in first.specs.items():
            if experts > 1:  # no times of their units: a rate
                flops = 3 * spec.flops * self.args.batch * self.args.parts[0]
                self.profiles[experts] = replace(
                    assumed, tflops=flops / self.steps[experts, self.args.parts[0]] / 1e9, unit_us=0.0
                )
        one = Layout(world=1, fsdp=1, table_shard=1)
        self.plans = {
            row["batch"]: predict(first.specs[1], self.topology, one, int(row["batch"]), profile=self.profiles[1])
            for row in first.rows
        }
        own, parts = self.plans[self.args.batch], self.args.parts[0]
        self.results: list[dict[str, Any]] = [
            {
                "case": "alone", "op": "train", "pass": "step", "batch": self.args.batch, "parts": parts, "ratio": 1.0,
                "graphs": not self.args.launched and runtime.device.type == "cuda", "ms": self.steps[1, parts],
                "samples_per_s": self.args.batch * parts / self.steps[1, parts] * 1e3, "batches": first.rows,
                "cards": [single.ms[1, parts] for single in everyone],
                "of_parts": {n: self.steps[1, n] for n in self.args.parts},
                "of_experts": {n: ms for (n, p), ms in self.steps.items() if p == parts},
                "plan": {"ms": own.step_s * 1e3, "memory_gib": own.memory["peak"] / 2**30},
                "plans": [{"batch": batch, "ms": plan.step_s * 1e3, "compute_ms": plan.compute_s * 1e3}
                          for batch, plan in self.plans.items()],
            }
        ]  # fmt: skip
        self.dropped: list[str] = []

    def say_alone(self) -> None:
        """The head of the table, and one card by itself."""
        args, runtime = self.args, self.runtime
        what = f"{args.model}, {args.batch} samples a card and part, {args.parts[0]} parts a step"
        say(runtime, f"{what}, {runtime.world} x {self.topology.device}")
        say(runtime, f"{'row':24} {'step ms':>9} {'samples/s':>10} {'ratio':>6} {'lost':>7} {'exposed':>8} {'work':>6} "
                     f"{'loss':>7} {'norm':>7} {'GiB':>6} {'tables':>8} {'plan ms':>8}")  # fmt: skip
        for (experts, n), ms in self.steps.items():
            cards = " ".join(f"{single.ms[experts, n]:.1f}" for single in self.everyone)
            name = f"alone, {n} parts" + (f", ensembles of {2 * experts}" if experts > 1 else "")
            say(runtime, f"{name:24} {ms:9.2f} {args.batch * n / ms * 1e3:10.0f} {1:6.3f}   by card: {cards}")
        for row in self.everyone[0].rows:
            fitted = "" if row["batch"] in self.shares else ", held out"
            plan = self.plans[row["batch"]].step_s * 1e3
            say(runtime, f"{'alone, ' + format(row['batch'], '.0f') + fitted:24} {row['ms']:9.2f} {'':66} {plan:8.2f}")

    def try_row(self, row: Row, kept: Kept) -> dict[str, Any]:
        """Measure it within its time; where it fails, the file says how before the run ends."""
        began = time.perf_counter()

        def tell(how_far: str) -> None:
            if self.runtime.is_main:
                print(f"    {row.name}: {how_far}, {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)

        if self.runtime.is_main:
            kept.begin(row, f"it was begun with {self.runtime.world} ranks")
        faulthandler.dump_traceback_later(self.args.row_seconds, exit=True)
        try:
            result = run_row(self.bench, row, self.runtime, tell)
        except Exception as error:
            kept.begin(row, f"rank {self.runtime.rank}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
        key = row.config.experts, result["parts"]
        one = self.everyone[0].ms[key] if row.strong else self.steps[key]
        fair = one / (self.runtime.world if row.strong else 1)  # a perfect step
        result |= {"ratio": fair / result["ms"], "lost_ms": result["ms"] - fair}
        specs = self.everyone[0].specs
        result["plan"] = predicted(self.bench, row, specs, self.profiles, result["work"], self.topology)
        if self.runtime.is_main:
            kept.end(row, result)
        return result

    def add(self, row: Row, result: dict[str, Any]) -> None:
        """Print a row and write all of them."""
        self.results.append(result)
        if "failed" in result:
            say(self.runtime, f"{row.name:24} {result['failed']}")
        else:
            plan = f"{result['plan']['ms']:8.2f}" if result["plan"] else f"{'-':>8}"
            say(
                self.runtime,
                f"{row.name:24} {result['ms']:9.2f} {result['samples_per_s']:10.0f} {result['ratio']:6.3f} "
                f"{result['lost_ms']:7.2f} {result['exposed_ms']:8.2f} {result['work']:6.3f} {result['loss']:7.4f} "
                f"{result['norm']:7.3f} {result['memory_gib']:6.1f} {result['tables_mib']:8.1f} {plan}",
            )
        self.write()

    def drop(self, rows: list[Row], left_s: float) -> None:
        """Say which rows there is no time for."""
        self.dropped = [row.name for row in rows]
        say(self.runtime, f"no time ({left_s:.0f} s) for {'; '.join(self.dropped)}")

    def write(self) -> None:
        """All rows in one file."""
        if self.runtime.is_main:
            more = {"world": self.runtime.world, "model": self.args.model, "dropped": self.dropped}
            write(str(self.args.out), "scaling", self.results, **more)


def say(runtime: Runtime, text: str) -> None:
    """Rank 0 speaks."""
    if runtime.is_main:
        print(text, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
