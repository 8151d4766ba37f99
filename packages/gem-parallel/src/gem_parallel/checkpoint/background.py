"""Work in a thread whose error is not lost, and a process group for its collectives."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gem_parallel.runtime import Runtime


class Background:
    """A call that runs in a thread."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="gem-parallel background")
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._value = work()
        except BaseException as error:  # handed on by result()
            self._error = error

    def result(self) -> Any:
        """Wait for the call; its value, or its exception."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value


def second_control(runtime: Runtime) -> Runtime:
    """The same ranks with a control group of their own, so that two threads do not mix their collectives.

    Called by all ranks together.
    """
    if runtime.world == 1:
        return runtime
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=runtime.timeout_s))
    return dataclasses.replace(runtime, control=group, owns_group=False)
