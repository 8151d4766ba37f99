"""A limit to how long streams wait for other ranks. A stream that waits for ever says nothing; this says for whom."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NoReturn


@dataclass(frozen=True)
class _Wait:
    since: float
    done: Callable[[], bool]
    what: Callable[[], str]


def end_process(message: str) -> NoReturn:
    """Say it, with where every thread is, and end: nobody can call back a stream. A launcher ends the other ranks."""
    print(message, file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    sys.stderr.flush()
    os._exit(1)


class Watch:
    """Looks once in a while, from a thread of its own, whether what was to end has ended.

    Args:
        timeout_s: how long a wait may last, from when the host has asked for it.
        end: what happens then; it is told who waited for what.
        pause_s: before each look.
        clock: seconds.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        end: Callable[[str], object] = end_process,
        pause_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timeout_s, self._end, self._pause, self._clock = timeout_s, end, pause_s, clock
        self._waits: dict[Hashable, deque[_Wait]] = {}
        self._lock = threading.Lock()
        self._started = False

    def expect(self, place: Hashable, done: Callable[[], bool], what: Callable[[], str]) -> None:
        """From now on `done()` should come true before long; waits at one place end in the order of the calls.

        `what` is called when it has not, and may take its time: "rank 1: ...".
        """
        with self._lock:
            self._waits.setdefault(place, deque()).append(_Wait(self._clock(), done, what))
            if not self._started:
                self._started = True
                threading.Thread(target=_keep_looking, args=(weakref.ref(self), self._pause), daemon=True).start()

    def look(self) -> None:
        """Forget what has ended, and call `end` for the first that lasts too long."""
        late: _Wait | None = None
        with self._lock:
            for waits in self._waits.values():
                while waits and waits[0].done():
                    waits.popleft()
                if waits and self._clock() - waits[0].since > self.timeout_s:
                    late = min(late or waits[0], waits[0], key=lambda wait: wait.since)
            self._waits = {place: waits for place, waits in self._waits.items() if waits}
        if late is not None:
            self._end(f"{late.what()} (after {self._clock() - late.since:.0f} s, the limit is {self.timeout_s:.0f})")

    @property
    def pending(self) -> int:
        """Waits that had not ended at the last look."""
        with self._lock:
            return sum(map(len, self._waits.values()))


def _keep_looking(watch: weakref.ref[Watch], pause_s: float) -> None:
    while True:
        time.sleep(pause_s)
        here = watch()
        if here is None:
            return
        here.look()
        del here
