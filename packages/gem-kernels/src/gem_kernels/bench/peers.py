"""Other people's attention on the same inputs, where it can be imported: FlashAttention 3 and 4, torch's varlen,
cuDNN on padded batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from gem_kernels import jagged

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def _fa3(q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int) -> Forward:
    from fa3 import fa3_varlen

    cu_q, cu_k = q_offsets.int(), k_offsets.int()
    return lambda q, k, v: fa3_varlen(q, k, v, cu_q, cu_k, max_q, max_k)


def _fa4(q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int) -> Forward:
    from flash_attn.cute import flash_attn_varlen_func

    cu_q, cu_k = q_offsets.int(), k_offsets.int()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Any = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k
        )
        return out[0] if isinstance(out, tuple) else out

    return run


def _torch_varlen(q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int) -> Forward:
    from torch.nn.attention.varlen import varlen_attn

    cu_q, cu_k = q_offsets.int(), k_offsets.int()
    return lambda q, k, v: cast(Tensor, varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k))


PEERS: dict[str, Callable[[Tensor, Tensor, int, int], Forward]] = {
    "fa3": _fa3,
    "fa4": _fa4,
    "torch-varlen": _torch_varlen,
}


def padded_cudnn(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int
) -> tuple[Forward, list[Tensor]]:
    """cuDNN attention over the padded batch and its inputs [B, H, L, D]; the padding itself is not timed, and
    padded keys are not masked.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch = q_offsets.numel() - 1

    def dense(x: Tensor, offsets: Tensor, longest: int) -> Tensor:
        index = jagged.dense_index(offsets.long(), x.shape[0], longest)
        return jagged.pad(x, index, batch, longest).transpose(1, 2).contiguous()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    return run, [dense(q, q_offsets, max_q), dense(k, k_offsets, max_k), dense(v, k_offsets, max_k)]
