"""Windows on Hopper: which problems the kernels of `window_kernels` take, with which configuration, and their launches.
Nothing here waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gem_kernels.block_attention import blocks
from gem_kernels.jagged_attention import triton
from gem_kernels.jagged_attention.window_kernels import forward_kernel, key_gradient_kernel, query_gradient_kernel
from gem_kernels.tiling import LOG2E, CompileCase, Tile

__all__ = ["backward", "compile_cases", "forward", "takes"]

ROWS = 64
SLOTS = 2  # of the ring
PLACE = {  # of a kernel by head dimension: programs on an SM, and registers of a thread at most
    "forward_kernel": {64: (3, 168), 128: (2, 255)},
    "query_gradient_kernel": {64: (3, 168), 128: (2, 255)},
    "key_gradient_kernel": {64: (2, 255), 128: (2, 255)},
}
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def takes(q: Tensor, k: Tensor, q_offsets: Tensor | None, left: int, right: int) -> bool:
    """Whether a problem that Hopper kernels may run is one for these unasked: a narrow window, queries of their own for
    every sequence, as many key heads as query heads, head dimension 64 or 128.
    """
    heads, dim = q.shape[1:]
    return triton.narrow(left, right) and q_offsets is not None and heads == k.shape[1] and dim in (64, 128)


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
    return gl.NVMMASharedLayout.get_default_for([ROWS, dim], DTYPES[dtype])


def _descriptor(x: Tensor) -> TensorDescriptor:
    """x [T, H, D] as [T, H * D], in tiles of one head."""
    rows, heads, dim = x.shape
    return TensorDescriptor(x, [rows, heads * dim], [x.stride(0), 1], [ROWS, dim], _layout(x.dtype, dim))


def _launch(
    kernel: Any, own: Tensor, own_offsets: Tensor, other_offsets: Tensor, first: tuple[Any, ...],
    last: tuple[Any, ...], **constants: Any,
) -> None:  # fmt: skip
    total, heads, dim = own.shape
    records = blocks.records(own_offsets, other_offsets, total, ROWS)
    tiles = records.shape[0] * heads
    programs, registers = PLACE[kernel.__name__][dim]
    kernel[(min(tiles, _processors(own.device) * programs),)](
        *first, records, tiles, *last, D=dim, HEADS=heads, SLOTS=SLOTS, **constants,
        num_warps=ROWS // 16, maxnreg=registers,
    )  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, scale: float, left: int, right: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """O [Tq, H, D] and LSE [Tq, H]; the scale must be positive."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if q.shape[0] == 0:
        return out, lse
    if k.shape[0] == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    q, k, v = (_addressable(x) for x in (q, k, v))
    with torch.cuda.device(q.device):
        _launch(
            forward_kernel, q, q_offsets, k_offsets,
            (*(_descriptor(x) for x in (q, k, v, out)), out, out.stride(0), lse), (left, right, scale * LOG2E.value),
        )  # fmt: skip
    return out, lse


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    q_offsets: Tensor, k_offsets: Tensor, scale: float, left: int, right: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK and dV."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if q.shape[0] == 0 or k.shape[0] == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    dout, q, k, v, out = (_addressable(x) for x in (dout, q, k, v, out))
    lse = lse.contiguous()
    total, heads = q.shape[:2]
    lse2, delta = (torch.empty(heads * total, dtype=torch.float32, device=q.device) for _ in range(2))
    with torch.cuda.device(q.device):
        _launch(
            query_gradient_kernel, q, q_offsets, k_offsets,
            (*(_descriptor(x) for x in (q, dout, k, v, out, dq)), lse,
             lse if dlse is None else dlse.contiguous(), lse2, delta, dq, dq.stride(0)),
            (left, right, total, scale * LOG2E.value, scale), DLSE=dlse is not None,
        )  # fmt: skip
        _launch(
            key_gradient_kernel, k, k_offsets, q_offsets,
            (*(_descriptor(x) for x in (k, v, q, dout)), lse2, delta, _descriptor(dk), _descriptor(dv),
             dk, dv, dk.stride(0)),
            (left, right, total, scale * LOG2E.value, scale),
        )  # fmt: skip
    return dq, dk, dv


def compile_cases() -> list[CompileCase]:
    """The kernels at both head dimensions."""
    from triton.experimental.gluon._runtime import GluonASTSource

    source: Callable[..., Any] = GluonASTSource
    cases = []
    for name, kernel in (
        ("forward", forward_kernel), ("dq", query_gradient_kernel), ("dkv", key_gradient_kernel)
    ):  # fmt: skip
        for dim in (64, 128):
            constants = {"D": dim, "HEADS": 4, "SLOTS": SLOTS}
            constants |= {"DLSE": True} if "DLSE" in kernel.arg_names else {}
            types = {}
            for argument in kernel.arg_names:
                if argument in constants:
                    types[argument] = "constexpr"
                elif argument.endswith("_desc"):
                    types[argument] = f"tensordesc<bf16[{ROWS}, {dim}],{_layout(torch.bfloat16, dim)!r}>"
                elif argument == "records_ptr":
                    types[argument] = "*i32"
                elif argument in ("lse_ptr", "dlse_ptr", "lse2_ptr", "delta_ptr"):
                    types[argument] = "*fp32"
                elif argument.endswith("_ptr"):
                    types[argument] = "*bf16"
                else:
                    types[argument] = "fp32" if argument.endswith("scale") else "i32"
            divisible = tuple(a for a in types if a.endswith(("_ptr", "_row")))
            tile = Tile(bm=ROWS, bn=ROWS, warps=ROWS // 16, registers=PLACE[kernel.__name__][dim][1])
            cases.append(CompileCase(f"window {name} d{dim}", kernel, types, constants, tile, divisible, (90,), source))
    return cases
