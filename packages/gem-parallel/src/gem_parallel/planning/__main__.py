"""`python -m gem_parallel.planning MODEL TOPOLOGY --batch N`: print a plan."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gem_parallel.planning.layout import STRATEGIES
from gem_parallel.planning.planner import NothingFitsError, plan
from gem_parallel.planning.profile import Profile
from gem_parallel.planning.simulator import Disturbance, curve_table, scaling_curve, simulate
from gem_parallel.planning.spec import ModelSpec
from gem_parallel.planning.topology import Topology


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a plan. Exit status 0; 1 when nothing fits; 2 for a file or value that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m gem_parallel.planning", description="Choose a layout before the run."
    )
    parser.add_argument("model", type=Path, help="TOML of a ModelSpec")
    parser.add_argument("topology", type=Path, help="TOML of a Topology")
    parser.add_argument("--batch", type=int, required=True, help="samples per device and step")
    parser.add_argument("--parts", type=int, help="that a device makes of them; as few as leave room by default")
    parser.add_argument("--world", type=int, help="devices; all of the topology by default")
    parser.add_argument("--profile", type=Path, nargs="+", default=[], help="TOML or JSON files of a measured Profile")
    parser.add_argument(
        "--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES, help="table strategies; v2 is inexact"
    )
    parser.add_argument("--simulate", action="store_true", help="also simulate imbalance and stragglers")
    parser.add_argument("--curve", type=int, nargs="+", help="simulate these numbers of devices (weak scaling)")
    parser.add_argument("--balanced", type=float, default=0.0, help="share of the imbalance that shuffling takes away")
    args = parser.parse_args(arguments)
    began = time.perf_counter()
    try:
        result = plan(
            ModelSpec.from_toml(args.model),
            Topology.from_toml(args.topology),
            args.batch,
            parts=args.parts,
            world=args.world,
            profile=Profile.read(*args.profile) if args.profile else None,
            strategies=args.strategies,
        )
    except NothingFitsError as error:
        print(f"nothing fits: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: cannot read {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{result}\nplanned in {time.perf_counter() - began:.2f} s")
    if args.simulate or args.curve:
        disturbance = Disturbance(balanced=args.balanced)
        print(f"\n{simulate(result, disturbance)}")
        if args.curve:
            options = {
                "parts": args.parts,
                "profile": result.profile,
                "strategies": args.strategies,
                "disturbance": disturbance,
            }
            rows = scaling_curve(result.model, result.topology, args.batch, args.curve, **options)
            print(f"\n{curve_table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
