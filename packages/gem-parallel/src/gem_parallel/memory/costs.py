"""FLOPs of this project's kernels for torch's partitioner, from shapes: attention as if all sequences were of equal
length, for lengths are not in shapes.

The operators are known by their names; whoever has not imported them has none to compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from gem_parallel.memory.profile import declare_cost


def attention(
    q: torch.Size, k: torch.Size, v: torch.Size, q_offsets: torch.Size | None, k_offsets: torch.Size, *_: Any, **__: Any
) -> int:
    """Two products of every query with its sample's keys: 4 H D Tq Tk / B; learned queries serve each sample."""
    samples = max(k_offsets[0] - 1, 1)
    queries = q[0] * samples if q_offsets is None else q[0]
    return 4 * queries * q[1] * q[2] * k[0] // samples


def folded_norm(x: torch.Size, gain: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    """A projection with the norm before it: x [.., C], weight [O, C]."""
    return 2 * x.numel() * weight[0]


def normed_projection(x: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    """The same with the norm behind it."""
    return 2 * x.numel() * weight[0]


KNOWN: dict[str, Callable[..., float]] = {
    "jagged_attention": attention,
    "gdpa": attention,
    "norm_linear": folded_norm,
    "linear_norm": normed_projection,
}


def declare_kernels() -> list[str]:
    """Tell the solvers of those that there are, unless somebody has; returns their names."""
    found = [name for name in KNOWN if hasattr(torch.ops.gem_kernels, name)]
    for name in found:
        operator = getattr(torch.ops.gem_kernels, name)
        if operator not in flop_registry:
            declare_cost(operator, flops=KNOWN[name])
    return found
