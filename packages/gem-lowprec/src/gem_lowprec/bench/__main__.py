"""`python -m gem_lowprec.bench [CASE ...]`: measure low-precision products, quantisers and layers on this machine's
GPU, print a table and write a benchmark file. A case may be the beginning of a name: "gemm", "linear-65536".
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from gem_lowprec.bench import problems, timing


def _commit() -> str:
    """The commit of the checkout that holds this file, marked when the package differs from it; "unknown" outside."""
    here = Path(__file__).resolve().parent.parent
    git = ["git", "-c", "safe.directory=*", "-C", str(here)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "."], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if changed.strip() else "")


def _versions() -> dict[str, str]:
    import triton

    from gem_lowprec import __version__

    return {
        "gem-lowprec": __version__, "torch": torch.__version__, "triton": triton.__version__,
        "cuda": torch.version.cuda or "none", "python": sys.version.split()[0],
    }  # fmt: skip


def _table(rows: list[dict[str, Any]]) -> str:
    """One line a variant; peers' rates behind the first variant of a case."""
    lines = [
        f"{'case':22s} {'variant':24s} {'ms':>8s} {'rate':>8s} {'of GEMM':>8s} {'of copy':>8s} {'of peer':>8s}  "
        "peers (TFLOP/s of products, GB/s of the rest)"
    ]
    shown: set[str] = set()
    for r in rows:
        peers = "" if r["case"] in shown else "  ".join(f"{n} {x:.0f}" for n, x in r["peers"].items())
        shown.add(r["case"])
        first = next(iter(r["peers"].values()), None)
        of_peer = "" if first is None else f"{r[r['unit']] / first:.2f}"
        of_gemm = "" if r["of_gemm"] is None else f"{r['of_gemm']:.2f}"
        lines.append(
            f"{r['case']:22s} {r['variant']:24s} {r['ms']:8.3f} {r[r['unit']]:8.0f} {of_gemm:>8s} {r['of_copy']:8.2f} "
            f"{of_peer:>8s}  {peers}"
        )
    return "\n".join(lines)


def _gate(p: problems.Problem) -> dict[str, float]:
    """The error of every variant; a RuntimeError says which is wrong, and nothing is timed then."""
    from gem_kernels.testing import poisoned

    errors = {}
    for variant in p.runs:
        with poisoned():
            errors[variant] = p.check(variant)
        if not errors[variant] <= p.limit:  # also of NaN
            raise RuntimeError(f"{p.name}: {variant} is wrong: {errors[variant]:.2e} where {p.limit:.0e} is the limit")
    print(f"  {p.name}: errors {', '.join(f'{v} {e:.1e}' for v, e in errors.items())}", flush=True)
    return errors


def _measure(p: problems.Problem, options: argparse.Namespace, found: dict[str, float]) -> list[dict[str, Any]]:
    """The rows of one case."""
    errors = _gate(p)
    if options.gate_only:
        return []
    runs: dict[str, timing.Run] = {}
    for name, run in {**p.runs, **{f"peer {n}": r for n, r in p.peers.items()}}.items():
        try:
            runs[name] = timing.captured(run)
        except Exception as error:  # of a peer: whatever it throws is the finding
            if name in p.runs:
                raise
            print(f"  {name}: {type(error).__name__}: {str(error)[:160]}")
    times = timing.interleaved(runs, rounds=options.rounds, rep=options.rep)
    launched = {v: timing.kernels(run) for v, run in p.runs.items()} if options.kernels else {}
    for variant, lines in launched.items():
        print(f"{p.name}, {variant}: {sum(us for *_, us in lines):.0f} us on the GPU in a call")
        for kernel, launches, us in lines:
            print(f"  {us:9.1f} us {launches:6.1f} x  {kernel[:90]}", flush=True)

    def rate(run: str) -> float:
        return p.flops / times[run] / 1e9 if p.unit == "tflops" else problems.bytes_of(p, run) / times[run] / 1e6

    peers = {n: round(rate(f"peer {n}"), 1) for n in p.peers if f"peer {n}" in times}
    rows = []
    for variant in p.runs:
        moved = problems.bytes_of(p, variant) / times[variant] / 1e6
        tflops = p.flops / times[variant] / 1e9 if p.flops else None
        rows.append({
            "case": p.name, "op": p.op, "variant": variant, "pass": p.what, "dtype": "float8_e4m3fn",
            "head_dim": p.width, "ms": round(times[variant], 4), "tflops": None if tflops is None else round(tflops, 1),
            "gbps": round(moved, 1), "of_copy": round(moved / 1e3 / found["copy_tbps"], 3),
            "of_gemm": None if tflops is None else round(tflops / found["gemm_bf16_tflops"], 3),
            "error": errors[variant], "peers": peers, "unit": p.unit,
            **({"kernels": launched[variant]} if variant in launched else {}),
        })  # fmt: skip
    return rows


