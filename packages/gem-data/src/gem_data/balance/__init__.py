"""Which rank takes which samples of a global batch: the methods, and a simulation of what they are worth."""

from __future__ import annotations

from gem_data.balance.methods import (
    SUB_BATCH,
    CostFunction,
    LengthCost,
    Method,
    assign,
    budget_batches,
    check_costs,
    deal,
    imbalance,
    moved,
)
from gem_data.balance.parts import in_even_parts

__all__ = [
    "SUB_BATCH",
    "CostFunction",
    "LengthCost",
    "Method",
    "assign",
    "budget_batches",
    "check_costs",
    "deal",
    "imbalance",
    "in_even_parts",
    "moved",
]
