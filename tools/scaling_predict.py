"""What `gem_parallel.predict` expects of the rows of tools/scaling_cards.py, from one card's measured steps: no cards.

    python tools/scaling_predict.py docs/benchmarks/scaling-2-h200-2026-11-30.json \\
        --links docs/benchmarks/comm-2-h200-2026-11-30.json --worlds 2 4 8

The first file gives the step of one card alone and its passes at several batches, the second NCCL's collectives alone
and what a product beside them loses; both become the plan's profile, as in a run on cards. Ratios of ensembles are left
out: one card alone has not trained them.
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gem_parallel import ModelSpec, Profile, Topology
from scaling_cards import predicted, units_profile
from scaling_rows import table
from scaling_steps import Bench, described

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


def links(file: Path | None, tier: str) -> Profile:
    """The measured collectives of `file`, or assumed ones."""
    if file is None:
        return Profile()
    result = json.loads(file.read_text())
    ours = [row for row in result["rows"] if row["op"] in [f"{kind}, default" for kind in KINDS]]
    found = [
        {
            "tier": tier,
            "kind": row["op"].partition(",")[0].replace("-", "_"),
            "size": result["world"],
            "bytes": row["bytes"],
            "ms": row["ms"],
        }
        for row in ours
    ]
    slowdown = 1 - min(row["gemm"] for row in ours if row["op"].startswith("all-gather"))
    return replace(Profile().measured(collectives=found), slowdown=slowdown)


def main(arguments: list[str] | None = None) -> int:
    """A table for each world."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--links", type=Path)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--topology", default="h200-host", help="an example of gem_parallel's")
    args = parser.parse_args(arguments)
    result = json.loads(args.file.read_text())
    alone: dict[str, Any] = next(row for row in result["rows"] if row["case"] == "alone")
    with importlib.resources.as_file(importlib.resources.files("gem_parallel") / "examples") as folder:
        topology = Topology.from_toml(folder / f"{args.topology}.toml")
    assumed = links(args.links, topology.tiers[0].name)
    print(f"{result['model']}, {alone['batch']} samples a card and part, alone {alone['ms']:.1f} ms; {assumed.source}")
    print(f"{'row':24} " + " ".join(f"{n:>3} cards {'ratio':>6} {'work':>6} {'GiB':>6}" for n in args.worlds))
    lines: dict[str, list[str]] = {}
    for column, world in enumerate(args.worlds):
        options = argparse.Namespace(model=result["model"], batch=int(alone["batch"]), parts=[1, 4])
        bench = Bench(options, world)
        first = bench.batches(bench.deal(options.batch, 1, False), 0, torch.device("cpu"))[0]
        specs: dict[int, ModelSpec] = {n: described(bench, n, first, "bf16") for n in (1, 2)}
        profile = assumed.measured(units=units_profile(specs[1], alone["batches"][:2]))
        rate = replace(assumed, tflops=3 * specs[1].flops * options.batch / alone["ms"] / 1e9, unit_us=0.0)
        for row in table(world, options.parts):
            share, parts = options.batch // (world if row.strong else 1), row.parts or 1
            work = bench.work(bench.deal(share, parts, row.balanced, row.strong), row.config.experts)
            found = predicted(bench, row, specs, {1: profile, 2: rate}, work, topology)
            if found is None:
                continue
            fair = alone["of_parts"][str(parts)] / (world if row.strong else 1)
            ratio = f"{fair / found['ms']:6.3f}" if row.config.experts == 1 else f"{'-':>6}"
            text = f"{found['ms']:9.1f} {ratio} {work:6.3f} {found['memory_gib']:6.1f}"
            cells = lines.setdefault(row.name, [])
            cells += [f"{'':>30}"] * (column - len(cells)) + [text]
    for name, cells in lines.items():
        print(f"{name:24} " + " ".join(cells))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
