"""Where the Hopper kernel of projected heads runs and how it is launched. Nothing here waits for the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from gem_kernels.dispatch import Problem
from gem_kernels.norm_linear.triton import addressable
from gem_kernels.project_gated import hopper as gated
from gem_kernels.project_gated.hopper_tiles import COLUMNS, HALF, ROWS
from gem_kernels.project_rotary import hopper_kernels
from gem_kernels.tiling import CompileCase, Tile

__all__ = ["applies", "compile_cases", "forward"]


def applies(problem: Problem) -> tuple[bool, str]:
    """16 bits, K a multiple of 64 up to 512; what is asked of the heads is in the features."""
    return gated.applies(problem)


def _constants(
    steps: int, *, dim: int, bias: bool, norm: bool, turns: int, among: bool, config: gated.Forward
) -> dict[str, Any]:  # fmt: skip
    return {
        "STEPS": steps, "SLOTS": config.slots, "PHASES": gated.phases(steps, config.slots), "OUT": config.out,
        "DIM": dim, "BIAS": bias, "NORM": norm, "TURNS": turns, "AMONG": among, "REGS": 232,
    }  # fmt: skip


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, gains: list[Tensor | None], heads: int, positions: list[Tensor],
    bases: list[float], seats: Tensor | None, added: int, eps: float, *, config: gated.Forward | None = None,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """packed [T, (n + 1) H D] of x [T, K], and its first n parts [T, H, D] normed and turned; the first of two with
    `added` rows that are left to the caller, its own where `seats` say.
    """
    x, weight = addressable(x), addressable(weight)
    rows, count = x.shape[0], len(gains)
    width = weight.shape[0] // (count + 1)
    dim = width // heads
    packed = torch.empty(rows, weight.shape[0], dtype=x.dtype, device=x.device)
    sizes = (rows + added, rows)[:count] if count == 2 else (rows,)
    parts = [torch.empty(n, heads, dim, dtype=x.dtype, device=x.device) for n in sizes]
    if rows:
        config = config or gated.FORWARD["usual"]
        constants = _constants(
            x.shape[1] // HALF.value, dim=dim, bias=bias is not None, norm=gains[0] is not None, turns=len(positions),
            among=seats is not None, config=config,
        )  # fmt: skip
        given = [weight if g is None else g for g in gains]
        places = [p.contiguous() for p in positions] or [x]
        logs = [math.log2(b) for b in bases] + [0.0, 0.0]
        columns = width // COLUMNS.value
        with torch.cuda.device(x.device):
            hopper_kernels.kernel[(gated.grid(x.device, columns),)](
                gated.rows_of(x), gated.in_pairs(weight, weight.shape[0] // HALF.value), gated.rows_of(packed),
                *(gated.rows_of(p.view(p.shape[0], width)) for p in (parts[0], parts[-1])), parts[0],
                weight if bias is None else bias, given[0], given[-1], places[0], places[-1],
                packed if seats is None else seats.contiguous(), logs[0], logs[1],
                triton.cdiv(rows, ROWS.value), columns, count + 1, rows, width, eps, **constants, num_warps=4,
            )  # fmt: skip
    return packed, parts


def compile_cases() -> list[CompileCase]:
    """At the shapes of GEM's preset "large"."""
    from triton.experimental.gluon._runtime import GluonASTSource

    source: Callable[..., Any] = GluonASTSource
    cases = []
    kernel = hopper_kernels.kernel
    row = (ROWS.value, HALF.value)
    for name, turns, among in (("among", 1, True), ("two turns", 2, False), ("alone", 0, False)):
        constants = _constants(
            8, dim=128, bias=turns > 0, norm=turns > 0, turns=turns, among=among,
            config=gated.FORWARD["usual"],
        )  # fmt: skip
        blocks = {
            **dict.fromkeys(("x_desc", "packed_desc", "q_desc", "k_desc"), row), "w_desc": (2, HALF.value, HALF.value)
        }  # fmt: skip
        types = gated.types_of(kernel, blocks, constants)
        types |= {"first_ptr": "*fp32", "second_ptr": "*fp32", "seats_ptr": "*i64", "width": "i32"}
        types |= {"log_first": "fp32", "log_second": "fp32"}
        cases.append(CompileCase(
            f"project_rotary hopper {name}", kernel, types, constants, Tile(bm=ROWS.value, bn=COLUMNS.value),
            ("width", *(n for n in types if n.endswith("_ptr"))), (90,), source,
        ))  # fmt: skip
    return cases
