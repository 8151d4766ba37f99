"""`python -m gem_kernels.bench attention|gdpa|block|norms`: measure a suite on this machine's GPU, print every case's
rows and write a benchmark file, as they come.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from gem_kernels.bench import block, cases, norms, timing
from gem_kernels.bench import carry as carried


def _commit() -> str:
    """The commit of the checkout that holds this file, marked when the package differs from it; "unknown" outside a
    checkout.
    """
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

    from gem_kernels import __version__

    cuda = torch.version.cuda or "none"
    return {
        "gem-kernels": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": cuda,
        "python": sys.version.split()[0],
    }


def _without(words: list[str], *options: str) -> list[str]:
    """The command line without these options and their values: they say nothing about what was measured."""
    kept = [w for w in words if not w.startswith(tuple(f"{o}=" for o in options))]
    return [w for i, w in enumerate(kept) if w not in options and (i == 0 or kept[i - 1] not in options)]


def _table(rows: list[dict[str, Any]], heading: bool = True) -> str:
    unit = "GB/s" if rows and rows[0]["unit"] == "gbps" else "TFLOP/s"
    lines = [
        f"{'case':18s} {'pass':8s} {'op':16s} {'variant':24s} {'ms':>8s} {unit:>8s} {'of GEMM':>8s} "
        f"{'of copy':>8s} {'host us':>8s}  peers ({unit})"
    ] * heading
    shown: set[tuple[str, str]] = set()
    for r in rows:
        group = (r["case"], r["pass"])
        peers = "" if group in shown else "  ".join(f"{n} {x:.0f}" for n, x in r["peers"].items())
        shown.add(group)
        lines.append(
            f"{r['case']:18s} {r['pass']:8s} {r['op']:16s} {r['variant']:24s} {r['ms']:8.3f} {r[r['unit']]:8.1f} "
            f"{'' if r['of_gemm'] is None else format(r['of_gemm'], '.3f'):>8s} {r['of_copy']:8.3f} "
            f"{format(r['host_us'], '.0f') if 'host_us' in r else '':>8s}  {peers}"
            + (f"  at {r['ghz']:.2f} GHz" if "ghz" in r else "")
        )
    return "\n".join(lines)


def _show(rows: list[dict[str, Any]], heading: bool) -> None:
    if rows:
        print(_table(rows, heading), flush=True)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m gem_kernels.bench", description=__doc__)
    parser.add_argument("suite", choices=("attention", "gdpa", "block", "norms"))
    parser.add_argument("--case", action="append", help="may be repeated; all of the suite by default")
    parser.add_argument(
        "--pass", dest="passes", action="append", choices=("forward", "backward"), help="both by default"
    )
    parser.add_argument(
        "--activation", action="append", help="of the gdpa suite, may be repeated; silu and silu_poly by default"
    )
    parser.add_argument("--variant", default="", help="only variants whose name contains this")
    parser.add_argument(
        "--skip", action="append", default=[], help="no variants whose name contains this; may be repeated"
    )
    parser.add_argument("--peer", action="append", default=[], help="only this peer; may be repeated; all by default")
    parser.add_argument(
        "--clock", action="store_true", help="also the SMs' clock under each variant (attention and gdpa)"
    )
    parser.add_argument(
        "--constant", action="store_true", help="inputs of one number, which need little power (attention and gdpa)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all variants; the median counts")
    parser.add_argument("--rep", type=int, default=40, help="milliseconds of repeats of a variant in a round")
    parser.add_argument(
        "--gate-only", action="store_true", help="check results (and fill the compile cache), time nothing"
    )
    parser.add_argument(
        "--jobs", type=int, default=8,
        help="processes that build before anything is timed; 1 for none",
    )  # fmt: skip
    parser.add_argument(
        "--lock",
        type=Path,
        help="a file that several of these commands share: one at a time measures, none while one builds",
    )
    parser.add_argument("--carry", type=Path, help=argparse.SUPPRESS)  # of a process that a kernel brought down
    parser.add_argument("--commit", help="recorded in the file; by default asked of git")
    parser.add_argument("--out", type=Path, help="write the benchmark file here")
    options = parser.parse_args(arguments)
    names = {"norms": norms.NAMES, "block": block.NAMES}.get(options.suite, cases.NAMES)
    extra = cases.EXTRA if names is cases.NAMES else ()
    unknown = set(options.case or ()) - {*names, *extra}
    if unknown:
        parser.error(
            f"{options.suite} has no case {', '.join(sorted(unknown))}; expected one of {', '.join((*names, *extra))}"
        )
    words = sys.argv[1:] if arguments is None else arguments
    if options.suite in ("block", "norms"):
        return _by_turns(options, list(options.case or names), words)
    if options.jobs > 1 and not options.carry:
        _prebuild(options, options.case or names)  # by forks: before CUDA is in use here
    if not torch.cuda.is_available():
        print("the benchmarks need a GPU, and torch sees none", file=sys.stderr)
        return 2

    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    found: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    if options.carry:
        words, found, rows = carried.load(options.carry)
    elif not options.gate_only:
        found = timing.ceilings(device)
    print("ceilings:", {name: round(x, 2) for name, x in found.items()}, flush=True)
    begun = time.monotonic()
    todo = list(options.case or names)
    while todo:
        name = todo.pop(0)
        try:
            new = _measure(options, name, device, found)
            _show(new, heading=not rows)
            rows += new
        except Exception as error:  # a case that cannot be made, or none of it run, is no reason to lose the others
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        print(f"{name} done after {time.monotonic() - begun:.1f} s", flush=True)
        if rows and options.out:  # after every case: a run that is cut short leaves what it has
            _write(
                options.out,
                options.suite,
                options.commit or _commit(),
                found,
                rows,
                words,
                torch.cuda.get_device_name(),
            )
        if not carried.alive():
            return carried.go_on(words, found, rows, todo)
        torch.cuda.empty_cache()
    return 0


def _prebuild(options: argparse.Namespace, names: Iterable[str]) -> None:
    """Compile what the attention suites will run."""
    from gem_kernels.bench import prebuild

    def wanted(variant: str) -> bool:
        return options.variant in variant and not any(x in variant for x in options.skip)

    prebuild.build(prebuild.tasks(names, _activations(options), wanted, options.peer), 2 * options.jobs)


def _activations(options: argparse.Namespace) -> list[str | None]:
    return [None] if options.suite == "attention" else list(options.activation or ("silu", "silu_poly"))


def _by_turns(options: argparse.Namespace, names: list[str], words: list[str]) -> int:
    """The block and norms suites: processes build side by side, then measure one after the other."""
    from gem_kernels.bench import turns

    if options.activation:
        raise SystemExit("the cases of the block and norms suites have their activations: no --activation")
    turns.compile_alone()
    rows: list[dict[str, Any]] = []
    with turns.Workers(names, max(1, options.jobs), _Suite(options), options.lock) as workers:
        if workers.card is None:
            print("the benchmarks need a GPU, and torch sees none", file=sys.stderr)
            return 2
        found = {} if options.gate_only else workers.ceilings()
        print("ceilings:", {name: round(x, 2) for name, x in found.items()}, flush=True)
        begun = time.monotonic()
        for name in names:
            new = workers.measure(name, found)
            _show(new, heading=not rows)
            rows += new
            print(f"{name} done after {time.monotonic() - begun:.1f} s", flush=True)
            if rows and options.out:  # after every case: a run that is cut short leaves what it has
                _write(options.out, options.suite, options.commit or _commit(), found, rows, words, workers.card)
    return 0


class _Suite:
    """What a process does for a case of the block or norms suite."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.passes = options, tuple(options.passes or ("forward", "backward"))

    def build(self, name: str, device: torch.device) -> None:
        """Everything that a case runs, once."""
        suite = norms if self.options.suite == "norms" else block
        suite.warm(name, device, self.passes, tuple(self.options.peer), self.options.variant, tuple(self.options.skip))

    def measure(self, name: str, device: torch.device, ceilings: dict[str, float]) -> list[dict[str, Any]]:
        """The case's rows."""
        return _measure(self.options, name, device, ceilings)


