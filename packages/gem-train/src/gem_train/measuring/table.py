"""The findings of a bench for a terminal."""

from __future__ import annotations

from typing import Any

from gem_train.measuring import kernels
from gem_train.measuring.names import NAMES

SLOWED = 1.05  # by a trace: on a CPU, which is busy with it, and where launches are what takes the time


def render(found: dict[str, Any]) -> str:
    """MFU with numerators and denominators, the units alone, and the losses of a step."""
    step, mfu = found["step"], found["mfu"]
    lines = [
        f"{found['recipe']} on {found['world']} x {found['device']}, {found['precision']}, low precision: "
        f"{found['lowprec']}; {found['batch_size']} samples a step in {parts_of(found['accumulate'])}, lengths "
        f"{found['lengths']}",
        f"step {step['seconds'] * 1e3:.2f} ms, {step['samples_per_s']:,.0f} samples/s, peak memory "
        f"{step['memory_bytes'] / 2**30:.2f} GiB",
        f"E2E MFU {_share(mfu['end_to_end'])} = local MFU {_share(mfu['local'])} x scaling ratio "
        f"{mfu['scaling_ratio']:.3f}",
        f"  {mfu['stated']}",
        f"  {found['peak']['note']}",
        "",
        f"Layers alone, {found['units_batch']} samples, forward and backward",
        f"  {'unit':<24}{'ms':>10}{'TFLOP/s':>12}{'MFU':>8}",
    ]
    lines += [
        f"  {u['name']:<24}{u['seconds'] * 1e3:>10.3f}{u['tflops']:>12.3g}{_share(u['mfu']):>8}" for u in found["units"]
    ]
    parts = found["waterfall"]
    told = f"{parts['step'] * 1e3:.2f} ms"
    if parts["step"] > SLOWED * step["seconds"]:
        told += f", {step['seconds'] * 1e3:.2f} ms without a trace"
    lines += ["", f"Where a step goes ({told}; the device's times are those of a trace)"]
    lines += [
        f"  {NAMES[name]:<46}{seconds * 1e3:>10.3f} ms {seconds / parts['step']:>7.1%}"
        for name, seconds in parts.items()
        if name != "step"
    ]
    if found["kernels"] is not None:
        lines += ["", kernels.render(found["kernels"])]
    return "\n".join(lines)


def parts_of(count: int) -> str:
    """ "1 part" or "4 parts"."""
    return f"{count} part" + ("s" if count != 1 else "")


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
