"""GDPA on Hopper: persistent, warp-specialised Gluon kernels (`gem_kernels.hopper`), the softmax's without the
softmax; forward through a narrow window over the past, that of `jagged_attention.window_past`.
"""

from __future__ import annotations

from torch import Tensor

from gem_kernels.dispatch import Problem
from gem_kernels.gdpa import triton
from gem_kernels.hopper import launch, launch_backward, support
from gem_kernels.hopper.tiles import Tiles
from gem_kernels.jagged_attention import window_past
from gem_kernels.tiling import CompileCase

__all__ = ["applies", "backward", "compile_cases", "forward"]


def applies(problem: Problem) -> tuple[bool, str]:
    """bfloat16 or float16, head dimension 32, 64, 96 or 128."""
    return support.applies(problem)


def compile_cases() -> list[CompileCase]:
    """Every kernel configuration that may be picked, for the activations that differ in kind."""
    acts = ("silu", "gelu", "silu_poly4")
    return [case for act in acts for case in support.compile_cases(act) + window_past.compile_cases(act)]


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, max_q: int, max_k: int,
    activation: str, scale: float, out_scale: float, left: int, right: int, residual: Tensor | None = None,
    *, config: launch.ForwardConfig | None = None, tiles: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """O [Tq, H, D]; the arguments of `gem_kernels.gdpa`'s backends. `config` and `tiles`: see
    `jagged_attention.hopper.forward`.
    """
    plain = config is None and residual is None
    if plain and window_past.takes(q, k, q_offsets, k_offsets, left, right, activation):
        return window_past.forward(q, k, v, k_offsets, scale, left, act=activation, out_scale=out_scale)[0]
    return launch.forward(
        q, k, v, q_offsets, k_offsets, max_q, max_k, scale,
        act=activation, out_scale=out_scale, left=left, right=right, config=config, tiles=tiles, residual=residual,
    )[0]  # fmt: skip


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, max_q: int, max_k: int,
    activation: str, scale: float, out_scale: float, left: int, right: int,
    *, config: launch_backward.BackwardConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV; `config=None` lets `launch_backward.choose_backward` decide."""
    if config is None:
        config = launch_backward.choose_backward(max_q, max_k, q.shape[1] // k.shape[1], left, right)
    if config is None:
        return triton.backward(
            dout, q, k, v, q_offsets, k_offsets, max_q, max_k, activation, scale, out_scale, left, right
        )
    return launch_backward.backward(
        dout, None, q, k, v, None, None, q_offsets, k_offsets, max_q, max_k, scale,
        act=activation, out_scale=out_scale, left=left, right=right, config=config,
    )  # fmt: skip
