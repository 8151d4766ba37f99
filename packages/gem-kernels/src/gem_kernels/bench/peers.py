"""Other people's attention on the same inputs, where it can be imported: FlashAttention 3 and 4, torch's varlen,
cuDNN and what torch picks on padded batches.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from gem_kernels import jagged
from gem_kernels.bench.cases import CAUSAL, Case

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def _fa3(c: Case, q_offsets: Tensor, k_offsets: Tensor) -> Forward:
    from fa3 import fa3_varlen

    cu_q, cu_k = q_offsets.int(), k_offsets.int()
    causal = c.window == CAUSAL
    window = (-1, -1) if causal else c.window
    return lambda q, k, v: fa3_varlen(q, k, v, cu_q, cu_k, c.max_q, c.max_k, causal=causal, window=window)


def _fa4(c: Case, q_offsets: Tensor, k_offsets: Tensor) -> Forward:
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # on disk: what prebuild compiled is found
    from flash_attn.cute import flash_attn_varlen_func

    cu_q, cu_k = q_offsets.int(), k_offsets.int()
    causal = c.window == CAUSAL
    window = (None, None) if causal else tuple(None if side < 0 else side for side in c.window)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Any = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=c.max_q, max_seqlen_k=c.max_k,
            softmax_scale=c.dim**-0.5, causal=causal, window_size=window,
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out

    return run


def _torch_varlen(c: Case, q_offsets: Tensor, k_offsets: Tensor) -> Forward:
    from torch.nn.attention.varlen import varlen_attn

    cu_q, cu_k = q_offsets.int(), k_offsets.int()
    options: dict[str, Any] = {"window_size": c.window}
    if "is_causal" in inspect.signature(varlen_attn).parameters:  # torch 2.11
        if c.window not in ((-1, -1), CAUSAL):
            raise NotImplementedError("torch's varlen attention takes no window")
        options = {"is_causal": c.window == CAUSAL}
    return lambda q, k, v: cast(Tensor, varlen_attn(q, k, v, cu_q, cu_k, c.max_q, c.max_k, **options))


PEERS: dict[str, Callable[[Case, Tensor, Tensor], Forward]] = {
    "fa3": _fa3,
    "fa4": _fa4,
    "torch-varlen": _torch_varlen,
}
COMPILED = ("fa4",)  # those that are compiled when they are first called


def make(name: str, c: Case, q_offsets: Tensor, k_offsets: Tensor) -> Forward:
    """The peer called `name` on this case. ImportError where it is not installed, NotImplementedError for what it does
    not do.
    """
    if c.bias:
        raise NotImplementedError(f"{name} takes no bias")
    return PEERS[name](c, q_offsets, k_offsets)


PADDED = ("cudnn-padded", "sdpa-padded")
WASTE = 8.0  # padded tokens to true ones: beyond it nobody would pad, and the time is the benchmark's


def padded(
    name: str, c: Case, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, bias: Tensor | None
) -> tuple[Forward, list[Tensor]]:
    """Attention of torch over the padded batch and its inputs [B, H, L, D], by cuDNN or (only with a bias, where no
    varlen kernel does it) by torch's own choice; the padding itself is not timed, and padded keys are not masked.
    NotImplementedError for a window, and where the batch is mostly padding.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if c.window not in ((-1, -1), CAUSAL):
        raise NotImplementedError("torch's dense attention takes no window")
    if name == "sdpa-padded" and bias is None:
        raise NotImplementedError("for a bias only")
    if len(c.q) * c.max_q > WASTE * c.q.sum() or len(c.k) * c.max_k > WASTE * c.k.sum():
        raise NotImplementedError(f"more than {WASTE:g} padded tokens for a true one")
    backends = [SDPBackend.CUDNN_ATTENTION]
    if name == "sdpa-padded":
        backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    batch = q_offsets.numel() - 1

    def dense(x: Tensor, offsets: Tensor, longest: int) -> Tensor:
        index = jagged.dense_index(offsets.long(), x.shape[0], longest)
        return jagged.pad(x, index, batch, longest).transpose(1, 2).contiguous()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backends):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=bias, is_causal=c.window == CAUSAL
            )

    return run, [dense(q, q_offsets, c.max_q), dense(k, k_offsets, c.max_k), dense(v, k_offsets, c.max_k)]
