"""How good the predictions are (NE, AUC, GAUC, calibration) and how well the machine was used (MFU)."""

from gem_train.metrics.bootstrap import FEW_USERS, METRICS, Draws, resample
from gem_train.metrics.classification import (
    GroupedAuc,
    auc,
    binary_entropy,
    calibration,
    calibration_curve,
    grouped_auc,
    log_loss,
    logit,
    normalized_entropy,
    sigmoid,
    summarize,
)
from gem_train.metrics.mfu import PEAK_TFLOPS, Mfu, model_flops_utilization, peak_flops

__all__ = [
    "FEW_USERS",
    "METRICS",
    "PEAK_TFLOPS",
    "Draws",
    "GroupedAuc",
    "Mfu",
    "auc",
    "binary_entropy",
    "calibration",
    "calibration_curve",
    "grouped_auc",
    "log_loss",
    "logit",
    "model_flops_utilization",
    "normalized_entropy",
    "peak_flops",
    "resample",
    "sigmoid",
    "summarize",
]
