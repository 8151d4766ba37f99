"""The loader: which rows make a batch, as a pure function of epoch, step, rank and world, and iteration with resume.

A global batch depends on (seed, epoch, step) alone. Each rank takes its contiguous slice of it, so every world size
trains on the same batches, and a position is two integers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gem_data.batch import JaggedBatch
from gem_data.collate import Collator, MaxHistory
from gem_data.log import EventLog
from gem_data.prefetch import prefetched
from gem_data.validate import mix64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How to read.

    batch_size   of the global batch, over all ranks.
    shuffle      a new permutation each epoch, or the rows in the order given.
    drop_last    drop the last incomplete global batch of an epoch (training), or keep it, padded (evaluation).
    prefetch     batches that a background thread prepares ahead; 0 for none. Never changes what comes or its order.
    pin_memory   page-lock the batches (in the background thread, if there is one).
    """

    batch_size: int
    max_history: MaxHistory
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = True
    prefetch: int = 0
    pin_memory: bool = False

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("seed", 0), ("prefetch", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be {least} or more, not {getattr(self, name)}")
        limits = self.max_history.values() if isinstance(self.max_history, Mapping) else [self.max_history]
        for limit in limits:
            if limit < 0:
                raise ValueError(f"max_history must be 0 or more, not {limit}")
        if self.seed >= 2**64:
            raise ValueError(f"seed must be under 2^64, not {self.seed}")


def permutation(n: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of range(n) from (seed, epoch): sorted by a SplitMix64 hash of (seed, epoch, i).

    Not numpy's generator, whose streams may change between versions: a resumed run must see the order it began with.
    """
    start = mix64(mix64(np.array([seed], np.uint64)) + _GOLDEN * np.array([epoch + 1], np.uint64))
    keys = mix64(start + _GOLDEN * np.arange(1, n + 1, dtype=np.uint64))
    return np.argsort(keys, kind="stable").astype(np.int64)


class Loader:
    """Batches of `rows` of `log` for rank `rank` of `world`.

    Iterating goes from the current position to the end of the epoch; the next iteration is the next epoch.
    `state_dict()` taken in the loop's body says that the current batch is consumed: a loader of the same log and
    configuration, at the same or another world size, continues with the batch after it.

    Raises ValueError for rows outside the log, for no rows, where `drop_last` leaves no batch, and where training can't
    give equal shares of a global batch to the ranks. Evaluation pads shares to equal size (sample id -1, weight 0).
    """

    def __init__(self, log: EventLog, rows: Any, config: LoaderConfig, *, rank: int = 0, world: int = 1) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not one of a world of {world}")
        self.rows, self.config, self.rank, self.world = log.rows(rows), config, rank, world
        n, size = len(self.rows), config.batch_size
        if n == 0:
            raise ValueError("no rows to load")
        if config.drop_last and size % world:
            raise ValueError(
                f"batch_size {size} does not divide among {world} ranks; the next that does is {size + -size % world}"
            )
        if config.drop_last and n < size:
            raise ValueError(
                f"{n} rows do not fill one global batch of {size}; lower batch_size or use drop_last=False"
            )
        self.epoch = self.step = 0
        self._collate = Collator(log, max_history=config.max_history)
        self._order: tuple[int, NDArray[np.int64]] | None = None

    @property
    def log(self) -> EventLog:
        """The log that is read."""
        return self._collate.log

    @property
    def steps_per_epoch(self) -> int:
        """Global batches per epoch; the last, incomplete one counts where it is kept."""
        full, rest = divmod(len(self.rows), self.config.batch_size)
        return full + int(rest > 0 and not self.config.drop_last)

    @property
    def dropped_per_epoch(self) -> int:
        """Rows that an epoch leaves out: those that fill no global batch (others each epoch if shuffled)."""
        return len(self.rows) % self.config.batch_size if self.config.drop_last else 0

    @property
    def local_batch_size(self) -> int:
        """Samples per step on each rank, padding included."""
        return -(-self.config.batch_size // self.world)

    def __len__(self) -> int:
        return self.steps_per_epoch

    def global_rows(self, epoch: int, step: int) -> NDArray[np.int64]:
        """The rows of a global batch, without padding."""
        if not 0 <= step < self.steps_per_epoch:
            raise ValueError(f"step {step} is outside an epoch of {self.steps_per_epoch} steps")
        size = self.config.batch_size
        return self._epoch_order(epoch)[step * size : (step + 1) * size]

    def local_rows(self, epoch: int, step: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """This rank's share of a global batch: rows [local_batch_size] and which of them are padding."""
        rows = self.global_rows(epoch, step)
        at = np.arange(self.rank * self.local_batch_size, (self.rank + 1) * self.local_batch_size)
        return rows[np.minimum(at, len(rows) - 1)], at >= len(rows)

    def batch(self, epoch: int, step: int) -> JaggedBatch:
        """This rank's batch at a position, wherever the loader stands."""
        rows, padding = self.local_rows(epoch, step)
        batch = self._collate(rows, padding=padding)
        return batch.pin_memory() if self.config.pin_memory else batch

    def __iter__(self) -> Iterator[JaggedBatch]:
        epoch, first = self.epoch, self.step
        steps = range(first, self.steps_per_epoch)
        batches = prefetched((self.batch(epoch, s) for s in steps), self.config.prefetch)
        try:
            for step, batch in zip(steps, batches, strict=True):
                last = step + 1 == self.steps_per_epoch
                self.epoch, self.step = (epoch + 1, 0) if last else (epoch, step + 1)
                yield batch
        finally:
            batches.close()

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        if not self.config.shuffle:
            return self.rows
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self.rows[permutation(len(self.rows), seed=self.config.seed, epoch=epoch)]
        return self._order[1]

    # Position.

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What the order and content of the batches depend on; the world size is not among it."""
        config = {k: v for k, v in asdict(self.config).items() if k not in ("prefetch", "pin_memory")}
        rows = hashlib.sha256(self.rows.tobytes()).hexdigest()[:16]
        return {**config, "schema": self.log.schema.fingerprint(), "log": self.log.digest[:16], "rows": rows}

    def state_dict(self) -> dict[str, Any]:
        """The position (epoch, step) of the next batch, and what it is a position in. Plain values."""
        return {"epoch": self.epoch, "step": self.step, "config": dict(self._identity)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. Raises ValueError naming what differs if it was saved with other data or settings."""
        for key in ("epoch", "step", "config"):
            if key not in state:
                raise ValueError(f"the loader's state lacks {key!r}; it has {', '.join(map(str, state)) or 'nothing'}")
        saved, here = state["config"], self._identity
        lines = [
            f"{key} {saved.get(key)!r} there, {here.get(key)!r} here"
            for key in sorted(saved.keys() | here.keys())
            if saved.get(key) != here.get(key)
        ]
        if lines:
            raise ValueError("the position was saved by a loader of other data or settings: " + "; ".join(lines))
        epoch, step = int(state["epoch"]), int(state["step"])
        if epoch < 0 or not 0 <= step < self.steps_per_epoch:
            raise ValueError(f"position (epoch {epoch}, step {step}) is outside epochs of {self.steps_per_epoch} steps")
        self.epoch, self.step = epoch, step
