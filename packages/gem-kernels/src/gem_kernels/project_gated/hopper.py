"""Where the Hopper kernels of gated projections run and how they are launched. Nothing here waits for the device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gem_kernels.dispatch import Problem
from gem_kernels.norm_linear.triton import addressable
from gem_kernels.project_gated import hopper_backward, hopper_forward
from gem_kernels.project_gated.hopper_tiles import COLUMNS, HALF, NC, ROWS
from gem_kernels.projections.gates import sum_up
from gem_kernels.tiling import CompileCase, Tile

__all__ = ["applies", "backward", "compile_cases", "forward"]

WIDEST = 512  # inputs: 128 rows of the weight of so many are 128 KB
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@dataclass(frozen=True, kw_only=True)
class Forward:
    """A ring of `slots` steps of rows, and `out` parts of the result for each consumer."""

    slots: int
    out: int

    def constants(self, steps: int, *, q: bool, dim: int, bias: bool, norm: bool) -> dict[str, Any]:
        """The kernel's."""
        given = {"STEPS": steps, "SLOTS": self.slots, "PHASES": phases(steps, self.slots), "OUT": self.out, "Q": q}
        return {**given, "DIM": dim, "BIAS": bias, "NORM": norm, "REGS": 232}


@dataclass(frozen=True, kw_only=True)
class Backward:
    """A ring of `slots` steps of rows, and `sets` of 64 columns of gate and up, which are asked for to come to L2
    `ahead` tiles before.
    """

    slots: int
    sets: int
    ahead: int = 0

    def constants(self, steps: int, *, rest: bool, again: bool, bias: bool) -> dict[str, Any]:
        """The kernel's."""
        given = {"STEPS": steps, "SLOTS": self.slots, "PHASES": phases(steps, self.slots), "SETS": self.sets}
        return {**given, "REST": rest, "AGAIN": again, "BIAS": bias, "AHEAD": self.ahead, "REGS": 232}


FORWARD = {"usual": Forward(slots=8, out=2)}
BACKWARD = {"usual": Backward(slots=6, sets=3, ahead=2), "again": Backward(slots=6, sets=2)}


def phases(steps: int, slots: int) -> int:
    """Barriers for steps whose rows are there, each of one slot and one consumer."""
    return math.lcm(slots, NC.value * steps)


def applies(problem: Problem) -> tuple[bool, str]:
    """16 bits, K a multiple of 64 up to 512; what is asked of hidden, q and its heads is in the features."""
    if problem.dtype not in DTYPES:
        return False, f"the Hopper kernels take bfloat16 and float16; got {problem.dtype}"
    if problem.head_dim % HALF.value or not 0 < problem.head_dim <= WIDEST:
        return False, f"the Hopper kernels take K in steps of 64 up to {WIDEST}; got {problem.head_dim}"
    for feature in problem.features:
        name, _, number = feature.partition(":")
        if name == "head" and int(number) not in (0, 64, 128):
            return False, f"the Hopper kernels take heads of 64 and 128; got {number}"
        if name in ("hidden", "behind") and int(number) % COLUMNS.value:
            return False, f"the Hopper kernels take columns in steps of {COLUMNS.value}; got {name} {number}"
    return True, "persistent, warp-specialised Gluon kernels for compute capability 9"


@functools.cache
def _programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def grid(device: torch.device, *columns: int) -> int:
    """One program for each processor, and at least one for each column of tiles."""
    return max(_programs(device), *columns)


def _layout(dtype: torch.dtype, *block: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), DTYPES[dtype])


def _descriptor(x: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), _layout(x.dtype, *block))


def rows_of(x: Tensor) -> TensorDescriptor:
    return _descriptor(x, ROWS.value, HALF.value)


