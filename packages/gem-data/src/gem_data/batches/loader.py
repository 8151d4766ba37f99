"""The loader: which rows make a batch, as a pure function of epoch, step, rank and world, and iteration with resume.

A global batch depends on (seed, epoch, step) alone. Each rank takes its contiguous slice of it, so every world size
trains on the same batches, and a position is two integers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gem_data.balance import SUB_BATCH, CostFunction, LengthCost, Method, assign, budget_batches, deal, in_even_parts
from gem_data.batches.batch import JaggedBatch
from gem_data.batches.collate import Collator, MaxHistory
from gem_data.batches.order import Cipher, permutation
from gem_data.batches.workers import Share, Start, from_workers
from gem_data.log.event_log import EventLog
from gem_data.prefetch import prefetched
from gem_data.schema import unknown

Permute = Literal["sort", "cipher"]

PIECE = 1 << 20  # samples whose costs are held at a time where a budget cuts an epoch

# Not part of a position: they change neither which samples come nor when.
_FREE = (
    "prefetch",
    "pin_memory",
    "workers",
    "restarts",
    "start",
    "share_requests",
    "balance",
    "sub_batch",
    "cost",
    "parts",
)


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How to read.

    batch_size   of the global batch, over all ranks; with a `budget`, at most.
    budget       the most that the samples of a global batch may cost together: as many samples as fit, in order, dealt
                 to the ranks by cost, not in equal number. Costs are of the histories: their number of events, or what
                 `cost`, a `LengthCost`, makes of it. An epoch then begins with a pass over all lengths, has as many
                 steps as it takes, and drops nothing.
    shuffle      a new permutation each epoch, or the rows in the order given.
    drop_last    drop the last incomplete global batch of an epoch (training), or keep it, padded (evaluation).
    prefetch     batches that a background thread prepares ahead; 0 for none. Never changes what comes or its order.
    pin_memory   page-lock the batches (in the background thread, if there is one).
    permute      how to shuffle: "sort" writes the permutation of an epoch out (16 bytes a row while it is made),
                 "cipher" computes it where it is needed, for logs of any size (give the rows as a `range`).
    balance      who takes which samples of a global batch in training (see `gem_data.balance`), in runs of `sub_batch`;
                 `cost` is a function of the number of events of a sample's histories, their sum by default.
    parts        a rank's samples come in an order in which so many equal runs of them hold about as many events each
                 (`gem_data.balance.in_even_parts`), for whoever computes a batch in parts; not with share_requests.
    share_requests  samples of one request share a history (see `JaggedBatch.requests`).
    workers      processes that collate, each `prefetch` (or 2) batches ahead; a dead one is replaced `restarts` times.
    start        how workers start: "forkserver" and "spawn" import the main script again, which has to keep what it
                 does under `if __name__ == "__main__":`; "fork" does not, and may hang beside threads (a lock that
                 another thread holds at that moment stays locked in the worker for ever).
    """

    batch_size: int
    max_history: MaxHistory
    budget: float | None = None
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = True
    prefetch: int = 0
    pin_memory: bool = False
    permute: Permute = "sort"
    balance: Method = "none"
    sub_batch: int = SUB_BATCH
    cost: CostFunction | None = None
    parts: int = 1
    share_requests: bool = False
    workers: int = 0
    restarts: int = 3
    start: Start = "forkserver"

    def __post_init__(self) -> None:
        for name, choices in (("permute", Permute), ("balance", Method), ("start", Start)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(unknown(name, getattr(self, name), get_args(choices)))
        least_of = {"batch_size": 1, "sub_batch": 1, "parts": 1} | dict.fromkeys(
            ("seed", "prefetch", "workers", "restarts"), 0
        )
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be {least} or more, not {getattr(self, name)}")
        limits = self.max_history.values() if isinstance(self.max_history, Mapping) else [self.max_history]
        for limit in limits:
            if limit < 0:
                raise ValueError(f"max_history must be 0 or more, not {limit}")
        if self.seed >= 2**64:
            raise ValueError(f"seed must be under 2^64, not {self.seed}")
        if self.balance != "none" and not self.drop_last:
            raise ValueError(f"balance {self.balance!r} is for training: batches that are padded are not balanced")
        if self.budget is not None:
            self._check_budget(self.budget)

    def _check_budget(self, budget: float) -> None:
        if not budget > 0:
            raise ValueError(f"budget must be positive, not {budget!r}")
        if self.balance != "none":
            raise ValueError(
                f"with a budget samples are dealt to the ranks by cost; balance must be 'none', not {self.balance!r}"
            )
        if not (self.cost is None or isinstance(self.cost, LengthCost)):
            raise ValueError(
                f"with a budget the cost decides which samples come, so that a saved position must name it: expected a "
                f"LengthCost, not {self.cost!r}"
            )


def costs_of(collate: Collator, config: LoaderConfig, rows: NDArray[np.int64]) -> NDArray[Any]:
    """What each sample costs: the events of its histories, or what `config.cost` makes of their number."""
    lengths = collate.costs(rows)
    return config.cost(lengths) if config.cost else lengths


def balanced(
    collate: Collator, config: LoaderConfig, rows: NDArray[np.int64], rank: int, world: int
) -> NDArray[np.int64]:
    """The rows of a global batch that `rank` takes by `config.balance`: the same for all who ask, without a message."""
    costs = costs_of(collate, config, rows)
    return rows[assign(costs, world, method=config.balance, sub_batch=config.sub_batch)[rank]]


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
        self.config, self.rank, self.world = config, rank, world
        self._rows = _checked_range(log, rows) if isinstance(rows, range) else log.rows(rows)
        n, size = len(self._rows), config.batch_size
        if n == 0:
            raise ValueError("no rows to load")
        if config.drop_last and size % world and config.budget is None:
            raise ValueError(
                f"batch_size {size} does not divide among {world} ranks; the next that does is {size + -size % world}"
            )
        if config.drop_last and n < size and config.budget is None:
            raise ValueError(
                f"{n} rows do not fill one global batch of {size}; lower batch_size, or let the last batch be smaller "
                "(LoaderConfig.drop_last=False)"
            )
        self.epoch = self.step = 0
        self._collate = Collator(
            log, max_history=config.max_history, share=config.share_requests, scattered=config.shuffle
        )
        self._order: tuple[int, NDArray[np.int64]] | None = None
        self._cuts: tuple[int, NDArray[np.int64]] | None = None

    @property
    def log(self) -> EventLog:
        """The log that is read."""
        return self._collate.log

    @property
    def rows(self) -> NDArray[np.int64]:
        """The rows that are read, in the order given."""
        return np.asarray(self._rows, np.int64)

    @property
    def steps_per_epoch(self) -> int:
        """Global batches per epoch; the last, incomplete one counts where it is kept. With a budget: of this epoch."""
        return self._steps(self.epoch)

    def _steps(self, epoch: int) -> int:
        if self.config.budget is not None:
            return len(self._epoch_cuts(epoch)) - 1
        full, rest = divmod(len(self._rows), self.config.batch_size)
        return full + int(rest > 0 and not self.config.drop_last)

    @property
    def dropped_per_epoch(self) -> int:
        """Rows that an epoch leaves out: those that fill no global batch (others each epoch if shuffled)."""
        return len(self._rows) % self.config.batch_size if self.config.drop_last and self.config.budget is None else 0

    @property
    def local_batch_size(self) -> int:
        """Samples per step on each rank, padding included. With a budget ranks differ: what an equal share would be."""
        return -(-self.config.batch_size // self.world)

    def __len__(self) -> int:
        return self.steps_per_epoch

    def global_rows(self, epoch: int, step: int) -> NDArray[np.int64]:
        """The rows of a global batch, without padding."""
        return self._ordered(epoch, *self._bounds(epoch, step))

    def _bounds(self, epoch: int, step: int) -> tuple[int, int]:
        """The positions of a global batch within its epoch."""
        steps = self._steps(epoch)
        if not 0 <= step < steps:
            raise ValueError(f"step {step} is outside an epoch of {steps} steps")
        if self.config.budget is not None:
            cuts = self._epoch_cuts(epoch)
            return int(cuts[step]), int(cuts[step + 1])
        size = self.config.batch_size
        return step * size, min((step + 1) * size, len(self._rows))

    def _ordered(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """The rows at positions [start, stop) of an epoch."""
        if self.config.shuffle and self.config.permute == "sort":
            return self._epoch_order(epoch)[start:stop]
        at = np.arange(start, stop)
        if self.config.shuffle:
            at = Cipher(n=len(self._rows), seed=self.config.seed, epoch=epoch)(at)
        if isinstance(self._rows, range):
            return self._rows.start + self._rows.step * at
        return self._rows[at]

    def local_rows(self, epoch: int, step: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """This rank's share of a global batch: rows [local_batch_size] and which of them are padding."""
        rows, padding = self._share(epoch, step)
        if self.config.parts > 1 and not self.config.share_requests and not padding.any():
            rows = rows[in_even_parts(self._collate.lengths(rows), self.config.parts)]
        return rows, padding

    def _share(self, epoch: int, step: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        if self.config.budget is None and self.config.balance == "none":  # no need to know what the others take
            start, stop = self._bounds(epoch, step)
            first = start + self.rank * self.local_batch_size
            at = np.arange(first, first + self.local_batch_size)
            rows = self._ordered(epoch, min(first, stop - 1), min(first + self.local_batch_size, stop))
            return rows[np.minimum(at - first, len(rows) - 1)], at >= stop
        rows = self.global_rows(epoch, step)
        if self.config.budget is not None:
            chosen = deal(costs_of(self._collate, self.config, rows), self.world)[self.rank]
            if len(chosen) == 0:  # fewer samples than ranks; this one still takes part in the step
                return rows[:1], np.ones(1, bool)
            return rows[chosen], np.zeros(len(chosen), bool)
        share = balanced(self._collate, self.config, rows, self.rank, self.world)
        return share, np.zeros(len(share), bool)

    def batch(self, epoch: int, step: int) -> JaggedBatch:
        """This rank's batch at a position, wherever the loader stands."""
        rows, padding = self.local_rows(epoch, step)
        batch = self._collate(rows, padding=padding)
        return batch.pin_memory() if self.config.pin_memory else batch

    def __iter__(self) -> Iterator[JaggedBatch]:
        epoch, first = self.epoch, self.step
        count = self._steps(epoch)
        steps = range(first, count)
        batches = self._batches(epoch, steps)
        try:
            for step, batch in zip(steps, batches, strict=True):
                last = step + 1 == count
                self.epoch, self.step = (epoch + 1, 0) if last else (epoch, step + 1)
                yield batch
                if self.config.shuffle:  # now that there is a batch to work on
                    self.log.read_ahead()
        finally:
            batches.close()

    def _batches(self, epoch: int, steps: range) -> Generator[JaggedBatch, None, None]:
        config = self.config
        if config.workers == 0:
            return prefetched((self.batch(epoch, s) for s in steps), config.prefetch)

        def rows_of(step: int) -> Share:
            return self.local_rows(epoch, step)

        made = from_workers(
            self._collate,
            steps,
            rows_of,
            workers=config.workers,
            ahead=config.prefetch or 2,
            pin=config.pin_memory,
            restarts=config.restarts,
            start=config.start,
        )
        # In a thread: started from the main one, torch would raise a worker's death from a signal handler, in whatever
        # the main thread is doing then.
        return prefetched(made, 1)

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self.rows[permutation(len(self.rows), seed=self.config.seed, epoch=epoch)]
        return self._order[1]

    def _epoch_cuts(self, epoch: int) -> NDArray[np.int64]:
        """Where the batches of an epoch begin, and its end: [steps + 1]. A piece of the epoch at a time."""
        if self._cuts is None or self._cuts[0] != epoch:
            budget, most = self.config.budget, self.config.batch_size
            assert budget is not None
            found, waiting, n = [np.zeros(1, np.int64)], np.zeros(0), len(self._rows)
            for start in range(0, n, PIECE):
                stop = min(start + PIECE, n)
                rows = self._ordered(epoch, start, stop)
                costs = np.concatenate([waiting, costs_of(self._collate, self.config, rows)])
                ends = budget_batches(costs, budget, most=most)[1:]
                closed = ends if stop == n else ends[:-1]  # the last may have room for what comes next
                found.append(closed + (stop - len(costs)))
                waiting = costs[closed[-1] if len(closed) else 0 :]
            self._cuts = epoch, np.concatenate(found)
        return self._cuts[1]

    # Position.

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What the order and content of the batches depend on; the world size is not among it."""
        config = {f.name: getattr(self.config, f.name) for f in fields(self.config) if f.name not in _FREE}
        if config["permute"] == "sort":  # as it was before there was a choice
            del config["permute"]
        if config["budget"] is None:
            del config["budget"]
        elif self.config.cost is not None:
            config["cost"] = repr(self.config.cost)
        if isinstance(config["max_history"], Mapping):
            config["max_history"] = dict(config["max_history"])
        if isinstance(self._rows, range) and self.config.permute == "cipher":
            rows = repr(self._rows)
        else:
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
        steps = self._steps(max(epoch, 0))
        if epoch < 0 or not 0 <= step < steps:
            raise ValueError(f"position (epoch {epoch}, step {step}) is outside epochs of {steps} steps")
        self.epoch, self.step = epoch, step


def _checked_range(log: EventLog, rows: range) -> range:
    if len(rows):
        log.rows([min(rows[0], rows[-1]), max(rows[0], rows[-1])])
    return rows


__all__ = ["Loader", "LoaderConfig", "permutation"]
