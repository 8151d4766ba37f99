"""What the Hopper forward has to do for a case, counted from its tile list: `python -m gem_kernels.bench.count`, on the
CPU.

useful: products asked for, of those that are multiplied (64 rows, 64 keys at a time); slots: of a consumer's places in
tiles those that have a block; tensor: milliseconds of products alone, L2: of the operands alone, both at a given clock;
tail: the last program over the mean where a program takes a tile three tiles ahead, as the loader does, and two
("late"), by the costs of a step and of a tile. With a benchmark file, the clock at which products alone would take as
long as was measured: what it is short of the card's is lost, one way or another.
"""

from __future__ import annotations

import argparse
import heapq
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gem_kernels import schedule
from gem_kernels.bench import cases

PROGRAMS = 132
MACS = 2048  # of an SM and cycle, 16-bit
L2_BYTES = 30  # of an SM and cycle: 5.7 to 6.8 TB/s were seen at 1.5 GHz
COSTS = {128: (3300, 1800, 2500), 64: (2130, 1800, 1600)}  # cycles of a whole step, a short one, a tile (notes)


def _offsets(lengths: Any) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.as_tensor(lengths).cumsum(0)])


def tail(costs: list[float], ahead: int, programs: int = PROGRAMS) -> float:
    """The last program's end over the mean of all. A program takes its next tile when it begins the one that is `ahead`
    tiles before it; the first ones are taken at once, in turn.
    """
    ends = [0.0] * programs
    begun: list[list[float]] = [[] for _ in range(programs)]
    waiting = [(0.0, 0, p) for p in range(programs)]  # when it takes its next tile, its turn, the program
    for cost in costs:
        _, turn, p = heapq.heappop(waiting)
        begun[p].append(ends[p])
        ends[p] += cost
        mine = begun[p]
        # tile number len(mine) is taken when tile number len(mine) - ahead begins
        at = mine[len(mine) - ahead] if len(mine) >= ahead else 0.0
        heapq.heappush(waiting, (at, turn + 1, p))
    mean = sum(ends) / programs
    return max(ends) / mean if mean else 1.0


def count(name: str, step: int, ghz: float) -> dict[str, float]:
    """The figures of one case (without a window) and one length of a step."""
    case = cases.case(name)
    q, k = torch.as_tensor(case.q), torch.as_tensor(case.k)
    shape = schedule.TileShape(consumers=3, step=step)
    table = schedule.tiles(_offsets(q), _offsets(k), cases.HEADS, shape)
    blocks, keys = -(-table[:, 1].long() // 64), table[:, 3].long()
    wholes = keys // step
    shorts = -(-(keys - wholes * step) // 64)
    units = wholes * (step // 64) + shorts  # of 64 keys
    useful, executed = float((q * k).sum()) * cases.HEADS, float((blocks * units).sum()) * 64 * 64
    operands = (units * 2 * 64 + blocks * 2 * 64) * case.dim * 2  # K and V of the steps, Q and O of the blocks
    whole, short, tile = COSTS[step]
    costs = (wholes * whole + shorts * short + tile).double().tolist()
    cycles = PROGRAMS * ghz * 1e6
    return {
        "useful": useful / executed, "slots": executed / float((3 * units).sum() * 64 * 64),
        "tiles": len(table) / PROGRAMS, "wholes": float(wholes.double().mean()),
        "shorts": float(shorts.double().mean()), "tensor": executed * 2 * case.dim / MACS / cycles,
        "L2": float(operands.sum()) / L2_BYTES / cycles, "tail": tail(costs, 3), "late": tail(costs, 2),
    }  # fmt: skip


def _measured(path: Path | None) -> dict[str, float]:
    rows = json.loads(path.read_text())["rows"] if path else []
    mine = [r for r in rows if r["pass"] == "forward" and r["variant"] == "hopper" and not r["op"].endswith("_poly")]
    return {r["case"]: r["ms"] for r in mine}


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m gem_kernels.bench.count", description=__doc__.split("\n\n")[0])
    parser.add_argument("--ghz", type=float, default=1.5, help="the SMs' clock")
    parser.add_argument("--measured", type=Path, help="a benchmark file of the attention or the gdpa suite")
    options = parser.parse_args(arguments)
    measured = _measured(options.measured)
    names = [n for n in cases.NAMES if max(cases.case(n).window) < 0 and cases.case(n).dim == cases.DIM]
    columns = list(count("self-half-512", 128, options.ghz))
    print("| case, keys of a step |", " | ".join(columns), "| measured ms | products at GHz |")
    print("| --- |" + " --- |" * (len(columns) + 2))
    for name in names:
        if cases.case(name).bias:
            continue
        for step in COSTS:
            figures = count(name, step, options.ghz)
            ms = measured.get(name)
            last = [f"{ms:.3f}", f"{figures['tensor'] * options.ghz / ms:.2f}"] if ms else ["", ""]
            print(f"| {name}, {step} |", " | ".join([*(f"{figures[c]:.3g}" for c in columns), *last]), "|")


if __name__ == "__main__":
    main()
