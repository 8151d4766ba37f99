"""Block attention on Hopper: where the Gluon kernels of `hopper_kernels` run, with which configuration, and how they
are launched. Nothing here waits for the device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gem_kernels.block_attention.hopper_kernels import backward_kernel, forward_kernel
from gem_kernels.dispatch import Problem
from gem_kernels.tiling import LOG2E, CompileCase, Tile

__all__ = ["applies", "backward", "compile_cases", "forward"]

BLOCK = 64
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@dataclass(frozen=True, kw_only=True)
class Config:
    """`slots` sets of buffers for a program, `programs` of them on an SM, `registers` of a thread at most."""

    slots: int
    programs: int
    registers: int


# By head dimension, as measured (docs/notes/block-attention.md). Shared memory of a program: slots * (3 or 4) * 128 D
# bytes, and backward 8 KB; 227 KB on an SM.
FORWARD = {64: Config(slots=3, programs=3, registers=168), 128: Config(slots=2, programs=2, registers=255)}
BACKWARD = {64: Config(slots=2, programs=2, registers=255), 128: Config(slots=1, programs=2, registers=255)}


def applies(problem: Problem) -> tuple[bool, str]:
    """Blocks of 64, float16 and bfloat16, head dimensions 64 and 128, as many key heads as query heads."""
    if problem.dtype not in DTYPES:
        return False, f"the Hopper kernels take bfloat16 and float16; got {problem.dtype}"
    if problem.head_dim not in FORWARD:
        return False, f"the Hopper kernels take head dimensions 64 and 128; got {problem.head_dim}"
    if "grouped" in problem.features:
        return False, "the Hopper kernels take as many key heads as query heads"
    if f"block:{BLOCK}" not in problem.features:
        return False, f"the Hopper kernels take blocks of {BLOCK}"
    return True, "persistent Gluon kernels for compute capability 9"


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _addressable(x: Tensor) -> Tensor:
    """x [T, H, D], copied where its heads are not side by side or TMA cannot address its rows."""
    size = x.element_size()
    aligned = x.stride(0) * size % 16 == 0 and x.stride(0) > 0 and x.data_ptr() % 16 == 0
    together = x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)
    return x if aligned and together else x.contiguous()


def _layout(dtype: torch.dtype, dim: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([BLOCK, dim], DTYPES[dtype])


def _descriptor(x: Tensor) -> TensorDescriptor:
    """x [T, H, D] as [T, H * D], in blocks of one head."""
    rows, heads, dim = x.shape
    return TensorDescriptor(x, [rows, heads * dim], [x.stride(0), 1], [BLOCK, dim], _layout(x.dtype, dim))


def _constants(dim: int, heads: int, slots: int, act: str | None, rope: int, values: bool, base: float | None) -> Any:
    return {
        "D": dim, "HEADS": heads, "SLOTS": slots, "ACT": act or "softmax", "ROPE": rope, "VALUES": values,
        "LOG2_BASE": math.log2(base or 1.0),
    }  # fmt: skip


def _run(
    kernel: Any, config: Config, q: Tensor, blocks: Tensor, positions: Tensor | None, arguments: tuple[Any, ...],
    scales: tuple[float, ...], act: str | None, base: float | None, values: bool,
) -> None:  # fmt: skip
    heads, dim = q.shape[1:]
    tiles = (blocks.shape[0] - 1) * heads
    rope = 0 if base is None else 1 if positions is None else 2
    assert not values or rope != 1, "values are turned by their place in the sequence"
    with torch.cuda.device(q.device):
        kernel[(min(tiles, _processors(q.device) * config.programs),)](
            *arguments, blocks, blocks if positions is None else positions.float().contiguous(), tiles, *scales,
            **_constants(dim, heads, config.slots, act, rope, values, base),
            num_warps=4, maxnreg=config.registers,
        )  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, blocks: Tensor, positions: Tensor | None,
    block: int, scale: float, activation: str | None, base: float | None, values: bool,
    *, config: Config | None = None,
) -> None:  # fmt: skip
    """Write O; the arguments of `gem_kernels.block_attention`'s backends. `config=None` takes that of the head dim."""
    assert block == BLOCK
    if q.shape[0] == 0:
        return
    q, k, v = (_addressable(x) for x in (q, k, v))
    _run(
        forward_kernel, config or FORWARD[q.shape[2]], q, blocks, positions,
        (*(_descriptor(x) for x in (q, k, v, out)), out, out.stride(0)),
        (scale * LOG2E.value if activation is None else scale,), activation, base, values,
    )  # fmt: skip


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    blocks: Tensor, positions: Tensor | None,
    block: int, scale: float, activation: str | None, base: float | None, values: bool,
    *, config: Config | None = None,
) -> None:  # fmt: skip
    """Write dQ, dK and dV, which may be views of one packed gradient."""
    assert block == BLOCK
    if q.shape[0] == 0:
        return
    dout, q, k, v = (_addressable(x) for x in (dout, q, k, v))
    assert dq.stride() == dk.stride() == dv.stride()
    _run(
        backward_kernel, config or BACKWARD[q.shape[2]], q, blocks, positions,
        (*(_descriptor(x) for x in (q, k, v, dout, dq, dk, dv)), dq, dk, dv, dq.stride(0)),
        (scale * LOG2E.value if activation is None else scale, scale), activation, base, values,
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """Both kernels at both head dimensions, without and with either rotary embedding."""
    from triton.experimental.gluon._runtime import GluonASTSource

    source: Callable[..., Any] = GluonASTSource
    cases = []
    for phase, kernel, configs in (("forward", forward_kernel, FORWARD), ("backward", backward_kernel, BACKWARD)):
        for dim, act, rope in ((64, None, 1), (128, None, 0), (128, None, 1), (128, "silu", 2)):
            constants = _constants(dim, 4, configs[dim].slots, act, rope, rope == 2, 1e4)
            types = {}
            for name in kernel.arg_names:
                if name in constants:
                    types[name] = "constexpr"
                elif name.endswith("_desc"):
                    types[name] = f"tensordesc<bf16[{BLOCK}, {dim}],{_layout(torch.bfloat16, dim)!r}>"
                elif name.endswith("_ptr"):
                    types[name] = {"blocks_ptr": "*i64", "positions_ptr": "*fp32"}.get(name, "*bf16")
                else:
                    types[name] = "fp32" if name.endswith("scale") else "i32"
            divisible = tuple(name for name in types if name.endswith(("_ptr", "_row")))
            label = f"block_attention hopper {phase} d{dim} {act or 'softmax'}{('', ' rope', ' rope v')[rope]}"
            tile = Tile(bm=BLOCK, bn=BLOCK, registers=configs[dim].registers)
            cases.append(CompileCase(label, kernel, types, constants, tile, divisible, (90,), source))
    return cases
