"""What the parts of an efficiency waterfall are called, in their order."""

from __future__ import annotations

NAMES = {
    "local": "layers, as fast as alone",
    "beside": "layers, beyond what they take alone",
    "exposed communication": "exposed communication",
    "imbalance": "imbalance (waiting for a rank that computes)",
    "recomputation": "recomputation",
    "tables": "embedding tables: lookups and updates",
    "optimizer": "optimizer and gradient norm",
    "launch gaps": "launch gaps (the device has nothing to do)",
    "data wait": "data wait",
}
