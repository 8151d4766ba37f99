"""Useful FLOPs and bytes of the operators, exact for given lengths: only pairs of a query and a key that it sees are
counted.

A multiply-add is 2 FLOPs and only the matrix products count, as is the custom for MFU. Forward has two products per
visible pair (Q K^T and P V): 4 D FLOPs per pair and query head. Backward has five (S again, dV, dP, dQ, dK): 2.5
times the forward; recomputing S is counted, as FlashAttention's own figures do. `batch_flops` of a model, which
counts no recomputation, takes 2 times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Lengths: TypeAlias = "Sequence[int] | Tensor | npt.NDArray[np.integer[Any]]"
BACKWARD = 2.5


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one call must compute and move at least: each operand read once, each result written once."""

    forward_flops: int
    forward_bytes: int
    backward_bytes: int
    products: tuple[int, int] = (2, 5)  # matrix products of the forward and of the backward pass

    @property
    def backward_flops(self) -> int:
        """Attention has five matrix products where the forward has two; a projection two where it has one."""
        forward, backward = self.products
        return self.forward_flops * backward // forward


def _as_lengths(name: str, lengths: Lengths) -> Tensor:
    array = torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
    if array.ndim != 1:
        raise ValueError(f"{name} must be a list of lengths; got shape {tuple(array.shape)}")
    if array.numel() and array.min() < 0:
        raise ValueError(f"{name} must not be negative; got {int(array.min())}")
    return array


def pairs(
    q_lengths: Lengths,
    k_lengths: Lengths | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
) -> Tensor:
    """How many (query, key) pairs each sequence has, [B] int64; the mask is `jagged_attention`'s."""
    q = _as_lengths("q_lengths", q_lengths)
    k = q if k_lengths is None else _as_lengths("k_lengths", k_lengths)
    if q.shape != k.shape:
        raise ValueError(f"q_lengths and k_lengths must hold as many sequences; got {q.numel()} and {k.numel()}")
    left, right = (-1 if side is None else int(side) for side in window) if window is not None else (-1, -1)
    right = 0 if causal else right
    if min(left, right) < -1:
        raise ValueError(f"window sides must be non-negative, or -1 or None for unlimited; got {window!r}")

    def up_to(last: Tensor, count: Tensor, most: Tensor) -> Tensor:
        # sum over the `count` integers that end at `last` of clip(x, 0, most)
        def ramp(x: Tensor) -> Tensor:  # sum of clip(t, 0, most) for t <= x
            inside = torch.minimum(x.clamp(min=0), most)
            return inside * (inside + 1) // 2 + (x - most).clamp(min=0) * most

        return ramp(last) - ramp(last - count)

    # Query i stands at p = i + k - q, p running up to k - 1. It sees keys [p - left, p + right], clipped to [0, k).
    end = q * k if right < 0 else up_to(k + right, q, k)  # sum of the ends, clip(p + right + 1, 0, k)
    begin = torch.zeros_like(q) if left < 0 else up_to(k - 1 - left, q, k)  # sum of the begins, clip(p - left, 0, k)
    return end - begin


def attention(
    q_lengths: Lengths,
    k_lengths: Lengths | None = None,
    *,
    heads: int,
    head_dim: int,
    kv_heads: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    shared_q: bool = False,
    element_size: int = 2,
    softmax: bool = True,
) -> Cost:
    """Cost of one `jagged_attention` (or, with softmax=False, `gdpa`) over these lengths.

    `shared_q`: q_lengths (all equal) are those of learned queries read once for the whole batch. Bytes: forward reads
    Q, K, V and writes O (and the float32 LSE); backward reads Q, K, V, dO (and O, LSE) and writes dQ, dK, dV. A bias
    is not counted.
    """
    q = _as_lengths("q_lengths", q_lengths)
    k = q if k_lengths is None else _as_lengths("k_lengths", k_lengths)
    kv_heads = kv_heads or heads
    flops = 4 * head_dim * heads * int(pairs(q, k, causal=causal, window=window).sum())
    rows_o = int(q.sum())
    rows_q = max(q.tolist(), default=0) if shared_q else rows_o
    q_bytes, o_bytes = (rows * heads * head_dim * element_size for rows in (rows_q, rows_o))
    kv_bytes = 2 * int(k.sum()) * kv_heads * head_dim * element_size
    lse_bytes = rows_o * heads * 4 if softmax else 0
    backward_reads = q_bytes + kv_bytes + o_bytes + (o_bytes + lse_bytes if softmax else 0)
    return Cost(
        forward_flops=flops,
        forward_bytes=q_bytes + kv_bytes + o_bytes + lse_bytes,
        backward_bytes=backward_reads + q_bytes + kv_bytes,
    )


def gdpa(q_lengths: Lengths, k_lengths: Lengths | None = None, **options) -> Cost:  # type: ignore[no-untyped-def]
    """Cost of one `gdpa`; the options of `attention`. The activation's own arithmetic is not counted."""
    return attention(q_lengths, k_lengths, softmax=False, **options)


