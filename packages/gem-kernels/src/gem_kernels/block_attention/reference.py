"""Block attention in plain PyTorch: every block is a sequence of its own. Differentiable by autograd."""

from __future__ import annotations

from torch import Tensor

from gem_kernels.gdpa import reference as gdpa_reference
from gem_kernels.jagged import block_offsets
from gem_kernels.jagged_attention import reference as softmax_reference
from gem_kernels.rotary import reference as rotary_reference


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    block: int,
    scale: float,
    activation: str | None = None,
    positions: Tensor | None = None,
    base: float = 10000.0,
    values: bool = False,
) -> Tensor:
    """O [T, H, D]; with `positions` [T], q and k (and v if `values`) are rotated first."""
    if positions is not None:
        q, k = (rotary_reference.rotate(x, positions, base) for x in (q, k))
        v = rotary_reference.rotate(v, positions, base) if values else v
    blocks = block_offsets(offsets, q.shape[0], block)
    if activation is None:
        return softmax_reference.attention(q, k, v, blocks, blocks, block, block, scale=scale)[0]
    return gdpa_reference.attention(q, k, v, blocks, blocks, block, block, activation=activation, scale=scale)
