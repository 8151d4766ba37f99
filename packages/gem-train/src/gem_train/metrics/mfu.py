"""Model FLOPs utilisation: useful FLOPs per second over the card's dense peak for the dtype of its matrix products.

    MFU = training FLOPs of the batch / (step seconds x peak)

The numerator counts valid tokens and unmasked positions only and no recomputation (3 x the forward). Without a peak
that we are sure of there is no MFU, only a note saying so: a number against a guessed peak is worse than none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Dense tensor-core peaks in TFLOP/s from the maker's data sheets (the headline figures with sparsity, halved). fp32 is
# the rate outside the tensor cores, which is what torch uses unless TF32 is switched on.
PEAK_TFLOPS: dict[str, dict[str, float]] = {
    r"NVIDIA B200": {"bf16": 2250.0, "fp8": 4500.0},
    r"NVIDIA H200$": {"bf16": 989.4, "fp8": 1978.9, "tf32": 494.7, "fp32": 66.9},
    r"NVIDIA H100 80GB HBM3": {"bf16": 989.4, "fp8": 1978.9, "tf32": 494.7, "fp32": 66.9},
    r"NVIDIA H100 PCIe": {"bf16": 756.0, "fp8": 1513.0, "tf32": 378.0, "fp32": 51.0},
    r"(NVIDIA )?A100": {"bf16": 312.0, "tf32": 156.0, "fp32": 19.5},
    r"NVIDIA L40S": {"bf16": 362.0, "fp8": 733.0, "tf32": 183.0, "fp32": 91.6},
    r"NVIDIA L4$": {"bf16": 121.0, "fp8": 242.0, "tf32": 60.0, "fp32": 30.3},
}


@dataclass(frozen=True, kw_only=True)
class Mfu:
    """The peak that utilisation is measured against (FLOP/s), or why there is none."""

    peak: float | None
    note: str


def peak_flops(card: str | None, dtype: str) -> Mfu:
    """The dense peak of `card` for "bf16", "fp8", "tf32" or "fp32".

    `card` is spelt as by `torch.cuda.get_device_name`; None is a CPU.
    """
    if card is None:
        return Mfu(peak=None, note="no MFU on a CPU: its peak depends on clocks and vector units that nobody states")
    for pattern, peaks in PEAK_TFLOPS.items():
        if re.match(pattern, card):
            if dtype not in peaks:
                return Mfu(peak=None, note=f"no MFU: the peak of {card} for {dtype} is not in the table")
            return Mfu(
                peak=peaks[dtype] * 1e12, note=f"MFU against {peaks[dtype]:g} TFLOP/s, the dense {dtype} peak of {card}"
            )
    return Mfu(peak=None, note=f"no MFU: the card {card!r} is not in the table of peaks")


def model_flops_utilization(useful_flops: float, seconds: float, peak: float | None) -> float | None:
    """useful_flops / (seconds x peak), None without a peak; FLOPs and peak are per card."""
    if peak is None:
        return None
    if seconds <= 0:
        raise ValueError(f"seconds is {seconds}; expected a positive duration")
    return useful_flops / (seconds * peak)
