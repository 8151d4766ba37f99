"""A polite request to stop: SIGTERM (the scheduler's, torchrun's) or Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ECHO_S = 2.0


class StopRequest:
    """Inside the `with` block a signal only sets `requested`.

    Launchers repeat themselves: `timeout` signals the process and its group, torchrun and a scheduler may both pass on
    a SIGTERM, a terminal sends Ctrl-C to everyone. A further SIGTERM therefore changes nothing (who loses patience
    sends SIGKILL), and a further Ctrl-C interrupts at once only if it comes more than two seconds after the first.
    Does nothing outside the main thread, where Python allows no handlers.
    """

    def __init__(self) -> None:
        self.requested = False
        self.name = ""
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._handle) for s in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for which, handler in self._before.items():
            signal.signal(which, handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested, self.name, self._since = True, signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since > ECHO_S:
            raise KeyboardInterrupt
