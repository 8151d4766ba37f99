"""What a person sees while a run goes on: a bar in a terminal, a line every ten seconds elsewhere. Rank 0 only."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

LINE_EVERY_S = 10.0
WINDOW = 20  # steps that the rates are averaged over


class Progress:
    """Shows steps, loss, speed and the share of time spent waiting for data; silent unless `enabled`."""

    def __init__(self, *, enabled: bool = True, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.enabled = enabled
        self._total = 0
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
        self._ne: dict[str, float] = {}  # of each task, in the last validation
        self._began: tuple[float, int] | None = None
        self._printed = 0.0
        self._bar: RichProgress | None = None
        self._task: Any = None

    def start(self, step: int, total: int) -> None:
        """Begin at `step` of `total`."""
        self._total, self._began, self._printed = total, (time.monotonic(), step), time.monotonic()
        if self.enabled and self.console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
            self._bar = RichProgress(*columns, TextColumn("{task.fields[state]}"), console=self.console)
            self._task = self._bar.add_task("train", total=total, completed=step, state="")
            self._bar.start()

    def step(self, step: int, record: Mapping[str, Any]) -> None:
        """One step is done; `record` is its line in metrics.jsonl."""
        self._recent.append(record)
        if not self.enabled:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=step, state=self._state())
        elif time.monotonic() - self._printed >= LINE_EVERY_S or step == self._total:
            self._printed = time.monotonic()
            self.note(f"step {step}/{self._total}  {self._state()}  ETA {self._eta(step)}")

    def evaluated(self, step: int, ne: float, tasks: Mapping[str, Mapping[str, float]]) -> None:
        """A validation is done."""
        self._ne = {name: f["ne"] for name, f in tasks.items()}
        each = "  ".join(f"{name}: NE {f['ne']:.4f} AUC {f['auc']:.4f}" for name, f in tasks.items())
        self.note(f"validation at step {step}  {each}")

    def streamed(self, step: int, tasks: Mapping[str, Mapping[str, float]]) -> None:
        """A window of the progressive validation is complete."""
        self.note(f"progressive at step {step}  " + "  ".join(f"{name}: NE {f['ne']:.4f}" for name, f in tasks.items()))

    def note(self, message: str, *, style: str | None = None) -> None:
        """A line of text, above the bar if there is one."""
        if self.enabled:
            self.console.print(message, style=style, highlight=False, markup=False, soft_wrap=True)

    def _state(self) -> str:
        mean = {k: sum(r[k] for r in self._recent) / len(self._recent) for k in ("loss", "data_wait_s", "step_s")}
        per_s = sum(r["samples_per_s"] for r in self._recent) / len(self._recent)
        wait = mean["data_wait_s"] / (mean["data_wait_s"] + mean["step_s"])
        mfu = [r["mfu"] for r in self._recent if "mfu" in r]
        parts = [f"loss {mean['loss']:.4f}", f"{per_s:,.0f} samples/s", f"data wait {wait:.0%}"]
        parts += [f"MFU {mfu[-1]:.1%}"] if mfu else []
        parts += [f"{self._recent[-1]['memory_bytes'] / 2**30:.1f} GiB"]
        parts += ["NE " + " ".join(f"{name} {ne:.4f}" for name, ne in self._ne.items())] if self._ne else []
        return "  ".join(parts)

    def _eta(self, step: int) -> str:
        assert self._began is not None
        began, first = self._began
        left = (time.monotonic() - began) / max(step - first, 1) * (self._total - step)
        return f"{int(left) // 60}:{int(left) % 60:02d}"

    def stop(self) -> None:
        """Leave the terminal as it was found."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
