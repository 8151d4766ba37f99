"""`gem_kernels.nn.JaggedAttention` whose products of queries, keys and values are in low precision."""

from __future__ import annotations

from typing import Any

import torch
from gem_kernels.nn import JaggedAttention, NormLinear, RMSNorm
from torch import Tensor, nn

from gem_lowprec.attention import attention_engine, low_precision_attention
from gem_lowprec.attention.emulated import AttentionPrecision
from gem_lowprec.attention.operands import BLOCK
from gem_lowprec.linear import LowPrecisionLinear
from gem_lowprec.norm_linear import LowPrecisionNormLinear

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _hooked(module: nn.Module) -> bool:
    return any(getattr(module, name) for name in HOOKS)


def _layer(projection: Any) -> Any:
    """The linear layer of a projection with or without a norm."""
    return projection.linear if isinstance(projection, NormLinear) else projection


def _usable(offsets: Tensor, x: Tensor) -> bool:
    """Whether offsets are such as kernels read; what else is wrong with them the operator says."""
    integers = offsets.dtype in (torch.int32, torch.int64)
    return integers and offsets.ndim == 1 and offsets.numel() > 1 and offsets.device == x.device


class LowPrecisionJaggedAttention(JaggedAttention):
    """Attends in `precision`; with a bias, which that does not take, as `JaggedAttention`.

    `convert` makes one of a `JaggedAttention` where `Recipe.attention` asks for it: parameters, their names and the
    state_dict stay, projections are linear layers and have rules of their own.

    Where `fp8` runs natively, the module attends to itself and heads have 128 dims, a projection in `fp8_block` norms
    and turns heads as the module asks, in float32, and writes q, k and v in FP8 as attention reads them; attention
    writes its result in FP8 for a projection in `fp8_block` after it: no pass quantises between them.
    """

    precision: AttentionPrecision

    def forward(self, x: Tensor, offsets: Tensor, max_len: int, *context: Any, **named: Any) -> Tensor:
        """See `JaggedAttention`."""
        usual = any(c is not None for c in (*context, *named.values())) or not _usable(offsets, x)
        if usual or not self.writes_operands(x):
            return super().forward(x, offsets, max_len, *context, **named)
        from gem_lowprec.attention.projected import Between, Into, attend

        projection: Any = self.qkv
        if type(projection) is NormLinear:
            x, projection = projection.norm(x), projection.linear
        dtype = _layer(projection).plan(x).dtype
        gains, eps = None, 1e-6
        if self.q_norm is not None and self.k_norm is not None:
            gains, eps = (self.q_norm.weight, self.k_norm.weight), self.q_norm.eps
        into = Into(
            offsets=offsets, max_len=max_len, heads=self.heads, kv_heads=self.kv_heads, dtype=dtype,
            between=Between(gains=gains, eps=eps, base=self.rope_base),
        )  # fmt: skip
        packed = projection(x, sink=into)
        after: nn.Module = self.out
        takes = isinstance(after, LowPrecisionLinear) and not _hooked(after)
        takes = takes and after.takes_fp8(x.new_empty(0, dtype=dtype), x.shape[0])  # type: ignore[operator]
        out, rows = attend(packed, into, self.scale, rows=takes)
        return after(out.flatten(1), rows) if takes else after(out.flatten(1))  # type: ignore[no-any-return]

    def pass_between(self) -> str | None:
        """Why q, k and v are quantised by a pass of their own; None where the projection may write them."""
        if self.crosses:
            return "it has two projections"
        norms = [n for n in (self.q_norm, self.k_norm) if n is not None]
        if any(type(n) is not RMSNorm or _hooked(n) for n in norms) or len({n.eps for n in norms}) > 1:
            return "the norms of its heads are not what a kernel can do for them"
        if self.head_dim != BLOCK:
            return f"heads have {self.head_dim} dims, not {BLOCK}"
        layer = _layer(self.qkv)
        if not isinstance(layer, LowPrecisionLinear) or layer.products.forward != "fp8_block":
            return "its projection does not run in fp8_block"
        if _hooked(layer) or _hooked(self.qkv):
            return "its projection has hooks, which would not see a result"
        return None

    def writes_operands(self, x: Tensor) -> bool:
        """Whether the projection of x [T, C] would now write attention's operands."""
        if torch.compiler.is_compiling() or self.precision != "fp8" or x.ndim != 2 or x.shape[0] == 0:
            return False
        if self.pass_between() is not None:
            return False
        layer: Any = _layer(self.qkv)
        fused: Any = self.qkv if isinstance(self.qkv, LowPrecisionNormLinear) else None  # its norm has a say, too
        if not (layer.takes_fp8(x, x.shape[0]) if fused is None else fused.takes_fp8(x)):
            return False
        like = x.new_empty(0, self.heads, self.head_dim, dtype=layer.plan(x).dtype)
        masked = self.causal or self.window is not None or self.scale <= 0
        return attention_engine("fp8", like, masked=masked).name == "native"

    def _attend(self, q, k, v, q_offsets, k_offsets, max_q, max_k, bias) -> Any:  # type: ignore[no-untyped-def]
        if bias is not None:
            return super()._attend(q, k, v, q_offsets, k_offsets, max_q, max_k, bias)
        return low_precision_attention(
            q, k, v, q_offsets, k_offsets, max_q, max_k, precision=self.precision, scale=self.scale,
            causal=self.causal, window=self.window,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Shown in the module's repr."""
        return f"attention={self.precision}"
