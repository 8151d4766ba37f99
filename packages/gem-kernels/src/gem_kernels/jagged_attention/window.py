"""Windows on Hopper: which problems the kernels of `window_kernels` take, with which configuration, and their launches.
Nothing here waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gem_kernels.block_attention import blocks
from gem_kernels.jagged_attention.window_kernels import forward_kernel, key_gradient_kernel, query_gradient_kernel
from gem_kernels.tiling import LOG2E, CompileCase, Tile

__all__ = ["backward", "compile_cases", "forward", "takes"]

STEP = 64
WIDEST = 512  # keys of a window: beyond, kernels that overlap products and softmax inside a program are faster
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Tiles of `rows` rows and rows / 16 warps, `programs` of them on an SM, `registers` of a thread at most."""

    rows: int
    programs: int
    registers: int


FORWARD = Config(rows=64, programs=2, registers=255)
QUERY_GRADIENT = Config(rows=64, programs=2, registers=255)
KEY_GRADIENT = Config(rows=64, programs=2, registers=255)
SLOTS = 2


def takes(q: Tensor, k: Tensor, q_offsets: Tensor | None, left: int, right: int) -> bool:
    """Whether a problem that Hopper kernels may run is one for these: narrow on both sides, every sequence with its own
    queries, as many key heads as query heads, head dimension 64 or 128.
    """
    narrow = left >= 0 and right >= 0 and left + right < WIDEST
    return narrow and q_offsets is not None and q.shape[1] == k.shape[1] and q.shape[2] in (64, 128)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _addressable(x: Tensor) -> Tensor:
    """x [T, H, D], copied where its heads are not side by side or TMA cannot address its rows."""
    size = x.element_size()
    aligned = x.stride(0) * size % 16 == 0 and x.stride(0) > 0 and x.data_ptr() % 16 == 0
    together = x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)
    return x if aligned and together else x.contiguous()


def _descriptor(x: Tensor, block: int) -> TensorDescriptor:
    """x [T, H, D] as [T, H * D], in blocks of `block` rows of one head."""
    rows, heads, dim = x.shape
    layout = gl.NVMMASharedLayout.get_default_for([block, dim], DTYPES[x.dtype])
    return TensorDescriptor(x, [rows, heads * dim], [x.stride(0), 1], [block, dim], layout)


def _launch(
    kernel: Any, config: Config, own: Tensor, own_offsets: Tensor, other_offsets: Tensor, first: tuple[Any, ...],
    last: tuple[Any, ...], **constants: Any,
) -> None:  # fmt: skip
    total, heads, dim = own.shape
    records = blocks.records(own_offsets, other_offsets, total, config.rows)
    tiles = records.shape[0] * heads
    kernel[(min(tiles, _processors(own.device) * config.programs),)](
        *first, records, tiles, *last,
        BM=config.rows, D=dim, HEADS=heads, SLOTS=SLOTS, **constants,
        num_warps=config.rows // 16, maxnreg=config.registers,
    )  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, scale: float, left: int, right: int,
    *, config: Config | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """O [Tq, H, D] and LSE [Tq, H]."""
    config = config or FORWARD
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if q.shape[0] == 0:
        return out, lse
    if k.shape[0] == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    q, k, v = (_addressable(x) for x in (q, k, v))
    with torch.cuda.device(q.device):
        _launch(
            forward_kernel, config, q, q_offsets, k_offsets,
            (_descriptor(q, config.rows), _descriptor(k, STEP), _descriptor(v, STEP), out, out.stride(0), lse),
            (left, right, scale * LOG2E.value),
        )  # fmt: skip
    return out, lse


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    q_offsets: Tensor, k_offsets: Tensor, scale: float, left: int, right: int,
    *, query_config: Config | None = None, key_config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK and dV."""
    query_config, key_config = query_config or QUERY_GRADIENT, key_config or KEY_GRADIENT
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if q.shape[0] == 0 or k.shape[0] == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    dout, q, k, v = (_addressable(x) for x in (dout, q, k, v))
    out, lse = out.contiguous(), lse.contiguous()
    total, heads = q.shape[:2]
    stats = torch.empty(2, heads, total, dtype=torch.float32, device=q.device)
    with torch.cuda.device(q.device):
        rows = query_config.rows
        _launch(
            query_gradient_kernel, query_config, q, q_offsets, k_offsets,
            (_descriptor(q, rows), _descriptor(dout, rows), _descriptor(k, STEP), _descriptor(v, STEP),
             out, out.stride(0), lse, lse if dlse is None else dlse.contiguous(), stats, dq, dq.stride(0)),
            (left, right, total, scale * LOG2E.value, scale), DLSE=dlse is not None,
        )  # fmt: skip
        rows = key_config.rows
        _launch(
            key_gradient_kernel, key_config, k, k_offsets, q_offsets,
            (_descriptor(k, rows), _descriptor(v, rows), _descriptor(q, STEP), _descriptor(dout, STEP),
             stats, dk, dv, dk.stride(0)),
            (left, right, total, scale * LOG2E.value, scale),
        )  # fmt: skip
    return dq, dk, dv


def compile_cases() -> list[CompileCase]:
    """The kernels at both head dimensions."""
    from triton.experimental.gluon._runtime import GluonASTSource

    source: Callable[..., Any] = GluonASTSource
    cases = []
    for name, kernel, config, own in (
        ("forward", forward_kernel, FORWARD, ("q_desc",)),
        ("dq", query_gradient_kernel, QUERY_GRADIENT, ("q_desc", "do_desc")),
        ("dkv", key_gradient_kernel, KEY_GRADIENT, ("k_desc", "v_desc")),
    ):
        for dim in (64, 128):
            constants = {"BM": config.rows, "D": dim, "HEADS": 4, "SLOTS": SLOTS}
            constants |= {"DLSE": True} if "DLSE" in kernel.arg_names else {}
            types = {}
            for argument in kernel.arg_names:
                if argument in constants:
                    types[argument] = "constexpr"
                elif argument.endswith("_desc"):
                    rows = config.rows if argument in own else STEP
                    layout = gl.NVMMASharedLayout.get_default_for([rows, dim], gl.bfloat16)
                    types[argument] = f"tensordesc<bf16[{rows}, {dim}],{layout!r}>"
                elif argument == "records_ptr":
                    types[argument] = "*i32"
                elif argument in ("lse_ptr", "dlse_ptr", "stats_ptr"):
                    types[argument] = "*fp32"
                elif argument.endswith("_ptr"):
                    types[argument] = "*bf16"
                else:
                    types[argument] = "fp32" if argument.endswith("scale") else "i32"
            divisible = tuple(a for a in types if a.endswith(("_ptr", "_row")))
            tile = Tile(bm=config.rows, bn=STEP, warps=config.rows // 16, registers=config.registers)
            cases.append(CompileCase(f"window {name} d{dim}", kernel, types, constants, tile, divisible, (90,), source))
    return cases