def _measure(
    options: argparse.Namespace, name: str, device: torch.device, found: dict[str, float]
) -> list[dict[str, Any]]:
    """The rows of one case of the suite."""
    shared: dict[str, Any] = {
        "passes": tuple(options.passes or ("forward", "backward")), "peer_names": tuple(options.peer),
        "rounds": options.rounds, "rep": options.rep, "ceilings": found, "gate_only": options.gate_only,
    }  # fmt: skip
    chosen: dict[str, Any] = {"only": options.variant, "skip": tuple(options.skip)}
    if options.suite == "norms":
        return norms.measure(name, device, **chosen, **shared)
    if options.suite == "block":
        return block.measure(name, device, **chosen, **shared)
    from gem_kernels.bench import suite

    chosen |= {"clock": options.clock, "constant": options.constant}
    rows = []
    for act in _activations(options):
        rows += suite.measure(cases.case(name), act, device, **chosen, **shared)
    return rows


def _write(
    path: Path,
    suite: str,
    commit: str,
    found: dict[str, float],
    rows: list[dict[str, Any]],
    words: list[str],
    card: str,
) -> None:
    words = _without(words, "--out", "--commit", "--lock")
    result = {
        "suite": suite, "date": datetime.date.today().isoformat(), "card": card,
        "commit": commit,
        "versions": _versions(), "command": shlex.join(["python", "-m", "gem_kernels.bench", *words]),
        "ceilings": {name: round(x, 2) for name, x in found.items()}, "rows": rows,
    }  # fmt: skip
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
