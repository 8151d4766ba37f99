"""The portable forward with subtraction masking: the last tile's missing keys are zeros, and what they add to the sum
is taken off once.

The keys past a sequence's end are loaded as 0, so their scores are 0 and each adds exp(0 - max) to a row's sum; c of
them together c exp(-max), which is known. Their values are 0 too, so P V is right as it is. The mask of the last tile,
a comparison and a selection for every score, becomes one multiply-add for every row.

Where all of a row's true scores are far below 0 the true sum is small beside the surplus, and the subtraction loses
digits: relative error about 2^-24 c / sum exp(s). So a tile uses the mask after all unless every row has a score above
-`limit` (base 2), shown by a key tile before or by a positive score in the last one. That is decided in the kernel.

Selectable for comparison (`forward`) and in the benchmark; without causal masks and windows, whose edges need a mask
anyway. The backward is `triton.backward`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gem_kernels.jagged_attention import triton
from gem_kernels.tiled_attention import forward_kernel
from gem_kernels.tiling import CompileCase, signature

__all__ = ["LIMIT", "compile_cases", "forward"]

LIMIT = 3.0  # at most 2^-24 * 64 * 2^3 = 3e-5 of the sum is lost


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, bias: Tensor | None,
    max_q: int, max_k: int, scale: float, *, limit: float = LIMIT,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """O [Tq, H, D] and LSE [Tq, H] of `jagged_attention` without causal mask and window.

    limit: a tile subtracts if every row has a score of at least -limit, in base 2 (a natural score times log2 e).
    """
    return triton.forward(q, k, v, q_offsets, k_offsets, bias, max_q, max_k, scale, -1, -1, subtract=limit)


def compile_cases() -> list[CompileCase]:
    """The kernel at the head dimensions that matter."""
    cases = []
    for dim in (64, 128):
        t = triton.tile("forward", torch.bfloat16, dim)
        constants: dict[str, object] = {
            "HEADS": 4, "GROUP": 1, "D": dim, "DP": dim, "BM": t.bm, "BN": t.bn, "SHARED": False, "BIAS": False,
            "PRECISION": "ieee", "ACT": "softmax", "LEFT": False, "RIGHT": False, "NARROW": False, "SUBTRACT": LIMIT,
        }  # fmt: skip
        types, divisible = signature(forward_kernel, "bf16", constants)
        label = f"jagged_attention forward bf16 d{dim} subtraction"
        cases.append(CompileCase(label, forward_kernel, types, constants, t, divisible))
    return cases
