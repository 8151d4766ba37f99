"""A polite request to stop: SIGTERM (the scheduler's, torchrun's) or the first Ctrl-C."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Inside the `with` block, the first signal only sets `requested`; a second one acts as it did before.

    Does nothing outside the main thread, where Python allows no handlers.
    """

    def __init__(self) -> None:
        self.requested = False
        self.name = ""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._handle) for s in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested, self.name = True, signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for which, handler in self._before.items():
            signal.signal(which, handler)
        self._before = {}