def block_attention(
    lengths: Lengths,
    *,
    heads: int,
    head_dim: int,
    kv_heads: int | None = None,
    block: int = 64,
    element_size: int = 2,
    positions: bool = False,
) -> Cost:
    """Cost of one `block_attention`: a sequence's last block is short; no LSE, and backward does not read O.

    `positions`: a rotary embedding reads float32 positions, once for all heads; counted ones cost no bytes. The
    rotation itself is no matrix product and not counted.
    """
    n = _as_lengths("lengths", lengths)
    last = n % block
    visible = (n // block) * block * block + last * last
    kv_heads = kv_heads or heads
    q_bytes = int(n.sum()) * heads * head_dim * element_size
    kv_bytes = 2 * int(n.sum()) * kv_heads * head_dim * element_size
    place_bytes = int(n.sum()) * 4 if positions else 0
    return Cost(
        forward_flops=4 * head_dim * heads * int(visible.sum()),
        forward_bytes=2 * q_bytes + kv_bytes + place_bytes,
        backward_bytes=3 * q_bytes + 2 * kv_bytes + place_bytes,
    )


def rotary(tokens: int, *, heads: int, head_dim: int, element_size: int = 2) -> Cost:
    """Cost of one `rope` or `rote`: x (or its gradient) is read and written, float32 positions are read."""
    moved = 2 * tokens * heads * head_dim * element_size + 4 * tokens
    return Cost(forward_flops=0, forward_bytes=moved, backward_bytes=moved)


def norm_linear(rows: int, inputs: int, outputs: int, *, after: bool = False, element_size: int = 2) -> Cost:
    """Cost of one `norm_linear`, or (`after`) `linear_norm`, of [rows, inputs] to [rows, outputs] without a bias: a
    matrix product forward, two backward. Bytes: x, the weight and y forward; x, dy and the weight, dx and the weight's
    gradient backward.
    """
    x, y, weight = (n * element_size for n in (rows * inputs, rows * outputs, inputs * outputs))
    gain = (outputs if after else inputs) * element_size
    return Cost(
        forward_flops=2 * rows * inputs * outputs,
        forward_bytes=x + y + weight + gain,
        backward_bytes=2 * x + y + 2 * (weight + gain),
        products=(1, 2),
    )


def norm(
    rows: int,
    width: int,
    *,
    layer: bool = False,
    residual: bool = False,
    weight: bool = True,
    element_size: int = 2,
    weight_size: int = 4,
) -> Cost:
    """Cost of one `rms_norm` or (`layer`) `layer_norm` of [rows, width]; no matrix products, so no FLOPs.

    Bytes: forward reads x (and the residual) and writes y (and the sum); backward reads the normalised rows and dy (and
    the sum's gradient) and writes dx, which is the residual's gradient too. Weight and bias are read in both passes and
    their gradients written once; the partial sums of the gradients are not counted.
    """
    if min(rows, width) < 0:
        raise ValueError(f"rows and width must not be negative; got {rows} and {width}")
    tensor = rows * width * element_size
    vectors = (weight + layer * weight) * width * weight_size
    return Cost(
        forward_flops=0,
        forward_bytes=(4 if residual else 2) * tensor + vectors,
        backward_bytes=(4 if residual else 3) * tensor + 2 * vectors,
    )


def most_recent(lengths: Lengths, *, k: int, width: int, element_size: int = 2) -> Cost:
    """Cost of one `most_recent`: forward reads the rows that are kept and writes k of every sequence; backward reads
    the kept rows' gradients and writes those of all rows. Offsets are not counted, here and below.
    """
    n = _as_lengths("lengths", lengths)
    row = width * element_size
    kept = int(n.clamp(max=k).sum()) * row
    return Cost(forward_flops=0, forward_bytes=kept + n.numel() * k * row, backward_bytes=kept + int(n.sum()) * row)


def to_dense(lengths: Lengths, *, longest: int, width: int, element_size: int = 2) -> Cost:
    """Cost of putting sequences into [B, longest, width]: forward reads the rows and writes all places, backward reads
    and writes the rows. The way back to rows costs the same, backward for forward.
    """
    n = _as_lengths("lengths", lengths)
    row = width * element_size
    kept = int(n.clamp(max=longest).sum()) * row
    return Cost(forward_flops=0, forward_bytes=kept + n.numel() * longest * row, backward_bytes=2 * kept)


def jagged_concat(a_lengths: Lengths, b_lengths: Lengths, *, width: int, element_size: int = 2) -> Cost:
    """Cost of one `jagged_concat` or `jagged_split`: every row is read and written once, in both passes."""
    rows = int(_as_lengths("a_lengths", a_lengths).sum() + _as_lengths("b_lengths", b_lengths).sum())
    moved = 2 * rows * width * element_size
    return Cost(forward_flops=0, forward_bytes=moved, backward_bytes=moved)


def jagged_add(lengths: Lengths, *, width: int, element_size: int = 2, bias_size: int = 2) -> Cost:
    """Cost of one `jagged_add`: forward reads values and bias and writes the sum; backward reads the gradient, which is
    that of the values too, and writes the bias's.
    """
    n = _as_lengths("lengths", lengths)
    rows, vectors = int(n.sum()) * width * element_size, n.numel() * width * bias_size
    return Cost(forward_flops=0, forward_bytes=2 * rows + vectors, backward_bytes=rows + vectors)
