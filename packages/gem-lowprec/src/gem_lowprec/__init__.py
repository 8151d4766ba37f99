"""Ultra-low precision training: MX formats, quantisers, recipes and FP8 modules."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gem_lowprec.__about__ import __version__
from gem_lowprec.convert import Conversion, Row, convert
from gem_lowprec.formats import BF16, E2M1, E4M3, E5M2, Format, ScaleMode
from gem_lowprec.gemm import engine
from gem_lowprec.hadamard import hadamard, random_signs
from gem_lowprec.linear import LowPrecisionLinear, Products, low_precision_linear
from gem_lowprec.quantize import (
    FP8_1X128,
    FP8_128X128,
    FP8_ROW,
    FP8_TENSOR,
    MXFP4,
    MXFP8,
    MXFP8_E5M2,
    MXFP8_SQUARE,
    QTensor,
    QuantSpec,
    dequantize,
    quantize,
)
from gem_lowprec.recipe import RECIPES, Recipe, Rule, get_recipe
from gem_lowprec.report import Numerics, Watch, watch
from gem_lowprec.rounding import Randoms, stochastic_round
from gem_lowprec.weight import QuantizedWeight

if TYPE_CHECKING:
    from gem_lowprec.attention import attention_engine, low_precision_attention
    from gem_lowprec.block_gemm import block_matmul
    from gem_lowprec.fsdp import Gather, Gathers, plan_gathers, quantize_gathers
    from gem_lowprec.mx_gemm import mx_matmul
    from gem_lowprec.norms import norm_quantize
    from gem_lowprec.orientations import Norm, Oriented, quantize_both

__all__ = [
    "BF16",
    "E2M1",
    "E4M3",
    "E5M2",
    "FP8_1X128",
    "FP8_128X128",
    "FP8_ROW",
    "FP8_TENSOR",
    "MXFP4",
    "MXFP8",
    "MXFP8_E5M2",
    "MXFP8_SQUARE",
    "RECIPES",
    "Conversion",
    "Format",
    "Gather",
    "Gathers",
    "LowPrecisionLinear",
    "Norm",
    "Numerics",
    "Oriented",
    "Products",
    "QTensor",
    "QuantSpec",
    "QuantizedWeight",
    "Randoms",
    "Recipe",
    "Row",
    "Rule",
    "ScaleMode",
    "Watch",
    "__version__",
    "attention_engine",
    "block_matmul",
    "convert",
    "dequantize",
    "engine",
    "get_recipe",
    "hadamard",
    "low_precision_attention",
    "low_precision_linear",
    "mx_matmul",
    "norm_quantize",
    "plan_gathers",
    "quantize",
    "quantize_both",
    "quantize_gathers",
    "random_signs",
    "stochastic_round",
    "watch",
]


# What imports Triton or torch.distributed.fsdp, which are slow to import.
_LATER = {
    "Gather": "fsdp",
    "Gathers": "fsdp",
    "Norm": "orientations",
    "Oriented": "orientations",
    "attention_engine": "attention",
    "block_matmul": "block_gemm",
    "low_precision_attention": "attention",
    "mx_matmul": "mx_gemm",
    "norm_quantize": "norms",
    "quantize_both": "orientations",
    "plan_gathers": "fsdp",
    "quantize_gathers": "fsdp",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"gem_lowprec.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
