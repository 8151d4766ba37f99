"""Modules around the operators, small enough that a precision recipe can replace them by name.

Every forward takes jagged rows: x [T, C], offsets [B + 1] and max_len, a host int that is at least the longest
sequence.
"""

from __future__ import annotations

from gem_kernels.nn.attention import GDPA, JaggedAttention
from gem_kernels.nn.norms import LayerNorm, NormLinear, RMSNorm
from gem_kernels.nn.pooling import PMA

__all__ = ["GDPA", "PMA", "JaggedAttention", "LayerNorm", "NormLinear", "RMSNorm"]
