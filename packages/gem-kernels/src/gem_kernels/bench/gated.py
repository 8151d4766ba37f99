"""`python -m gem_kernels.bench.gated`: projections with what reads them in their registers, fused on Hopper
(`gem_kernels.project_gated`, forward and backward; `project_rotary`) and apart (cuBLAS and the kernels of
`gem_kernels.projections`), at the widths of GEM's preset "large". Every variant is checked against float64 first; what
is wrong is not timed. Runs are CUDA graphs that take turns; rows are printed as they come.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_kernels import testing
from gem_kernels.bench import __main__ as header
from gem_kernels.bench import timing
from gem_kernels.project_gated import hopper
from gem_kernels.project_gated import triton as apart
from gem_kernels.project_rotary import hopper as heads_hopper
from gem_kernels.project_rotary import triton as heads_apart
from gem_kernels.projections import reference as projections

WIDTH, HIDDEN, HEADS, EPS = 512, 1024, 4, 1e-6
SAMPLE = 4096  # rows, of both ends, that are compared
PEERS = ("cuBLAS", "apart")  # the product alone; the product and the pass behind it
TOLERANCE = 6e-3  # relative error of a BF16 result against float64
Run = Callable[[], tuple[Tensor | None, ...]]


class Case:
    """Operands of T rows, and what runs on them by direction and name."""

    def __init__(self, rows: int, device: torch.device) -> None:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16)

        outputs = 2 * HIDDEN + WIDTH
        self.rows = rows
        self.x, self.weight = normal(rows, WIDTH), normal(outputs, WIDTH) / WIDTH**0.5
        self.bias, self.gain = torch.randn(outputs, device=device), 1 + 0.1 * torch.randn(WIDTH // HEADS, device=device)
        self.dy, self.both = normal(rows, WIDTH), normal(WIDTH, HIDDEN + WIDTH) / WIDTH**0.5
        self.packed = normal(rows, outputs)
        self.heads_weight = normal(3 * WIDTH, WIDTH) / WIDTH**0.5
        self.age = torch.rand(rows, device=device) * 15
        at = torch.arange(rows, device=device)
        self.seats = at + 3 * (at // 1000 + 1)  # three rows before each thousand
        self.added = rows // 1000 * 3 + 3

    def forward(self, run: Callable[..., tuple[Tensor, ...]], **how: Any) -> tuple[Tensor, ...]:
        """packed, h and q."""
        return run(self.x, self.weight, self.bias, self.gain, HIDDEN, HEADS, EPS, **how)

    def backward(self, run: Callable[..., tuple[Any, ...]], **how: Any) -> tuple[Tensor | None, ...]:
        """The gradients of gate and up, their sums, the gradient of what else is multiplied, and h if it is made."""
        dpacked = torch.empty_like(self.packed)
        dbias = torch.empty(2 * HIDDEN, device=self.x.device)
        rest, h = run(self.dy, self.both, self.packed, dpacked, dbias, HIDDEN, **how)
        return dpacked[:, : 2 * HIDDEN], dbias, rest, h

    def heads(self, run: Callable[..., tuple[Tensor, list[Tensor]]], **how: Any) -> tuple[Tensor, ...]:
        """packed, q without the rows that are left to others, and k."""
        given = (self.bias[: 3 * WIDTH], [self.gain, self.gain], HEADS, [self.age], [1e2], self.seats, self.added, EPS)
        packed, (q, k) = run(self.x, self.heads_weight, *given, **how)
        return packed, q, k

    def runs(self) -> dict[str, dict[str, Run]]:
        """By direction: what is timed."""
        forward: dict[str, Run] = {
            "cuBLAS": lambda: (F.linear(self.x, self.weight),),
            "apart": lambda: self.forward(apart.forward),
        }
        for name, config in hopper.FORWARD.items():
            forward[f"hopper {name}"] = functools.partial(self.forward, hopper.forward, config=config)
        backward: dict[str, Run] = {
            "cuBLAS": lambda: (self.dy @ self.both,),
            "apart": lambda: self.backward(apart.backward),
            "apart, h again": lambda: self.backward(apart.backward, again=True),
        }
        for name, plan in hopper.BACKWARD.items():
            again = name == "again"
            backward[f"hopper {name}"] = functools.partial(self.backward, hopper.backward, config=plan, again=again)
        heads: dict[str, Run] = {
            "cuBLAS": lambda: (F.linear(self.x, self.heads_weight),),
            "apart": lambda: self.heads(heads_apart.forward),
        }
        for name, config in hopper.FORWARD.items():
            heads[f"hopper {name}"] = functools.partial(self.heads, heads_hopper.forward, config=config)
        return {"forward": forward, "backward": backward, "heads": heads}

    def exact(self, direction: str, rows: slice) -> tuple[Tensor, ...]:
        """Of some rows in float64; sums are left out."""
        if direction == "forward":
            packed = self.x[rows].double() @ self.weight.double().T + self.bias.double()
            gate, up, q = packed.split((HIDDEN, HIDDEN, WIDTH), dim=1)
            heads = q.unflatten(1, (HEADS, -1))
            normed = heads / (heads.square().mean(-1, keepdim=True) + EPS).sqrt() * self.gain.double()
            return packed, F.silu(gate) * up, normed
        if direction == "heads":
            packed = self.x[rows].double() @ self.heads_weight.double().T + self.bias[: 3 * WIDTH].double()
            turn = [self.age[rows]], [1e2]
            gains = [self.gain.double()] * 2
            return packed, *projections.rotary_heads(packed, HEADS, gains, *turn, EPS)[:2]  # type: ignore[arg-type]
        given = self.packed[rows, : 2 * HIDDEN].double().requires_grad_()
        h = F.silu(given[:, :HIDDEN]) * given[:, HIDDEN:]
        made = self.dy[rows].double() @ self.both.double()
        (dgates,) = torch.autograd.grad(h, given, made[:, :HIDDEN])
        return dgates, made[:, HIDDEN:], h.detach()

    def wrong(self, direction: str, run: Run) -> float:
        """The largest relative error at either end of the rows, NaN included; of sums against the gradients' own."""
        with testing.poisoned():
            made = run()
        worst = 0.0
        if direction == "backward":
            sums = made[1]
            assert sums is not None
            worst = testing.relative_error(sums, made[0].double().sum(0))  # type: ignore[union-attr]
            made = (made[0], *made[2:])
        if direction == "heads":
            made = (made[0], made[1][self.seats], made[2])  # type: ignore[index]
        for rows in (slice(0, SAMPLE), slice(self.rows - SAMPLE, self.rows)):
            for got, exact in zip(made, self.exact(direction, rows), strict=False):
                if got is not None:
                    worst = max(worst, testing.relative_error(got[rows], exact), key=lambda e: (e != e, e))
        return worst


