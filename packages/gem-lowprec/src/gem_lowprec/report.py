"""Numerics of a running model: how well each quantised tensor is represented, worst first.

`watch` attaches to converted layers and, every n steps, measures each operand exactly where it is quantised: inputs,
weights and gradients of every product, after a Hadamard transform if there is one. When a run diverges, the first
rows say where.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from gem_lowprec.convert import Conversion
from gem_lowprec.quantize import QTensor
from gem_lowprec.table import render


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """One operand of one product of one layer, as last measured.

    sqnr_db:    10 log10(sum x^2 / sum (x - x_hat)^2), inf where exact, NaN where x or x_hat is not finite.
    saturation: share of the elements beyond the largest value of their block's scale, |x| > max * scale.
    underflow:  share of the non-zero elements that became zero.
    amax:       largest magnitude.
    """

    layer: str
    product: str
    tensor: str
    spec: str
    step: int
    sqnr_db: float
    saturation: float
    underflow: float
    amax: float


def measure(x: Tensor, q: QTensor) -> Tensor:
    """(sqnr_db, saturation, underflow, amax) of `q` as a quantisation of `x`, float32 [4] on the device of x (no
    sync)."""
    value = x.detach().to(torch.float32)
    scale = q.scale_values()
    elements = q.values()
    error = value - elements * scale
    nonzero = value != 0
    sqnr = 10 * torch.log10(_power(value) / _power(error))
    sqnr = torch.where(nonzero.any(), sqnr, torch.inf)
    # A hair above max * scale is the rounding of a float32 scale, not saturation.
    saturated = value.abs() > q.spec.element.max * (1 + 2.0**-20) * scale
    underflow = (nonzero & (elements == 0)).sum() / nonzero.sum().clamp(min=1)
    amax = value.abs().amax() if value.numel() else value.new_zeros(())
    stats = (sqnr, saturated.double().mean() if value.numel() else amax, underflow, amax)
    return torch.stack([s.to(torch.float32) for s in stats])


def _power(x: Tensor) -> Tensor:
    return x.double().square().sum()


class Watch:
    """Collects `Numerics` from converted layers; made by `watch`. A context manager: leaving it detaches."""

    def __init__(self, conversion: Conversion, every: int, log: Path | None = None) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self.conversion, self.every, self.log = conversion, every, log
        self._written = -1  # the step of the last line in the log
        conversion.clock.leave = None if log is None else self.write
        self._latest: dict[tuple[str, str, str], tuple[int, str, Tensor]] = {}
        for name, module in conversion.modules.items():
            module.observer = _Observer(self, name)

    def _see(self, layer: str, product: str, role: str, x: Tensor, q: QTensor) -> None:
        step = self.conversion.clock.step
        if step % self.every == 0:
            self._latest[layer, product, role] = (step, str(q.spec), measure(x, q))

    def rows(self) -> list[Numerics]:
        """The last measurement of every operand, worst first: NaN, then by rising SQNR. Waits for the device."""
        rows = []
        for (layer, product, role), (step, spec, stats) in self._latest.items():
            sqnr, saturation, underflow, amax = stats.tolist()
            rows.append(
                Numerics(
                    layer=layer, product=product, tensor=role, spec=spec, step=step, sqnr_db=sqnr,
                    saturation=saturation, underflow=underflow, amax=amax,
                )
            )  # fmt: skip
        return sorted(rows, key=lambda r: (not math.isnan(r.sqnr_db), r.sqnr_db))

    def write(self) -> None:
        """Append what the current step measured to the log as one line; nothing if it measured nothing."""
        step = self.conversion.clock.step
        if self.log is None or step == self._written or not any(s == step for s, _, _ in self._latest.values()):
            return
        self._written = step
        rows = [asdict(r) for r in self.rows() if r.step == step]
        for row in rows:  # JSON has no infinity and no NaN
            del row["step"]
            row.update({k: None for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)})
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "rows": rows}) + "\n")

    def table(self, limit: int | None = None) -> str:
        """The first `limit` rows as aligned text."""
        cells = [
            (r.layer, f"{r.product}.{r.tensor}", r.spec, str(r.step), f"{r.sqnr_db:.1f}", f"{r.saturation:.2%}",
             f"{r.underflow:.2%}", f"{r.amax:.3g}")
            for r in self.rows()[:limit]
        ]  # fmt: skip
        return render(("layer", "operand", "format", "step", "SQNR dB", "saturated", "underflow", "amax"), cells)

    def close(self) -> None:
        """Detach from the layers; the rows stay, and the log gets what is not in it yet."""
        self.write()
        if self.conversion.clock.leave == self.write:
            self.conversion.clock.leave = None
        for module in self.conversion.modules.values():
            if isinstance(module.observer, _Observer) and module.observer.watch is self:
                module.observer = None

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self.close()


@dataclass(frozen=True)
class _Observer:
    watch: Watch
    layer: str

    def __call__(self, product: str, role: str, x: Tensor, q: QTensor) -> None:
        self.watch._see(self.layer, product, role, x, q)


def watch(conversion: Conversion, *, every: int = 100, log: str | Path | None = None) -> Watch:
    """Measure the layers of `conversion` on the steps that `every` divides (see `Conversion.set_step`).

    `log`: a file that gets a JSON line of every measured step, {"step": ..., "rows": [the fields of `Numerics`, worst
    first; null for what is not finite]}, when the next step begins. On the other steps the cost is one comparison per
    operand. It replaces an earlier watch of the same layers.
    """
    if not isinstance(conversion, Conversion):
        raise TypeError(f"conversion must be what `convert` returned, got {type(conversion).__name__}")
    return Watch(conversion, every, None if log is None else Path(log))
