"""How unequal the programs' shares of a case are, by schedule: `python -m gem_kernels.bench.skew`, on the CPU.

Largest estimated work of a program over the mean, 132 persistent programs. "dense grid": each takes an equal run of a
grid over (sequence, head, row tile), empty tiles included; "sorted, in runs": equal runs of the tiles that hold rows,
by work; "zigzag": those dealt forwards and backwards; "taken": each to the program that is free first, which is what an
atomic counter does at run time.
"""

from __future__ import annotations

import torch

from gem_kernels import schedule
from gem_kernels.bench import cases

PROGRAMS = 132
SHAPE = schedule.TileShape(consumers=3, step=128)


def dense_grid(q: torch.Tensor, k: torch.Tensor, heads: int, shape: schedule.TileShape) -> torch.Tensor:
    """Work of every tile of the dense grid, [tiles], in its order."""
    rows = shape.block * shape.consumers
    first = torch.arange(-(-int(q.max()) // rows)) * rows
    blocks = -(-(q[:, None] - first).clamp(0, rows) // shape.block)
    steps = -(-k // shape.step)
    work = torch.where(blocks > 0, schedule.work(blocks, steps[:, None]), 0)
    return work[:, None, :].expand(-1, heads, -1).flatten()


def skews(name: str) -> dict[str, float]:
    """Of one case, by schedule; and how many tiles of the dense grid are empty."""
    case = cases.case(name)
    q, k = (torch.as_tensor(x) for x in (case.q, case.k))
    own, other = (torch.cat([torch.zeros(1, dtype=torch.int64), x.cumsum(0)]) for x in (q, k))
    table = schedule.tiles(own, other, cases.HEADS, SHAPE)
    work, dense = schedule.tile_work(table, SHAPE), dense_grid(q, k, cases.HEADS, SHAPE)
    return {
        "empty": float((dense == 0).float().mean()),
        "dense grid": schedule.skew(dense, schedule.blocked(len(dense), PROGRAMS), PROGRAMS),
        "sorted, in runs": schedule.skew(work, schedule.blocked(len(work), PROGRAMS), PROGRAMS),
        "zigzag": schedule.skew(work, schedule.zigzag(len(work), PROGRAMS), PROGRAMS),
        "taken": schedule.skew(work, schedule.longest_first(work, PROGRAMS), PROGRAMS),
    }


def main() -> None:
    """Print the table."""
    plain = [name for name in cases.NAMES if max(cases.case(name).window) < 0 and cases.case(name).dim == cases.DIM]
    rows = {name: skews(name) for name in plain if not cases.case(name).bias}
    columns = list(next(iter(rows.values())))
    print("| case |", " | ".join(columns), "|")
    print("| --- |", " | ".join("---" for _ in columns), "|")
    for name, row in rows.items():
        print(f"| {name} | {row['empty']:.0%} |", " | ".join(f"{row[c]:.2f}" for c in columns[1:]), "|")


if __name__ == "__main__":
    main()