def _flops(direction: str, rows: int) -> int:
    return 2 * rows * WIDTH * {"forward": 2 * HIDDEN, "backward": HIDDEN, "heads": 2 * WIDTH}[direction] + (
        2 * rows * WIDTH * WIDTH
    )


def measure(rows: int, device: torch.device, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of T, as they come."""
    case, found = Case(rows, device), []
    for direction, runs in case.runs().items():
        kept: dict[str, Run] = {}
        errors: dict[str, float] = {}
        for name, run in runs.items():
            if name not in PEERS:
                try:
                    errors[name] = case.wrong(direction, run)
                except Exception as failure:  # whatever it throws is the finding
                    print(f"{rows} {direction} {name}: {type(failure).__name__}: {str(failure)[:300]}", flush=True)
                    continue
                print(f"{rows} {direction} {name}: relative error {errors[name]:.2e}", flush=True)
                if not errors[name] < TOLERANCE:
                    continue
            kept[name] = timing.captured(run)
        if options.check:
            continue
        times = timing.interleaved(kept, rounds=options.rounds, rep=options.rep)
        rates = {name: round(_flops(direction, rows) / ms / 1e9, 1) for name, ms in times.items()}
        for name, ms in times.items():
            row = {
                "case": f"{direction}-{rows}", "op": "project_rotary" if direction == "heads" else "project_gated",
                "pass": "backward" if direction == "backward" else "forward", "variant": name, "head_dim": WIDTH,
                "ms": round(ms, 4), "tflops": rates[name], "of_apart": round(times["apart"] / ms, 3),
                "ghz": round(timing.sm_ghz(kept[name], 150), 3), "error": errors.get(name),
                "peers": {peer: rates[peer] for peer in PEERS}, "unit": "tflops",
            }  # fmt: skip
            found.append(row)
            print(json.dumps({k: v for k, v in row.items() if k not in ("peers", "unit", "head_dim")}), flush=True)
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m gem_kernels.bench.gated", description=__doc__.split(":")[0])
    parser.add_argument("--rows", type=int, action="append", help="may be repeated; default 65536 and 262144")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rep", type=int, default=60, help="milliseconds of a variant in each round")
    parser.add_argument("--check", action="store_true", help="no times")
    parser.add_argument("--once", metavar="DIRECTION", help="run this pass twice, for a profiler")
    parser.add_argument("--commit", help="what is measured; default: what git says")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    if options.once:
        run = Case((options.rows or [65536])[0], device).runs()[options.once]
        for _ in range(2):
            run["hopper usual"]()
        torch.cuda.synchronize()
        return 0
    rows = [row for count in options.rows or [65536, 262144] for row in measure(count, device, options)]
    if options.out:
        command = ["python", "-m", "gem_kernels.bench.gated", *header._without(words, "--out", "--commit")]
        told = {
            "suite": "projections", "date": datetime.date.today().isoformat(), "card": torch.cuda.get_device_name(),
            "commit": options.commit or header._commit(), "versions": header._versions(),
            "command": shlex.join(command), "ceilings": {}, "rows": rows,
        }  # fmt: skip
        options.out.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
