"""Between one packed projection and the operators that read its parts: one pass over memory each way.

A projection makes gate, up and q, or q, k and v, side by side in one matrix. Taken apart with plain operators each part
is normed, turned and copied by itself, and the gradients are copied together again; here a kernel writes each part
once, and one gradient of the whole matrix.
"""

from __future__ import annotations

from gem_kernels.projections.gated import gated_heads, sigmoid_gate
from gem_kernels.projections.key_value import key_value, side_by_side
from gem_kernels.projections.rotary import Among, Turn, rotary_heads

__all__ = ["Among", "Turn", "gated_heads", "key_value", "rotary_heads", "side_by_side", "sigmoid_gate"]
