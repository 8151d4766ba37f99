"""`gem_kernels.nn.JaggedAttention` whose products of queries, keys and values are in low precision."""

from __future__ import annotations

from typing import Any

from gem_kernels.nn import JaggedAttention

from gem_lowprec.attention import low_precision_attention
from gem_lowprec.attention.emulated import AttentionPrecision


class LowPrecisionJaggedAttention(JaggedAttention):
    """Attends in `precision`; with a bias, which that does not take, as `JaggedAttention`.

    `convert` makes one of a `JaggedAttention` where `Recipe.attention` asks for it: parameters, their names and the
    state_dict stay, projections are linear layers and have rules of their own.
    """

    precision: AttentionPrecision

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
