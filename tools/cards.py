"""What the cards of a host can show of gem-parallel, in stages of one process a card, so that imports are paid once.

    torchrun --standalone --nproc_per_node N tools/cards.py --out FOLDER [--stages ...] [--rehearse]

    tests         the kernels, and recomputation bit by bit (pytest -m gpu)
    memory        memory against step time, the variants dealt to the cards: python -m gem_parallel.bench memory
    comm          every layout against one process; collectives alone and beside a matrix product:
                  python -m gem_parallel.bench comm
    scaling       the preset alone and together, rung by rung: tools/scaling_cards.py

Each prints as it goes and writes its own JSON. One that fails is said and passed over; one that lasts longer than
`--limit` seconds ends the run, since ranks that hang cannot be called back (in the scaling, one row).
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import gem_parallel.bench.__main__ as bench
import torch

STAGES = ("tests", "memory", "comm", "scaling")
BENCH = "-m"  # python -m gem_parallel.bench
TESTS = Path(__file__).resolve().parents[1] / "packages" / "gem-parallel" / "tests"


def main() -> int:
    """Run the stages; 1 when one of them failed on this card."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument("--parts", nargs="+", default=["layouts", "collectives"], help="of comm")
    parser.add_argument("--rows", nargs="+", default=[], help="of the scaling")
    parser.add_argument("--seconds", default="240", help="of the scaling; rows that do not fit are dropped")
    parser.add_argument("--row-seconds", default="60", help="a row of the scaling that lasts longer ends the run")
    parser.add_argument("--resume", action="store_true", help="go on behind the rows of the scaling that are kept")
    parser.add_argument("--batch", type=int, default=256, help="of a card and part, in the scaling")
    parser.add_argument("--step-parts", nargs="+", default=["1", "4"], help="parts of a step, in the scaling")
    parser.add_argument("--budgets", nargs="+", default=["0.25", "0.5"])
    parser.add_argument("--limit", type=float, default=120, help="seconds of a stage")
    parser.add_argument("--rehearse", action="store_true", help="the same on a CPU, small")
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if not args.rehearse:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    began, failed = time.perf_counter(), []
    for stage in args.stages:
        if stage != "scaling":
            faulthandler.dump_traceback_later(args.limit, exit=True)
        try:
            status = RUN[stage](args, rank, world)
        except Exception:
            traceback.print_exc()
            status = 1
        faulthandler.cancel_dump_traceback_later()
        if status:
            failed.append(stage)
        if rank == 0 or status:
            print(f"== {stage}: {'FAILED' if status else 'done'}, second {time.perf_counter() - began:.1f}", flush=True)
    return 1 if failed else 0


def tests(args: argparse.Namespace, rank: int, world: int) -> int:
    """On a CPU there are none to run: pytest finds them and skips."""
    import pytest

    return int(pytest.main(["-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short", "-k", "card", *TEST_FILES]))


def memory(args: argparse.Namespace, rank: int, world: int) -> int:
    """Variants rank, rank + world, ..."""
    call = ["memory", "--workload", "gem_memory:large", "--batch", "160", "--steps", "2", "--device", "cuda"]
    if args.rehearse:
        call = ["memory", "--workload", "gem_memory:tiny", "--batch", "8", "--steps", "1", "--min-kib", "4"]
    call += ["--budgets", *args.budgets, "--only", "full", "uniform", "regions", "fp8", "--share", f"{rank}/{world}"]
    return command(bench.main, BENCH, [*call, "--out", str(args.out / f"memory-large-{rank}.json")])


def comm(args: argparse.Namespace, rank: int, world: int) -> int:
    """All ranks together."""
    small = ["--mib", "1", "8", "--repeats", "2"] if args.rehearse else []
    call = ["comm", "--device", device(args), "--parts", *args.parts, "--steps", "5", "--ctas", "2", "8"]
    files = ["--out", str(args.out / f"comm-{world}.json"), "--profile", str(args.out / f"profile-{world}.json")]
    return command(bench.main, BENCH, [*call, *small, *files])


def scaling(args: argparse.Namespace, rank: int, world: int) -> int:
    """All ranks, each alone first."""
    import scaling_cards

    model = ["--model", "tiny", "--batch", "8"] if args.rehearse else ["--batch", str(args.batch)]
    times = ["--seconds", args.seconds, "--row-seconds", args.row_seconds, *(["--resume"] if args.resume else [])]
    files = ["--out", str(args.out / f"scaling-{world}.json"), "--keep-alone", str(args.out / "alone")]
    (args.out / "alone").mkdir(parents=True, exist_ok=True)
    profile = args.out / f"profile-{world}.json"
    files += ["--profile", str(profile)] if profile.exists() else []
    call = ["--device", device(args), *model, "--parts", *args.step_parts, *times, *files]
    rows = ["--rows", *args.rows] if args.rows else []
    return command(lambda _: scaling_cards.main(), "scaling_cards.py", [*call, *rows])


def device(args: argparse.Namespace) -> str:
    """Of the stage."""
    return "cpu" if args.rehearse else "cuda"


def command(run: Callable[[list[str]], int], program: str, call: list[str]) -> int:
    """Run with `call` as the command line, which goes into the JSON."""
    whole = sys.argv
    sys.argv = [program, *call]
    try:
        return run(call)
    finally:
        sys.argv = whole


TEST_FILES = [str(TESTS / "test_parallel_memory_card.py")]
RUN: dict[str, Callable[[argparse.Namespace, int, int], int]] = {
    "tests": tests,
    "memory": memory,
    "comm": comm,
    "scaling": scaling,
}

if __name__ == "__main__":
    raise SystemExit(main())
