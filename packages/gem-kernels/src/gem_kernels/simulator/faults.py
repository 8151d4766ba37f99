"""What the simulator reports, and where in a kernel it happened."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

_HERE = str(Path(__file__).parent)


class Fault(Exception):
    """A kernel did what a GPU does not promise to do right. `kind` is a word of `KINDS`, the message names the line."""

    def __init__(self, kind: str, what: str, where: str | None = None) -> None:
        assert kind in KINDS, kind
        self.kind = kind
        super().__init__(f"{kind}: {what} [{where or place()}]")


KINDS = {
    "bounds": "memory outside a tensor, a buffer or shared memory as a whole",
    "uninitialised": "shared memory is read that nobody has written, or a barrier used that nobody has initialised",
    "race": "two accesses to the same bytes that nothing puts in order",
    "proxy": "shared memory stored by threads and then touched by the asynchronous proxy, without a fence between",
    "barrier": "too many arrivals, transaction bytes that do not fit, a phase that was missed",
    "pending": "a product's registers are read before they were waited for",
    "deadlock": "everybody waits",
    "unfinished": "a program ended with copies under way",
    "overflow": "a 32-bit number that is too large",
    "unsupported": "an operation that the simulator does not know",
}


def place() -> str:
    """The innermost line of a kernel on this thread's stack, with the lines that called it."""
    frame: FrameType | None = sys._getframe(1)
    lines = []
    while frame is not None:
        code = frame.f_code
        if "__kernel__" in frame.f_globals and not code.co_filename.startswith(_HERE):
            lines.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " < ".join(lines) or "outside kernels"
