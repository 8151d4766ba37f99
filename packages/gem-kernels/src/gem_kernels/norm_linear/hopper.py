"""A projection with an RMSNorm before or after it on Hopper: where the Gluon kernel of `hopper_kernels` runs and how it
is launched. Nothing here waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gem_kernels.dispatch import Problem
from gem_kernels.norm_linear import hopper_resident as resident
from gem_kernels.norm_linear import triton as portable
from gem_kernels.norm_linear.hopper_kernels import NC, PARTS, ROWS, kernel
from gem_kernels.tiling import CompileCase, Tile

__all__ = ["applies", "compile_cases", "forward", "forward_after"]

TILE_ROWS = NC.value * ROWS.value
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@dataclass(frozen=True, kw_only=True)
class Config:
    """BN columns of the result and BK of the inputs at a time, a ring of `slots`; `steps` of BK columns are all that
    there are, and the weight stays in shared memory (None: it does not).
    """

    bn: int
    slots: int
    bk: int = 64
    steps: int | None = None

    def constants(self, before: bool, bias: bool) -> dict[str, Any]:
        """The kernel's."""
        stays = {} if self.steps is None else {"STEPS": self.steps}
        return {"BN": self.bn, "BK": self.bk, "SLOTS": self.slots, "BEFORE": before, "BIAS": bias, **stays}


WIDE, SLIM = Config(bn=256, slots=4), Config(bn=128, slots=5)
RESIDENT = {steps: Config(bn=256, slots=3, steps=steps) for steps in (1, 2, 3, 4)}


def choose(inputs: int, outputs: int, *, bias: bool = False) -> Config:
    """The configuration for these widths. The weight stays where that was measured to be faster: not for one program's
    columns alone, nor with a bias, with which the kernel spills; nor for so many columns that the programs, as many for
    each 256, would leave more than a tenth of the SMs without any.
    """
    if inputs == 256 and 2 * WIDE.bn <= outputs <= 16 * WIDE.bn and not bias:
        return RESIDENT[4]
    return WIDE if outputs > SLIM.bn else SLIM


def applies(problem: Problem) -> tuple[bool, str]:
    """float16 and bfloat16, widths that are multiples of 8."""
    able, reason = portable.applies(problem)
    return able, "a persistent, warp-specialised Gluon kernel for compute capability 9" if able else reason


@functools.cache
def _programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _layout(dtype: torch.dtype, rows: int, columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], DTYPES[dtype])


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], _layout(x.dtype, rows, columns))


def _run(
    x: Tensor, weight: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float, config: Config
) -> Tensor:  # fmt: skip
    """`gain` None: the norm is before the product, and the weight has the gain in it."""
    rows, columns = x.shape[0], weight.shape[0]
    y = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    x, weight = portable.addressable(x), portable.addressable(weight)
    across = triton.cdiv(columns, config.bn)
    if config.steps is None:
        run, tiles = kernel, triton.cdiv(rows, TILE_ROWS) * across
        programs = min(tiles, _programs(x.device))
    else:
        run, tiles = resident.kernel, triton.cdiv(rows, ROWS.value)
        programs = min(tiles, max(1, _programs(x.device) // across)) * across
    with torch.cuda.device(x.device):
        run[(programs,)](
            _descriptor(x, ROWS.value, config.bk), _descriptor(weight, config.bn, config.bk),
            _descriptor(y, ROWS.value, config.bn // PARTS.value),
            weight if gain is None else gain, weight if bias is None else bias,
            tiles, x.shape[1], columns, across, eps, **config.constants(gain is None, bias is not None), num_warps=4,
        )  # fmt: skip
    return y


def forward(
    x: Tensor, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, config: Config | None = None
) -> Tensor:  # fmt: skip
    """The norm before the product: [M, K], [K], [N, K], [N] -> [M, N]."""
    config = config or choose(weight.shape[1], weight.shape[0], bias=bias is not None)
    return _run(x, portable.scaled(weight, gain), None, bias, eps, config)


def forward_after(
    x: Tensor, weight: Tensor, gain: Tensor, bias: Tensor | None, eps: float, *, config: Config | None = None
) -> Tensor:  # fmt: skip
    """The norm after the product: [M, K], [N, K], [N], [N] -> [M, N], N <= 256."""
    config = config or choose(weight.shape[1], weight.shape[0])
    assert weight.shape[0] <= config.bn, "a row must fit in one tile"
    return _run(x, weight, gain, bias, eps, config)


def compile_cases() -> list[CompileCase]:
    """Both orders at both widths."""
    from triton.experimental.gluon._runtime import GluonASTSource

    source: Callable[..., Any] = GluonASTSource
    cases = []
    for name, config in (("n256", WIDE), ("n128", SLIM), ("k256", RESIDENT[4])):
        for before in (True, False):
            constants = config.constants(before, True)
            shapes = {
                "x_desc": (ROWS.value, config.bk), "w_desc": (config.bn, config.bk),
                "y_desc": (ROWS.value, config.bn // PARTS.value),
            }  # fmt: skip
            types = {
                **{n: f"tensordesc<bf16[{r}, {c}],{_layout(torch.bfloat16, r, c)!r}>" for n, (r, c) in shapes.items()},
                "gain_ptr": "*bf16", "bias_ptr": "*bf16", "tiles": "i32", "K": "i32", "N": "i32", "columns": "i32",
                "eps": "fp32", **dict.fromkeys(constants, "constexpr"),
            }  # fmt: skip
            label = f"norm_linear hopper {'before' if before else 'after'} {name}"
            run = kernel if config.steps is None else resident.kernel
            tile = Tile(bm=TILE_ROWS, bn=config.bn)
            cases.append(CompileCase(label, run, types, constants, tile, ("gain_ptr", "bias_ptr"), (90,), source))
    return cases
