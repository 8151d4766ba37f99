"""Jagged attention kernels for recommendation models: softmax (JFA), GDPA, 64-token blocks.

The operators are functions of this package; a folder of the same name holds each one's backends (write
`from gem_kernels.gdpa import reference` to reach them).
"""

from gem_kernels import dispatch, flops, jagged, nn
from gem_kernels.__about__ import __version__
from gem_kernels.block_attention import block_attention, block_attention_packed
from gem_kernels.dispatch import why
from gem_kernels.gdpa import gdpa
from gem_kernels.jagged_attention import jagged_attention
from gem_kernels.jagged_attention.tables import position_bias, time_bias
from gem_kernels.late import LateProduct
from gem_kernels.norm_linear import linear_norm, norm_linear
from gem_kernels.norms import layer_norm, qk_norm, rms_norm
from gem_kernels.project_gated import GatedDown, project_gated
from gem_kernels.project_rotary import project_rotary
from gem_kernels.projections import Among, Turn, gated_heads, rotary_heads, sigmoid_gate
from gem_kernels.rotary import Rope, rope, rote, rote_positions
from gem_kernels.sequences import jagged_add, jagged_concat, jagged_split, most_recent
from gem_kernels.sequences.padded import jagged_to_padded, padded_to_jagged
from gem_kernels.stream import norm_rows, norm_rows_twice

__all__ = [
    "Among",
    "GatedDown",
    "LateProduct",
    "Rope",
    "Turn",
    "__version__",
    "block_attention",
    "block_attention_packed",
    "dispatch",
    "flops",
    "gated_heads",
    "gdpa",
    "jagged",
    "jagged_add",
    "jagged_attention",
    "jagged_concat",
    "jagged_split",
    "jagged_to_padded",
    "layer_norm",
    "linear_norm",
    "most_recent",
    "nn",
    "norm_linear",
    "norm_rows",
    "norm_rows_twice",
    "padded_to_jagged",
    "position_bias",
    "project_gated",
    "project_rotary",
    "qk_norm",
    "rms_norm",
    "rope",
    "rotary_heads",
    "rote",
    "rote_positions",
    "sigmoid_gate",
    "time_bias",
    "why",
]
