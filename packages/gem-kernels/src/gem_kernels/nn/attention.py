"""Attention operators with their projections."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gem_kernels.gdpa import gdpa
from gem_kernels.gdpa.activations import check_activation
from gem_kernels.jagged_attention import jagged_attention
from gem_kernels.nn.norms import NormLinear, RMSNorm
from gem_kernels.rotary import rope

Window = tuple[int | None, int | None] | None


class _Attention(nn.Module):
    """Projections around an attention operator: self-attention, or cross-attention when `context_dim` is given."""

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        context_dim: int | None = None,
        out_dim: int | None = None,
        pre_norm: bool = False,
        qk_norm: bool = False,
        rope_base: float | None = None,
        causal: bool = False,
        window: Window = None,
        bias: bool = False,
        scale: float | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if head_dim is None and dim % heads:
            raise ValueError(f"heads must divide dim when head_dim is not given; got dim {dim} and {heads} heads")
        self.heads, self.kv_heads = heads, kv_heads or heads
        if heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads; got {self.kv_heads} and {heads}")
        self.head_dim = head_dim or dim // heads
        self.rope_base, self.causal, self.window = rope_base, causal, window
        self.scale = 1.0 / math.sqrt(self.head_dim) if scale is None else scale
        self.backend = backend

        def project(features: int, out: int) -> nn.Module:
            if pre_norm:
                return NormLinear(features, out, bias, device=device)
            return nn.Linear(features, out, bias, device=device)

        q_width, kv_width = heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        if context_dim is None:
            self.qkv = project(dim, q_width + kv_width)
        else:
            self.q = project(dim, q_width)
            self.kv = project(context_dim, kv_width)
        self.crosses = context_dim is not None
        self.q_norm = RMSNorm(self.head_dim, device=device) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, device=device) if qk_norm else None
        self.out = nn.Linear(q_width, dim if out_dim is None else out_dim, bias, device=device)

    def forward(
        self,
        x: Tensor,
        offsets: Tensor,
        max_len: int,
        context: Tensor | None = None,
        context_offsets: Tensor | None = None,
        max_context: int | None = None,
        *,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Attend from x to itself, or to `context` where the module was built with `context_dim`.

        Args:
            x: [T, C].
            offsets: [B + 1].
            max_len: at least the longest sequence of x.
            context: [Tc, context_dim], for cross-attention, with its own offsets and maximum.
            context_offsets: [B + 1].
            max_context: at least the longest sequence of the context.
            positions: [T] for the rotary embedding, instead of counting (ROTE: `rotary.rote_positions`).
            context_positions: [Tc], the same for the keys of cross-attention.
            bias: [B or 1, H or 1, max_len, max_context], added to the scores (softmax only).

        Returns:
            [T, out_dim].

        Raises:
            ValueError: a context where none is wanted, or a part of it missing; else as the operator.
        """
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        if self.crosses:
            if context is None or context_offsets is None or max_context is None:
                given = {"context": context, "context_offsets": context_offsets, "max_context": max_context}
                missing = [name for name, value in given.items() if value is None]
                raise ValueError(
                    f"cross-attention needs context, context_offsets and max_context; missing: {', '.join(missing)}"
                )
            q = self.q(x).unflatten(-1, (self.heads, self.head_dim))
            k, v = self.kv(context).unflatten(-1, (-1, self.head_dim)).split(sizes[1:], dim=1)
        else:
            if context is not None:
                raise ValueError(
                    f"this module attends to itself; got a context of shape {list(context.shape)}, "
                    "for which it must be built with context_dim"
                )
            q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(sizes, dim=1)
            context_offsets, max_context, context_positions = offsets, max_len, positions
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_base is not None:
            q = rope(q, offsets, base=self.rope_base, positions=positions, backend=self.backend)
            k = rope(k, context_offsets, base=self.rope_base, positions=context_positions, backend=self.backend)
        out = self._attend(q, k, v, offsets, context_offsets, max_len, max_context, bias)  # [T, H, D]
        return self.out(out.flatten(1))

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_offsets: Tensor,
        k_offsets: Tensor,
        max_q: int,
        max_k: int,
        bias: Tensor | None,
    ) -> Tensor:
        raise NotImplementedError


class JaggedAttention(_Attention):
    """Softmax attention with its projections; see `jagged_attention` for the operator and `forward` for the tensors.

    Args:
        dim: width of x.
        heads: query heads.
        head_dim: dim / heads by default.
        kv_heads: key heads, as many as `heads` by default.
        context_dim: width of the context; given, the module does cross-attention.
        out_dim: width of the output, dim by default.
        pre_norm: normalise x (and the context) in the projection (NormLinear).
        qk_norm: RMS-normalise every head of q and k, which bounds the scores.
        rope_base: base of the rotary embedding; None for none.
        causal, window, scale, backend: see `jagged_attention`.
        bias: whether the projections have biases.
    """

    def _attend(self, q, k, v, q_offsets, k_offsets, max_q, max_k, bias):  # type: ignore[no-untyped-def]
        return jagged_attention(
            q,
            k,
            v,
            q_offsets,
            k_offsets,
            max_q,
            max_k,
            scale=self.scale,
            bias=bias,
            causal=self.causal,
            window=self.window,
            backend=self.backend,
        )


class GDPA(_Attention):
    """GDPA with its projections: as `JaggedAttention`, with an activation in the place of softmax.

    Args:
        activation: see `gdpa`.
        out_scale: factor of the attention's output, for example 1 / N.
        score_bound: see `gdpa`.
        others: see `JaggedAttention`.
    """

    def __init__(  # type: ignore[no-untyped-def]
        self, dim: int, heads: int, *, activation: str = "silu", out_scale: float = 1.0,
        score_bound: float | None = None, **others,
    ) -> None:  # fmt: skip
        super().__init__(dim, heads, **others)
        check_activation(activation)
        self.activation, self.out_scale, self.score_bound = activation, out_scale, score_bound

    def _attend(self, q, k, v, q_offsets, k_offsets, max_q, max_k, bias):  # type: ignore[no-untyped-def]
        if bias is not None:
            raise ValueError(f"GDPA takes no bias; got one of shape {list(bias.shape)}")
        return gdpa(
            q,
            k,
            v,
            q_offsets,
            k_offsets,
            max_q,
            max_k,
            activation=self.activation,
            scale=self.scale,
            out_scale=self.out_scale,
            score_bound=self.score_bound,
            causal=self.causal,
            window=self.window,
            backend=self.backend,
        )
