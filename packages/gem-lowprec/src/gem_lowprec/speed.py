"""Whether low precision makes a linear layer faster: a model of its step on many tokens, from a few measured rates.

    t = sum over the three products of 2 K N / rate(depth) + bytes of quantisation / bandwidth      a token

A product's rate grows with the depth of its contraction, over which reading and writing the result are spread:
rate(c) = top c / (c + half). Depth is K in the forward, N in the dgrad, the tokens in the wgrad.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gem_lowprec.products import Products


@dataclass(frozen=True, kw_only=True)
class Rate:
    """TFLOP/s of a product whose contraction is deep, and the depth at which it is half of that."""

    top: float
    half: float

    def ps(self, flops: float, depth: float) -> float:
        """Picoseconds for so many FLOPs of a product of that depth."""
        return flops / self.top * (depth + self.half) / depth


@dataclass(frozen=True, kw_only=True)
class Card:
    """What was measured on a kind of GPU: products by precision, those of the weight's gradient where they differ, and
    quantisers in TB/s read and written.
    """

    rates: dict[str, Rate]
    wgrad: dict[str, Rate]
    quantise: float


# Fitted to products of 65536 tokens on one H200 (docs/notes/lowprec.md).
HOPPER = Card(
    rates={
        "bf16": Rate(top=800.0, half=117.0), "fp8_block": Rate(top=1360.0, half=170.0),
        "fp8_row": Rate(top=1470.0, half=406.0),
    },
    wgrad={"fp8_block": Rate(top=1100.0, half=0.0)},
    quantise=3.4,
)  # fmt: skip
MANY = 65536
LAUNCHES = 40e6  # picoseconds: what some eight more kernels than in BF16 cost a layer
WORTH = 1.05  # a smaller gain is within what the model and a small batch leave out


def card(device: torch.device) -> Card | None:
    """The rates of the GPU, or of one like it; None where none were measured."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    return HOPPER


def step_ps(products: Products, shape: tuple[int, int], rates: Card) -> float:
    """Picoseconds a token of forward and backward of a layer [N, K] on `rates`' card; raises KeyError for a precision
    that has no rate there.
    """
    n, k = shape
    flops = 2.0 * n * k
    depths = {"forward": k, "dgrad": n, "wgrad": MANY}
    time = 0.0
    for name, depth in depths.items():
        precision = getattr(products, name)
        if precision != "skip":
            share = 1 / products.wgrad_every if name == "wgrad" else 1.0
            rate = rates.wgrad.get(precision) if name == "wgrad" else None
            time += share * (rate or rates.rates[precision]).ps(flops, depth)
    quantised = {name: getattr(products, name) not in ("bf16", "skip") for name in depths}
    # BF16 is read once for the two orientations of a tensor, each of which is written as one byte.
    bytes_x = (2 * (quantised["forward"] or quantised["wgrad"]) + quantised["forward"] + quantised["wgrad"]) * k
    bytes_dy = (2 * (quantised["dgrad"] or quantised["wgrad"]) + quantised["dgrad"] + quantised["wgrad"]) * n
    return time + (bytes_x + bytes_dy) / rates.quantise


def least_tokens(products: Products, shape: tuple[int, int], rates: Card) -> int:
    """From how many tokens on a layer [N, K] that gains on many tokens gains at all: quantising the weight, twice, and
    launching more kernels costs the same however few there are.
    """
    n, k = shape
    passes = sum(getattr(products, name) not in ("bf16", "skip") for name in ("forward", "dgrad"))
    fixed = LAUNCHES + passes * 3 * n * k / rates.quantise
    saved = step_ps(Products(), shape, rates) - step_ps(products, shape, rates)
    return math.ceil(fixed / saved)


def gain(products: Products, shape: tuple[int, int], rates: Card) -> float | None:
    """How many times faster than in BF16 a layer [N, K] trains on many tokens; None where no rate is known."""
    plain = Products(wgrad="skip" if products.wgrad == "skip" else "bf16", wgrad_every=products.wgrad_every)
    if products.hadamard or products.stochastic:
        return None  # their kernels were not measured
    try:
        return step_ps(plain, shape, rates) / step_ps(products, shape, rates)
    except KeyError:
        return None
