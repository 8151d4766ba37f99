"""Worker processes that collate batches: torch's DataLoader, fed with rows, so that a worker needs only the log.

Which rows make a batch is decided in the main process; a worker gets them and gives back one packed buffer. A worker
that dies is noticed by the DataLoader; the batches that were under way are made again by new workers.
"""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from gem_data.batches.batch import JaggedBatch
from gem_data.batches.collate import Collator
from gem_data.batches.pack import Packed, pack

Start = Literal["fork", "forkserver", "spawn"]
Share = tuple[NDArray[np.int64], NDArray[np.bool_]]  # rows, and which of them are padding

_DIED = ("exited unexpectedly", "is killed by signal")


class _Batches(Dataset[Packed]):
    def __init__(self, collate: Collator) -> None:
        self.collate = collate

    def __getitem__(self, share: Share) -> Packed:
        rows, padding = share
        return pack(self.collate(rows, padding=padding))


class _Shares(Sampler[Any]):
    def __init__(self, steps: Sequence[int], rows_of: Callable[[int], Share]) -> None:
        self.steps, self.rows_of = steps, rows_of

    def __iter__(self) -> Iterator[Share]:
        return (self.rows_of(step) for step in self.steps)

    def __len__(self) -> int:
        return len(self.steps)


def _same(packed: Packed) -> Packed:
    return packed


def from_workers(
    collate: Collator,
    steps: Sequence[int],
    rows_of: Callable[[int], Share],
    *,
    workers: int,
    ahead: int,
    pin: bool,
    restarts: int,
    start: Start,
) -> Generator[JaggedBatch, None, None]:
    """The batches of `steps` in order, at most `ahead` of each worker ready or under way.

    A dead worker costs a warning and new workers, up to `restarts` times; then it is a RuntimeError. Whatever a worker
    raises is raised here. Closing the generator ends the workers.
    """
    done, left = 0, restarts
    context = multiprocessing.get_context(start)
    if start == "forkserver":  # the server imports this once (and torch with it), not every worker
        context.set_forkserver_preload([__name__])
    while done < len(steps):
        loader: DataLoader[Packed] = DataLoader(
            _Batches(collate),
            batch_size=None,
            sampler=_Shares(steps[done:], rows_of),
            num_workers=workers,
            prefetch_factor=ahead,
            collate_fn=_same,  # type: ignore[arg-type]  # without batching it gets one item
            pin_memory=pin,
            multiprocessing_context=context,
            generator=torch.Generator(),  # else the workers' seed is drawn from the global one, in the middle of a step
        )
        batches = iter(loader)
        try:
            while done < len(steps):
                packed = next(batches)
                done += 1
                yield packed.unpack()
        except (RuntimeError, OSError, EOFError) as error:
            if not (any(word in str(error) for word in _DIED) or _lost(batches, error)):
                raise
            if left == 0:
                raise RuntimeError(
                    f"a loader's worker process died ({error}); it may have run out of memory: fewer workers, smaller "
                    "batches or a lower prefetch need less"
                ) from error
            left -= 1
            warnings.warn(
                f"a loader's worker process died ({error}); going on with new ones from batch {done} of this run "
                f"({left} restarts left)",
                RuntimeWarning,
                stacklevel=2,
            )
        finally:
            if hasattr(batches, "_shutdown_workers"):
                batches._shutdown_workers()


def _lost(batches: Any, error: Exception) -> bool:
    """Whether an error comes of a dead worker: what it had made is fetched from it, over a socket."""
    workers = getattr(batches, "_workers", [])
    patience = 2.0 if isinstance(error, ConnectionError | EOFError) else 0.0  # the system may not have reaped it yet
    end = time.monotonic() + patience
    while all(w.is_alive() for w in workers):
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)
    return True
