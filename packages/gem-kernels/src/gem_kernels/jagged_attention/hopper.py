"""Jagged flash attention on Hopper: a persistent, warp-specialised Gluon kernel forward (`gem_kernels.hopper`).

Rows past a sequence's end are the next sequence's: they are read, and weighted by 0, which does not keep an infinity or
a NaN out.
`launch_backward.choose_backward` says whether the Hopper backward or the portable one runs. Through a narrow window the
kernels of `window` run in both passes (`window_past` forward over the past), or the portable ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gem_kernels.dispatch import Problem
from gem_kernels.hopper import launch, launch_backward, support
from gem_kernels.hopper.tiles import Tiles
from gem_kernels.jagged_attention import triton, window, window_past
from gem_kernels.tiling import CompileCase

__all__ = ["applies", "backward", "compile_cases", "forward"]


def applies(problem: Problem) -> tuple[bool, str]:
    """bfloat16 or float16, head dimension 32, 64, 96 or 128."""
    return support.applies(problem)


def compile_cases() -> list[CompileCase]:
    """Every kernel configuration that may be picked, and the kernels for narrow windows."""
    return support.compile_cases("softmax") + window.compile_cases() + window_past.compile_cases("softmax")


def _positive(q: Tensor, scale: float) -> tuple[Tensor, float, int]:
    """The kernels take the maximum before they scale, so the scale must be positive: its sign goes into Q."""
    sign = (scale > 0) - (scale < 0)
    return (q, scale, 1) if sign > 0 else (q * sign, -scale if sign else 1.0, sign)


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, bias: Tensor | None,
    max_q: int, max_k: int, scale: float, left: int, right: int,
    *, config: launch.ForwardConfig | None = None, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """O [Tq, H, D] and LSE [Tq, H]; the arguments of `gem_kernels.jagged_attention`'s backends.

    config: the kernel configuration; None picks one from the lengths that the host knows.
    tiles: the tile list, when one is shared by several calls with the same offsets and configuration; None builds it
        on the GPU.
    """
    if config is None and bias is None and window.takes(q, k, q_offsets, left, right):
        assert q_offsets is not None
        q, scale, _ = _positive(q, scale)
        if window_past.takes(q, k, q_offsets, k_offsets, left, right, "softmax"):
            return window_past.forward(q, k, v, k_offsets, scale, left, act="softmax")
        return window.forward(q, k, v, q_offsets, k_offsets, scale, left, right)
    if config is None and triton.narrow(left, right):  # 192 rows and steps of 128 keys would do several times the work
        return triton.forward(q, k, v, q_offsets, k_offsets, bias, max_q, max_k, scale, left, right)
    q, scale, _ = _positive(q, scale)
    return launch.forward(
        q, k, v, q_offsets, k_offsets, max_q, max_k, scale,
        act="softmax", out_scale=1.0, left=left, right=right, config=config, tiles=tiles, bias=bias,
    )  # fmt: skip


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    q_offsets: Tensor | None, k_offsets: Tensor, bias: Tensor | None, bias_grad: bool,
    max_q: int, max_k: int, scale: float, left: int, right: int,
    *, config: launch_backward.BackwardConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV and the bias's gradient (empty unless `bias_grad`); `config=None` lets
    `launch_backward.choose_backward` decide.
    """
    if config is None and bias is None and window.takes(q, k, q_offsets, left, right):
        assert q_offsets is not None
        q, scale, sign = _positive(q, scale)
        dq, dk, dv = window.backward(dout, dlse, q, k, v, out, lse, q_offsets, k_offsets, scale, left, right)
        return (dq if sign > 0 else dq * sign), dk, dv, torch.empty(0, dtype=q.dtype, device=q.device)
    if config is None and not triton.narrow(left, right):
        config = launch_backward.choose_backward(
            max_q, max_k, q.shape[1] // k.shape[1], left, right, bias=bias is not None
        )  # fmt: skip
    if config is None:
        return triton.backward(
            dout, dlse, q, k, v, out, lse, q_offsets, k_offsets, bias, bias_grad, max_q, max_k, scale, left, right
        )
    dbias = torch.empty(
        bias.shape if bias is not None and bias_grad else 0,
        dtype=q.dtype if bias is None else bias.dtype,
        device=q.device,
    )
    q, scale, sign = _positive(q, scale)
    dq, dk, dv = launch_backward.backward(
        dout, dlse, q, k, v, out, lse, q_offsets, k_offsets, max_q, max_k, scale,
        act="softmax", out_scale=1.0, left=left, right=right, config=config,
        bias=bias, bias_grad=dbias if bias_grad else None,
    )  # fmt: skip
    return (dq if sign > 0 else dq * sign), dk, dv, dbias
