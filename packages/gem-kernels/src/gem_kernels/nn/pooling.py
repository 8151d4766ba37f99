"""Learned queries that summarise every sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gem_kernels.gdpa import gdpa
from gem_kernels.gdpa.activations import check_activation
from gem_kernels.jagged_attention import jagged_attention
from gem_kernels.nn.norms import NormLinear
from gem_kernels.projections import key_value


class PMA(nn.Module):
    """Pooling by multi-head attention: a few learned queries, shared by all samples, summarise every sequence.

    Args:
        dim: width of x.
        queries: how many learned queries.
        heads: attention heads.
        head_dim: dim / heads by default.
        out_dim: width of the output, dim by default.
        activation: None for softmax, or one of GDPA's activations.
        out_scale: factor of the attention's output, with an activation.
        pre_norm: normalise x in the projection (NormLinear).
        bias: whether the projections have biases.
        backend: see `jagged_attention`.

    Source: Set Transformer (Lee et al., 2019).
    """

    def __init__(
        self,
        dim: int,
        queries: int,
        heads: int,
        *,
        head_dim: int | None = None,
        out_dim: int | None = None,
        activation: str | None = None,
        out_scale: float = 1.0,
        pre_norm: bool = False,
        bias: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if head_dim is None and dim % heads:
            raise ValueError(f"heads must divide dim when head_dim is not given; got dim {dim} and {heads} heads")
        if activation is not None:
            check_activation(activation)
        self.heads, self.head_dim = heads, head_dim or dim // heads
        self.activation, self.out_scale, self.backend = activation, out_scale, backend
        width = heads * self.head_dim
        self.queries = nn.Parameter(torch.empty(queries, heads, self.head_dim, device=device))
        self.kv: nn.Module
        if pre_norm:
            self.kv = NormLinear(dim, 2 * width, bias, device=device)
        else:
            self.kv = nn.Linear(dim, 2 * width, bias, device=device)
        self.out = nn.Linear(width, dim if out_dim is None else out_dim, bias, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Queries from N(0, 1); the projections initialise themselves."""
        nn.init.normal_(self.queries)

    def forward(
        self,
        x: Tensor,
        offsets: Tensor,
        max_len: int,
        residual: Tensor | None = None,
        residual_bias: Tensor | None = None,
    ) -> Any:
        """x [T, C], offsets [B + 1] -> [B, queries, out_dim]; an empty sequence gives the output bias.

        With a residual (and `pre_norm`), what is pooled is x + residual, and that sum is returned, too.
        """
        if residual is None:
            return self.pooled(self.kv(x), offsets, max_len)
        kv, total = self.kv(x, residual) if residual_bias is None else self.kv(x, residual, residual_bias)
        return self.pooled(kv, offsets, max_len), total

    def pooled(self, kv: Tensor, offsets: Tensor, max_len: int) -> Tensor:
        """Projected keys and values [T, 2 H D] -> [B, queries, out_dim]."""
        k, v = key_value(kv, self.heads)
        q = self.queries.to(k.dtype)  # [Lq, H, D]
        tensors = (q, k, v, None, offsets, q.shape[0], max_len)
        if self.activation is None:
            out = jagged_attention(*tensors, backend=self.backend)
        else:
            out = gdpa(*tensors, activation=self.activation, out_scale=self.out_scale, backend=self.backend)
        return self.out(out.flatten(1)).unflatten(0, (-1, q.shape[0]))  # type: ignore[union-attr]