def in_pairs(rows: Tensor, first: int) -> TensorDescriptor:
    """Rows of a weight [first * n, K] as [first, n, K], of which a load takes 64 of two neighbours."""
    pairs = rows.unflatten(0, (first, rows.shape[0] // first))
    return _descriptor(pairs, 2, HALF.value, HALF.value)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, gain: Tensor | None, hidden: int, heads: int, eps: float,
    *, config: Forward | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """packed [T, 2 hidden + H D], h [T, hidden] and q [T, H, D] of x [T, K]."""
    x, weight = addressable(x), addressable(weight)
    rows, outputs = x.shape[0], weight.shape[0]
    width = outputs - 2 * hidden
    dim = width // heads
    packed, h, q = (torch.empty(rows, n, dtype=x.dtype, device=x.device) for n in (outputs, hidden, width))
    if rows:
        config = config or FORWARD["usual"]
        constants = config.constants(
            x.shape[1] // HALF.value, q=width > 0, dim=dim or 64, bias=bias is not None, norm=gain is not None
        )
        gates = in_pairs(weight[: 2 * hidden], 2)
        behind = in_pairs(weight[2 * hidden :], width // HALF.value) if width else gates
        with torch.cuda.device(x.device):
            hopper_forward.kernel[(grid(x.device, hidden // HALF.value, width // COLUMNS.value),)](
                rows_of(x), gates, behind, rows_of(packed), rows_of(h), rows_of(q if width else h),
                weight if bias is None else bias, weight if gain is None else gain,
                triton.cdiv(rows, ROWS.value), hidden // HALF.value, width // COLUMNS.value, hidden, eps,
                **constants, num_warps=4,
            )  # fmt: skip
    return packed, h, q.view(rows, heads, dim)


def backward(
    dy: Tensor, weight: Tensor, packed: Tensor, dpacked: Tensor, dbias: Tensor | None, hidden: int,
    *, again: bool = False, config: Backward | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """With dh = (dy weight)[:, :hidden], writes the gradients of gate and up into dpacked [T, >= 2 hidden] and their
    columns' sums into dbias [2 hidden].

    Returns (dy weight)[:, hidden:], and h where it is asked for again.
    """
    dy, weight = addressable(dy), addressable(weight)
    rows, behind = dy.shape[0], weight.shape[1] - hidden
    rest = torch.empty(rows, behind, dtype=dy.dtype, device=dy.device)
    h = torch.empty(rows, hidden, dtype=dy.dtype, device=dy.device) if again else None
    if rows == 0:
        if dbias is not None:
            dbias.zero_()
        return rest, h
    config = config or BACKWARD["again" if again else "usual"]
    constants = config.constants(weight.shape[0] // HALF.value, rest=behind > 0, again=again, bias=dbias is not None)
    gates, rests = hidden // COLUMNS.value, behind // COLUMNS.value
    programs = grid(dy.device, gates + rests)
    tiles = triton.cdiv(rows, ROWS.value)
    parts = 4 * NC.value * min(programs // (gates + rests), tiles) if dbias is not None else 0
    sums = torch.empty(parts * 2 * hidden, dtype=torch.float32, device=dy.device)
    with torch.cuda.device(dy.device):
        hopper_backward.kernel[(programs,)](
            rows_of(dy), _descriptor(weight, HALF.value, COLUMNS.value), rows_of(packed), rows_of(dpacked),
            rows_of(dpacked if h is None else h), rows_of(rest if behind else dpacked),
            packed, sums, tiles, gates, rests, hidden, rows, packed.stride(0), **constants, num_warps=4,
        )  # fmt: skip
    if dbias is not None:
        sum_up(sums, parts, dbias)
    return rest, h


def types_of(kernel: Any, blocks: Mapping[str, tuple[int, ...]], constants: dict[str, Any]) -> dict[str, str]:
    types = {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name in blocks:
            shape = ", ".join(map(str, blocks[name]))
            types[name] = f"tensordesc<bf16[{shape}],{_layout(torch.bfloat16, *blocks[name])!r}>"
        elif name.endswith("_ptr"):
            types[name] = "*bf16"
        else:
            types[name] = {"parts_f32": "*fp32", "eps": "fp32"}.get(name, "i32")
    return types


def compile_cases() -> list[CompileCase]:
    """Every configuration at the shapes of GEM's preset "large"."""
    from triton.experimental.gluon._runtime import GluonASTSource

    source: Callable[..., Any] = GluonASTSource
    cases = []
    tile, half, columns = ROWS.value, HALF.value, COLUMNS.value
    row = (tile, half)
    bare = ("alone", FORWARD["usual"])  # no bias, no norm
    for name, config in (*FORWARD.items(), bare):
        whole = name != bare[0]
        constants = config.constants(8, q=True, dim=128, bias=whole, norm=whole)
        rows = dict.fromkeys(("x_desc", "packed_desc", "h_desc", "told_desc"), row)
        blocks = {**rows, **dict.fromkeys(("gate_desc", "q_desc"), (2, half, half))}
        types = types_of(hopper_forward.kernel, blocks, constants)
        cases.append(CompileCase(
            f"project_gated hopper forward {name}", hopper_forward.kernel, types, constants,
            Tile(bm=tile, bn=columns), ("bias_ptr", "gain_ptr"), (90,), source,
        ))  # fmt: skip
    for name, plan in (*BACKWARD.items(), ("alone", BACKWARD["usual"])):
        whole = name != bare[0]
        constants = plan.constants(8, rest=whole, again=name == "again", bias=whole)
        names = ("x_desc", "packed_desc", "dpacked_desc", "again_desc", "rest_desc")
        blocks = {**dict.fromkeys(names, row), "w_desc": (half, columns)}
        types = types_of(hopper_backward.kernel, blocks, constants)
        cases.append(CompileCase(
            f"project_gated hopper backward {name}", hopper_backward.kernel, types, constants,
            Tile(bm=tile, bn=columns), ("parts_f32", "packed_ptr", "packed_row"), (90,), source,
        ))  # fmt: skip
    return cases