def _build(names: list[str]) -> None:
    """Check some cases, and so build what they need; what fails is heard of when the case is measured."""
    device = torch.device("cuda", torch.cuda.current_device())
    made = problems.names()
    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet), contextlib.suppress(Exception):
        for name in names:
            _gate(made[name](device))
            torch.cuda.empty_cache()


def _warm(names: list[str], jobs: int) -> None:
    """Fill the compile cache by processes side by side, forked before this one has met the GPU."""
    begun = time.monotonic()
    context = multiprocessing.get_context("fork")
    shares = [names[i::jobs] for i in range(min(jobs, len(names)))]
    running = [context.Process(target=_build, args=(share,)) for share in shares]
    for process in running:
        process.start()
    for process in running:
        process.join()
    print(f"built in {time.monotonic() - begun:.1f} s", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m gem_lowprec.bench", description=__doc__)
    parser.add_argument("case", nargs="*", help="names of cases or their beginnings; all by default")
    parser.add_argument("--skip", action="append", default=[], help="no cases that begin so; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and leave")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all variants; the median counts")
    parser.add_argument("--rep", type=int, default=30, help="milliseconds of repeats of a variant in a round")
    parser.add_argument(
        "--kernels", action="store_true", help="also list what a call of each variant runs on the GPU, by the profiler"
    )
    parser.add_argument("--gate-only", action="store_true", help="check results (and build), time nothing")
    parser.add_argument("--jobs", type=int, default=8, help="processes that build beforehand; 1 for none")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so many seconds")
    parser.add_argument("--commit", help="recorded in the file; by default asked of git")
    parser.add_argument("--out", type=Path, help="write the benchmark file here")
    options = parser.parse_args(arguments)
    made = problems.names()
    chosen = [n for n in made if any(n.startswith(c) for c in options.case or [""])]
    chosen = [n for n in chosen if not any(n.startswith(s) for s in options.skip)]
    lost = [c for c in options.case if not any(n.startswith(c) for n in made)]
    if lost:
        parser.error(f"no case begins with {', '.join(lost)}; there are {', '.join(made)}")
    if options.list:
        print("\n".join(chosen))
        return 0
    begun = time.monotonic()
    if options.jobs > 1:
        # One case of each kind and width builds what all of them need.
        kinds = {n.rsplit("-", 2)[0] if n.startswith(("gemm", "wgrad", "linear")) else n: n for n in chosen}
        _warm(list(kinds.values()), options.jobs)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("the benchmarks need a Hopper GPU, and torch sees none", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    found = {} if options.gate_only else timing.ceilings(device)
    print("ceilings:", {name: round(x, 2) for name, x in found.items()}, flush=True)
    rows: list[dict[str, Any]] = []
    wrong = 0
    for name in chosen:
        if time.monotonic() - begun > options.seconds:
            print(f"{name} and what follows: no time left")
            break
        try:
            rows += _measure(made[name](device), options, found)
        except RuntimeError as error:  # of one case: the others are measured all the same
            wrong += 1
            print(f"{name} FAILED: {error}", flush=True)
        print(f"{name} done after {time.monotonic() - begun:.1f} s", flush=True)
        if rows and options.out:  # after every case: a run that is cut short leaves what it has
            _write(options.out, options.commit or _commit(), found, rows, arguments)
        torch.cuda.empty_cache()
    print(_table(rows))
    return 1 if wrong else 0


def _write(
    path: Path, commit: str, found: dict[str, float], rows: list[dict[str, Any]], arguments: list[str] | None
) -> None:  # fmt: skip
    words = sys.argv[1:] if arguments is None else arguments
    kept = [w for i, w in enumerate(words) if not {w, words[i - 1] if i else ""} & {"--out", "--commit"}]
    result = {
        "suite": "lowprec", "date": datetime.date.today().isoformat(), "card": torch.cuda.get_device_name(),
        "commit": commit, "versions": _versions(), "command": shlex.join(["python", "-m", "gem_lowprec.bench", *kept]),
        "ceilings": {name: round(x, 2) for name, x in found.items()}, "rows": rows,
    }  # fmt: skip
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
