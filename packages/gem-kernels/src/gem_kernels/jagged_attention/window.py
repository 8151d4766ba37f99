"""Windows on Hopper: which problems the kernels for them take, with which configuration, and their launches. Nothing
here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gem_kernels.block_attention import blocks
from gem_kernels.hopper.launch import programs
from gem_kernels.jagged_attention import triton
from gem_kernels.jagged_attention.window_backward import backward_kernel, statistics_kernel
from gem_kernels.jagged_attention.window_forward import forward_kernel
from gem_kernels.jagged_attention.window_two_passes import key_gradient_kernel, query_gradient_kernel
from gem_kernels.tiling import LOG2E, CompileCase, Tile, launch

__all__ = ["addressable", "backward", "compile_cases", "descriptor", "forward", "kernel_case", "of_the_past", "takes"]

ROWS = 64
SLOTS = 2  # of the ring
STATISTICS = Tile(bm=64, bn=64, stages=1)


def _place(kernel: Any, dim: int, ahead: bool) -> tuple[int, int]:
    """A kernel's programs on an SM, and registers of a thread at most."""
    small = dim == 64 and kernel in (forward_kernel, query_gradient_kernel) and not ahead
    return (3, 168) if small else (2, 255)


DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def takes(q: Tensor, k: Tensor, q_offsets: Tensor | None, left: int, right: int) -> bool:
    """Whether a problem that Hopper kernels may run is one for these unasked: a narrow window, queries of their own for
    every sequence, as many key heads as query heads, head dimension 64 or 128.
    """
    heads, dim = q.shape[1:]
    return triton.narrow(left, right) and q_offsets is not None and heads == k.shape[1] and dim in (64, 128)


def of_the_past(q_offsets: Tensor, k_offsets: Tensor, right: int) -> bool:
    """Whether it is self-attention over the past. The same offsets may come as two tensors."""
    own = q_offsets.shape == k_offsets.shape and q_offsets.dtype == k_offsets.dtype
    return right == 0 and own and q_offsets.data_ptr() == k_offsets.data_ptr()


def addressable(x: Tensor) -> Tensor:
    """x [T, H, D], copied where its heads are not side by side or TMA cannot address its rows."""
    size = x.element_size()
    aligned = x.stride(0) * size % 16 == 0 and x.stride(0) > 0 and x.data_ptr() % 16 == 0
    together = x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)
    return x if aligned and together else x.contiguous()


def _layout(dtype: torch.dtype, dim: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([ROWS, dim], DTYPES[dtype])


def descriptor(x: Tensor) -> TensorDescriptor:
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
    resident, registers = _place(kernel, dim, constants.get("AHEAD", False))
    kernel[(min(tiles, programs(own.device) * resident),)](
        *first, records, tiles, *last, D=dim, HEADS=heads, **constants, num_warps=4, maxnreg=registers
    )


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, scale: float, left: int, right: int,
    *, ahead: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """O [Tq, H, D] and LSE [Tq, H]; the scale must be positive. `ahead`: scores are made a step ahead; None does so for
    self-attention over the past in bfloat16 of 128 columns, whose wider windows are `window_past`'s.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if q.shape[0] == 0:
        return out, lse
    if k.shape[0] == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    q, k, v = (addressable(x) for x in (q, k, v))
    if ahead is None:
        ahead = q.dtype == torch.bfloat16 and q.shape[2] == 128 and of_the_past(q_offsets, k_offsets, right)
    with torch.cuda.device(q.device):
        _launch(
            forward_kernel, q, q_offsets, k_offsets,
            (descriptor(q), descriptor(k), descriptor(v), descriptor(out), out, out.stride(0), lse),
            (left, right, scale * LOG2E.value), SLOTS=SLOTS, AHEAD=ahead,
        )  # fmt: skip
    return out, lse


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    q_offsets: Tensor, k_offsets: Tensor, scale: float, left: int, right: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK and dV: in one pass for self-attention over the past, else in two."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if q.shape[0] == 0 or k.shape[0] == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    dout, q, k, v, out = (addressable(x) for x in (dout, q, k, v, out))
    lse = lse.contiguous()
    total, heads, dim = q.shape
    lse2, delta = (torch.empty(heads * total, dtype=torch.float32, device=q.device) for _ in range(2))
    if of_the_past(q_offsets, k_offsets, right):
        launch(
            statistics_kernel, -(-total // STATISTICS.bm) * heads, q.device, STATISTICS,
            out, dout, lse, lse if dlse is None else dlse.contiguous(), lse2, delta, out.stride(0), dout.stride(0),
            total, HEADS=heads, D=dim, BM=STATISTICS.bm, DLSE=dlse is not None,
        )  # fmt: skip
        with torch.cuda.device(q.device):
            _launch(
                backward_kernel, q, q_offsets, k_offsets,
                (*(descriptor(x) for x in (q, dout, k, v, dq, dk, dv)), lse2, delta, dq, dk, dv, dq.stride(0)),
                (left, total, scale * LOG2E.value, scale),
            )  # fmt: skip
        return dq, dk, dv
    with torch.cuda.device(q.device):
        _launch(
            query_gradient_kernel, q, q_offsets, k_offsets,
            (*(descriptor(x) for x in (q, dout, k, v, out, dq)), lse,
             lse if dlse is None else dlse.contiguous(), lse2, delta, dq, dq.stride(0)),
            (left, right, total, scale * LOG2E.value, scale), SLOTS=SLOTS, DLSE=dlse is not None,
        )  # fmt: skip
        _launch(
            key_gradient_kernel, k, k_offsets, q_offsets,
            (*(descriptor(x) for x in (k, v, q, dout)), lse2, delta, descriptor(dk), descriptor(dv),
             dk, dv, dk.stride(0)),
            (left, right, total, scale * LOG2E.value, scale), SLOTS=SLOTS,
        )  # fmt: skip
    return dq, dk, dv


def kernel_case(
    name: str, kernel: Any, dim: int, constants: dict[str, Any], registers: int, **options: bool
) -> CompileCase:  # fmt: skip
    """A kernel of windows in bfloat16; `options` as those of `CompileCase`."""
    from triton.experimental.gluon._runtime import GluonASTSource

    source: Callable[..., Any] = GluonASTSource
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
    return CompileCase(
        name=name, kernel=kernel, signature=types, constants=constants,
        tile=Tile(bm=ROWS, bn=ROWS, registers=registers),
        divisible=tuple(a for a in types if a.endswith(("_ptr", "_row"))), arch=(90,), source=source, **options,
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """The kernels at both head dimensions."""
    cases = []
    for name, kernel, dims in (
        ("forward", forward_kernel, (64, 128)), ("forward, ahead", forward_kernel, (128,)),
        ("dq", query_gradient_kernel, (64, 128)), ("dkv", key_gradient_kernel, (64, 128)),
        ("backward", backward_kernel, (64, 128)),
    ):  # fmt: skip
        for dim in dims:
            ahead = name == "forward, ahead"
            asked = {"SLOTS": SLOTS, "DLSE": True, "AHEAD": ahead}
            constants = {"D": dim, "HEADS": 4, **{n: x for n, x in asked.items() if n in kernel.arg_names}}
            cases.append(kernel_case(f"window {name} d{dim}", kernel, dim, constants, _place(kernel, dim, ahead)[1]))
    return cases
