"""A loader that follows a growing log: events in order of time, each exactly once, waiting for more at the end.

The stream is the generations of the log one after another, each in order of time, which is the order of time of all.
Its position is a number of events, so it can be continued at any world size and on a log that has grown since.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gem_data.batches.batch import JaggedBatch
from gem_data.batches.collate import Collator
from gem_data.batches.loader import LoaderConfig, balanced
from gem_data.log.event_log import EventLog


class TailLoader:
    """Global batches of `config.batch_size` events of the log in `folder`, this rank's share of each, by
    `config.balance` or else a contiguous one.

    At the end of what there is, it opens the log again every `poll_s` seconds until a whole global batch is there, so
    that ranks which see the log grow at different moments still make the same batches. It ends when `stop()` says so or
    after `idle_s` seconds without a new event; what does not fill a global batch is left for the next time.

    `config.shuffle`, `workers` and `permute` do not apply. Raises ValueError for a batch size that the ranks can't
    share equally, and for a budget.
    """

    def __init__(
        self,
        folder: str | Path,
        config: LoaderConfig,
        *,
        rank: int = 0,
        world: int = 1,
        poll_s: float = 1.0,
        idle_s: float | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        if not 0 <= rank < world or config.batch_size % world:
            raise ValueError(f"batch_size {config.batch_size} for rank {rank} of {world} ranks is no equal share")
        if config.budget is not None:
            raise ValueError(f"a tail has batches of equal numbers, not of a budget ({config.budget!r})")
        self.folder, self.config, self.rank, self.world = Path(folder), config, rank, world
        self.poll_s, self.idle_s, self.stop = poll_s, idle_s, stop
        self.position = 0
        self._open()

    def _open(self) -> None:
        self.log = EventLog.open(self.folder)
        options = self.config
        self._collate = Collator(self.log, max_history=options.max_history, share=options.share_requests)

    def _rows(self, start: int, stop: int) -> NDArray[np.int64]:
        """The rows at positions [start, stop) of the stream."""
        found = []
        for g in self.log.generations:
            a, b = max(start, g.first) - g.first, min(stop, g.first + g.rows) - g.first
            if a < b:
                found.append(np.asarray(g.by_time[a:b]) + g.first)
        return np.concatenate(found)

    def __iter__(self) -> Iterator[JaggedBatch]:
        size = self.config.batch_size
        share = size // self.world
        while True:
            if not self._wait(self.position + size):
                return
            rows = self._rows(self.position, self.position + size)
            if self.config.balance == "none":
                mine = rows[self.rank * share : (self.rank + 1) * share]
            else:
                mine = balanced(self._collate, self.config, rows, self.rank, self.world)
            batch = self._collate(mine)
            self.position += size
            yield batch.pin_memory() if self.config.pin_memory else batch

    def _wait(self, needed: int) -> bool:
        """Until the log has `needed` events; False where it is time to stop."""
        since = time.monotonic()
        while len(self.log) < needed:
            if self.stop():
                return False
            before = len(self.log)
            self._open()
            if len(self.log) > before:
                since = time.monotonic()
            elif self.idle_s is not None and time.monotonic() - since >= self.idle_s:
                return False
            else:
                time.sleep(self.poll_s)
        return True

    def state_dict(self) -> dict[str, Any]:
        """The position, in events, and what it is a position in. Plain values."""
        return {"position": self.position, "config": self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. Raises ValueError for another log, or one that is shorter than the position."""
        if state.get("config") != self._identity():
            raise ValueError(f"the position is of {state.get('config')!r}, but this is {self._identity()!r}")
        position = int(state["position"])
        if not 0 <= position <= len(self.log):
            raise ValueError(f"position {position} is outside a log of {len(self.log)} events")
        self.position = position

    def _identity(self) -> dict[str, Any]:
        """The schema and the events that the log began with; not the batch size, which a position does not need."""
        first = self.log.manifest["generations"][0]["parts"] if "generations" in self.log.manifest else []
        digest = "".join(p["sha256"][:8] for p in first) or self.log.digest[:16]
        return {"schema": self.log.schema.fingerprint(), "log": digest}
